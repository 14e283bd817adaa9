"""How much one call of a failing sink brings, and the delta that it fails at on and on. Pure.

A sink that says how far it came is brought as much as it managed, one that does not half of what failed. So
what can be applied is, and where one delta stands in the way a call brings that one alone before long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop.route.late import rows_of
from delta_prop.route.status import FailingDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.sink import Delivery


class CallSize:
    """One sink's. `failing`: the delta at which call after call failed that brought it alone."""

    def __init__(self, *, cuts: bool) -> None:
        """`cuts`: batches may be delivered in parts."""
        self.failing: FailingDelta | None = None
        self._cuts = cuts
        self._rows_max: int | None = None  # None: whatever there is, as nothing has failed lately

    def split(self, deliveries: list[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
        """Split deliveries into what the next call brings, and the rest."""
        left = self._rows_max
        if left is None:
            return deliveries, []
        for place, delivery in enumerate(deliveries):
            if delivery.count > left:
                if self._cuts and left:
                    head, tail = _cut(delivery, left)
                    return [*deliveries[:place], head], [tail, *deliveries[place + 1 :]]
                count = max(place, 1)
                return deliveries[:count], deliveries[count:]
            left -= delivery.count
        return deliveries, []

    def failed(self, brought: Sequence[Delivery], done: int) -> None:
        """A call failed that brought these, of which it applied so many rows."""
        count = sum(delivery.count for delivery in brought)
        self._rows_max = done or max(count // 2, 1)
        first = brought[0]
        if count > 1 or done or first.batch.is_control:
            self.failing = None
            return
        row = int(rows_of(first)[0])
        offset, before = first.first_offset + row, self.failing
        failures = before.failures if before is not None and before.offset == offset else 0
        self.failing = FailingDelta(offset, first.batch.namespaces[row], first.batch.keys[row], failures + 1)

    def succeeded(self, enough: int) -> None:
        """A call applied all that it brought. `enough`: rows that need no bound."""
        self.failing = None
        if self._rows_max is not None:
            self._rows_max *= 2
            if self._rows_max >= enough:
                self._rows_max = None


def _cut(delivery: Delivery, count: int) -> tuple[Delivery, Delivery]:
    """The first rows of a delivery, and the rest; up to the first of the rest all is dealt with."""
    rows = rows_of(delivery)
    end = delivery.first_offset + int(rows[count])
    return replace(delivery, rows=rows[:count], end=end), replace(delivery, rows=rows[count:])
