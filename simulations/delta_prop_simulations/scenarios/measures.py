"""Measures durations, and values over time, in memory that does not grow with a run's length. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import ceil, log2
from typing import TYPE_CHECKING

from delta_prop_simulations.scenarios.result import Latency, Series, SinkResult

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch

LAG_S_MAX = 1.0
"""A delta that is applied or received within this time of its append counts as `within_1s`."""
POINTS_MAX = 200
"""Maximum number of intervals in a series."""
INTERVAL_S_MIN = 0.05

BUCKETS_PER_OCTAVE = 16
BUCKET_S_MIN = 1e-6
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_FORGET_BATCHES_MIN = 4_096
_IN_TRANSIT_MAX = 1_000_000


class Histogram:
    """Counts durations in buckets that are a sixteenth of an octave wide: quantiles are accurate to 2 %."""

    def __init__(self) -> None:
        self.count = self.within_1s = 0
        self.sum_s = self.max_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of `seconds`."""
        self.count += count
        self.within_1s += count if seconds <= LAG_S_MAX else 0
        self.sum_s += seconds * count
        self.max_s = max(self.max_s, seconds)
        bucket = int(log2(seconds / BUCKET_S_MIN) * BUCKETS_PER_OCTAVE) + 1 if seconds > BUCKET_S_MIN else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self.count += other.count
        self.within_1s += other.within_1s
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """Return the duration that this share of all did not exceed; 0 if below a microsecond, or none."""
        remaining = ceil(share * self.count)
        for bucket in sorted(self._buckets):
            remaining -= self._buckets[bucket]
            if remaining <= 0:
                return min(_bound_s(bucket - 0.5), self.max_s) if bucket else 0.0
        return self.max_s

    def latency(self) -> Latency:
        """Return the durations as a `Latency` of a result."""
        quantiles = {name: self.quantile(share) for name, share in QUANTILES.items()}
        buckets = [(_bound_s(bucket), self._buckets[bucket]) for bucket in sorted(self._buckets)]
        return Latency(self.count, quantiles | {"max": self.max_s}, buckets)

    def result(
        self, name: str, duration_s: float, failures: int = 0, series: Sequence[Series] = ()
    ) -> SinkResult:
        """Return the result of the sink, or other receiver of deltas, whose lag this is."""
        within_1s_per_s = self.within_1s / duration_s
        return SinkResult(name, self.count, failures, within_1s_per_s, self.latency(), list(series))


def _bound_s(bucket: float) -> float:
    """Return the upper bound of a bucket, in seconds; `k - 0.5` gives the middle of bucket `k`."""
    return float(BUCKET_S_MIN * 2 ** (bucket / BUCKETS_PER_OCTAVE))


class ForwardingTimes:
    """Measures how long deltas take from the service that accepts them to each other service, in a run in
    which all services get all deltas in the end. `times`: keyed by source and target service.

    A batch is identified by its last dot, since forwarding does not split batches. It is forgotten once all
    services have it.
    """

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], Histogram] = {}
        # First service, time there, and number of services that lack the batch; by origin and last counter.
        self._in_transit: dict[tuple[int, int], tuple[str, float, int]] = {}

    def note(self, service: str, logged: LoggedBatch, now: float, other_count: int) -> None:
        """Note that a batch is visible at a service. `other_count`: the number of the other services."""
        batch = logged.batch
        key = (batch.origin, batch.last)
        entry = self._in_transit.get(key)
        if entry is None:
            if other_count and len(self._in_transit) < _IN_TRANSIT_MAX:
                self._in_transit[key] = (service, now, other_count)
            return
        source, at_s, missing_count = entry
        if source == service:
            return
        self.times.setdefault((source, service), Histogram()).add(now - at_s, batch.count)
        if missing_count > 1:
            self._in_transit[key] = (source, at_s, missing_count - 1)
        else:
            del self._in_transit[key]


class OffsetTimes:
    """Keeps the time at which each offset was assigned, until every sink has applied it."""

    def __init__(self) -> None:
        self._offsets: list[int] = []  # the first of each batch
        self._times: list[float] = []

    def note(self, offset: int, now: float) -> None:
        """Note that a batch was appended whose first offset is `offset`."""
        self._offsets.append(offset)
        self._times.append(now)

    def at(self, offset: int) -> float | None:
        """Return the time at which the offset was assigned; None if it is not assigned, or forgotten."""
        index = bisect_right(self._offsets, offset) - 1
        return self._times[index] if index >= 0 else None

    def forget(self, end: int) -> None:
        """Forget the offsets below `end`, which all sinks have applied."""
        index = bisect_right(self._offsets, end) - 1
        if index > _FORGET_BATCHES_MIN:
            del self._offsets[:index], self._times[:index]

    def __len__(self) -> int:
        return len(self._offsets)


class Timeline:
    """Series of numbers, all sampled at the same times."""

    def __init__(self, duration_s: float) -> None:
        self.interval_s = max(duration_s / POINTS_MAX, INTERVAL_S_MIN)
        self._duration_s = duration_s
        self._series: dict[tuple[str, str], Series] = {}
        self._totals: dict[tuple[str, str], tuple[float, float]] = {}

    def times(self) -> Iterator[float]:
        """Yield the times of the samples."""
        for number in range(round(self._duration_s / self.interval_s) + 1):
            yield number * self.interval_s

    def note(self, sink: str, name: str, unit: str, now: float, value: float) -> None:
        """Add a sample to a series. `sink`: the sink that the series belongs to; "" for none."""
        series = self._series.get((sink, name))
        if series is None:
            series = self._series[sink, name] = Series(name, unit, [], [])
        series.times_s.append(round(now, 9))
        series.values.append(round(value, 9))

    def note_rate(self, sink: str, name: str, unit: str, now: float, total: float) -> None:
        """Add a sample: the growth of a total per second since its last sample."""
        before, at_s = self._totals.get((sink, name), (0.0, 0.0))
        self._totals[sink, name] = (total, now)
        if now > at_s:
            self.note(sink, name, unit, now, (total - before) / (now - at_s))

    def series(self, sink: str = "") -> list[Series]:
        """Return all series of a sink; by default those that belong to no sink."""
        return [series for (owner, _), series in self._series.items() if owner == sink]

    def peak(self, name: str, sink: str = "") -> float:
        """Return the highest value of a series; 0 if it has no values."""
        series = self._series.get((sink, name))
        return max(series.values, default=0.0) if series is not None else 0.0
