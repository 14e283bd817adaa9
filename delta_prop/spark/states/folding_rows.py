"""What of folding goes row by row: metadata, and whole vectors that cannot be folded with others.

The algebra of `wire` does it; here rows of Arrow tables become what it takes, and what it gives rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa

from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop_wire.algebra import State, ignoring
from delta_prop_wire.algebra import fold as fold_state
from delta_prop_wire.delta import Kind, KnownIds, Operation
from delta_prop_wire.metadata import merge
from delta_prop_wire.twins import Identified, without_effect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from delta_prop_wire.algebra import Key


class Folded(NamedTuple):
    """A vector's state, and the offset of its last delta."""

    key: str
    state: State
    offset: int


def metadata_of(table: pa.Table, rows: NDArray[np.intp], vectors: NDArray[np.intp], count: int) -> pa.Array:
    """The metadata of so many vectors, in msgpack, that the patches in rows give; null where that is none."""
    if not len(rows):
        return pa.nulls(count, pa.binary())
    found: dict[int, dict[str, Any]] = {}
    patches = table.column("patch").take(pa.array(rows)).to_pylist()
    for vector, patch in zip(vectors.tolist(), patches, strict=True):
        found[vector] = merge(found.get(vector, {}), msgpack.unpackb(patch, strict_map_key=True))
    return pa.array(map(_packed, map(found.get, range(count))), pa.binary())


def fold_rows(table: pa.Table, rows: NDArray[np.intp]) -> Folded:
    """Fold one vector, whose changes these rows are, in canonical order."""
    told = table.take(pa.array(rows)).to_pylist()
    onto, changes, late = State(), told, 0
    before = next((at for at, row in enumerate(told) if row["kind"] & STATE), None)
    if before is not None:
        onto, changes, late = _state(told[before]), told[before + 1 :], before
    known = [
        Identified(row["id"], _key(row), row["offset"], KnownIds(row["known"]))
        for row in changes
        if row["id"] is not None
    ]
    twins = without_effect(known, whole=before is None)
    state = fold_state(
        ((_key(row), _operation(row), _unpacked(row["patch"])) for row in changes), onto, without_effect=twins
    )
    return Folded(told[-1]["key"], ignoring(state, late, state.key), told[-1]["offset"])


def states_of(folded: Sequence[Folded]) -> pa.Table:
    """States as rows."""
    return pa.Table.from_pylist([_row(one) for one in folded], schema=CHANGES)


def state_in(row: dict[str, Any]) -> State:
    """The state that a row of states holds."""
    return _state(row)


def _row(folded: Folded) -> dict[str, Any]:
    state = folded.state
    assert state.key is not None, "a state of no change"
    lamport, origin, counter = state.key
    kind = Kind.CREATE if state.vector is not None else Kind.OPAQUE if state.alive else Kind.DELETE
    return {
        "key": folded.key,
        "kind": kind | STATE,
        "values": [] if state.vector is None else state.vector,
        "indices": [],
        "data": state.data or b"",
        "patch": _packed(dict(state.metadata)),
        "known": 0,
        "offset": folded.offset,
        "lamport": lamport,
        "origin": origin,
        "counter": counter,
        "ignored": state.ignored,
    }


def _state(row: dict[str, Any]) -> State:
    kind, metadata = row["kind"] & ~STATE, _unpacked(row["patch"]) or {}
    if kind == Kind.DELETE:
        return State(ignored=row["ignored"], key=_key(row))
    if kind == Kind.OPAQUE:
        return State(True, data=row["data"], metadata=metadata, ignored=row["ignored"], key=_key(row))
    vector = np.array(row["values"], np.float32)
    return State(True, vector, None, metadata, row["ignored"], _key(row))


def _operation(row: dict[str, Any]) -> Operation:
    kind = row["kind"]
    values, indices = np.array(row["values"], np.float32), np.array(row["indices"], np.uint32)
    if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
        return Operation(kind, values, indices)
    return Operation(kind, values) if len(values) else Operation(kind, data=row["data"])


def _key(row: dict[str, Any]) -> Key:
    return row["lamport"], row["origin"], row["counter"]


def _unpacked(patch: bytes | None) -> dict[str, Any] | None:
    return None if patch is None else msgpack.unpackb(patch, strict_map_key=True)


def _packed(metadata: dict[str, Any] | None) -> bytes | None:
    return msgpack.packb(metadata) if metadata else None
