"""What a service advises a producer: a rate, and when to send nothing at all.

Pure. Advice shapes what is sent and never loses anything: the hard bound are credits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from delta_prop_wire.frames import Level

if TYPE_CHECKING:
    from delta_prop_wire.frames import Backpressure

BURST_S = 0.1
"""How much of a second's rate may go at once after a rest."""
RATE_MIN = 1.0
"""Deltas a second below which no advice goes, so that a producer never stands still for ever."""
PAUSE_S_MAX = 60.0
STOP_S = 1.0
"""How long a producer rests that is told to stop and not for how long."""


class Advice:
    """A bucket that fills at the advised rate. What goes is charged in full, so it may be overdrawn."""

    __slots__ = ("_at", "_left", "_until", "level", "rate")

    def __init__(self) -> None:
        self.level = Level.OK
        self.rate: float | None = None
        self._left = 0.0
        self._at = 0.0
        self._until = 0.0

    def take(self, advice: Backpressure, now: float) -> None:
        """Follow this from now on."""
        self._fill(now)
        self.level = advice.level
        # At `ok` nothing binds, and only `stop` is a pause: below it, it is the time to an empty queue.
        rate = None if advice.level is Level.OK else advice.rate
        self.rate = None if rate is None or not math.isfinite(rate) else max(rate, RATE_MIN)
        self._at = now
        pause_s = 0.0
        if advice.level is Level.STOP:
            pause_s = (advice.retry_after_ms or 0) / 1000 or STOP_S
        self._until = now + min(pause_s, PAUSE_S_MAX)

    def rest(self, seconds: float, now: float) -> None:
        """Send nothing for so long."""
        self._until = max(self._until, now + min(seconds, PAUSE_S_MAX))

    def forget(self) -> None:
        """The connection on which it was given is gone."""
        self.level, self.rate, self._until = Level.OK, None, 0.0

    def wait_s(self, now: float) -> float:
        """How long to wait before the next batch; 0: it may go."""
        wait_s = max(self._until - now, 0.0)
        if self.rate is None:
            return wait_s
        self._fill(now)
        return max(wait_s, -self._left / self.rate)

    def spend(self, deltas: int, now: float) -> None:
        """So many go."""
        if self.rate is not None:
            self._fill(now)
            self._left -= deltas

    def _fill(self, now: float) -> None:
        if self.rate is not None:
            self._left = min(self._left + (now - self._at) * self.rate, max(self.rate * BURST_S, 1.0))
        self._at = now
