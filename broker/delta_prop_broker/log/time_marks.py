"""Time marks: pairs of a time and an offset, from which the ages of a log's rows are derived."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.log_clock import MonotonicClock

TIME_MARKS_MAX = 4_096
"""Maximum number of stored time marks; older ones lie further apart."""


class TimeMarks:
    """The time at which the log ended at an offset, noted now and then, so that an append need not do it."""

    def __init__(self, clock: MonotonicClock | None) -> None:
        """`clock`: None in a log whose rows need no ages; then all are 0."""
        self._clock = clock
        self._ends: list[int] = []  # the next offset at each time of `_times`
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, start: int, end: int) -> None:
        """Note that the log holds the rows from `start` to `end` now."""
        if self._clock is None or (self._ends and self._ends[-1] == end):
            return
        self._ends.append(end)
        self._times.append(self._clock.now())
        if len(self._ends) > TIME_MARKS_MAX:
            removed_count = bisect_right(self._ends, start)
            if removed_count * 2 > TIME_MARKS_MAX:
                del self._ends[:removed_count], self._times[:removed_count]
            else:  # thin out the older half
                del self._ends[: TIME_MARKS_MAX // 2 : 2], self._times[: TIME_MARKS_MAX // 2 : 2]

    def age_s(self, offset: int) -> float:
        """Return the seconds since the first mark after the row at `offset`; 0 if there is none yet."""
        index = bisect_right(self._ends, offset)
        if self._clock is None or index == len(self._ends):
            return 0.0
        return max(self._clock.now() - self._times[index], 0.0)
