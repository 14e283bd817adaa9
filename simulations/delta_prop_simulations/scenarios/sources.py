"""Arrival processes: the times of a source's calls and their numbers of deltas, drawn from a random stream.

The module only yields arrivals, and sends nothing.
"""

from __future__ import annotations

from itertools import takewhile
from math import pi, sin
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_simulations.scenarios.scenario import Between

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop.directory.recorded_traffic import RecordedBatch, RecordedTraffic
    from delta_prop_simulations.rng import Random
    from delta_prop_simulations.scenarios.scenario import SourceSpec


class Arrival(NamedTuple):
    """One call of a source. `at_s`: its time, in seconds of the run; `deltas`: their number; `recorded`: the
    batch to replay, if any.
    """

    at_s: float
    deltas: int
    recorded: RecordedBatch | None = None


def arrivals(
    spec: SourceSpec, random: Random, duration_s: float, traffic: RecordedTraffic | None = None
) -> Iterator[Arrival]:
    """Return all arrivals of a source within the run, in order. `traffic`: the traffic to replay, if any."""
    end_s = duration_s if spec.stop is None else min(spec.stop, duration_s)
    if traffic is None:
        unbounded = (Arrival(at_s, _draw_count(spec.batch, random)) for at_s in _draw_times(spec, random))
    else:
        unbounded = (
            Arrival(spec.start + at_s, batch.count, batch) for at_s, batch in traffic.arrivals(spec.speed)
        )
    return takewhile(lambda arrival: arrival.at_s < end_s, unbounded)


def mean_batch(batch: int | Between) -> float:
    """Return the mean number of deltas per call."""
    return batch if isinstance(batch, int) else (batch.min + batch.max) / 2


def _draw_count(batch: int | Between, random: Random) -> int:
    return batch if isinstance(batch, int) else random.randint(batch.min, batch.max)


def _draw_times(spec: SourceSpec, random: Random) -> Iterator[float]:
    calls_per_s = spec.rate / mean_batch(spec.batch)
    if spec.pattern == "constant":
        return _constant(spec.start, calls_per_s)
    if spec.pattern == "poisson":
        return _thinned_poisson(spec.start, calls_per_s, lambda at_s: 1.0, random)
    if spec.pattern == "bursty":
        return _bursty(spec, calls_per_s, random)
    assert spec.pattern == "diurnal", "a replay has its own times"
    low, period_s = spec.day.low, spec.day.period
    mean = (1 + low) / 2

    def share(at_s: float) -> float:
        return mean + (1 - mean) * sin(2 * pi * at_s / period_s)

    return _thinned_poisson(spec.start, calls_per_s / mean, share, random)


def _constant(start_s: float, calls_per_s: float) -> Iterator[float]:
    number = 0
    while True:
        yield start_s + number / calls_per_s
        number += 1


def _thinned_poisson(
    start_s: float, calls_per_s: float, share: Callable[[float], float], random: Random
) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate is a time-dependent share of `calls_per_s`, by
    thinning.
    """
    at_s = start_s
    while True:
        at_s += random.expovariate(calls_per_s)
        rate_share = share(at_s)
        if rate_share >= 1 or random.random() < rate_share:
            yield at_s


def _bursty(spec: SourceSpec, calls_per_s: float, random: Random) -> Iterator[float]:
    """Yield the times of a Poisson process during bursts; the time between bursts does not count for it."""
    on_s, off_s = spec.burst.on, spec.burst.off
    burst_s, peak_per_s = 0.0, calls_per_s * (on_s + off_s) / on_s
    while True:
        burst_s += random.expovariate(peak_per_s)
        earlier_bursts, into_s = divmod(burst_s, on_s)
        yield spec.start + earlier_bursts * (on_s + off_s) + into_s
