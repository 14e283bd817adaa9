"""The rate that suits one pacing sink, in deltas a second: from what it drains and what stands before it.

Pure, and stepped at a fixed interval. Depth alone tells too late and makes a rate swing; the rate at
which a busy sink drains is its capacity, so the rate follows that, and depth only corrects it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from delta_prop_wire.errors import UsageError

INTERVAL_S = 0.1
"""How often a law is stepped."""
ELAPSED_S_MIN = 0.001
ELAPSED_S_MAX = 60.0
"""A step closer to the last one, or later, counts as this: so samples are few, and their sum is finite."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Where a rate starts and what bounds it, in deltas a second; the window drains are measured over.

    `rate_initial`: where the sink has drained for a while already, what it drained. `standing_s`: what
    may stand before the sink, as the time it drains that in; for a sink with many calls in flight more
    than their round trip, or what is only under way is taken for a queue, and the rate sinks.
    """

    rate_initial: float = 10_000.0
    rate_min: float = 100.0
    rate_max: float = 1_000_000.0
    increase_share: float = 0.3
    window_s: float = 1.0
    standing_s: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.rate_min <= self.rate_initial <= self.rate_max < float("inf"):
            raise UsageError(
                f"rates min={self.rate_min}, initial={self.rate_initial}, max={self.rate_max} deltas/s: "
                "give 0 < min <= initial <= max"
            )
        if not 0 < self.increase_share <= 1:
            raise UsageError(f"increase_share={self.increase_share}: give a share of at most 1")
        if not (INTERVAL_S <= self.window_s <= 60 and 0 < self.standing_s <= 60):
            raise UsageError(
                f"window_s={self.window_s}, standing_s={self.standing_s}: give {INTERVAL_S} to 60 s, "
                "and up to 60 s"
            )


LONG_S = 10.0
"""No measure reaches further back, unless its window does."""


class Law(Protocol):
    """What turns measurements into a rate. One object a sink."""

    @property
    def rate(self) -> float:
        """The rate that suits now, deltas a second."""
        ...

    @property
    def drain_rate(self) -> float:
        """What left the sink over the last window, deltas a second; 0 before the first step."""
        ...

    def update(
        self,
        *,
        drained: int,
        depth: int,
        depth_max: int,
        elapsed_s: float = INTERVAL_S,
        demand_limited: bool = False,
        in_call: int | None = None,
    ) -> float:
        """Step the law and return the new rate.

        `drained`: deltas that left since the last step, that is admitted less the growth of the depth.
        `depth`: admitted and not applied, or a backlog of the sink's own, now; `depth_max` its bound.
        `elapsed_s`: since the last step; what a late step measured is spread over its real time.
        `demand_limited`: nothing was held back for this sink's rate, so the source had no more to give.
        `in_call`: of the depth, what the call in hand should have done by now, where that is known.
        """
        ...

    def follow(self, *, drained: int, share: float, elapsed_s: float = INTERVAL_S) -> float:
        """Step while the sink catches up by itself: the rate is a share of what it drains."""
        ...


class _Meter:
    """Deltas a second over the last `window_s` of samples.

    Over a longer time, 10 s at most, where in the window less than `steps_min` steps saw anything leave.
    """

    __slots__ = ("_samples", "_steps", "_steps_min", "_window_s", "seconds", "total")

    def __init__(self, window_s: float, steps_min: int = 0) -> None:
        self._window_s = window_s
        self._steps_min = steps_min
        self._samples: deque[tuple[float, int]] = deque()
        self._steps = 0
        self.seconds = 0.0
        self.total = 0

    def note(self, elapsed_s: float, count: int) -> None:
        samples = self._samples
        samples.append((min(max(elapsed_s, ELAPSED_S_MIN), ELAPSED_S_MAX), count))
        self.total += count
        self._steps += count > 0
        # Summed anew: a running sum of seconds would gather the errors of a lifetime.
        self.seconds = sum(seconds for seconds, _ in samples)
        while len(samples) > 1:
            seconds, old = samples[0]
            left_s, left_steps = self.seconds - seconds, self._steps - (old > 0)
            # A hair below, since ten times 0.1 is not 1.
            if left_s < self._window_s * 0.999 or (left_steps < self._steps_min and left_s < LONG_S):
                return
            samples.popleft()
            self.seconds, self.total, self._steps = left_s, self.total - old, left_steps

    @property
    def rate(self) -> float:
        return self.total / self.seconds if self.seconds > 0 else 0.0

    @property
    def lump(self) -> float:
        """What left between two steps in which anything did, on average."""
        return self.total / self._steps if self._steps else 0.0


class _Measured:
    """What both laws share: the clamps, the smoothing of increases alone, the drain over a window."""

    def __init__(self, limits: RateLimits | None = None) -> None:
        self.limits = limits or RateLimits()
        self._rate = self.limits.rate_initial
        self._drained = _Meter(self.limits.window_s)

    @property
    def rate(self) -> float:
        """The rate that suits now, deltas a second."""
        return self._rate

    @property
    def drain_rate(self) -> float:
        """What left the sink over the last window, deltas a second; 0 before the first step."""
        return self._drained.rate

    def follow(self, *, drained: int, share: float, elapsed_s: float = INTERVAL_S) -> float:
        """Step while the sink catches up by itself: the rate is a share of what it drains."""
        if elapsed_s > 0:
            self._drained.note(elapsed_s, max(drained, 0))
            self._move(share * self._drained.rate)
        return self._rate

    def _move(self, target: float) -> None:
        """Down at once, up by a share of the way; within the bounds."""
        limits = self.limits
        target = min(max(target, limits.rate_min), limits.rate_max)
        if target > self._rate:
            target = limits.increase_share * target + (1 - limits.increase_share) * self._rate
        self._rate = min(max(target, limits.rate_min), limits.rate_max)


RESPONSE_S = 1.0
"""In this time a depth that is off would be corrected; what exceeds twice the wanted depth, in a quarter."""
FALL_MAX = 0.5
"""A rate falls to this share of itself at most in one step: one odd sample does not stop a source."""
PROBE = 1.5
"""What a starved sink is tried with, times the present rate. Smoothed, that doubles it in half a second."""
HEADROOM = 2.0
"""A rate is never raised beyond this multiple of what is really drained."""
CALLS_MIN = 2
"""A capacity is measured over so many calls at least, however long they take."""
KNOWN_S = 0.3
"""From so much measured time on a capacity is known."""
NOISE_MAX = 0.2
"""A measure that is off by no more, and a call more or less in its window, is noise; else it is a change."""
NOISE_SHARE = 0.1
"""Noise moves the known capacity by this share of the way; a change replaces it."""


class DrainLaw(_Measured):
    """rate = capacity + (wanted depth - depth) / response time, down at once and up smoothly.

    Capacity is what the sink drained over the last second in which it could not have done more: it had
    work all the time, or the gate held the source back. Idle time is no measure of it. A sink that
    takes many deltas in one call lets them go at once; so the part of the call in hand that should be
    done by now counts as gone, and what one call takes may stand before it besides.
    """

    def __init__(self, limits: RateLimits | None = None) -> None:
        super().__init__(limits)
        self._busy = _Meter(self.limits.window_s, CALLS_MIN)
        self._even = _Meter(self.limits.window_s, CALLS_MIN)  # the same, with what calls in hand have done
        self._lately = _Meter(KNOWN_S)
        self._depth = self._in_call = 0
        self._capacity = 0.0
        self._quiet_s = 0.0  # since something left

    def update(
        self,
        *,
        drained: int,
        depth: int,
        depth_max: int,
        elapsed_s: float = INTERVAL_S,
        demand_limited: bool = False,
        in_call: int | None = None,
    ) -> float:
        """Step the law and return the new rate; see `Law.update`."""
        if not elapsed_s > 0:
            return self._rate
        drained, depth, depth_max = max(drained, 0), max(depth, 0), max(depth_max, 0)
        before, self._depth = self._depth, depth
        evenly, self._in_call = drained + (in_call or 0) - self._in_call, in_call or 0
        self._drained.note(elapsed_s, drained)
        self._lately.note(elapsed_s, drained)
        self._quiet_s = 0.0 if drained else self._quiet_s + elapsed_s
        # Had it drained no more than stood before it, it never ran dry.
        if not demand_limited or (before and drained <= before):
            self._busy.note(elapsed_s, drained)
            self._even.note(elapsed_s, evenly)
            off = (self._busy if in_call is None else self._even).rate - self._capacity
            noise = NOISE_MAX * self._capacity + self._busy.lump / self._busy.seconds
            self._capacity += (NOISE_SHARE if abs(off) <= noise else 1.0) * off
        self._move(self._target(depth, depth_max, demand_limited, in_call))
        return self._rate

    def _target(self, depth: int, depth_max: int, demand_limited: bool, in_call: int | None) -> float:
        if self._busy.seconds < KNOWN_S * 0.999:
            return self._rate * FALL_MAX if depth > 0.9 * depth_max else self._rate
        capacity, lump = self._capacity, self._busy.lump
        done = capacity * self._quiet_s if in_call is None else in_call
        standing = depth - min(done, lump, depth)
        wanted = min(self.limits.standing_s * capacity + lump, depth_max / 2)
        excess = standing - wanted
        target = capacity - (excess + 3 * max(excess - wanted, 0.0)) / RESPONSE_S
        if standing <= wanted / 2 and depth <= wanted:  # starved: no reason to go down, whatever was drained
            if not demand_limited:
                target = max(target, PROBE * self._rate)
            target = max(min(target, HEADROOM * max(self._lately.rate, self._drained.rate)), self._rate)
        return max(target, FALL_MAX * self._rate)


class SpecificationLaw(_Measured):
    """The law by depth alone, for comparison: halve above 90 %, x0.9 above 70 %, x1.1 below 30 %."""

    def update(
        self,
        *,
        drained: int,
        depth: int,
        depth_max: int,
        elapsed_s: float = INTERVAL_S,
        demand_limited: bool = False,
        in_call: int | None = None,
    ) -> float:
        """Step the law and return the new rate; a bound of 0 counts as full. See `Law.update`."""
        if not elapsed_s > 0:
            return self._rate
        self._drained.note(elapsed_s, max(drained, 0))
        full = depth / depth_max if depth_max > 0 else 1.0
        factor = 0.5 if full > 0.9 else 0.9 if full > 0.7 else 1.1 if full < 0.3 else 1.0
        limits = self.limits
        target = min(max(self._rate * factor, limits.rate_min), limits.rate_max)
        # Smoothed both ways, as it is written down: this is what makes it late.
        self._rate = limits.increase_share * target + (1 - limits.increase_share) * self._rate
        return self._rate
