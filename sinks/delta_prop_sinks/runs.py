"""Runs: batches of one kind, put together so that they are folded as one block.

A call over arrays costs a few µs whatever it is given; a small batch folded by itself would spend most of its
time on them. So what sets numbers of vectors, and nothing else, waits until somebody reads, or much waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from delta_prop_sinks.table import (
    COUNTER,
    LAMPORT,
    OFFSET,
    ORIGIN,
    VECTOR,
    heads_of,
    rising_heads,
    signed,
)
from delta_prop_wire.batch import F32, U32
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.lazy import lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from delta_prop_sinks.sink import Delivery
    from delta_prop_sinks.table import Table
    from delta_prop_wire.batch import Batch, LoggedBatch

N = TypeVar("N", np.float32, np.uint32)

ROWS_MAX = 512
"""So many rows are folded at once, by who brings the last of them or reads: 0.3 to 1.5 ms."""

BYTES_MAX = 1 << 20
"""Likewise, of the batches that hold them."""

SETTING_KINDS = frozenset(map(int, (Kind.CREATE, Kind.DENSE, Kind.SPARSE)))
"""Kinds that set numbers."""

_NUMBER_BYTES = 4
_REPLICA, _NO_IDS = Source.REPLICA, KnownIds.NONE


class Run:
    """Deliveries whose rows set whole vectors, or numbers of such, in one table; no metadata among them.

    To a table it is what a batch is: `values` and `indices` side by side, `row_values` a row. `count`: rows
    that are meant; `whole`: all of the batches'; `plain`: all of them are.
    """

    has_metadata = False

    def __init__(self, table: Table, kind: int, row_values: int) -> None:
        self.table = table
        self.namespace = table.namespace
        self.kind = kind
        self.row_values = row_values
        self.deliveries: list[Delivery] = []
        self.count = 0
        self.whole = self.plain = True

    def metadata(self, row: int) -> None:
        """None of its rows has any."""

    def rows(self) -> Iterator[tuple[LoggedBatch, int]]:
        """Each row with its batch."""
        for one in self.deliveries:
            for row in range(one.logged.count) if one.rows is None else one.rows.tolist():
                yield one.logged, row

    @lazy
    def batches(self) -> list[Batch]:
        """What its deliveries are of."""
        return [one.logged.batch for one in self.deliveries]

    @lazy
    def keys(self) -> list[str]:
        """The vector ids, row by row."""
        if self.whole:
            return [key for batch in self.batches for key in batch.keys]
        return [logged.batch.keys[row] for logged, row in self.rows()]

    @lazy
    def heads(self) -> NDArray[np.int64]:
        """What a table's `heads` shall hold after each row."""
        if self.count > len(self.deliveries) or not self.whole:
            return np.concatenate([heads_of(one.logged, one.rows) for one in self.deliveries])
        every = [one.logged for one in self.deliveries]
        origins = {batch.origin for batch in self.batches}
        if len(origins) == 1 and _are_neighbours(every[0], every[-1], self.count):
            return rising_heads(every[0], self.count)
        heads = np.empty((self.count, 4), np.int64)
        heads[:, LAMPORT] = [one.lamport for one in every]
        heads[:, ORIGIN] = [signed(batch.origin) for batch in self.batches]
        heads[:, COUNTER] = [batch.base for batch in self.batches]
        heads[:, OFFSET] = [one.offset for one in every]
        return heads

    @lazy
    def values(self) -> NDArray[np.float32]:
        """The numbers, row by row."""
        if self._ends is not None:
            numbers: NDArray[np.float32] = self._ends.view(F32)[
                :, -self._padded : self.row_values - self._padded or None
            ]
            return numbers
        return self._together([batch.values for batch in self.batches])

    @lazy
    def indices(self) -> NDArray[np.uint32]:
        """Where the numbers go, row by row."""
        if self._ends is not None:
            return self._ends[:, : self.row_values]
        return self._together([batch.indices for batch in self.batches])

    @lazy
    def index_highest(self) -> int:
        """No index is above it."""
        if len(self.deliveries) == 1:
            return self.batches[0].index_highest
        return int(np.maximum.reduce(self.indices, axis=None, initial=0))

    @lazy
    def _ends(self) -> NDArray[np.uint32] | None:
        """What single plain rows end with, a row each: indices and numbers, or numbers; None of others."""
        if not (self.plain and self.whole and self.row_values) or self.count > len(self.deliveries):
            return None
        columns = 2 if self.kind == Kind.SPARSE else 1
        size = columns * self._padded * _NUMBER_BYTES
        ends = [batch.raw[batch.length - size : batch.length] for batch in self.batches]
        return np.frombuffer(b"".join(ends), U32).reshape(self.count, columns * self._padded)

    @property
    def _padded(self) -> int:
        """How many numbers a row's column has room for."""
        return self.row_values + self.row_values % 2

    def _together(self, columns: list[NDArray[N]]) -> NDArray[N]:
        if not self.whole:
            columns = [
                column
                if one.rows is None
                else column.reshape(one.logged.count, self.row_values)[one.rows].reshape(-1)
                for column, one in zip(columns, self.deliveries, strict=True)
            ]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)


class Unfolded:
    """What a sink has taken and not yet folded, each table's by itself. Whoever reads has it folded first."""

    def __init__(self, kinds: frozenset[int]) -> None:
        """`kinds`: those that may wait, which set numbers; so to fold one twice in a row changes nothing."""
        self.rows = 0
        self.is_full = False
        """Whether no more may wait."""
        self._bytes = 0
        self._kinds = kinds
        self._runs: dict[Table, Run] = {}
        self._last: Run | None = None

    def go_on(self, delivery: Delivery) -> bool:
        """Hold a whole plain batch like that which was added last: `may_wait` and `add` in a few steps.

        False, and nothing changed, where it is no such.
        """
        run, logged = self._last, delivery.logged
        batch = logged.batch
        if (
            run is None
            or not batch.plain
            or batch.kind != run.kind
            or batch.row_values != run.row_values
            or batch.namespace != run.namespace
            or delivery.rows is not None
            or delivery.late
            or logged.source is _REPLICA
            or logged.known_ids is not _NO_IDS
        ):
            return False
        run.deliveries.append(delivery)
        count = logged.count
        run.count += count
        self.rows += count
        self._bytes += batch.size
        if self.rows >= ROWS_MAX or self._bytes >= BYTES_MAX:
            self.is_full = True
        return True

    def may_wait(self, delivery: Delivery) -> bool:
        """Whether its rows set numbers in one namespace, and nothing says that they may be late."""
        logged = delivery.logged
        batch = logged.batch
        return (
            batch.kind in self._kinds
            and (batch.plain or _sets_numbers_only(batch))
            and logged.source is not _REPLICA
            and logged.known_ids is _NO_IDS
            and not delivery.late
        )

    def add(self, delivery: Delivery, table: Table, count: int) -> bool:
        """Hold what may wait, of so many rows; False where what waits already has to be folded first."""
        batch = delivery.logged.batch
        run = self._runs.get(table)
        if run is None:
            assert batch.kind is not None
            assert batch.row_values is not None
            run = self._runs[table] = Run(table, batch.kind, batch.row_values)
        elif run.kind != batch.kind or run.row_values != batch.row_values:
            return False  # a create clears metadata, a dense keeps it
        if delivery.rows is not None:
            run.whole = False
        if not batch.plain:
            run.plain = False
        self._last = run
        run.deliveries.append(delivery)
        run.count += count
        self.rows += count
        self._bytes += batch.size
        self.is_full = self.rows >= ROWS_MAX or self._bytes >= BYTES_MAX
        return True

    def fold(self, fold: Callable[[Run], None]) -> None:
        """Have all of it folded. What `fold` raises leaves all there, to be folded again."""
        for run in self._runs.values():
            fold(run)
        self.forget()

    def forget(self) -> None:
        """Hold nothing: it is folded, or void."""
        self._runs.clear()
        self._last = None
        self.rows = self._bytes = 0
        self.is_full = False


def fold_new(run: Run, slots: NDArray[np.intp], rows: NDArray[np.intp] | None = None) -> None:
    """Fold a run, or some of its rows, that are newer than all that these slots hold."""
    table = run.table
    if not table.fold_block(run, run.kind, rows, slots):
        _fold_in_parts(run, slots, np.arange(run.count) if rows is None else rows)
    table.heads[slots] = run.heads if rows is None else run.heads[rows]


def _fold_in_parts(run: Run, slots: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
    """Vectors that hold no numbers that the run could set are folded row by row, the others as a block."""
    table = run.table
    alone = table.forms.take(slots) != VECTOR
    if run.kind != Kind.SPARSE or not table.fold_block(run, run.kind, rows[~alone], slots[~alone]):
        alone[:] = True
    every = list(run.rows())
    for row, slot in zip(rows[alone].tolist(), slots[alone].tolist(), strict=True):
        logged, place = every[row]
        table.fold_row(logged.batch, place, slot)


def _are_neighbours(first: LoggedBatch, last: LoggedBatch, count: int) -> bool:
    """Whether rows of one origin, of which these are the first and the last, lie side by side in the log.

    In each of these numbers they rise.
    """
    apart = count - 1
    return (
        last.offset - first.offset == apart
        and last.lamport - first.lamport == apart
        and last.batch.base - first.batch.base == apart
    )


class Folded:
    """The newest whole batches, back to back, that have been folded: who brings one again is told at once."""

    def __init__(self) -> None:
        self._begin = self._end = 0

    def forget(self) -> None:
        """What was folded is folded no more, or of another log."""
        self._begin = self._end = 0

    def note(self, delivery: Delivery, next_offset: int) -> None:
        """A delivery was folded, which reaches up to there."""
        if delivery.rows is None and delivery.end is None and not delivery.late:
            if delivery.logged.offset != self._end:
                self._begin = delivery.logged.offset
            self._end = next_offset

    def has(self, delivery: Delivery) -> bool:
        """Whether all rows of a delivery are among them."""
        begin, end = delivery.first_offset, delivery.next_offset
        return self._begin <= begin and end <= self._end and not delivery.late


def _sets_numbers_only(batch: Batch) -> bool:
    """Of a batch that is not plain, of one kind that sets numbers."""
    return not (
        batch.is_control
        or batch.has_metadata
        or batch.leaps
        or batch.is_state
        or batch.namespace is None
        or batch.row_values is None
    )
