"""A distribution of service times: the measured durations of calls, by their number of deltas.

Pure. Draws are measured durations; between two measured sizes they are interpolated. No family of
distributions is assumed, so the tail stays as it was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_simulations.rng import Random

TIMES_PER_SIZE_MAX = 256
"""Maximum number of durations per size; of more, this many equidistant quantiles are stored."""
SIZES_MAX = 64


@dataclass(frozen=True, slots=True)
class Distribution:
    """`sizes`: numbers of deltas per call, ascending. `times_s`: for each size the durations of calls,
    ascending.

    `delta_bytes`: the mean size of a delta; `byte_s`: the seconds that each additional byte takes. The
    constructor raises UsageError if the values are not valid.
    """

    sizes: tuple[int, ...]
    times_s: tuple[tuple[float, ...], ...]
    delta_bytes: float = 0.0
    byte_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= SIZES_MAX or len(self.times_s) != len(self.sizes):
            raise UsageError(
                f"the distribution has {len(self.sizes)} sizes and {len(self.times_s)} lists of times: "
                f"give 1 to {SIZES_MAX} sizes, and one list of times for each"
            )
        if self.sizes[0] < 1 or any(one >= other for one, other in pairwise(self.sizes)):
            raise UsageError(
                f"sizes {self.sizes}: not ascending integers: give integers from 1 on, ascending"
            )
        for size, times in zip(self.sizes, self.times_s, strict=True):
            if not 1 <= len(times) <= TIMES_PER_SIZE_MAX:
                raise UsageError(f"size {size} has {len(times)} times: give 1 to {TIMES_PER_SIZE_MAX}")
            if times[0] < 0 or not all(map(isfinite, times)) or any(a > b for a, b in pairwise(times)):
                raise UsageError(f"size {size}: give its times in seconds, from 0 on, ascending")
        for name in ("delta_bytes", "byte_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError(f"{name} {getattr(self, name)}: out of range: give a number from 0 on")

    @classmethod
    def of(
        cls, samples: Mapping[int, Sequence[float]], *, delta_bytes: float = 0.0, byte_s: float = 0.0
    ) -> Distribution:
        """Return the distribution of measured durations. `samples`: the durations, by number of deltas."""
        sizes = tuple(sorted(samples))
        times = tuple(_thin(sorted(samples[size])) for size in sizes)
        return cls(sizes, times, delta_bytes, byte_s)

    def draw(self, random: Random, delta_count: int, size_bytes: float | None = None) -> float:
        """Draw the duration of one call, in seconds."""
        return self.quantile(random.random(), delta_count, size_bytes)

    def quantile(self, share: float, delta_count: int, size_bytes: float | None = None) -> float:
        """Return the duration, in seconds, that this share (0 to 1) of calls of this size does not exceed.

        Below the smallest measured size the duration is constant; above the largest one it grows as the
        median does between the two largest sizes.
        """
        sizes = self.sizes
        index = bisect_left(sizes, delta_count)
        if index == len(sizes):
            seconds = _quantile(self.times_s[-1], share) + (delta_count - sizes[-1]) * self._last_slope_s
        elif index == 0 or sizes[index] == delta_count:
            seconds = _quantile(self.times_s[index], share)
        else:
            weight = (delta_count - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
            low, high = _quantile(self.times_s[index - 1], share), _quantile(self.times_s[index], share)
            seconds = low + weight * (high - low)
        if size_bytes is not None:
            seconds += self.byte_s * (size_bytes - delta_count * self.delta_bytes)
        return max(seconds, 0.0)

    def mean(self, delta_count: int) -> float:
        """Return the mean duration of calls with this many deltas, in seconds."""
        return sum(self.quantile((step + 0.5) / 200, delta_count) for step in range(200)) / 200

    @property
    def _last_slope_s(self) -> float:
        last = _quantile(self.times_s[-1], 0.5)
        if len(self.sizes) == 1:
            return last / self.sizes[-1]
        return max(last - _quantile(self.times_s[-2], 0.5), 0.0) / (self.sizes[-1] - self.sizes[-2])

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, with times rounded to a tenth of a microsecond."""
        return {
            "sizes": list(self.sizes),
            "times_us": [[round(time * 1e6, 1) for time in times] for times in self.times_s],
            "delta_bytes": self.delta_bytes,
            "byte_us": self.byte_s * 1e6,
        }

    @classmethod
    def from_json(cls, data: object) -> Distribution:
        """Read the JSON data of `to_json`. Raises UsageError."""
        try:
            assert isinstance(data, dict)
            sizes = tuple(int(size) for size in data["sizes"])
            times_s = tuple(tuple(float(time) / 1e6 for time in times) for times in data["times_us"])
            return cls(sizes, times_s, float(data["delta_bytes"]), float(data["byte_us"]) / 1e6)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"a distribution lacks sizes, times_us, delta_bytes or byte_us ({error!r}): add all four"
            ) from None


class Samples:
    """The measured durations so far, by kind of measurement and number of deltas."""

    def __init__(self, delta_bytes: float = 0.0) -> None:
        self._delta_bytes = delta_bytes
        self._seconds: dict[str, dict[int, list[float]]] = {}

    def add(self, kind: str, delta_count: int, *seconds: float) -> None:
        """Add durations; a negative duration, which a coarse clock can give, counts as 0."""
        durations = self._seconds.setdefault(kind, {}).setdefault(delta_count, [])
        durations += [max(duration, 0.0) for duration in seconds]

    def distributions(self) -> dict[str, Distribution]:
        """Return the distribution of each kind."""
        return {
            kind: Distribution.of(by_size, delta_bytes=self._delta_bytes)
            for kind, by_size in self._seconds.items()
        }


def _quantile(times: Sequence[float], share: float) -> float:
    position = min(max(share, 0.0), 1.0) * (len(times) - 1)
    index = int(position)
    if index + 1 >= len(times):
        return times[-1]
    return times[index] + (position - index) * (times[index + 1] - times[index])


def _thin(times: Sequence[float]) -> tuple[float, ...]:
    if len(times) <= TIMES_PER_SIZE_MAX:
        return tuple(times)
    return tuple(_quantile(times, index / (TIMES_PER_SIZE_MAX - 1)) for index in range(TIMES_PER_SIZE_MAX))
