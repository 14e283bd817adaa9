"""How long a call of a simulated sink takes, drawn from a law.

Pure. All laws but the calibrated one have the mean that the scenario names.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.laboratory.scenario import SinkSpec


class Law(Protocol):
    """Draws service times."""

    def draw(self, random: Random, deltas: int, size_bytes: int) -> float:
        """Seconds that a call with so many deltas and bytes takes."""
        ...


class SpokenLaw:
    """What the keys of a sink say: a time for each call, one for each delta, and a spread."""

    def __init__(self, spec: SinkSpec) -> None:
        self._call_s = spec.per_call_ms / 1_000
        self._delta_s = spec.per_delta_us / 1_000_000
        self._capacity = spec.capacity_per_s
        self._factor = _factor(spec)

    def draw(self, random: Random, deltas: int, size_bytes: int) -> float:
        """Seconds that a call with so many deltas takes, however large they are."""
        took_s = (self._call_s + self._delta_s * deltas) * self._factor(random)
        return max(took_s, deltas / self._capacity) if self._capacity else took_s


def _factor(spec: SinkSpec) -> Callable[[Random], float]:
    """What multiplies a call's mean."""
    noise = spec.noise
    if spec.law == "exponential":
        return lambda random: random.expovariate(1.0)
    if spec.law == "constant" or not noise:
        return lambda random: 1.0
    if spec.law == "normal":
        return lambda random: max(random.gauss(1.0, noise), 0.0)
    sigma = sqrt(log(1 + noise * noise))
    return lambda random: exp(random.gauss(-sigma * sigma / 2, sigma))
