"""Bounds the work of a sink's call by the number of deltas that it folds, since work takes no virtual
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.violation import Violation
from delta_prop_sinks import IndexSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.chaos.log_history import LogHistory
    from delta_prop_sinks.sink import Delivery

REFOLDS_MAX = 2
"""Maximum number of times that a call may fold each delta of the vectors that it changes."""


class CountedIndex(IndexSink):
    """An index that notes a violation if a call folds more deltas than `REFOLDS_MAX` permits."""

    def __init__(self, name: str, history: LogHistory, violations: list[Violation]) -> None:
        super().__init__(name=name)
        self._history = history
        self._violations = violations

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply the deliveries as an index does, and check how many deltas the call folds."""
        before = self._count_refolded()
        try:
            await super().apply(deliveries)
        finally:
            self._check(deliveries, self._count_refolded() - before)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Apply the deliveries as an index does, and check how many deltas the call folds."""
        before = self._count_refolded()
        try:
            return super().apply_now(deliveries)
        finally:
            self._check(deliveries, self._count_refolded() - before)

    def _count_refolded(self) -> int:
        return self.resident.statistics().refolded

    def _check(self, deliveries: Sequence[Delivery], folded_count: int) -> None:
        if not folded_count:
            return
        changed_vectors = {
            ref
            for one in deliveries
            if not one.batch.is_control
            for ref in zip(one.batch.namespaces, one.batch.keys, strict=True)
        }
        logged_rows = [
            *self._history.rows(),
            *((offset, logged, row) for offset, logged, row, _ in self._history.lost_rows()),
        ]
        row_count = sum(
            (logged.batch.namespaces[row], logged.batch.keys[row]) in changed_vectors
            for _, logged, row in logged_rows
        )
        if folded_count > REFOLDS_MAX * row_count:
            delivered_count = sum(one.count for one in deliveries)
            self._violations.append(
                Violation(
                    "work",
                    f"{self._history.node}, sink {self.name!r}: a call with {delivered_count} deltas folded "
                    f"{folded_count} deltas, but its vectors have only {row_count}",
                )
            )
