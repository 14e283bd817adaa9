"""Flow-control advice that a sender of deltas follows: a rate, and pauses.

Pure. A producer uses it to follow the service's advice, the service to follow a subscriber's. Advice shapes
traffic and never loses anything: the hard bound is the credit window.
"""

from __future__ import annotations

import math

from delta_prop_wire.frames import Backpressure, PressureLevel

BURST_S = 0.125
"""Capacity of the bucket, and maximum sent at once: the deltas that the rate yields in this time."""
RATE_MIN = 1.0
"""Lower bound of the advised deltas per second, so that no sender stalls for ever."""
PAUSE_S_MAX = 60.0
"""Maximum length of a pause that no later advice ends, so that a lost message stalls no sender for ever."""
_WAIT_S_MIN = 1e-6
"""Shortest wait that a clock can measure."""


class Advice:
    """Token bucket that fills at the advised rate, and a pause.

    Deltas are charged in full, so the bucket may be overdrawn; then nothing is sent until it is refilled.
    `rate`: deltas per second; None: no limit.
    """

    __slots__ = ("_paused_until", "_tokens", "_tokens_at", "level", "rate")

    def __init__(self) -> None:
        self.level = PressureLevel.OK
        self.rate: float | None = None
        self._tokens = 0.0
        self._tokens_at = 0.0
        self._paused_until = 0.0

    def update(self, advice: Backpressure, now: float) -> None:
        """Follow this advice in place of all earlier advice: a pause ends here, whatever the new level."""
        self._refill(now)
        self.level = advice.level
        # At `ok` no limit holds. retry_after_ms is a pause only at `stop`; else it estimates the time until
        # the queue is empty.
        rate = None if advice.level is PressureLevel.OK else advice.rate
        self.rate = None if rate is None or not math.isfinite(rate) else max(rate, RATE_MIN)
        pause_s = 0.0
        if advice.level is PressureLevel.STOP:
            retry_after_ms = advice.retry_after_ms
            pause_s = PAUSE_S_MAX if retry_after_ms is None else min(retry_after_ms / 1000, PAUSE_S_MAX)
        self._paused_until = now + pause_s

    def clear(self) -> None:
        """Forget the advice, since the connection that carried it has closed."""
        self.level, self.rate, self._paused_until = PressureLevel.OK, None, 0.0

    @property
    def rows_max(self) -> int | None:
        """Maximum deltas to send at once, if frames can be sliced; None: any number."""
        return None if self.rate is None else max(int(self.rate * BURST_S), 1)

    def wait_s(self, now: float) -> float:
        """Return the seconds to wait before sending the next deltas; 0: send now."""
        wait_s = max(self._paused_until - now, 0.0)
        if self.rate is not None:
            self._refill(now)
            wait_s = max(wait_s, -self._tokens / self.rate)
        return wait_s if wait_s > _WAIT_S_MIN else 0.0

    def spend(self, delta_count: int, now: float) -> None:
        """Charge the bucket for the deltas sent."""
        if self.rate is not None:
            self._refill(now)
            self._tokens -= delta_count

    def _refill(self, now: float) -> None:
        if self.rate is None:
            self._tokens = 0.0
        else:
            self._tokens = min(self._tokens + (now - self._tokens_at) * self.rate, self.rate * BURST_S)
        self._tokens_at = now
