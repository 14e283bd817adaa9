"""A distribution of service times: the measured durations of calls, by their numbers of deltas and bytes.

Values and arithmetic only. Draws are measured durations; between two measured sizes they are interpolated. No
family of distributions is assumed, so that a tail keeps its measured shape.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delta_prop_simulations.rng import Random

TIMES_PER_SIZE_MAX = 256
"""The maximum number of durations stored for each size. Of more, this many equidistant quantiles are stored,
the shortest and longest among them."""
SIZES_MAX = 64


@dataclass(frozen=True, slots=True)
class Distribution:
    """`sizes`: deltas per call, ascending. `times_s`: for each size the durations of calls, ascending.

    `delta_bytes`: the mean bytes of a delta; `byte_s`: the cost of an additional byte, in seconds.
    Raises UsageError if the values are not valid.
    """

    sizes: tuple[int, ...]
    times_s: tuple[tuple[float, ...], ...]
    delta_bytes: float = 0.0
    byte_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= SIZES_MAX or len(self.times_s) != len(self.sizes):
            raise UsageError(
                f"the distribution has {len(self.sizes)} sizes and {len(self.times_s)} lists of times: "
                f"give 1 to {SIZES_MAX} sizes, and times for each"
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
        """Return the distribution of measured seconds, by the number of deltas."""
        sizes = tuple(sorted(samples))
        times = tuple(_thin(sorted(samples[size])) for size in sizes)
        return cls(sizes, times, delta_bytes, byte_s)

    # --- queries

    def draw(self, random: Random, deltas: int, size_bytes: float | None = None) -> float:
        """Draw the duration of one call, in seconds."""
        return self.quantile(random.random(), deltas, size_bytes)

    def quantile(self, share: float, deltas: int, size_bytes: float | None = None) -> float:
        """Return the seconds that this share (0 to 1) of calls with these deltas and bytes stay below.

        Below the smallest measured size it is constant; above the largest it grows with the median's slope.
        """
        sizes = self.sizes
        at = bisect_left(sizes, deltas)
        if at == len(sizes):
            seconds = _quantile(self.times_s[-1], share) + (deltas - sizes[-1]) * self._last_slope_s
        elif at == 0 or sizes[at] == deltas:
            seconds = _quantile(self.times_s[at], share)
        else:
            part = (deltas - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            low, high = _quantile(self.times_s[at - 1], share), _quantile(self.times_s[at], share)
            seconds = low + part * (high - low)
        if size_bytes is not None:
            seconds += self.byte_s * (size_bytes - deltas * self.delta_bytes)
        return max(seconds, 0.0)

    def mean(self, deltas: int) -> float:
        """Return the mean duration of calls with this many deltas, in seconds."""
        return sum(self.quantile((step + 0.5) / 200, deltas) for step in range(200)) / 200

    @property
    def _last_slope_s(self) -> float:
        """The seconds per delta above the largest size."""
        last = _quantile(self.times_s[-1], 0.5)
        if len(self.sizes) == 1:
            return last / self.sizes[-1]
        return max(last - _quantile(self.times_s[-2], 0.5), 0.0) / (self.sizes[-1] - self.sizes[-2])

    # --- as JSON

    def to_json(self) -> dict[str, Any]:
        """Return plain data; times in tenths of a microsecond."""
        return {
            "sizes": list(self.sizes),
            "times_us": [[round(time * 1e6, 1) for time in times] for times in self.times_s],
            "delta_bytes": self.delta_bytes,
            "byte_us": self.byte_s * 1e6,
        }

    @classmethod
    def from_json(cls, data: object) -> Distribution:
        """Read what `to_json` returned. Raises UsageError if it is not that."""
        try:
            assert isinstance(data, dict)
            sizes = tuple(int(size) for size in data["sizes"])
            times = tuple(tuple(float(time) / 1e6 for time in some) for some in data["times_us"])
            return cls(sizes, times, float(data["delta_bytes"]), float(data["byte_us"]) / 1e6)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"a distribution lacks sizes, times_us, delta_bytes or byte_us ({error!r}): add all four"
            ) from None


class Samples:
    """The measured durations so far, by what they measure and by the number of deltas."""

    def __init__(self, delta_bytes: float = 0.0) -> None:
        self._delta_bytes = delta_bytes
        self._seconds: dict[str, dict[int, list[float]]] = {}

    def add(self, of: str, deltas: int, *seconds: float) -> None:
        """Add durations; negative ones of a coarse clock count as 0."""
        times = self._seconds.setdefault(of, {}).setdefault(deltas, [])
        times += [max(one, 0.0) for one in seconds]

    def distributions(self) -> dict[str, Distribution]:
        """Return the distribution of each."""
        return {
            of: Distribution.of(some, delta_bytes=self._delta_bytes) for of, some in self._seconds.items()
        }


def _quantile(times: Sequence[float], share: float) -> float:
    place = min(max(share, 0.0), 1.0) * (len(times) - 1)
    below = int(place)
    if below + 1 >= len(times):
        return times[-1]
    return times[below] + (place - below) * (times[below + 1] - times[below])


def _thin(times: Sequence[float]) -> tuple[float, ...]:
    if len(times) <= TIMES_PER_SIZE_MAX:
        return tuple(times)
    return tuple(_quantile(times, at / (TIMES_PER_SIZE_MAX - 1)) for at in range(TIMES_PER_SIZE_MAX))
