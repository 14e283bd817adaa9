"""The two times of a log: log time, which stamps carry, and seen time, by which its segments age.

A wall clock may be wrong, and may be set while a process runs or between two runs, so it never decides
which rows to remove. *Seen time* counts the monotonic time that passed in processes with the log open; an
age is a difference of seen times. *Log time* stamps appends, for people who ask by date: it begins at the
wall clock, never falls, and follows the wall clock at half to double the speed of the monotonic clock.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

JUMP_US = 60_000_000
"""A wall clock has jumped if it moves this much more, or less, than the monotonic one."""
STOP_US = 86_400_000_000
"""A start this long after the last log time is reported as a jump, though it may follow a long stop."""


class MonotonicClock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return monotonic seconds."""


class Clock(MonotonicClock, Protocol):
    """A monotonic clock and a wall clock."""

    def wall_us(self) -> int:
        """Return microseconds since 1970, as far as the machine knows."""


class ClockJump(NamedTuple):
    """The wall time that was expected and the one that was found, in microseconds since 1970."""

    expected_us: int
    found_us: int


class LogClock:
    """Log time and seen time, in microseconds; they move when `read` is called.

    `jumps` counts the jumps since this object was created; `jump` is the newest known jump.
    """

    def __init__(self, clock: Clock, *, seen_us: int, time_us: int, jump: ClockJump | None) -> None:
        """`time_us`: the last log time known, 0 in a new log. The clock is first read by the first `read`."""
        self.seen_us = seen_us
        self.time_us = time_us
        self.ahead_us = 0
        """Microseconds by which the wall clock is ahead of log time, at the last `read`."""
        self.jump = jump
        self.jumps = 0
        self._now, self._read_wall_us = clock.now, clock.wall_us
        self._first_now: float | None = None
        self._base_us = seen_us  # seen time at the first read of the clock
        self._wall_us = 0  # wall time at the last read

    def read(self) -> int:
        """Advance both times, and return log time."""
        now, wall = self._now(), self._read_wall_us()
        if self._first_now is None:
            return self._start(now, wall)
        seen = self._base_us + int((now - self._first_now) * 1e6 + 0.5)
        passed = seen - self.seen_us
        self.seen_us = seen
        expected = self._wall_us + passed
        if not -JUMP_US < wall - expected < JUMP_US:
            self._note_jump(expected, wall)
        self._wall_us = wall
        step = wall - self.time_us
        if step > passed << 1:
            step = passed << 1
        elif step < passed >> 1:
            step = passed >> 1
        self.time_us += step
        self.ahead_us = wall - self.time_us
        return self.time_us

    def peek(self) -> int:
        """Return log time as of now, without advancing it."""
        if self._first_now is None:
            return max(self.time_us, self._read_wall_us())
        seen_us = self._base_us + int((self._now() - self._first_now) * 1e6)
        return self.time_us + max(seen_us - self.seen_us, 0)

    def poll(self) -> int:
        """Advance both times, and return seen time."""
        self.read()
        return self.seen_us

    def _start(self, now: float, wall: int) -> int:
        self._first_now, self._wall_us = now, wall
        if self.time_us and not -JUMP_US < wall - self.time_us < STOP_US:
            self._note_jump(self.time_us, wall)
        self.time_us = max(self.time_us, wall)
        self.ahead_us = wall - self.time_us
        return self.time_us

    def _note_jump(self, expected_us: int, found_us: int) -> None:
        self.jump = ClockJump(expected_us, found_us)
        self.jumps += 1
