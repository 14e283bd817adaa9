"""Measures durations, and values over time, in bounded memory.

Pure: the time is an argument. The memory used does not grow with the length of a run.
"""

from __future__ import annotations

from bisect import bisect_right
from math import ceil, log2
from typing import TYPE_CHECKING

from delta_prop_simulations.scenarios.result import Latency, Series

if TYPE_CHECKING:
    from collections.abc import Iterator

POINTS_MAX = 200
"""The number of points of a series."""
INTERVAL_S_MIN = 0.05

BUCKETS_PER_OCTAVE = 16
LEAST_S = 1e-6
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_COMPACT_AT = 4_096


class Histogram:
    """Counts of durations, in buckets a sixteenth of an octave wide: quantiles are exact to 2 %."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of `seconds`."""
        self.count += count
        self.sum_s += seconds * count
        self.max_s = max(self.max_s, seconds)
        bucket = int(log2(seconds / LEAST_S) * BUCKETS_PER_OCTAVE) + 1 if seconds > LEAST_S else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """Return the duration that this share did not exceed; 0 below a microsecond, or if there is none."""
        left = ceil(share * self.count)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(_bound_s(bucket - 0.5), self.max_s) if bucket else 0.0
        return self.max_s

    def latency(self) -> Latency:
        """Return the latency entry of a result."""
        quantiles = {name: self.quantile(share) for name, share in QUANTILES.items()}
        buckets = [(_bound_s(bucket), self._buckets[bucket]) for bucket in sorted(self._buckets)]
        return Latency(self.count, quantiles | {"max": self.max_s}, buckets)


def _bound_s(bucket: float) -> float:
    """Return the upper bound of a bucket, in seconds."""
    return float(LEAST_S * 2 ** (bucket / BUCKETS_PER_OCTAVE))


class OffsetTimes:
    """The time at which each offset was assigned, until every sink has applied it."""

    def __init__(self) -> None:
        self._offsets: list[int] = []  # the first of each batch
        self._times: list[float] = []

    def note(self, offset: int, now: float) -> None:
        """Note that a batch from this offset on was appended."""
        self._offsets.append(offset)
        self._times.append(now)

    def at(self, offset: int) -> float | None:
        """Return the time at which the offset was assigned; None if it was not, or is forgotten."""
        place = bisect_right(self._offsets, offset) - 1
        return self._times[place] if place >= 0 else None

    def forget(self, below: int) -> None:
        """Forget the offsets below, which all sinks have applied."""
        place = bisect_right(self._offsets, below) - 1
        if place > _COMPACT_AT:
            del self._offsets[:place], self._times[:place]

    def __len__(self) -> int:
        return len(self._offsets)


class Timeline:
    """Series of numbers, sampled on one grid of times."""

    def __init__(self, duration_s: float) -> None:
        self.interval_s = max(duration_s / POINTS_MAX, INTERVAL_S_MIN)
        self._duration_s = duration_s
        self._series: dict[tuple[str, str], Series] = {}
        self._totals: dict[tuple[str, str], tuple[float, float]] = {}

    def times(self) -> Iterator[float]:
        """Yield the times of the samples."""
        for number in range(round(self._duration_s / self.interval_s) + 1):
            yield number * self.interval_s

    def note(self, of: str, name: str, unit: str, now: float, value: float) -> None:
        """Add a sample of a number; `of`: the sink that it belongs to, or an empty string."""
        series = self._series.get((of, name))
        if series is None:
            series = self._series[of, name] = Series(name, unit, [], [])
        series.times_s.append(round(now, 9))
        series.values.append(round(value, 9))

    def note_rate(self, of: str, name: str, unit: str, now: float, total: float) -> None:
        """Add the growth per second of a total since its last sample."""
        before, at_s = self._totals.get((of, name), (0.0, 0.0))
        self._totals[of, name] = (total, now)
        if now > at_s:
            self.note(of, name, unit, now, (total - before) / (now - at_s))

    def series(self, of: str = "") -> list[Series]:
        """Return all series of a sink, or those that belong to none."""
        return [series for (owner, _), series in self._series.items() if owner == of]

    def peak(self, name: str, of: str = "") -> float:
        """Return the highest value of a series; 0 if there is none."""
        series = self._series.get((of, name))
        return max(series.values, default=0.0) if series is not None else 0.0
