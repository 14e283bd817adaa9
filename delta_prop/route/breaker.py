"""The circuit breaker of a sink: decides when to retry a failed call; first retries, then probes.

Pure. It decides on delays only; the cursor stays in place however long they last. After
M. Nygard, "Release It!" (circuit breaker), with retries inside: a delivery that has used up its retries
counts once, and enough of those within a window open the breaker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Limits on retries of a failed call: number, delays, and when the breaker opens and closes.

    Delays double from `first_s` to `max_s`, each varied by up to `jitter` of itself, either way.
    """

    retries: int = 5
    first_s: float = 0.05
    max_s: float = 5.0
    jitter: float = 0.1
    breaker_failures: int = 5
    breaker_window_s: float = 60.0
    probe_s: float = 30.0
    heal_successes: int = 3


class BreakerState(Enum):
    """Closed: calls are made. Open: none is. Probing: calls are made, and one failure opens it."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """One sink's breaker. Report the result of each call; `note_failure` returns the delay of the next."""

    def __init__(self, limits: RetryLimits) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self.probe_at = 0.0
        self._limits = limits
        self._tries = 0
        self._successes = 0
        self._has_progressed = False  # the present call fails, but has applied rows
        self._exhausted_at: deque[float] = deque(maxlen=limits.breaker_failures)

    def note_failure(self, now: float, random_value: float) -> float:
        """Note a failed call; return the seconds until the next. `random_value` in 0..1 sets the jitter."""
        limits = self._limits
        if self.state is not BreakerState.CLOSED and not self._has_progressed:
            return self._open(now)
        self._tries += 1
        wait_s = min(limits.first_s * 2.0 ** min(self._tries - 1, 60), limits.max_s)
        if self._tries > limits.retries:
            self._tries = 0
            self._exhausted_at.append(now)
            often = len(self._exhausted_at) == limits.breaker_failures
            if often and now - self._exhausted_at[0] <= limits.breaker_window_s:
                return self._open(now)
        return wait_s * (1 + limits.jitter * (2 * random_value - 1))

    def note_progress(self) -> None:
        """Note that a call failed after it applied rows: the remaining rows are another delivery."""
        self.note_success()
        self._has_progressed = True

    def note_success(self) -> None:
        """Note that a call applied all its rows."""
        self._tries = 0
        if self.state is not BreakerState.CLOSED:
            self._successes += 1
            if self._successes >= self._limits.heal_successes:
                self.reset()

    def probe(self) -> None:
        """Allow the next call, as a probe of the sink."""
        self._has_progressed = False
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.PROBING

    def reset(self) -> None:
        """Close, and forget all failures."""
        self.state = BreakerState.CLOSED
        self._tries = self._successes = 0
        self._exhausted_at.clear()

    def _open(self, now: float) -> float:
        self.opened += self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._successes = 0
        self.probe_at = now + self._limits.probe_s
        return self._limits.probe_s
