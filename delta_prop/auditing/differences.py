"""Differences between what a sink holds and what the log makes of it: which kind, why, and what mends each.

Pure, one vector at a time. Every audit judges by this module, however it brings the two sides together.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from delta_prop_wire.delta import Kind
from delta_prop_wire.jsonlines import NOT_THERE
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from delta_prop_wire.algebra import Key, State

MISSING, STALE, EXTRA, CORRUPTED = "missing", "stale", "extra", "corrupted"
SET_ASIDE = "set aside"
_NAMES = {Kind.CREATE: "a vector", Kind.OPAQUE: "bytes", Kind.DELETE: "deleted"}


class Held(NamedTuple):
    """One row of a sink.

    `metadata`: None where they cannot be read. `tells_metadata`: False where the sink tells none, which are
    not compared then. `key`: of its last delta, None where the sink tells none; `offset`: of the same, or -1.
    """

    kind: Kind
    vector: NDArray[np.float32] | None
    data: bytes
    metadata: dict[str, Any] | None
    key: Key | None
    offset: int
    tells_metadata: bool = True

    @property
    def alive(self) -> bool:
        """True unless the row says that its vector is deleted."""
        return self.kind is not Kind.DELETE


class Known(NamedTuple):
    """A vector as the log has it: its state, and the offset of its last delta."""

    state: State
    offset: int


class Verdict(NamedTuple):
    """The kind of a difference, and its cause."""

    difference: str
    reason: str


class Difference(NamedTuple):
    """One difference. `op`, `vector`, `data`, `metadata`: the delta that mends it, metadata as JSON.

    `origin`, `counter`: the last delta that the log has of the vector, which that one goes behind; None where
    it has none, and the vector must still not be there. `op` is None where the sink has set deltas of the
    vector aside: the mending delta would line up behind those.
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
        """The difference as a line of JSON says it."""
        told: dict[str, Any] = {"vector_id": self.vector_id, "namespace": self.namespace}
        told |= {"difference": self.difference, "reason": self.reason}
        if self.op is None:
            return told
        mended: dict[str, Any] = {"vector_id": self.vector_id, "namespace": self.namespace, "op": self.op}
        if self.vector is not None:
            mended["vector"] = list(map(float, self.vector))
        if self.data is not None:
            mended["data"] = base64.b64encode(self.data).decode()
        if self.metadata is not None:
            mended["metadata"] = json.loads(self.metadata)
        mended["expect"] = NOT_THERE if self.origin is None else f"{self.origin}:{self.counter}"
        return told | {"mended_by": mended}


def judge(known: Known | None, held: Held | None) -> Verdict | None:
    """Tell how a sink's row differs from what the log makes of its vector; None where it does not."""
    if held is None:
        if known is None or not known.state.alive:
            return None
        return Verdict(MISSING, f"the log has it since offset {known.offset}, the sink has no row")
    if known is None:
        return Verdict(EXTRA, "the log tells of no such vector") if held.alive else None
    if not (known.state.alive or held.alive):
        return None
    same, same_delta = _detail(known.state, held) is None, held.key in (None, known.state.key)
    if same and same_delta:
        return None
    if not known.state.alive:
        return Verdict(EXTRA, f"the log has it deleted since offset {known.offset}")
    if not held.alive and not same_delta:
        return Verdict(MISSING, f"the log has it since offset {known.offset}, the sink has it deleted")
    what = _detail(known.state, held) or "its content is right"
    assert known.state.key is not None
    if held.key is not None and held.key < known.state.key:
        return Verdict(STALE, f"{what}; it lacks the delta at offset {known.offset}")
    if same_delta:
        return Verdict(CORRUPTED, f"{what}; it has the delta at offset {known.offset}")
    return Verdict(CORRUPTED, f"{what}; its last delta is none of the log's")


def difference(
    name: tuple[str, str], verdict: Verdict, held: Held | None, now: State | None, *, aside: bool
) -> Difference:
    """A verdict on the vector of that namespace and id, and what mends it.

    `now`: what the log makes of the vector at present, None where it tells of none. `aside`: the sink's
    quarantine holds deltas of it.
    """
    told: dict[str, Any] = {}
    if aside:
        verdict = Verdict(SET_ASIDE, f"{verdict.reason}; deltas of it wait in the quarantine")
    elif now is None:
        told = {"op": kind_name(Kind.DELETE)}
    else:
        told = _mending(now, (held.metadata if held is not None else None) or {})
    if now is not None:
        assert now.key is not None
        _, origin, counter = now.key
        told |= {"origin": f"{origin:016x}", "counter": counter}
    return Difference(*name, *verdict, **told)


def _mending(state: State, held: Mapping[str, Any]) -> dict[str, Any]:
    """The delta that sets a vector to its state, whatever a sink has in its place.

    A create clears metadata; bytes keep them, so that those which are too many are removed one by one.
    """
    if not state.alive:
        return {"op": kind_name(Kind.DELETE)}
    metadata = dict(state.metadata)
    if state.vector is not None:
        told: dict[str, Any] = {"op": kind_name(Kind.CREATE), "vector": state.vector}
    else:
        told = {"op": kind_name(Kind.OPAQUE), "data": state.data}
        metadata |= {name: None for name in held if name not in metadata}
    return told | ({"metadata": json.dumps(metadata, ensure_ascii=False)} if metadata else {})


def _detail(wanted: State, held: Held) -> str | None:
    """Find the first thing that is wrong with a row of the sink; None where nothing is."""
    kind = Kind.DELETE if not wanted.alive else Kind.OPAQUE if wanted.vector is None else Kind.CREATE
    if held.kind is not kind:
        return f"it is {_NAMES[held.kind]}, not {_NAMES[kind]}"
    if wanted.vector is not None and held.vector is not None:
        fault = _number_fault(wanted.vector, held.vector)
        if fault is not None:
            return fault
    if wanted.data is not None and held.data != wanted.data:
        return f"its {len(held.data)} bytes are not the {len(wanted.data)} of the log"
    if not held.tells_metadata:
        return None
    if held.metadata is None:
        return "its metadata cannot be read"
    patch = patch_between(held.metadata, dict(wanted.metadata))
    return f"its metadata differ in {', '.join(map(repr, sorted(patch)[:3]))}" if patch else None


def _number_fault(wanted: NDArray[np.float32], held: NDArray[np.float32]) -> str | None:
    if len(held) != len(wanted):
        return f"it has {len(held)} numbers, not {len(wanted)}"
    places = (held.view(np.uint32) != wanted.view(np.uint32)).nonzero()[0]
    if not len(places):
        return None
    at = int(places[0])
    more = f", and {len(places) - 1} more" if len(places) > 1 else ""
    return f"number {at} is {held[at]:.9g}, not {wanted[at]:.9g}{more}"


def patch_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes the one of the other; empty where they are the same."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := patch_between(before, value):
                patch[name] = inner
        elif name not in old or _canonical(before) != _canonical(value):
            patch[name] = value
    return patch


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # else 0 and False, or 1 and 1.0, were the same
