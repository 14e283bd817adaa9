"""Rate laws: limits and smoothing for any measurements, and rates for typical sinks."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery.backpressure.controller import (
    FALL_MAX,
    HEADROOM,
    DepthLaw,
    DrainLaw,
    Law,
    RateLimits,
)
from delta_prop_wire.errors import UsageError
from tests.delta_prop.delivery.backpressure.simulated_sinks import TICKS_PER_S, RunRecord, simulate

MakeLaw = Callable[[], Law]
with_each_law = pytest.mark.parametrize("make_law", [DrainLaw, DepthLaw])

amounts = st.one_of(st.integers(-10, 3_000), st.integers(0, 1 << 63))
samples = st.tuples(amounts, amounts, amounts, st.floats(0, 10) | st.floats(), st.booleans())


def admitted_per_s(record: RunRecord, first_s: float, last_s: float) -> float:
    """Return the deltas admitted per second between two times."""
    admitted = record.admitted[round(first_s * TICKS_PER_S) : round(last_s * TICKS_PER_S)]
    return sum(admitted) * TICKS_PER_S / len(admitted)


# --- any measurements


@with_each_law
@given(history=st.lists(samples, max_size=15))
def test_update_keeps_rate_within_limits_for_any_measurements(
    make_law: MakeLaw, history: list[tuple[int, int, int, float, bool]]
) -> None:
    law = make_law()
    for drained, depth, depth_max, elapsed_s, demand_limited in history:
        before = law.rate
        rate = law.update(
            drained=drained,
            depth=depth,
            depth_max=depth_max,
            elapsed_s=elapsed_s,
            demand_limited=demand_limited,
        )
        assert rate == law.rate
        assert isfinite(rate)
        assert 100 <= rate <= 1_000_000
        assert rate >= min(max(FALL_MAX * before, 100), before)
        # A rise is smoothed: up to 30 % of the distance to 1,000,000.
        assert rate <= max(before, 0.3 * 1_000_000 + 0.7 * before)
        assert isfinite(law.drain_rate)
        assert law.drain_rate >= 0


@with_each_law
def test_infinite_elapsed_time_keeps_rate_finite(make_law: MakeLaw) -> None:
    law = make_law()
    for _ in range(4):
        rate = law.update(drained=0, depth=0, depth_max=0, elapsed_s=float("inf"))  # type: ignore[attr-defined]
        assert isfinite(rate)


@with_each_law
@given(
    drains=st.lists(st.tuples(amounts, st.floats(0, 10) | st.floats()), max_size=10),
    share=st.floats(0.01, 0.99),
)
def test_follow_keeps_rate_within_limits_for_any_drains(
    make_law: MakeLaw, drains: list[tuple[int, float]], share: float
) -> None:
    law = make_law()
    for drained, elapsed_s in drains:
        before = law.rate
        rate = law.follow(drained=drained, share=share, elapsed_s=elapsed_s)
        assert isfinite(rate)
        assert 100 <= rate <= 1_000_000
        target = min(max(share * law.drain_rate, 100), 1_000_000)
        if elapsed_s > 0:
            assert rate == pytest.approx(target if target <= before else 0.3 * target + 0.7 * before)


def test_follow_falls_at_once_and_rises_smoothed() -> None:
    law = DrainLaw()
    assert law.follow(drained=500, share=0.5) == 2_500
    assert law.follow(drained=1_500, share=0.5) == pytest.approx(0.3 * 5_000 + 0.7 * 2_500)


# --- the drain law


def update_n_times(law: DrainLaw, count: int, **measurements: int) -> list[float]:
    return [law.update(**measurements) for _ in range(count)]


def test_capacity_drop_lowers_rate_at_once() -> None:
    law = DrainLaw()
    update_n_times(law, 30, drained=1_000, depth=3_500, depth_max=20_000)
    assert law.rate == pytest.approx(10_000, rel=0.02)
    before = law.rate
    first = law.update(drained=100, depth=12_000, depth_max=20_000)
    assert first == pytest.approx(FALL_MAX * before)
    assert update_n_times(law, 10, drained=100, depth=12_000, depth_max=20_000)[-1] == 100


def test_capacity_rise_raises_rate_smoothed() -> None:
    law = DrainLaw()
    update_n_times(law, 30, drained=1_000, depth=3_500, depth_max=20_000)
    rate = law.rate
    after = law.update(drained=1_000, depth=0, depth_max=20_000)
    assert after == pytest.approx(0.3 * 1.5 * rate + 0.7 * rate, rel=0.02)


def test_rate_stays_at_the_allowed_depth() -> None:
    law = DrainLaw()
    depth = 10_000 // 4 + 1_000
    assert update_n_times(law, 50, drained=1_000, depth=depth, depth_max=20_000)[-1] == pytest.approx(10_000)
    small = DrainLaw()
    assert update_n_times(small, 50, drained=1_000, depth=1_500, depth_max=3_000)[-1] == pytest.approx(10_000)


def test_first_samples_change_rate_only_near_depth_limit() -> None:
    law = DrainLaw()
    assert update_n_times(law, 2, drained=10, depth=500, depth_max=1_000) == [10_000, 10_000]
    fuller = DrainLaw()
    assert update_n_times(fuller, 2, drained=10, depth=950, depth_max=1_000) == [5_000, 2_500]


@pytest.mark.parametrize("make_law", [DrainLaw, DepthLaw])
def test_update_without_elapsed_time_keeps_rate(make_law: MakeLaw) -> None:
    law = make_law()
    assert law.update(drained=10, depth=10, depth_max=10, elapsed_s=0.0) == 10_000  # type: ignore[attr-defined]
    assert law.drain_rate == 0


def test_late_step_is_measured_over_elapsed_time() -> None:
    law = DrainLaw()
    for _ in range(10):
        law.update(drained=5_000, depth=3_500, depth_max=20_000, elapsed_s=0.5)
    assert law.drain_rate == pytest.approx(10_000)


def test_slow_source_does_not_inflate_rate() -> None:
    record = simulate(
        DrainLaw(), capacity=lambda _: 20_000, seconds=20, mailbox_deltas=20_000, demand=lambda _: 9_000
    )
    assert record.rates[-1] <= HEADROOM * 9_000 * 1.05
    assert record.rates[-1] >= 9_000
    assert admitted_per_s(record, 5, 20) == pytest.approx(9_000, rel=0.01)


def test_idle_source_keeps_its_rate() -> None:
    record = simulate(
        DrainLaw(),
        capacity=lambda _: 50_000,
        seconds=15,
        mailbox_deltas=20_000,
        demand=lambda now: 0 if 5 < now < 10 else 45_000,
    )
    assert min(record.rates[5 * 10 :]) >= 45_000  # neither the idle time nor the restart lowers the rate
    assert admitted_per_s(record, 10.2, 11) == pytest.approx(45_000, rel=0.02)


def test_starved_sink_rate_is_bounded_by_headroom_times_drain() -> None:
    law = DrainLaw()
    assert update_n_times(law, 20, drained=10, depth=0, depth_max=20_000)[-1] == 10_000
    assert update_n_times(law, 50, drained=1_500, depth=0, depth_max=20_000)[-1] == pytest.approx(
        HEADROOM * 15_000, rel=0.01
    )


def test_source_pause_does_not_lower_rate() -> None:
    record = simulate(
        DrainLaw(),
        capacity=lambda _: 20_000,
        seconds=15,
        mailbox_deltas=20_000,
        demand=lambda now: 100 if 5 < now < 10 else 200_000,
        batch_deltas=10,
        waiting_max=20_000,
    )
    assert min(record.rates[5 * 10 :]) >= 18_000


def test_low_demand_keeps_initial_rate() -> None:
    record = simulate(
        DrainLaw(),
        capacity=lambda _: 20_000,
        seconds=5,
        mailbox_deltas=20_000,
        demand=lambda _: 60,
        batch_deltas=3,
        bursty=True,
    )
    assert min(record.rates) == 10_000


@pytest.mark.parametrize("stall_s", [0.3, 1, 3])
def test_stalled_sink_recovers_its_rate_within_two_seconds(stall_s: float) -> None:
    record = simulate(
        DrainLaw(),
        capacity=lambda now: 0 if 5 < now < 5 + stall_s else 20_000,
        seconds=12,
        mailbox_deltas=20_000,
    )
    assert not record.credit_exceeded
    assert admitted_per_s(record, 5 + stall_s + 2, 12) == pytest.approx(20_000, rel=0.1)
    for start in range(round((5 + stall_s + 2) * 10), 110):
        assert admitted_per_s(record, start / 10, start / 10 + 1) >= 17_000


@pytest.mark.parametrize("call_s", [0.2, 1.0, 3.0])
def test_sink_with_long_calls_is_not_throttled_for_in_call_deltas(call_s: float) -> None:
    record = simulate(
        DrainLaw(),
        capacity=lambda _: 1_000 / call_s,
        seconds=48,
        mailbox_deltas=20_000,
        bursty=True,
        batch_deltas=100,
    )
    assert admitted_per_s(record, 24, 48) == pytest.approx(1_000 / call_s, rel=0.05)
    # The queue: a quarter of a second's worth, one call that waits and one in progress.
    assert max(record.depths[24 * TICKS_PER_S :]) <= 0.25 * 1_000 / call_s + 2_600


def test_steady_sink_depth_stays_small_and_stable() -> None:
    record = simulate(DrainLaw(), capacity=lambda _: 10_000, seconds=30, mailbox_deltas=100_000)
    settled = record.depths[20 * TICKS_PER_S :]
    assert max(settled) <= 4_000
    assert min(settled) >= 2_500


def test_sink_slower_than_rate_min_is_limited_by_credits() -> None:
    record = simulate(DrainLaw(), capacity=lambda _: 40, seconds=30, mailbox_deltas=500, batch_deltas=1)
    assert not record.credit_exceeded
    assert record.rates[-1] == 100
    assert admitted_per_s(record, 10, 30) == pytest.approx(40, rel=0.05)


def test_large_capacity_drop_is_drained_then_followed() -> None:
    record = simulate(
        DrainLaw(), capacity=lambda now: 50_000 if now < 5 else 5_000, seconds=20, mailbox_deltas=100_000
    )
    assert max(record.depths) <= 50_000  # up to one second's worth; the credits allow 100,000
    assert admitted_per_s(record, 14, 20) == pytest.approx(5_000, rel=0.05)


def test_larger_standing_s_allows_more_deltas_in_flight() -> None:
    rates = []
    for limits in (RateLimits(), RateLimits(standing_s=1.0)):
        law = DrainLaw(limits)
        in_flight = [0] * 6  # 0.6 s from the source to the acknowledgement, at any rate
        for _ in range(100):
            in_flight.append(round(law.rate / 10))
            law.update(drained=in_flight.pop(0), depth=sum(in_flight), depth_max=100_000)
        rates.append(law.rate)
    assert rates[0] < 5_000  # deltas in flight count as a queue
    assert rates[1] > 12_000


# --- the depth law


def test_depth_law_factors_by_depth() -> None:
    for depth, factor in ((95, 0.5), (80, 0.9), (50, 1.0), (10, 1.1)):
        law = DepthLaw()
        rate = law.update(drained=0, depth=depth, depth_max=100)
        assert rate == pytest.approx(0.3 * factor * 10_000 + 0.7 * 10_000)
    assert DepthLaw().update(drained=0, depth=0, depth_max=0) == pytest.approx(8_500)


# --- limits


@pytest.mark.parametrize(
    "invalid",
    [
        {"rate_min": 0.0},
        {"rate_initial": 50.0},
        {"rate_max": 5_000.0},
        {"rate_max": float("inf")},
        {"rate_min": float("nan")},
        {"increase_share": 0.0},
        {"increase_share": 1.5},
        {"window_s": 0.05},
        {"window_s": float("nan")},
        {"standing_s": 0.0},
    ],
)
def test_invalid_rate_limits_are_rejected(invalid: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(invalid)).removeprefix("rate_")):
        RateLimits(**invalid)


@pytest.mark.parametrize("with_in_call", [True, False])
def test_in_call_progress_smooths_the_rate(with_in_call: bool) -> None:
    """Calls of 1,000 deltas at 4,700 per second: 4 or 5 calls end each second, while the work is steady."""
    law, speed, finished, rates = DrainLaw(), 4_700, 0, []
    for step in range(1, 101):
        work = speed * step // 10
        finished_now = work // 1_000 * 1_000
        law.update(
            drained=finished_now - finished,
            depth=2_000 + work - finished_now,
            depth_max=20_000,
            in_call=work - finished_now if with_in_call else None,
        )
        finished = finished_now
        rates.append(law.rate)
    spread = (max(rates[50:]) - min(rates[50:])) / speed
    assert (spread < 0.02) if with_in_call else (spread > 0.05)
