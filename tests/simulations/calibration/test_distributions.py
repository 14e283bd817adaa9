"""Distributions of service times: draws equal measured times, the file keeps them, errors name the fix."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_simulations.calibration.calibration_file import Calibration
from delta_prop_simulations.calibration.distributions import TIMES_PER_SIZE_MAX, Distribution, Samples
from delta_prop_simulations.rng import Seed
from delta_prop_wire.errors import UsageError

seconds = st.floats(0, 10, allow_subnormal=False)
measurements = st.dictionaries(
    st.integers(1, 10_000), st.lists(seconds, min_size=1, max_size=50), min_size=1, max_size=6
)


@settings(max_examples=40)
@given(measurements, st.floats(0, 1))
def test_quantile_at_measured_size_is_within_its_times(samples: dict[int, list[float]], share: float) -> None:
    distribution = Distribution.of(samples)
    for size, times in samples.items():
        assert min(times) <= distribution.quantile(share, size) <= max(times)


@settings(max_examples=40)
@given(measurements, st.integers(1, 20_000))
def test_quantile_between_sizes_is_between_their_times(
    samples: dict[int, list[float]], delta_count: int
) -> None:
    distribution = Distribution.of(samples)
    low = max((size for size in samples if size <= delta_count), default=min(samples))
    high = min((size for size in samples if size >= delta_count), default=None)
    median = distribution.quantile(0.5, delta_count)
    if high is None:
        assert median >= distribution.quantile(0.5, low)
    else:
        ends = sorted((distribution.quantile(0.5, low), distribution.quantile(0.5, high)))
        assert ends[0] <= median * 1.000001 + 1e-12
        assert median <= ends[1] * 1.000001 + 1e-12


def test_draws_have_quantiles_of_measured_times() -> None:
    rng = Seed(1).stream("service times")
    times = [rng.lognormvariate(0, 1) for _ in range(5_000)]
    distribution = Distribution.of({10: times})
    drawn = sorted(distribution.draw(rng, 10) for _ in range(20_000))
    times.sort()
    for share in (0.1, 0.5, 0.9, 0.99):
        assert drawn[int(share * len(drawn))] == pytest.approx(times[int(share * len(times))], rel=0.06)
    assert len(distribution.times_s[0]) == TIMES_PER_SIZE_MAX
    assert distribution.times_s[0][-1] == times[-1]
    assert distribution.mean(10) == pytest.approx(sum(times) / len(times), rel=0.05)


def test_calls_beyond_measured_sizes_are_extrapolated() -> None:
    distribution = Distribution.of({100: [1.0], 200: [1.5]})
    assert distribution.quantile(0.5, 400) == pytest.approx(2.5)
    assert Distribution.of({100: [1.0]}).quantile(0.5, 300) == pytest.approx(3.0)


def test_bytes_beyond_measured_deltas_cost_byte_time() -> None:
    distribution = Distribution.of({10: [0.001]}, delta_bytes=100, byte_s=1e-6)
    assert distribution.quantile(0.5, 10, 1_000) == pytest.approx(0.001)
    assert distribution.quantile(0.5, 10, 3_000) == pytest.approx(0.003)
    assert distribution.quantile(0.5, 10, 0) == pytest.approx(0.0)


@settings(max_examples=20)
@given(measurements)
def test_file_stores_distributions_to_tenth_of_microsecond(samples: dict[int, list[float]]) -> None:
    distribution = Distribution.of(samples, delta_bytes=64, byte_s=2e-9)
    written = Calibration({"system": "here"}, {"storage": {"call": distribution}}).to_text()
    read = Calibration.from_text(written)
    assert read.machine == {"system": "here"}
    restored = read.distribution("storage")
    assert restored.sizes == distribution.sizes
    assert restored.delta_bytes == distribution.delta_bytes
    assert restored.byte_s == pytest.approx(distribution.byte_s)
    for restored_times, times in zip(restored.times_s, distribution.times_s, strict=True):
        assert restored_times == pytest.approx(times, abs=1e-7)


def test_each_sample_kind_becomes_a_distribution() -> None:
    samples = Samples(delta_bytes=8)
    samples.add("call", 10, 0.2, 0.1)
    samples.add("call", 1, -1e-9)
    samples.add("late", 1, 0.3)
    distributions = samples.distributions()
    assert distributions["call"] == Distribution((1, 10), ((0.0,), (0.1, 0.2)), delta_bytes=8)
    assert distributions["late"].quantile(1, 1) == 0.3


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ((), (), "1 to"),
        ((1, 2), ((0.1,),), "times for each"),
        ((2, 1), ((0.1,), (0.1,)), "not ascending"),
        ((0,), ((0.1,),), "from 1 on"),
        ((1,), ((),), "size 1 has 0 times"),
        ((1,), ((0.2, 0.1),), "from 0 on, ascending"),
        ((1,), ((-0.1,),), "from 0 on"),
        ((1,), ((float("nan"),),), "size 1"),
    ],
)
def test_invalid_distribution_is_refused_with_valid_values(
    sizes: tuple[int, ...], times: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Distribution(sizes, times)


def test_unknown_sink_or_distribution_error_suggests_name() -> None:
    calibration = Calibration({}, {"storage": {"call": Distribution.of({1: [0.1]})}})
    with pytest.raises(UsageError, match="did you mean 'storage'"):
        calibration.distribution("storge")
    with pytest.raises(UsageError, match="no distribution 'loop': give one of call"):
        calibration.distribution("storage", "loop")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"format": "delta-prop calibration 1"}),
        json.dumps({"format": "delta-prop calibration 1", "machine": {}, "sinks": {"a": {"call": {}}}}),
        json.dumps({"format": "delta-prop calibration 1", "machine": [], "sinks": {}}),
    ],
)
def test_invalid_calibration_file_error_names_the_command(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"mine\.json: not a calibration: .*simulate calibrate --to mine\.json"
    ):
        Calibration.from_text(text, "mine.json")
