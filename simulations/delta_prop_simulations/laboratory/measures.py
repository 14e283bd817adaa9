"""Measuring in bounded memory: how long things took, and what numbers were over time.

Pure: the time is an argument. However long a run is, what is kept here does not grow with it.
"""

from __future__ import annotations

from bisect import bisect_right
from math import ceil, log2
from typing import TYPE_CHECKING

from delta_prop_simulations.laboratory.result import Latency, Series

if TYPE_CHECKING:
    from collections.abc import Iterator

POINTS_MAX = 200
"""Points of a series."""
INTERVAL_S_MIN = 0.05

BUCKETS_AN_OCTAVE = 16
LEAST_S = 1e-6
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_CUT_AT = 4_096


class Histogram:
    """Counts of times, in buckets a sixteenth of an octave wide: what is read off is 2 % off at most."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """So many took so long."""
        self.count += count
        self.sum_s += seconds * count
        self.max_s = max(self.max_s, seconds)
        bucket = int(log2(seconds / LEAST_S) * BUCKETS_AN_OCTAVE) + 1 if seconds > LEAST_S else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def merge(self, other: Histogram) -> None:
        """Take in what another one has counted."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """The time that this share of all did not exceed; 0 below a microsecond, or where there is none."""
        left = ceil(share * self.count)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(_bound_s(bucket - 0.5), self.max_s) if bucket else 0.0
        return self.max_s

    def latency(self) -> Latency:
        """As part of a result."""
        quantiles = {name: self.quantile(share) for name, share in QUANTILES.items()}
        buckets = [(_bound_s(bucket), self._buckets[bucket]) for bucket in sorted(self._buckets)]
        return Latency(self.count, quantiles | {"max": self.max_s}, buckets)


def _bound_s(bucket: float) -> float:
    """The upper bound of a bucket, in seconds."""
    return float(LEAST_S * 2 ** (bucket / BUCKETS_AN_OCTAVE))


class Stamps:
    """When each offset was given, for as long as some sink has not applied it."""

    def __init__(self) -> None:
        self._offsets: list[int] = []  # the first of each batch
        self._times: list[float] = []

    def note(self, offset: int, now: float) -> None:
        """A batch from this offset on has its place."""
        self._offsets.append(offset)
        self._times.append(now)

    def at(self, offset: int) -> float | None:
        """When it was given; None where nothing was, or it is forgotten."""
        place = bisect_right(self._offsets, offset) - 1
        return self._times[place] if place >= 0 else None

    def forget(self, below: int) -> None:
        """Nobody asks for what lies below any more."""
        place = bisect_right(self._offsets, below) - 1
        if place > _CUT_AT:
            del self._offsets[:place], self._times[:place]

    def __len__(self) -> int:
        return len(self._offsets)


class Timeline:
    """Series of numbers, each looked at on one grid of times."""

    def __init__(self, duration_s: float) -> None:
        self.interval_s = max(duration_s / POINTS_MAX, INTERVAL_S_MIN)
        self._duration_s = duration_s
        self._series: dict[tuple[str, str], Series] = {}
        self._totals: dict[tuple[str, str], tuple[float, float]] = {}

    def times(self) -> Iterator[float]:
        """When to look."""
        for number in range(round(self._duration_s / self.interval_s) + 1):
            yield number * self.interval_s

    def note(self, of: str, name: str, unit: str, now: float, value: float) -> None:
        """A number as it is now; `of`: the sink that it belongs to, or nothing."""
        series = self._series.get((of, name))
        if series is None:
            series = self._series[of, name] = Series(name, unit, [], [])
        series.times_s.append(round(now, 9))
        series.values.append(round(value, 9))

    def note_rate(self, of: str, name: str, unit: str, now: float, total: float) -> None:
        """How much a total has grown since it was last noted, a second."""
        before, at_s = self._totals.get((of, name), (0.0, 0.0))
        self._totals[of, name] = (total, now)
        if now > at_s:
            self.note(of, name, unit, now, (total - before) / (now - at_s))

    def series(self, of: str = "") -> list[Series]:
        """All series of a sink, or those that belong to none."""
        return [series for (owner, _), series in self._series.items() if owner == of]

    def peak(self, name: str, of: str = "") -> float:
        """The highest value of a series; 0 where there is none."""
        series = self._series.get((of, name))
        return max(series.values, default=0.0) if series is not None else 0.0
