"""Fold runs: batches of one kind, concatenated so that they are folded as one block.

A call over arrays costs a few µs at any size; a small batch folded alone would spend most of its time on such
calls. So rows that only set numbers of vectors are buffered until a read, or until the buffer is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.sink import Delivery
from delta_prop_sinks.vector_table import (
    COUNTER,
    LAMPORT,
    OFFSET,
    ORIGIN,
    VECTOR,
    VectorTable,
    consecutive_heads,
    heads_of,
    to_signed,
)
from delta_prop_wire.batch import F32, U32, Batch, LoggedBatch
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.lazy import lazy

N = TypeVar("N", np.float32, np.uint32)

ROWS_MAX = 512
"""Maximum number of buffered rows. A read folds them, or the call that fills the buffer, in 0.3 to 1.5 ms."""

BYTES_MAX = 1 << 20
"""Maximum bytes of the batches with buffered rows."""

SETTING_KINDS = frozenset(map(int, (Kind.CREATE, Kind.DENSE, Kind.SPARSE)))
"""Kinds of deltas that set numbers of a vector."""

_NUMBER_BYTES = 4
_REPLICA, _NO_IDS = Source.REPLICA, KnownIds.NONE


class FoldRun:
    """Deliveries of one kind whose rows set full vectors, or numbers of vectors, in one table, without
    metadata.

    To a table it looks like a batch: concatenated `values` and `indices`, `values_per_row` numbers per row.
    `count`: the number of rows to fold. `has_all_rows`: these are all rows of the batches. `homogeneous`: all
    batches are homogeneous.
    """

    has_metadata = False

    def __init__(self, table: VectorTable, kind: int, values_per_row: int) -> None:
        self.table = table
        self.namespace = table.namespace
        self.kind = kind
        self.values_per_row = values_per_row
        self.deliveries: list[Delivery] = []
        self.count = 0
        self.has_all_rows = self.homogeneous = True

    def metadata(self, row: int) -> None:
        """Return None: no row has metadata."""

    def rows(self) -> Iterator[tuple[LoggedBatch, int]]:
        """Yield each row with its batch."""
        for delivery in self.deliveries:
            logged = delivery.logged
            for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
                yield logged, row

    @lazy
    def batches(self) -> list[Batch]:
        """The batches of the deliveries."""
        return [delivery.logged.batch for delivery in self.deliveries]

    @lazy
    def keys(self) -> list[str]:
        """Vector ids, row by row."""
        if self.has_all_rows:
            return [key for batch in self.batches for key in batch.keys]
        return [logged.batch.keys[row] for logged, row in self.rows()]

    @lazy
    def heads(self) -> NDArray[np.int64]:
        """The head that each row's vector has once the row is folded, as in a table's `heads`."""
        if self.count > len(self.deliveries) or not self.has_all_rows:
            return np.concatenate([heads_of(delivery.logged, delivery.rows) for delivery in self.deliveries])
        logged = [delivery.logged for delivery in self.deliveries]
        origins = {batch.origin for batch in self.batches}
        if len(origins) == 1 and _are_adjacent(logged[0], logged[-1], self.count):
            return consecutive_heads(logged[0], self.count)
        heads = np.empty((self.count, 4), np.int64)
        heads[:, LAMPORT] = [row.lamport for row in logged]
        heads[:, ORIGIN] = [to_signed(batch.origin) for batch in self.batches]
        heads[:, COUNTER] = [batch.base for batch in self.batches]
        heads[:, OFFSET] = [row.offset for row in logged]
        return heads

    @lazy
    def values(self) -> NDArray[np.float32]:
        """Numbers, row by row."""
        if self._last_columns is not None:
            numbers: NDArray[np.float32] = self._last_columns.view(F32)[
                :, -self._padded_width : self.values_per_row - self._padded_width or None
            ]
            return numbers
        return self._concatenate([batch.values for batch in self.batches])

    @lazy
    def indices(self) -> NDArray[np.uint32]:
        """Positions of the numbers in their vectors, row by row."""
        if self._last_columns is not None:
            return self._last_columns[:, : self.values_per_row]
        return self._concatenate([batch.indices for batch in self.batches])

    @lazy
    def highest_index(self) -> int:
        """An upper bound of all indices."""
        if len(self.deliveries) == 1:
            return self.batches[0].highest_index
        return int(np.maximum.reduce(self.indices, axis=None, initial=0))

    @lazy
    def _last_columns(self) -> NDArray[np.uint32] | None:
        """The joined last columns of single-row homogeneous batches; None if some are not of this sort."""
        if not (self.homogeneous and self.has_all_rows and self.values_per_row) or self.count > len(
            self.deliveries
        ):
            return None
        column_count = 2 if self.kind == Kind.SPARSE else 1
        size = column_count * self._padded_width * _NUMBER_BYTES
        columns = [batch.raw[batch.length - size : batch.length] for batch in self.batches]
        return np.frombuffer(b"".join(columns), U32).reshape(self.count, column_count * self._padded_width)

    @property
    def _padded_width(self) -> int:
        """The numbers of one row in a column, with padding."""
        return self.values_per_row + self.values_per_row % 2

    def _concatenate(self, columns: list[NDArray[N]]) -> NDArray[N]:
        if not self.has_all_rows:
            columns = [
                column
                if delivery.rows is None
                else column.reshape(delivery.logged.count, self.values_per_row)[delivery.rows].reshape(-1)
                for column, delivery in zip(columns, self.deliveries, strict=True)
            ]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)


class FoldBuffer:
    """Deliveries that a sink has accepted and not yet folded, by table. Every reader folds them first."""

    def __init__(self, kinds: frozenset[int]) -> None:
        """`kinds`: kinds to buffer. They set numbers, so folding a delta twice changes nothing."""
        self.row_count = 0
        self.is_full = False
        """True if no more rows may be buffered."""
        self._bytes = 0
        self._kinds = kinds
        self._runs: dict[VectorTable, FoldRun] = {}
        self._last: FoldRun | None = None

    def extend(self, delivery: Delivery) -> bool:
        """Buffer a full homogeneous batch like the last one, in place of `can_hold` and `add`; else False."""
        run, logged = self._last, delivery.logged
        batch = logged.batch
        if (
            run is None
            or not core_mode.is_native
            or not batch.homogeneous
            or batch.kind != run.kind
            or batch.values_per_row != run.values_per_row
            or batch.namespace != run.namespace
            or delivery.rows is not None
            or delivery.redelivered
            or logged.source is _REPLICA
            or logged.known_ids is not _NO_IDS
        ):
            return False
        run.deliveries.append(delivery)
        count = logged.count
        run.count += count
        self.row_count += count
        self._bytes += batch.size
        if self.row_count >= ROWS_MAX or self._bytes >= BYTES_MAX:
            self.is_full = True
        return True

    def can_hold(self, delivery: Delivery) -> bool:
        """True if the delivery's rows set numbers in one namespace, and none can be out of order."""
        logged = delivery.logged
        batch = logged.batch
        return (
            core_mode.is_native
            and batch.kind in self._kinds
            and (batch.homogeneous or _has_only_numbers(batch))
            and logged.source is not _REPLICA
            and logged.known_ids is _NO_IDS
            and not delivery.redelivered
        )

    def add(self, delivery: Delivery, table: VectorTable, count: int) -> bool:
        """Buffer `count` rows that `can_hold` accepts; False if the buffer must be folded first."""
        batch = delivery.logged.batch
        run = self._runs.get(table)
        if run is None:
            assert batch.kind is not None
            assert batch.values_per_row is not None
            run = self._runs[table] = FoldRun(table, batch.kind, batch.values_per_row)
        elif run.kind != batch.kind or run.values_per_row != batch.values_per_row:
            return False  # a create clears metadata, a dense retains it
        if delivery.rows is not None:
            run.has_all_rows = False
        if not batch.homogeneous:
            run.homogeneous = False
        self._last = run
        run.deliveries.append(delivery)
        run.count += count
        self.row_count += count
        self._bytes += batch.size
        self.is_full = self.row_count >= ROWS_MAX or self._bytes >= BYTES_MAX
        return True

    def fold(self, fold_run: Callable[[FoldRun], None]) -> None:
        """Call `fold_run` with each run. If it raises, the buffer is unchanged, and is folded later."""
        for run in self._runs.values():
            fold_run(run)
        self.clear()

    def clear(self) -> None:
        """Empty the buffer: its rows are folded or invalid."""
        self._runs.clear()
        self._last = None
        self.row_count = self._bytes = 0
        self.is_full = False


def fold_new(run: FoldRun, slots: NDArray[np.intp], rows: NDArray[np.intp] | None = None) -> None:
    """Fold a run, or the given rows of it, into slots. All deltas in these slots must be older."""
    table = run.table
    if not table.fold_block(run, run.kind, rows, slots):
        _fold_in_parts(run, slots, np.arange(run.count) if rows is None else rows)
    table.heads[slots] = run.heads if rows is None else run.heads[rows]


def _fold_in_parts(run: FoldRun, slots: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
    """Fold one by one the rows whose slot holds no vector, and the others as a block if possible."""
    table = run.table
    is_single = table.forms.take(slots) != VECTOR
    if run.kind != Kind.SPARSE or not table.fold_block(run, run.kind, rows[~is_single], slots[~is_single]):
        is_single[:] = True
    all_rows = list(run.rows())
    for row, slot in zip(rows[is_single].tolist(), slots[is_single].tolist(), strict=True):
        logged, index = all_rows[row]
        table.fold_row(logged.batch, index, slot)


def _are_adjacent(first: LoggedBatch, last: LoggedBatch, count: int) -> bool:
    """True if the ascending rows of one origin, from `first` to `last`, are `count` adjacent rows."""
    distance = count - 1
    return (
        last.offset - first.offset == distance
        and last.lamport - first.lamport == distance
        and last.batch.base - first.batch.base == distance
    )


class FoldedRange:
    """The newest contiguous range of fully folded batches, to detect a duplicate batch by one comparison."""

    def __init__(self) -> None:
        self._start = self._end = 0

    def clear(self) -> None:
        """Empty the range: the folded rows were dropped, or the log has changed."""
        self._start = self._end = 0

    def note(self, delivery: Delivery, next_offset: int) -> None:
        """Add a folded delivery that ends at `next_offset`."""
        if delivery.rows is None and delivery.end is None and not delivery.redelivered:
            if delivery.logged.offset != self._end:
                self._start = delivery.logged.offset
            self._end = next_offset

    def has_all_of(self, delivery: Delivery) -> bool:
        """True if all rows of a delivery are in the range."""
        start, end = delivery.first_offset, delivery.next_offset
        return self._start <= start and end <= self._end and not delivery.redelivered


def _has_only_numbers(batch: Batch) -> bool:
    """True if a heterogeneous batch, of a kind that sets numbers, does only that, and in one namespace."""
    return not (
        batch.is_control
        or batch.has_metadata
        or batch.has_gaps
        or batch.is_state
        or batch.namespace is None
        or batch.values_per_row is None
    )
