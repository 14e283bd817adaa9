"""Control laws: they compute the rate of a pacing sink (deltas per second) from its drain rate and depth.

Pure, stepped at a fixed interval. A rate that follows only the depth reacts too late and oscillates. The
drain rate of a busy sink is its capacity, so the rate follows that, and the depth only corrects it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from delta_prop_wire.errors import UsageError

INTERVAL_S = 0.1
"""Time between two steps."""
ELAPSED_S_MIN = 0.001
ELAPSED_S_MAX = 60.0
"""Bounds of a step's elapsed time, so that a window has a bounded number of samples and a finite sum."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Initial value and bounds of a rate, in deltas per second, and how drains are measured.

    `rate_initial`: give the drain rate, if the sink has drained for a while. `increase_share`: share of the
    way to a higher target that the rate rises in one step. `window_s`: the window over which drains are
    measured. `standing_s`: the allowed depth before the sink, as the time in which it drains that
    depth. For a sink with many calls in flight, give more than their round trip: otherwise deltas in flight
    count as a queue, and the rate falls.
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
            raise UsageError(f"increase_share={self.increase_share}: give a share above 0, up to 1")
        if not (INTERVAL_S <= self.window_s <= 60 and 0 < self.standing_s <= 60):
            raise UsageError(
                f"window_s={self.window_s}, standing_s={self.standing_s}: give {INTERVAL_S} to 60 s, "
                "and above 0, up to 60 s"
            )


WINDOW_S_MAX = 10.0
"""Maximum length to which a window is extended."""


class Measure(NamedTuple):
    """Measurement of one pacing sink since the last step, in deltas.

    `drained`: the admitted deltas less the growth of `depth`. For a mailbox, the depth counts the deltas
    that are admitted and not applied; for a sink's own backlog, or its share of the log, only those above the
    mark at which pacing starts. `in_call`: the part of the depth that the running call should have done by
    now; None: unknown.
    """

    drained: int
    depth: int
    depth_max: int
    in_call: int | None = None


class _Meter:
    """Measures deltas per second over the last `window_s`.

    The window is extended, up to `WINDOW_S_MAX`, until deltas were drained in `steps_min` of its steps.
    """

    __slots__ = ("_samples", "_steps", "_steps_min", "_window_s", "seconds", "total")

    def __init__(self, window_s: float, steps_min: int = 0) -> None:
        self._window_s = window_s
        self._steps_min = steps_min
        self._samples: deque[tuple[float, int]] = deque()
        self._steps = 0  # steps in the window that drained any deltas
        self.seconds = 0.0
        self.total = 0

    def note(self, elapsed_s: float, count: int) -> None:
        samples = self._samples
        samples.append((min(max(elapsed_s, ELAPSED_S_MIN), ELAPSED_S_MAX), count))
        self.total += count
        self._steps += count > 0
        # The sum is computed anew each time, since a running sum would accumulate rounding errors.
        self.seconds = sum(seconds for seconds, _ in samples)
        while len(samples) > 1:
            oldest_s, oldest_count = samples[0]
            left_s, left_steps = self.seconds - oldest_s, self._steps - (oldest_count > 0)
            # The factor allows for rounding errors: the sum of ten times 0.1 is not 1.
            if left_s < self._window_s * 0.999 or (left_steps < self._steps_min and left_s < WINDOW_S_MAX):
                return
            samples.popleft()
            self.seconds, self.total, self._steps = left_s, self.total - oldest_count, left_steps

    @property
    def rate(self) -> float:
        return self.total / self.seconds if self.seconds > 0 else 0.0

    @property
    def lump(self) -> float:
        """Average number of deltas drained in a step, over the steps that drained any."""
        return self.total / self._steps if self._steps else 0.0


class Law:
    """A control law from measurements to a rate, in deltas per second. One object for each sink."""

    def __init__(self, limits: RateLimits | None = None) -> None:
        self.limits = limits or RateLimits()
        self.rate = self.limits.rate_initial
        self._drained = _Meter(self.limits.window_s)

    @property
    def drain_rate(self) -> float:
        """Deltas per second that left the sink in the last window; 0 before the first step."""
        return self._drained.rate

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

        `drained`: deltas that left since the last step: the admitted deltas less the growth of the depth.
        `depth`: deltas that are admitted and not applied, or a backlog of the sink's own; `depth_max`: its
        bound. `elapsed_s`: time since the last step. `demand_limited`: this sink's rate held nothing back, so
        the source had no more to send. `in_call`: the part of the depth that the running call should have
        done by now; None: unknown.
        """
        if elapsed_s > 0:
            measure = Measure(max(drained, 0), max(depth, 0), max(depth_max, 0), in_call)
            self._drained.note(elapsed_s, measure.drained)
            self._step(measure, elapsed_s, demand_limited)
        return self.rate

    def _step(self, measure: Measure, elapsed_s: float, demand_limited: bool) -> None:
        raise NotImplementedError

    def follow(self, *, drained: int, share: float, elapsed_s: float = INTERVAL_S) -> float:
        """Step the law while the sink catches up from the log: the rate is a share of its drain rate."""
        if elapsed_s > 0:
            self._drained.note(elapsed_s, max(drained, 0))
            self._move(share * self._drained.rate)
        return self.rate

    def _move(self, target: float) -> None:
        """Move the rate down at once, or up by a share of the way; within the bounds."""
        limits = self.limits
        target = min(max(target, limits.rate_min), limits.rate_max)
        if target > self.rate:
            target = limits.increase_share * target + (1 - limits.increase_share) * self.rate
        self.rate = min(max(target, limits.rate_min), limits.rate_max)


RESPONSE_S = 1.0
"""Time in which a wrong depth is corrected; the part above twice the target depth, in a quarter of it."""
FALL_MAX = 0.5
"""Factor of the largest fall of a rate in one step, so that one odd sample does not stop a source."""
PROBE = 1.5
"""Factor by which the rate of a starved sink is raised. Smoothed, the rate doubles in half a second."""
HEADROOM = 2.0
"""Maximum multiple of the measured drain rate to which a rate is raised."""
CALLS_MIN = 2
"""Minimum number of calls over which a capacity is measured, if they take up to `WINDOW_S_MAX`."""
MEASURED_S_MIN = 0.3
"""Minimum measured time for a capacity."""
NOISE_MAX = 0.2
"""Maximum relative deviation that counts as noise, in addition to one call per window; more is a change."""
NOISE_SHARE = 0.1
"""Share of a deviation within the noise that is added to the known capacity; a change replaces it."""


class DrainLaw(Law):
    """Law: rate = capacity + (target depth - depth) / response time; falls at once and rises smoothly.

    The capacity is the drain rate over the last second in which the sink was the bottleneck: it had work all
    the time, or the gate held the source back. Idle time does not count. A sink that takes many deltas in one
    call finishes them all together. So the part of the running call that should be done by now counts as
    drained, and the deltas of one call may wait before the sink in addition to the target depth.
    """

    def __init__(self, limits: RateLimits | None = None) -> None:
        super().__init__(limits)
        self._busy_meter = _Meter(self.limits.window_s, CALLS_MIN)
        # As `_busy_meter`, but also counts the deltas that a running call should have done by now.
        self._in_call_meter = _Meter(self.limits.window_s, CALLS_MIN)
        self._recent_meter = _Meter(MEASURED_S_MIN)
        self._depth = self._in_call = 0
        self._capacity = 0.0
        self._idle_s = 0.0  # since the last drain

    def _step(self, measure: Measure, elapsed_s: float, demand_limited: bool) -> None:
        drained, depth, _, in_call = measure
        before, self._depth = self._depth, depth
        drained_with_call, self._in_call = drained + (in_call or 0) - self._in_call, in_call or 0
        self._recent_meter.note(elapsed_s, drained)
        self._idle_s = 0.0 if drained else self._idle_s + min(elapsed_s, ELAPSED_S_MAX)
        # A sink that drained no more than its depth before the step never ran dry.
        if not demand_limited or (before and drained <= before):
            self._busy_meter.note(elapsed_s, drained)
            self._in_call_meter.note(elapsed_s, drained_with_call)
            deviation = (self._busy_meter if in_call is None else self._in_call_meter).rate - self._capacity
            noise = NOISE_MAX * self._capacity + self._busy_meter.lump / self._busy_meter.seconds
            self._capacity += (NOISE_SHARE if abs(deviation) <= noise else 1.0) * deviation
        self._move(self._target(measure, demand_limited))

    def _target(self, measure: Measure, demand_limited: bool) -> float:
        _, depth, depth_max, in_call = measure
        if self._busy_meter.seconds < MEASURED_S_MIN * 0.999:
            return self.rate * FALL_MAX if depth > 0.9 * depth_max else self.rate
        capacity, lump = self._capacity, self._busy_meter.lump
        done_in_call = capacity * self._idle_s if in_call is None else in_call
        standing_depth = depth - min(done_in_call, lump, depth)
        target_depth = min(self.limits.standing_s * capacity + lump, depth_max / 2)
        excess = standing_depth - target_depth
        target = capacity - (excess + 3 * max(excess - target_depth, 0.0)) / RESPONSE_S
        if standing_depth <= target_depth / 2 and depth <= target_depth:  # starved: the rate must not fall
            if not demand_limited:
                target = max(target, PROBE * self.rate)
            target = max(min(target, HEADROOM * max(self._recent_meter.rate, self._drained.rate)), self.rate)
        return max(target, FALL_MAX * self.rate)


class DepthLaw(Law):
    """Law by depth alone, for comparison: the rate is halved above 90 %, x0.9 above 70 %, x1.1 below 30 %."""

    def _step(self, measure: Measure, elapsed_s: float, demand_limited: bool) -> None:
        # A `depth_max` of 0 counts as full.
        used_share = measure.depth / measure.depth_max if measure.depth_max > 0 else 1.0
        factor = 0.5 if used_share > 0.9 else 0.9 if used_share > 0.7 else 1.1 if used_share < 0.3 else 1.0
        limits = self.limits
        target = min(max(self.rate * factor, limits.rate_min), limits.rate_max)
        # The rate is smoothed in both directions, as specified, which makes it late.
        self.rate = limits.increase_share * target + (1 - limits.increase_share) * self.rate
