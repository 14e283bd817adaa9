"""Size of the calls to a failing sink, and detection of the delta that makes them fail.

After a failed call, a sink that reports its progress gets as many rows as it applied; any other sink gets
half as many as failed. So rows that can be applied are applied, and a delta that always fails is soon
delivered alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop.delivery.redelivery import row_numbers
from delta_prop.delivery.status import FailingDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.sink import Delivery


class CallSize:
    """One sink's call size. `failing`: a delta that was delivered alone, in calls that all failed."""

    def __init__(self, *, can_split: bool) -> None:
        """Create it; `can_split`: True if batches may be delivered in parts."""
        self.failing: FailingDelta | None = None
        self._can_split = can_split
        self._rows_max: int | None = None  # None: no bound, since no recent call failed

    def split(self, deliveries: list[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
        """Split deliveries into those of the next call, and the rest."""
        rows_left = self._rows_max
        if rows_left is None:
            return deliveries, []
        for index, delivery in enumerate(deliveries):
            if delivery.count > rows_left:
                if self._can_split and rows_left:
                    head, tail = _split_delivery(delivery, rows_left)
                    return [*deliveries[:index], head], [tail, *deliveries[index + 1 :]]
                count = max(index, 1)
                return deliveries[:count], deliveries[count:]
            rows_left -= delivery.count
        return deliveries, []

    def note_failure(self, deliveries: Sequence[Delivery], applied_count: int) -> None:
        """Note that a call with these deliveries failed after it applied `applied_count` rows."""
        count = sum(delivery.count for delivery in deliveries)
        self._rows_max = applied_count or max(count // 2, 1)
        first = deliveries[0]
        if count > 1 or applied_count or first.batch.is_control:
            self.failing = None
            return
        row = int(row_numbers(first)[0])
        offset, previous = first.first_offset + row, self.failing
        failures = previous.failures if previous is not None and previous.offset == offset else 0
        self.failing = FailingDelta(offset, first.batch.namespaces[row], first.batch.keys[row], failures + 1)

    def note_success(self, rows_per_call: int) -> None:
        """Note a call that applied all its rows: the bound doubles, and is dropped at `rows_per_call`."""
        self.failing = None
        if self._rows_max is not None:
            self._rows_max *= 2
            if self._rows_max >= rows_per_call:
                self._rows_max = None


def _split_delivery(delivery: Delivery, count: int) -> tuple[Delivery, Delivery]:
    """Return the first `count` rows, and the rest; the `end` of the first part is the rest's first offset."""
    rows = row_numbers(delivery)
    end = delivery.first_offset + int(rows[count])
    return replace(delivery, rows=rows[:count], end=end), replace(delivery, rows=rows[count:])
