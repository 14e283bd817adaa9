"""The breaker: when a sink that fails is called again. Retries first, then pauses with a probe.

Pure. It decides about waiting only; the cursor stays where it is however long that lasts. After
M. Nygard, "Release It!" (circuit breaker), with retries inside: a delivery whose retries ran out counts
once, and enough of those within a window open the breaker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often and how soon a failed call comes again, when to pause, when to trust the sink again.

    Waits double from `first_s` to `max_s`, each off by up to `jitter` of itself, either way.
    """

    retries: int = 5
    first_s: float = 0.05
    max_s: float = 5.0
    jitter: float = 0.1
    breaker_deliveries: int = 5
    breaker_window_s: float = 60.0
    probe_s: float = 30.0
    heal_successes: int = 3


class BreakerState(Enum):
    """Closed: calls go through. Open: none does. Probing: they do, and one failure opens it again."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """One sink's. Tell it how each call ended; `failed` answers how long to wait before the next."""

    def __init__(self, limits: RetryLimits) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self.probe_at = 0.0
        self._limits = limits
        self._tries = 0
        self._successes = 0
        self._progressed = False  # the call that runs fails, but has applied something
        self._ran_out: deque[float] = deque(maxlen=limits.breaker_deliveries)

    def failed(self, now: float, chance: float) -> float:
        """A call failed; seconds until the next one. `chance`, from 0 to 1, draws the jitter."""
        limits = self._limits
        if self.state is not BreakerState.CLOSED and not self._progressed:
            return self._open(now)
        self._tries += 1
        wait_s = min(limits.first_s * 2.0 ** min(self._tries - 1, 60), limits.max_s)
        if self._tries > limits.retries:
            self._tries = 0
            self._ran_out.append(now)
            often = len(self._ran_out) == limits.breaker_deliveries
            if often and now - self._ran_out[0] <= limits.breaker_window_s:
                return self._open(now)
        return wait_s * (1 + limits.jitter * (2 * chance - 1))

    def progressed(self) -> None:
        """A call failed, but applied something first: what is left is another delivery."""
        self.succeeded()
        self._progressed = True

    def succeeded(self) -> None:
        """A call applied everything."""
        self._tries = 0
        if self.state is not BreakerState.CLOSED:
            self._successes += 1
            if self._successes >= self._limits.heal_successes:
                self.reset()

    def probe(self) -> None:
        """The next call is let through, to see how the sink is."""
        self._progressed = False
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.PROBING

    def reset(self) -> None:
        """Close, as if nothing had failed."""
        self.state = BreakerState.CLOSED
        self._tries = self._successes = 0
        self._ran_out.clear()

    def _open(self, now: float) -> float:
        self.opened += self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._successes = 0
        self.probe_at = now + self._limits.probe_s
        return self._limits.probe_s
