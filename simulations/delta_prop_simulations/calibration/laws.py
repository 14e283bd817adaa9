"""A law of service times: how long a call takes that brings so many deltas and bytes, as it was measured.

Values and arithmetic alone. What is drawn is what was seen; between two sizes that were measured, what lies
between both. No family of distributions is assumed, so that a tail stays the tail that it was.
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

    from delta_prop_simulations.chance import Random

KEPT_MAX = 256
"""Times kept for each size. Of more, so many quantiles at equal distances, the shortest and longest among
them."""
SIZES_MAX = 64


@dataclass(frozen=True, slots=True)
class Law:
    """`sizes`: deltas a call, rising. `times_s`: for each size what calls took, rising.

    `delta_bytes`: what a delta had, on average; `byte_s`: what a byte more costs, in seconds.
    Raises UsageError where that makes no sense.
    """

    sizes: tuple[int, ...]
    times_s: tuple[tuple[float, ...], ...]
    delta_bytes: float = 0.0
    byte_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= SIZES_MAX or len(self.times_s) != len(self.sizes):
            raise UsageError(
                f"a law has {len(self.sizes)} sizes and {len(self.times_s)} lists of times: give 1 to "
                f"{SIZES_MAX} sizes, and times for each"
            )
        if self.sizes[0] < 1 or any(one >= other for one, other in pairwise(self.sizes)):
            raise UsageError(f"sizes {self.sizes}: give whole numbers from 1 on, each above the one before")
        for size, times in zip(self.sizes, self.times_s, strict=True):
            if not 1 <= len(times) <= KEPT_MAX:
                raise UsageError(f"size {size} has {len(times)} times: give 1 to {KEPT_MAX}")
            if times[0] < 0 or not all(map(isfinite, times)) or any(a > b for a, b in pairwise(times)):
                raise UsageError(f"size {size}: give its times in seconds, from 0 on, the shortest first")
        for name in ("delta_bytes", "byte_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError(f"{name} is {getattr(self, name)}: it is a number from 0 on")

    @classmethod
    def of(
        cls, samples: Mapping[int, Sequence[float]], *, delta_bytes: float = 0.0, byte_s: float = 0.0
    ) -> Law:
        """The law of what was measured: for each number of deltas, seconds."""
        sizes = tuple(sorted(samples))
        times = tuple(_thinned(sorted(samples[size])) for size in sizes)
        return cls(sizes, times, delta_bytes, byte_s)

    # --- asking

    def draw(self, random: Random, deltas: int, size_bytes: float | None = None) -> float:
        """How long one call takes, in seconds."""
        return self.quantile(random.random(), deltas, size_bytes)

    def quantile(self, share: float, deltas: int, size_bytes: float | None = None) -> float:
        """What this share (0 to 1) of calls with so many deltas, and bytes, stay below, in seconds.

        Below the smallest size measured it is that one's; beyond the largest the median's slope goes on.
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
        """The mean of calls with so many deltas, in seconds."""
        return sum(self.quantile((step + 0.5) / 200, deltas) for step in range(200)) / 200

    @property
    def _last_slope_s(self) -> float:
        """Seconds a delta beyond the largest size."""
        last = _quantile(self.times_s[-1], 0.5)
        if len(self.sizes) == 1:
            return last / self.sizes[-1]
        return max(last - _quantile(self.times_s[-2], 0.5), 0.0) / (self.sizes[-1] - self.sizes[-2])

    # --- as JSON

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in tenths of a microsecond."""
        return {
            "sizes": list(self.sizes),
            "times_us": [[round(time * 1e6, 1) for time in times] for times in self.times_s],
            "delta_bytes": self.delta_bytes,
            "byte_us": self.byte_s * 1e6,
        }

    @classmethod
    def from_json(cls, data: object) -> Law:
        """Raises UsageError where it is not what `to_json` gives."""
        try:
            assert isinstance(data, dict)
            sizes = tuple(int(size) for size in data["sizes"])
            times = tuple(tuple(float(time) / 1e6 for time in some) for some in data["times_us"])
            return cls(sizes, times, float(data["delta_bytes"]), float(data["byte_us"]) / 1e6)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"a law has sizes, times_us, delta_bytes and byte_us, and one here has not ({error!r})"
            ) from None


class Samples:
    """What was measured so far, by what it is of and by how many deltas a call brought."""

    def __init__(self, delta_bytes: float = 0.0) -> None:
        self._delta_bytes = delta_bytes
        self._seconds: dict[str, dict[int, list[float]]] = {}

    def add(self, of: str, deltas: int, *seconds: float) -> None:
        """Some more; what a coarse clock has measured as less than nothing is nothing."""
        times = self._seconds.setdefault(of, {}).setdefault(deltas, [])
        times += [max(one, 0.0) for one in seconds]

    def laws(self) -> dict[str, Law]:
        """The law of each."""
        return {of: Law.of(some, delta_bytes=self._delta_bytes) for of, some in self._seconds.items()}


def _quantile(times: Sequence[float], share: float) -> float:
    place = min(max(share, 0.0), 1.0) * (len(times) - 1)
    below = int(place)
    if below + 1 >= len(times):
        return times[-1]
    return times[below] + (place - below) * (times[below + 1] - times[below])


def _thinned(times: Sequence[float]) -> tuple[float, ...]:
    if len(times) <= KEPT_MAX:
        return tuple(times)
    return tuple(_quantile(times, at / (KEPT_MAX - 1)) for at in range(KEPT_MAX))
