"""What one side of a connection advises the one that sends it deltas: a rate, and when to send none at all.

Pure. A producer follows the service's advice by it, and the service that of a subscriber. Advice shapes what
is sent and never loses anything: the hard bound are credits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from delta_prop_wire.frames import Level

if TYPE_CHECKING:
    from delta_prop_wire.frames import Backpressure

BURST_S = 0.125
"""What the bucket holds, in seconds at the rate, and a piece of what goes. After a rest both go at once."""
RATE_MIN = 1.0
"""Deltas per second below which no advice goes, so that nobody stands still for ever."""
PAUSE_S_MAX = 60.0
"""How long a stop holds that no other advice ends, so that whoever forgets it hangs nobody for ever."""
_NOW_S = 1e-6
"""A wait that is too short for any clock to tell."""


class Advice:
    """Holds a token bucket that fills at the advised rate, and a pause.

    What goes is charged in full, so the bucket may be overdrawn; nothing goes until it is filled up again.
    """

    __slots__ = ("_at", "_left", "_until", "level", "rate")

    def __init__(self) -> None:
        self.level = Level.OK
        self.rate: float | None = None
        self._left = 0.0
        self._at = 0.0
        self._until = 0.0

    def take(self, advice: Backpressure, now: float) -> None:
        """Follow this from now on, in place of all before: a stop ends here, whatever the new level."""
        self._fill(now)
        self.level = advice.level
        # At `ok` nothing binds, and only `stop` is a pause: below it, it is the time to an empty queue.
        rate = None if advice.level is Level.OK else advice.rate
        self.rate = None if rate is None or not math.isfinite(rate) else max(rate, RATE_MIN)
        pause_s = 0.0
        if advice.level is Level.STOP:
            told_ms = advice.retry_after_ms
            pause_s = PAUSE_S_MAX if told_ms is None else min(told_ms / 1000, PAUSE_S_MAX)
        self._until = now + pause_s

    def forget(self) -> None:
        """The connection on which it was given is gone."""
        self.level, self.rate, self._until = Level.OK, None, 0.0

    @property
    def rows_max(self) -> int | None:
        """The most deltas that may go at a time, where frames can be cut; None: any number."""
        return None if self.rate is None else max(int(self.rate * BURST_S), 1)

    def wait_s(self, now: float) -> float:
        """The seconds to wait before the next deltas; 0: they may go."""
        wait_s = max(self._until - now, 0.0)
        if self.rate is not None:
            self._fill(now)
            wait_s = max(wait_s, -self._left / self.rate)
        return wait_s if wait_s > _NOW_S else 0.0

    def spend(self, deltas: int, now: float) -> None:
        """So many go."""
        if self.rate is not None:
            self._fill(now)
            self._left -= deltas

    def _fill(self, now: float) -> None:
        if self.rate is None:
            self._left = 0.0
        else:
            self._left = min(self._left + (now - self._at) * self.rate, self.rate * BURST_S)
        self._at = now
