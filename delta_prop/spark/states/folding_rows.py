"""Folds row by row what cannot be folded by columns: metadata, and vectors that are folded one at a time.

It converts rows of Arrow tables for the algebra of `wire`, and the algebra's results to rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa

from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop_wire.algebra import Key, VectorState, with_ignored
from delta_prop_wire.algebra import fold as fold_state
from delta_prop_wire.delta import Kind, KnownIds, Operation
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates
from delta_prop_wire.metadata import merge

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FoldedVector(NamedTuple):
    """A vector's state, and the offset of its last delta."""

    key: str
    state: VectorState
    offset: int


def metadata_of(
    table: pa.Table, rows: NDArray[np.intp], vector_numbers: NDArray[np.intp], count: int
) -> pa.Array:
    """Return the metadata of `count` vectors in msgpack, folded from the rows' patches; null if empty.

    `vector_numbers`: for each of the rows, the number of its vector, below `count`.
    """
    if not len(rows):
        return pa.nulls(count, pa.binary())
    metadata: dict[int, dict[str, Any]] = {}
    patches = table.column("patch").take(pa.array(rows)).to_pylist()
    for vector, patch in zip(vector_numbers.tolist(), patches, strict=True):
        metadata[vector] = merge(metadata.get(vector, {}), msgpack.unpackb(patch, strict_map_key=True))
    return pa.array(map(_pack, map(metadata.get, range(count))), pa.binary())


def fold_rows(table: pa.Table, rows: NDArray[np.intp]) -> FoldedVector:
    """Fold one vector from its changes: `rows`, in canonical order."""
    row_fields = table.take(pa.array(rows)).to_pylist()
    base, changes, ignored_count = VectorState(), row_fields, 0
    state_at = next((position for position, row in enumerate(row_fields) if row["kind"] & STATE), None)
    if state_at is not None:
        # Changes that sort before the state have no effect.
        base, changes = state_of_row(row_fields[state_at]), row_fields[state_at + 1 :]
        ignored_count = state_at
    identified = [
        IdentifiedDelta(row["id"], _key_of(row), row["offset"], KnownIds(row["known"]))
        for row in changes
        if row["id"] is not None
    ]
    duplicates = find_duplicates(identified, complete=state_at is None)
    state = fold_state(
        ((_key_of(row), _operation_of(row), _unpack(row["patch"])) for row in changes),
        base,
        without_effect=duplicates,
    )
    return FoldedVector(
        row_fields[-1]["key"], with_ignored(state, ignored_count, state.key), row_fields[-1]["offset"]
    )


def states_of(folded: Sequence[FoldedVector]) -> pa.Table:
    """Return states as rows."""
    return pa.Table.from_pylist([_to_row(one) for one in folded], schema=CHANGES)


def state_of_row(row: dict[str, Any]) -> VectorState:
    """Return the state in a row."""
    kind, metadata = row["kind"] & ~STATE, _unpack(row["patch"]) or {}
    if kind == Kind.DELETE:
        return VectorState(ignored=row["ignored"], key=_key_of(row))
    if kind == Kind.OPAQUE:
        return VectorState(
            True, data=row["data"], metadata=metadata, ignored=row["ignored"], key=_key_of(row)
        )
    vector = np.array(row["values"], np.float32)
    return VectorState(True, vector, None, metadata, row["ignored"], _key_of(row))


def _to_row(folded: FoldedVector) -> dict[str, Any]:
    state = folded.state
    assert state.key is not None, "the state must come from a change"
    lamport, origin, counter = state.key
    kind = Kind.CREATE if state.vector is not None else Kind.OPAQUE if state.alive else Kind.DELETE
    return {
        "key": folded.key,
        "kind": kind | STATE,
        "values": [] if state.vector is None else state.vector,
        "indices": [],
        "data": state.data or b"",
        "patch": _pack(dict(state.metadata)),
        "known": 0,
        "offset": folded.offset,
        "lamport": lamport,
        "origin": origin,
        "counter": counter,
        "ignored": state.ignored,
    }


def _operation_of(row: dict[str, Any]) -> Operation:
    kind = row["kind"]
    values, indices = np.array(row["values"], np.float32), np.array(row["indices"], np.uint32)
    if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
        return Operation(kind, values, indices)
    return Operation(kind, values) if len(values) else Operation(kind, data=row["data"])


def _key_of(row: dict[str, Any]) -> Key:
    return row["lamport"], row["origin"], row["counter"]


def _unpack(patch: bytes | None) -> dict[str, Any] | None:
    return None if patch is None else msgpack.unpackb(patch, strict_map_key=True)


def _pack(metadata: dict[str, Any] | None) -> bytes | None:
    return msgpack.packb(metadata) if metadata else None
