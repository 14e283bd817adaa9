"""Service times of a simulated sink's calls, drawn from a distribution.

Pure. All distributions except the calibrated one have the mean that the scenario names.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_simulations.rng import Random
    from delta_prop_simulations.scenarios.scenario import SinkSpec


class Distribution(Protocol):
    """Draws service times."""

    def draw(self, random: Random, deltas: int, size_bytes: int) -> float:
        """Draw the seconds that a call with this many deltas and bytes takes."""
        ...


class ConfiguredDistribution:
    """The distribution that a sink's configuration gives: a time per call, a time per delta, and a random
    factor.
    """

    def __init__(self, spec: SinkSpec) -> None:
        self._call_s = spec.per_call_ms / 1_000
        self._delta_s = spec.per_delta_us / 1_000_000
        self._capacity = spec.capacity_per_s
        self._factor = _factor(spec)

    def draw(self, random: Random, deltas: int, size_bytes: int) -> float:
        """Draw the seconds that a call with this many deltas takes; their size has no effect."""
        duration_s = (self._call_s + self._delta_s * deltas) * self._factor(random)
        return max(duration_s, deltas / self._capacity) if self._capacity else duration_s


def _factor(spec: SinkSpec) -> Callable[[Random], float]:
    """Return a function that draws the factor by which a call's duration differs from its mean."""
    noise = spec.noise
    if spec.distribution == "exponential":
        return lambda random: random.expovariate(1.0)
    if spec.distribution == "constant" or not noise:
        return lambda random: 1.0
    if spec.distribution == "normal":
        return lambda random: max(random.gauss(1.0, noise), 0.0)
    sigma = sqrt(log(1 + noise * noise))
    return lambda random: exp(random.gauss(-sigma * sigma / 2, sigma))
