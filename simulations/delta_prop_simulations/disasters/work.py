"""How much work a call of a sink may be: virtual time does not tell, so it is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.violation import Violation
from delta_prop_sinks import IndexSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_simulations.disasters.record import Record
    from delta_prop_sinks.sink import Delivery

AGAIN_MAX = 2
"""How often a call may fold each delta of the vectors that it changes, at most."""


class CountedIndex(IndexSink):
    """An index that tells a judge where a call of it folds more than it may."""

    def __init__(self, name: str, record: Record, complain: Callable[[Violation], None]) -> None:
        super().__init__(name=name)
        self._record = record
        self._complain = complain

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Do as an index does, and count."""
        before = self._folded_again()
        try:
            await super().apply(deliveries)
        finally:
            self._check(deliveries, self._folded_again() - before)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Do as an index does, and count."""
        before = self._folded_again()
        try:
            return super().apply_now(deliveries)
        finally:
            self._check(deliveries, self._folded_again() - before)

    def _folded_again(self) -> int:
        return self.resident.statistics().folded_again

    def _check(self, deliveries: Sequence[Delivery], folded: int) -> None:
        if not folded:
            return
        touched = {
            ref
            for one in deliveries
            if not one.batch.is_control
            for ref in zip(one.batch.namespaces, one.batch.keys, strict=True)
        }
        there = [*self._record.rows(), *((at, logged, row) for at, logged, row, _ in self._record.lost())]
        rows = sum(
            (logged.batch.namespaces[row], logged.batch.keys[row]) in touched for _, logged, row in there
        )
        if folded > AGAIN_MAX * rows:
            brought = sum(one.count for one in deliveries)
            self._complain(
                Violation(
                    "work",
                    f"{self._record.node}, sink {self.name!r}: a call that brought {brought} deltas folded "
                    f"{folded} of the {rows} that there are of their vectors",
                )
            )
