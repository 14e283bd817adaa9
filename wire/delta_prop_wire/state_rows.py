"""State rows: the full state of each vector at an offset, as in a log's snapshot.

A row's kind is create (a vector), opaque (bytes) or delete (neither: a tombstone, or only deltas without
effect); its metadata is all metadata of the vector. With the canonical key of the last delta and the number
of deltas without effect it equals an `algebra.VectorState`, so a fold can continue from it. A row also holds
the offset of that last delta.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import Delta, Kind, Operation
from delta_prop_wire.encode import assemble, columns_of
from delta_prop_wire.layout import Column


class StateRow(NamedTuple):
    """One vector's state, and the offset of its last delta. `state.key` is not None."""

    namespace: str
    vector_id: str
    state: VectorState
    offset: int


def encode_states(rows: Sequence[StateRow], *, hybrid_time: int = 0) -> Batch:
    """Encode states as rows. Raises Refused (TOO_LARGE) above the frame's bound."""
    columns, kinds_mask, dimension = columns_of([_delta(row) for row in rows])
    keys = [row.state.key for row in rows]
    assert None not in keys, "a state without a key contains no delta"
    lamports, origins, counters = zip(*(key for key in keys if key is not None), strict=True)
    pack = struct.Struct(f"<{len(rows)}Q").pack
    columns[Column.ROW_OFFSETS] = pack(*(row.offset for row in rows))
    columns[Column.STATE_ORIGINS] = pack(*origins)
    columns[Column.STATE_COUNTERS] = pack(*counters)
    columns[Column.STATE_LAMPORTS] = pack(*lamports)
    if any(row.state.ignored for row in rows):
        columns[Column.STATE_IGNORED] = pack(*(row.state.ignored for row in rows))
    return assemble_states(columns, len(rows), kinds_mask, dimension, hybrid_time)


def assemble_states(
    columns: dict[Column, bytes], count: int, kinds_mask: int, dimension: int, hybrid_time: int = 0
) -> Batch:
    """Encode a batch from the columns of state rows. Raises Refused (TOO_LARGE)."""
    return assemble(
        columns,
        attributes=0,
        count=count,
        origin=0,
        epoch=0,
        base=1,
        hybrid_time=hybrid_time,
        kinds_mask=kinds_mask,
        dimension=dimension,
    )


def state_of(batch: Batch, row: int) -> VectorState:
    """Return a copy of the state in a row of a batch of states; a fold can continue from it."""
    operation, ignored = batch.operation(row), batch.state_ignored
    ignored_count, key = 0 if ignored is None else int(ignored[row]), batch.state_keys[row]
    if operation.kind == Kind.DELETE:
        return VectorState(ignored=ignored_count, key=key)
    metadata = batch.metadata(row) or {}
    if operation.kind == Kind.OPAQUE:
        return VectorState(True, data=operation.data, metadata=metadata, ignored=ignored_count, key=key)
    assert operation.values is not None
    return VectorState(True, operation.values.copy(), None, metadata, ignored_count, key)


def _delta(row: StateRow) -> Delta:
    state = row.state
    if not state.alive:
        operation = Operation(Kind.DELETE)
    elif state.data is not None:
        operation = Operation(Kind.OPAQUE, data=state.data)
    else:
        operation = Operation(Kind.CREATE, state.vector)
    return Delta(row.vector_id, operation, row.namespace, metadata=state.metadata or None)
