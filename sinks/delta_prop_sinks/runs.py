"""Runs: neighbouring small batches of one kind, put together so that they are folded as one block.

A call over arrays costs a few µs whatever it is given; a sink that reads the log in frames of 25 rows would
spend most of its time on them. Arithmetic only: where a run cannot be folded, its deliveries are, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.table import heads_of
from delta_prop_wire.delta import Kind, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.sink import Delivery

ROWS_MAX = 512
"""A delivery of more rows is a block of its own; a run ends when it has so many."""

_KINDS = frozenset({Kind.CREATE, Kind.DENSE, Kind.SPARSE})


@dataclass(slots=True, eq=False)
class Run:
    """Deliveries whose rows set whole vectors, or numbers of such, in one namespace; no metadata among them.

    To a table it is what a batch is: `values` and `indices` side by side, `row_values` a row.
    """

    namespace: str
    kind: int
    row_values: int
    deliveries: list[Delivery] = field(default_factory=list)
    count: int = 0
    has_metadata: bool = False

    def metadata(self, row: int) -> None:
        """None of its rows has any."""

    def takes(self, delivery: Delivery, kind: int) -> bool:
        """Whether it goes on with this delivery, of a kind that runs hold."""
        batch = delivery.batch
        return (
            self.count + delivery.count <= ROWS_MAX
            and kind == self.kind  # a create clears metadata, a dense keeps it
            and batch.row_values == self.row_values
            and batch.namespace == self.namespace
        )

    def add(self, delivery: Delivery) -> None:
        """Put a delivery at the end."""
        self.deliveries.append(delivery)
        self.count += delivery.count

    @property
    def keys(self) -> list[str]:
        """The vector ids, row by row."""
        found: list[str] = []
        for delivery in self.deliveries:
            keys = delivery.batch.keys
            found += keys if delivery.rows is None else [keys[row] for row in delivery.rows.tolist()]
        return found

    @property
    def heads(self) -> NDArray[np.int64]:
        """What a table's `heads` shall hold after each row."""
        return np.concatenate([heads_of(one.logged, one.rows) for one in self.deliveries])

    @property
    def values(self) -> NDArray[np.float32]:
        """The numbers, row by row."""
        return np.concatenate([self._rows(one, one.batch.values) for one in self.deliveries])

    @property
    def indices(self) -> NDArray[np.uint32]:
        """Where the numbers go, row by row."""
        return np.concatenate([self._rows(one, one.batch.indices) for one in self.deliveries])

    @property
    def index_highest(self) -> int:
        """No index is above it."""
        return max(delivery.batch.index_highest for delivery in self.deliveries)

    def _rows(self, delivery: Delivery, column: NDArray[np.generic]) -> NDArray[np.generic]:
        if delivery.rows is None:
            return column
        return column.reshape(delivery.batch.count, self.row_values)[delivery.rows].reshape(-1)


class Folded:
    """The newest whole batches, back to back, that have been folded: who brings one again is told at once."""

    def __init__(self) -> None:
        self._begin = self._end = 0

    def forget(self) -> None:
        """What was folded is folded no more, or of another log."""
        self._begin = self._end = 0

    def note(self, delivery: Delivery) -> None:
        """A delivery was folded."""
        if delivery.rows is None and delivery.end is None and not delivery.late:
            if delivery.first_offset != self._end:
                self._begin = delivery.first_offset
            self._end = delivery.next_offset

    def part(self, deliveries: Sequence[Delivery]) -> tuple[Sequence[Delivery], int]:
        """Those that are not among them, and how many rows the others have."""
        if not deliveries or not (self.has(deliveries[0]) or any(map(self.has, deliveries[1:]))):
            return deliveries, 0
        folded = sum(one.count for one in deliveries if self.has(one))
        return [one for one in deliveries if not self.has(one)], folded

    def has(self, delivery: Delivery) -> bool:
        """Whether all rows of a delivery are among them."""
        begin, end = delivery.first_offset, delivery.next_offset
        return self._begin <= begin and end <= self._end and not delivery.late


def runs(deliveries: Sequence[Delivery]) -> Iterator[Delivery | Run]:
    """The same deliveries in order, neighbours put together where that is worth while."""
    if len(deliveries) == 1:
        yield deliveries[0]
        return
    run: Run | None = None
    for delivery in deliveries:
        kind = _kind(delivery)
        if run is not None and (kind is None or not run.takes(delivery, kind)):
            yield from _alone_or_together(run)
            run = None
        if kind is None:
            yield delivery
            continue
        if run is None:
            namespace, width = delivery.batch.namespace, delivery.batch.row_values
            assert namespace is not None
            assert width is not None
            run = Run(namespace, kind, width)
        run.add(delivery)
    if run is not None:
        yield from _alone_or_together(run)


def _alone_or_together(run: Run) -> Iterator[Delivery | Run]:
    if len(run.deliveries) == 1:
        yield run.deliveries[0]
    else:
        yield run


def _kind(delivery: Delivery) -> int | None:
    """The kind of a delivery that a run may hold, None where it stands alone."""
    if delivery.count >= ROWS_MAX or delivery.late or delivery.logged.source == Source.REPLICA:
        return None
    batch = delivery.batch
    if batch.is_control or batch.has_metadata or batch.row_values is None or batch.namespace is None:
        return None
    return batch.kind if batch.kind in _KINDS else None
