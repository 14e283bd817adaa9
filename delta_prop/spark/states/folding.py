"""Folds changes to the state of every vector by columns: the algebra of `wire` without a loop over rows.

Needs pyarrow, not Spark. Vectors that are set, changed, scaled, moved or deleted are folded together;
those that need more (duplicate ids, sums beyond float32, long mixed histories) one by one, by the algebra
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop.spark.states.folding_numbers import Lists, change_numbers
from delta_prop.spark.states.folding_rows import fold_rows, metadata_of, states_of
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Kinds that set a fact in full or delete it; that set a vector; that clear metadata; that change numbers.
_SETS = np.array([Kind.CREATE, Kind.DENSE, Kind.OPAQUE, Kind.DELETE])
_VECTORS = np.array([Kind.CREATE, Kind.DENSE])
_CLEARS = np.array([Kind.CREATE, Kind.DELETE])
_ON_NUMBERS = np.array([Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET])
_NONE = -1


def fold(changes: pa.Table) -> pa.Table:
    """Fold changes to states, one per vector, in the same columns.

    The table has all changes of each vector, in any order, or a state and all later changes. Duplicates have
    no further effect.
    """
    if not changes.num_rows:
        return changes
    rows = _sort(changes)
    last = rows.last_set[rows.ends]
    kinds = np.where(last < 0, Kind.DELETE, rows.kinds[last])
    is_vector = np.isin(kinds, _VECTORS)
    kinds[is_vector] = Kind.CREATE
    numbers = rows.values.take(np.where(is_vector, rows.order[last], _NONE))
    separate = _may_have_duplicate_ids(rows)
    separate |= change_numbers(numbers, *_number_changes(rows, last))
    states = _make_states(rows, last, kinds, numbers)
    if not separate.any():
        return states
    slow = [
        fold_rows(rows.table, rows.order[rows.starts[vector] : rows.ends[vector] + 1])
        for vector in separate.nonzero()[0]
    ]
    return pa.concat_tables([states.filter(pa.array(~separate)), states_of(slow)])


@dataclass(frozen=True, slots=True, eq=False)
class _SortedChanges:
    """Changes by vector in canonical order, without duplicates. Position p holds row `order[p]` of the table.

    `vector`: the number of the vector at each position. `starts`, `ends`: the first and the last position of
    each vector. `counted_from`: each vector's first position that counts: its state in a snapshot, or the
    first change if it has none.
    """

    table: pa.Table
    order: NDArray[np.intp]
    vector: NDArray[np.intp]
    starts: NDArray[np.intp]
    ends: NDArray[np.intp]
    counted_from: NDArray[np.intp]
    kinds: NDArray[np.uint8]
    values: Lists
    indices: Lists
    last_set: NDArray[np.intp]
    """Per position p: the last position up to p where its vector was set in full or deleted; -1: none."""
    has_effect: NDArray[np.bool_]
    """Per position: True if the change has an effect on the state."""

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers, by position."""
        by_position: NDArray[Any] = column_of(self.table, name).to_numpy()[self.order]
        return by_position


def column_of(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _sort(changes: pa.Table) -> _SortedChanges:
    table = changes.combine_chunks()
    codes = pc.dictionary_encode(column_of(table, "key")).indices.to_numpy()
    kinds = column_of(table, "kind").to_numpy()
    order, is_first_copy = _canonical_order(table, codes, kinds)
    order, codes = order[is_first_copy], codes[order[is_first_copy]]
    is_first = np.concatenate([[True], codes[1:] != codes[:-1]])
    starts = is_first.nonzero()[0]
    ends = np.append(starts[1:], len(order)) - 1
    vector = np.cumsum(is_first) - 1
    is_state, kinds = kinds[order] >= STATE, kinds[order] & np.uint8(STATE - 1)
    counted_from = starts.copy()
    counted_from[vector[is_state]] = is_state.nonzero()[0]
    positions = np.arange(len(order))
    is_counted = positions >= counted_from[vector]
    is_set = np.isin(kinds, _SETS) & is_counted
    last_set = np.maximum.accumulate(np.where(is_set, positions, _NONE))
    last_set[last_set < counted_from[vector]] = _NONE
    values, indices = (Lists.of(column_of(table, name)) for name in ("values", "indices"))
    has_effect = is_set | _has_effect_on_set_fact(
        kinds, last_set, values.sizes[order], indices.highest()[order]
    )
    return _SortedChanges(
        table, order, vector, starts, ends, counted_from, kinds, values, indices, last_set, has_effect
    )


def _canonical_order(
    table: pa.Table, codes: NDArray[np.int32], kinds: NDArray[np.uint8]
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the rows sorted by vector and canonical key, and a mask of those that are not duplicates."""
    keys = [column_of(table, name).to_numpy() for name in ("counter", "origin", "lamport")]
    lamport = keys[-1]
    order = np.argsort(codes, kind="stable")
    is_rising = lamport[order[1:]] > lamport[order[:-1]]
    # This is the case of every log without forwarded deltas.
    if (is_rising | (codes[order[1:]] != codes[order[:-1]])).all():
        return order, np.ones(len(order), bool)
    order = np.lexsort((kinds < STATE, *keys, codes))
    is_first_copy = np.ones(len(order), bool)
    is_first_copy[1:] = np.any([one[order[1:]] != one[order[:-1]] for one in (codes, *keys)], axis=0)
    return order, is_first_copy


def _has_effect_on_set_fact(
    kinds: NDArray[np.uint8],
    last_set: NDArray[np.intp],
    sizes: NDArray[np.int64],
    highest_index: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return a mask of the changes that have an effect on what was set before.

    A change of metadata has an effect on an alive fact; a change of numbers, on a vector that has the
    elements that the change names.
    """
    base = np.where(last_set < 0, Kind.DELETE, kinds[last_set])
    on_numbers = np.isin(kinds, _ON_NUMBERS) & np.isin(base, _VECTORS) & (highest_index < sizes[last_set])
    has_effect: NDArray[np.bool_] = on_numbers | ((kinds == Kind.METADATA) & (base != Kind.DELETE))
    return has_effect


def _may_have_duplicate_ids(rows: _SortedChanges) -> NDArray[np.bool_]:
    """Return a mask of the vectors with changes that may have duplicate ids."""
    may_have = np.zeros(len(rows.starts), bool)
    may_have[rows.vector[rows.column("known") > 0]] = True
    return may_have


def _number_changes(
    rows: _SortedChanges, last: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.uint8], Lists, Lists]:
    """Return the changes to numbers since the last set: their vectors, kinds, indices and values."""
    is_later = rows.has_effect & np.isin(rows.kinds, _ON_NUMBERS) & (rows.last_set == last[rows.vector])
    positions = is_later.nonzero()[0]
    change_rows = rows.order[positions]
    return (
        rows.vector[positions],
        rows.kinds[positions],
        rows.indices.take(change_rows),
        rows.values.take(change_rows),
    )


def _make_states(
    rows: _SortedChanges, last: NDArray[np.intp], kinds: NDArray[Any], numbers: Lists
) -> pa.Table:
    table, count = rows.table, len(rows.starts)
    last_rows = rows.order[rows.ends]
    ignored = np.bincount(rows.vector[~rows.has_effect], minlength=count)
    ignored_before = column_of(table, "ignored").to_numpy()[rows.order[rows.counted_from]]
    set_by = pa.array(rows.order[last], mask=last < 0)
    empty = pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.uint32()))
    columns = {
        "key": column_of(table, "key").take(pa.array(last_rows)),
        "kind": kinds.astype(np.uint8) | np.uint8(STATE),
        "values": numbers.array(),
        "indices": empty,
        "data": pc.fill_null(column_of(table, "data").take(set_by), b""),
        "patch": metadata_of(table, *_patch_rows(rows), count),
        "id": pa.nulls(count, pa.binary()),
        "known": np.zeros(count, np.uint8),
        "ignored": ignored_before + ignored,
    }
    for name in ("offset", "lamport", "origin", "counter"):
        columns[name] = column_of(table, name).take(pa.array(last_rows))
    return pa.table([columns[name] for name in CHANGES.names], schema=CHANGES)


def _patch_rows(rows: _SortedChanges) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows whose patches are merged to metadata, in order, and the vector of each."""
    has_patch = column_of(rows.table, "patch").is_valid().to_numpy(zero_copy_only=False)[rows.order]
    if not has_patch.any():
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    positions = np.arange(len(rows.order))
    is_clear = np.isin(rows.kinds, _CLEARS) & rows.has_effect
    last_clear = np.maximum.accumulate(np.where(is_clear, positions, _NONE))
    merged_from = np.maximum(last_clear[rows.ends], rows.counted_from)
    merged = (
        has_patch & rows.has_effect & (rows.kinds != Kind.DELETE) & (positions >= merged_from[rows.vector])
    ).nonzero()[0]
    return rows.order[merged], rows.vector[merged]
