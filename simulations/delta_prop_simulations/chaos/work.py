"""Bounds the work of a sink's call: as virtual time does not show it, folded deltas are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.violation import Violation
from delta_prop_sinks import IndexSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_simulations.chaos.log_history import LogHistory
    from delta_prop_sinks.sink import Delivery

REFOLDS_MAX = 2
"""The maximum number of times that a call may fold each delta of the vectors that it changes."""


class CountedIndex(IndexSink):
    """An index that notes a violation if a call folds more than it may."""

    def __init__(self, name: str, history: LogHistory, note_violation: Callable[[Violation], None]) -> None:
        super().__init__(name=name)
        self._history = history
        self._note_violation = note_violation

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply the deliveries as an index does, and count the folded deltas."""
        before = self._count_refolded()
        try:
            await super().apply(deliveries)
        finally:
            self._check(deliveries, self._count_refolded() - before)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Apply the deliveries as an index does, and count the folded deltas."""
        before = self._count_refolded()
        try:
            return super().apply_now(deliveries)
        finally:
            self._check(deliveries, self._count_refolded() - before)

    def _count_refolded(self) -> int:
        return self.resident.statistics().refolded

    def _check(self, deliveries: Sequence[Delivery], folded: int) -> None:
        if not folded:
            return
        touched = {
            ref
            for one in deliveries
            if not one.batch.is_control
            for ref in zip(one.batch.namespaces, one.batch.keys, strict=True)
        }
        logged_rows = [
            *self._history.rows(),
            *((at, logged, row) for at, logged, row, _ in self._history.lost_rows()),
        ]
        rows = sum(
            (logged.batch.namespaces[row], logged.batch.keys[row]) in touched
            for _, logged, row in logged_rows
        )
        if folded > REFOLDS_MAX * rows:
            brought = sum(one.count for one in deliveries)
            self._note_violation(
                Violation(
                    "work",
                    f"{self._history.node}, sink {self.name!r}: a call with {brought} deltas folded "
                    f"{folded}, their vectors have {rows}",
                )
            )
