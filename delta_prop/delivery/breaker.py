"""The circuit breaker of a sink: decides when to repeat a failed call; first by retries, then by probes.

Pure. It only decides on delays; the cursor does not move, however long they last. After M. Nygard,
"Release It!" (circuit breaker), with retries inside: a delivery that has used up its retries counts as one
failure, and enough failures within a window open the breaker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Limits on retries of a failed call: their number and delays, and when the breaker opens and closes.

    Delays double from `first_s` to `max_s`; each is varied, up or down, by up to the share `jitter`.
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
    """Closed: calls are made. Open: no call is made. Probing: calls are made, one failure opens it again."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """One sink's breaker. The caller notes the result of each call; `note_failure` returns a delay."""

    def __init__(self, limits: RetryLimits) -> None:
        self.state = BreakerState.CLOSED
        self.times_opened = 0
        self._limits = limits
        self._failed_calls = 0
        self._successes = 0
        self._has_progressed = False  # the present call fails, but has applied rows
        # Times at which a delivery had used up its retries.
        self._exhausted_at: deque[float] = deque(maxlen=limits.breaker_failures)

    def note_failure(self, now: float, random_value: float) -> float:
        """Note a failed call; return the seconds until the next. `random_value`: 0 to 1, for the jitter."""
        limits = self._limits
        if self.state is not BreakerState.CLOSED and not self._has_progressed:
            return self._open()
        self._failed_calls += 1
        wait_s = min(limits.first_s * 2.0 ** min(self._failed_calls - 1, 60), limits.max_s)
        if self._failed_calls > limits.retries:
            self._failed_calls = 0
            self._exhausted_at.append(now)
            is_full = len(self._exhausted_at) == limits.breaker_failures
            if is_full and now - self._exhausted_at[0] <= limits.breaker_window_s:
                return self._open()
        return wait_s * (1 + limits.jitter * (2 * random_value - 1))

    def note_progress(self) -> None:
        """Note that a call failed after it applied rows: the remaining rows count as another delivery."""
        self.note_success()
        self._has_progressed = True

    def note_success(self) -> None:
        """Note that a call applied all its rows."""
        self._failed_calls = 0
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
        """Close the breaker, and forget all failures."""
        self.state = BreakerState.CLOSED
        self._failed_calls = self._successes = 0
        self._exhausted_at.clear()

    def _open(self) -> float:
        self.times_opened += self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._successes = 0
        return self._limits.probe_s
