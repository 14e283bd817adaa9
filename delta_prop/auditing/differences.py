"""Differences between a sink and the log: their kinds, reasons and repairs.

Pure, one vector at a time. Every audit uses this module, however it joins the two sides.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_prop_wire.algebra import Key, VectorState
from delta_prop_wire.delta import Kind
from delta_prop_wire.jsonlines import ABSENT_TEXT
from delta_prop_wire.topics import kind_name

MISSING, STALE, EXTRA, CORRUPTED = "missing", "stale", "extra", "corrupted"
QUARANTINED = "quarantined"
"""Kinds of difference. Missing: only the log has the vector. Stale: the sink lacks its last deltas. Extra:
the log has no such vector, or has it deleted. Corrupted: the row is wrong otherwise. Quarantined: one of
these, while the sink's quarantine has deltas of the vector.
"""
_CONTENT_NAMES = {Kind.CREATE: "a vector", Kind.OPAQUE: "bytes", Kind.DELETE: "deleted"}


class SinkRow(NamedTuple):
    """One row of a sink.

    `metadata`: None if they cannot be read. `has_metadata`: False if the sink stores no metadata; they are
    not compared then. `key`: the sort key of the row's last delta, None if the sink does not store it.
    `offset`: the offset of that delta, -1 if the sink does not store it.
    """

    kind: Kind
    vector: NDArray[np.float32] | None
    data: bytes
    metadata: dict[str, Any] | None
    key: Key | None
    offset: int
    has_metadata: bool = True

    @property
    def alive(self) -> bool:
        """True unless the row says that its vector is deleted."""
        return self.kind is not Kind.DELETE


class LogState(NamedTuple):
    """A vector's state in the log, and the offset of its last delta."""

    state: VectorState
    offset: int


class Verdict(NamedTuple):
    """Kind and reason of a difference."""

    difference: str
    reason: str


class Difference(NamedTuple):
    """One difference. `op`, `vector`, `data`, `metadata`: the delta that repairs it, metadata as JSON.

    `origin`, `counter`: the dot of the vector's last delta in the log, which the repair expects. None: the
    log has no delta of the vector, and the repair expects that the vector does not exist. `op` is None if
    the sink's quarantine has deltas of the vector, because the sink would hold the repair there, too.
    """

    namespace: str
    vector_id: str
    difference: str
    reason: str
    op: str | None = None
    vector: Any = None
    data: bytes | None = None
    metadata: str | None = None
    origin: str | None = None
    counter: int | None = None

    def line(self) -> dict[str, Any]:
        """Return the difference as a JSON object of a report."""
        fields: dict[str, Any] = {"vector_id": self.vector_id, "namespace": self.namespace}
        fields |= {"difference": self.difference, "reason": self.reason}
        if self.op is None:
            return fields
        repair: dict[str, Any] = {"vector_id": self.vector_id, "namespace": self.namespace, "op": self.op}
        if self.vector is not None:
            repair["vector"] = list(map(float, self.vector))
        if self.data is not None:
            repair["data"] = base64.b64encode(self.data).decode()
        if self.metadata is not None:
            repair["metadata"] = json.loads(self.metadata)
        repair["expect"] = ABSENT_TEXT if self.origin is None else f"{self.origin}:{self.counter}"
        return fields | {"repaired_by": repair}


def classify(log_state: LogState | None, sink_row: SinkRow | None) -> Verdict | None:
    """Classify how a sink's row differs from its vector's state in the log; return None if it does not."""
    if sink_row is None:
        if log_state is None or not log_state.state.alive:
            return None
        return Verdict(MISSING, f"the log has it since offset {log_state.offset}; the sink has no row")
    if log_state is None:
        return Verdict(EXTRA, "the log has no such vector") if sink_row.alive else None
    if not (log_state.state.alive or sink_row.alive):
        return None
    is_equal, has_same_delta = (
        _find_fault(log_state.state, sink_row) is None,
        sink_row.key in (None, log_state.state.key),
    )
    if is_equal and has_same_delta:
        return None
    if not log_state.state.alive:
        return Verdict(EXTRA, f"the log has it deleted since offset {log_state.offset}")
    if not sink_row.alive and not has_same_delta:
        return Verdict(MISSING, f"the log has it since offset {log_state.offset}; the sink has it deleted")
    fault = _find_fault(log_state.state, sink_row) or "its content is correct"
    assert log_state.state.key is not None
    if sink_row.key is not None and sink_row.key < log_state.state.key:
        return Verdict(STALE, f"{fault}; it lacks the delta at offset {log_state.offset}")
    if has_same_delta:
        return Verdict(CORRUPTED, f"{fault}; it has the delta at offset {log_state.offset}")
    return Verdict(CORRUPTED, f"{fault}; its last delta is not in the log")


def make_difference(
    name: tuple[str, str],
    verdict: Verdict,
    sink_row: SinkRow | None,
    end_state: VectorState | None,
    *,
    is_quarantined: bool,
) -> Difference:
    """Combine a verdict with the repair. `name`: the vector's namespace and id.

    `end_state`: the vector's state at the end of the log, None if it has none. `is_quarantined`: True if the
    sink's quarantine has deltas of the vector.
    """
    fields: dict[str, Any] = {}
    if is_quarantined:
        verdict = Verdict(QUARANTINED, f"{verdict.reason}; deltas of it are in the quarantine")
    elif end_state is None:
        fields = {"op": kind_name(Kind.DELETE)}
    else:
        fields = _repair_fields(end_state, (sink_row.metadata if sink_row is not None else None) or {})
    if end_state is not None:
        assert end_state.key is not None
        _, origin, counter = end_state.key
        fields |= {"origin": f"{origin:016x}", "counter": counter}
    return Difference(*name, *verdict, **fields)


def _repair_fields(state: VectorState, sink_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the delta that sets a vector to `state`, whatever a sink holds instead.

    A create clears metadata. An opaque delta keeps them, so it removes each field that only the sink has.
    """
    if not state.alive:
        return {"op": kind_name(Kind.DELETE)}
    metadata = dict(state.metadata)
    if state.vector is not None:
        fields: dict[str, Any] = {"op": kind_name(Kind.CREATE), "vector": state.vector}
    else:
        fields = {"op": kind_name(Kind.OPAQUE), "data": state.data}
        metadata |= {name: None for name in sink_metadata if name not in metadata}
    return fields | ({"metadata": json.dumps(metadata, ensure_ascii=False)} if metadata else {})


def _find_fault(expected: VectorState, sink_row: SinkRow) -> str | None:
    """Describe the first difference between a sink's row and the expected state; None if there is none."""
    kind = Kind.DELETE if not expected.alive else Kind.OPAQUE if expected.vector is None else Kind.CREATE
    if sink_row.kind is not kind:
        return f"it is {_CONTENT_NAMES[sink_row.kind]}, not {_CONTENT_NAMES[kind]}"
    if expected.vector is not None and sink_row.vector is not None:
        fault = _find_number_fault(expected.vector, sink_row.vector)
        if fault is not None:
            return fault
    if expected.data is not None and sink_row.data != expected.data:
        return f"its {len(sink_row.data)} bytes are not the {len(expected.data)} of the log"
    if not sink_row.has_metadata:
        return None
    if sink_row.metadata is None:
        return "its metadata cannot be read"
    patch = diff_metadata(sink_row.metadata, dict(expected.metadata))
    return f"its metadata differ in {', '.join(map(repr, sorted(patch)[:3]))}" if patch else None


def _find_number_fault(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> str | None:
    if len(actual) != len(expected):
        return f"it has {len(actual)} numbers, not {len(expected)}"
    indices = (actual.view(np.uint32) != expected.view(np.uint32)).nonzero()[0]
    if not len(indices):
        return None
    first = int(indices[0])
    more = f", and {len(indices) - 1} more" if len(indices) > 1 else ""
    return f"number {first} is {actual[first]:.9g}, not {expected[first]:.9g}{more}"


def diff_metadata(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that turns `old` into `new`; empty if they are equal."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := diff_metadata(before, value):
                patch[name] = inner
        elif name not in old or _to_canonical(before) != _to_canonical(value):
            patch[name] = value
    return patch


def _to_canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # distinguishes 0 from False, and 1 from 1.0
