"""Parts of a run: arrival times, drawn deltas, times of calls, quantiles of histograms."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_simulations.rng import Seed
from delta_prop_simulations.scenarios.measures import Histogram, OffsetTimes, Timeline
from delta_prop_simulations.scenarios.scenario import Burst, Day, Deltas, Hot, Mix, SinkSpec, SourceSpec
from delta_prop_simulations.scenarios.sinks import ConfiguredDistribution
from delta_prop_simulations.scenarios.sources import Arrival, DeltaGenerator, Template, arrivals
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.encode import encode_batch

make_stream = Seed(1).stream


@pytest.mark.parametrize("pattern", ["constant", "poisson", "bursty", "diurnal"])
def test_every_pattern_keeps_the_mean_rate_and_the_order(pattern: Any) -> None:
    spec = SourceSpec("web", pattern, 1000.0, 10, burst=Burst(1.0, 4.0), day=Day(50.0, 0.2))
    arriving = list(arrivals(spec, make_stream(pattern), 200.0))
    assert sum(arrival.deltas for arrival in arriving) == pytest.approx(200_000, rel=0.03)
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(arriving))
    assert arriving[-1].at_s < 200.0


def test_bursts_pause_and_days_have_nights() -> None:
    spec = SourceSpec("web", "bursty", 1000.0, 10, burst=Burst(1.0, 4.0))
    assert all(arrival.at_s % 5.0 <= 1.0 for arrival in arrivals(spec, make_stream("b"), 100.0))
    day = replace(spec, pattern="diurnal", day=Day(100.0, 0.0))
    halves = Counter(arrival.at_s % 100 < 50 for arrival in arrivals(day, make_stream("d"), 200.0))
    assert halves[True] > 3 * halves[False]


def test_source_starts_and_stops_at_its_times() -> None:
    spec = SourceSpec("web", "constant", 10.0, 1, start=2.0, stop=4.0)
    assert [arrival.at_s for arrival in arrivals(spec, make_stream(""), 60.0)] == pytest.approx(
        [2 + i / 10 for i in range(20)]
    )


def test_hot_keys_get_their_share() -> None:
    spec = SourceSpec("web", deltas=Deltas(keys=1000, hot=Hot(0.01, 0.5)))
    generator = DeltaGenerator(spec, make_stream("hot"), AckLevel.MEMORY)
    template = generator.make(Arrival(0.0, 1000))
    assert isinstance(template, Template)
    hot_count = sum(int(delta.vector_id[1:]) < 10 for delta in template.deltas)
    assert 400 < hot_count < 600


@pytest.mark.parametrize("kind", ["dense", "create", "opaque", "delete"])
def test_template_equals_batch_encoded_directly(kind: str) -> None:
    spec = SourceSpec("web", deltas=Deltas(dimension=8, mix=Mix(**{kind: 1.0})), namespace="n")
    template = DeltaGenerator(spec, make_stream("ready"), AckLevel.DURABLE).make(Arrival(0.0, 50))
    assert isinstance(template, Template)
    numbers = {"origin": 1 << 60, "base": 77, "hybrid_time": 123 << 16}
    batch = template.with_dots(**numbers)
    assert batch.raw == encode_batch(template.deltas, ack_level=AckLevel.DURABLE, **numbers).raw
    assert batch.keys == parse_batch(batch.raw).keys
    assert (batch.namespace, batch.namespace_names, batch.count) == ("n", ("n",), 50)


@pytest.mark.parametrize("distribution", ["constant", "normal", "lognormal", "exponential"])
def test_distributions_have_the_configured_mean(distribution: Any) -> None:
    configured = ConfiguredDistribution(
        SinkSpec("index", per_call_ms=2.0, per_delta_us=30.0, noise=0.3, distribution=distribution)
    )
    rng = make_stream(distribution)
    times = [configured.draw(rng, 100, 0) for _ in range(4000)]
    assert sum(times) / len(times) == pytest.approx(0.005, rel=0.05)
    assert min(times) >= 0


def test_capacity_limits_the_rate() -> None:
    configured = ConfiguredDistribution(SinkSpec("index", per_call_ms=0.1, capacity_per_s=1000.0))
    assert configured.draw(make_stream(""), 100, 0) == pytest.approx(0.1)


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_near_the_exact_quantiles(times: list[float], share: float) -> None:
    histogram = Histogram()
    for seconds in times:
        histogram.add(seconds)
    exact = sorted(times)[max(-(-int(share * 1000) * len(times) // 1000) - 1, 0)]
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.03)
    assert sum(count for _, count in histogram.latency().buckets) == len(times)


def test_offset_times_are_found_until_forgotten() -> None:
    offset_times = OffsetTimes()
    for number in range(10_000):
        offset_times.note(number * 10, float(number))
    assert offset_times.at(0) == 0.0
    assert offset_times.at(25) == 2.0
    offset_times.forget(60_005)
    assert len(offset_times) < 5_000
    assert offset_times.at(60_005) == 6000.0
    assert offset_times.at(5) is None


@pytest.mark.parametrize("duration_s", [0.1, 7.0, 60.0, 86_400.0])
def test_series_have_few_points_for_any_duration(duration_s: float) -> None:
    times = list(Timeline(duration_s).times())
    assert 2 < len(times) <= 301
    assert times[-1] == pytest.approx(duration_s)
