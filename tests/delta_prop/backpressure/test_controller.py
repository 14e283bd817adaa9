"""The laws: bounds and smoothing for any measurements, and what each makes of typical sinks."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.backpressure.controller import (
    FALL_MAX,
    HEADROOM,
    DepthLaw,
    DrainLaw,
    RateLimits,
    _MeasuredLaw,
)
from delta_prop_wire.errors import UsageError
from tests.delta_prop.backpressure.simulated import TICKS_A_SECOND, Run, run

MakeLaw = Callable[[], _MeasuredLaw]
both = pytest.mark.parametrize("make", [DrainLaw, DepthLaw])

amounts = st.one_of(st.integers(-10, 3_000), st.integers(0, 1 << 63))
samples = st.tuples(amounts, amounts, amounts, st.floats(0, 10) | st.floats(), st.booleans())


def per_second(told: Run, first_s: float, last_s: float) -> float:
    """Admitted deltas a second between two times."""
    taken = told.admitted[round(first_s * TICKS_A_SECOND) : round(last_s * TICKS_A_SECOND)]
    return sum(taken) * TICKS_A_SECOND / len(taken)


# --- any measurements


@both
@given(history=st.lists(samples, max_size=15))
def test_any_measurements_leave_a_rate_within_its_bounds(
    make: MakeLaw, history: list[tuple[int, int, int, float, bool]]
) -> None:
    law = make()
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
        # Up by a share of the way at most: of the way to 1,000,000.
        assert rate <= max(before, 0.3 * 1_000_000 + 0.7 * before)
        assert isfinite(law.drain_rate)
        assert law.drain_rate >= 0


@both
@given(
    drains=st.lists(st.tuples(amounts, st.floats(0, 10) | st.floats()), max_size=10),
    share=st.floats(0.01, 0.99),
)
def test_a_sink_that_catches_up_leaves_a_rate_within_its_bounds(
    make: MakeLaw, drains: list[tuple[int, float]], share: float
) -> None:
    law = make()
    for drained, elapsed_s in drains:
        before = law.rate
        rate = law.follow(drained=drained, share=share, elapsed_s=elapsed_s)
        assert isfinite(rate)
        assert 100 <= rate <= 1_000_000
        target = min(max(share * law.drain_rate, 100), 1_000_000)
        if elapsed_s > 0:
            assert rate == pytest.approx(target if target <= before else 0.3 * target + 0.7 * before)


def test_following_goes_down_at_once_and_up_by_a_share() -> None:
    law = DrainLaw()
    assert law.follow(drained=500, share=0.5) == 2_500
    assert law.follow(drained=1_500, share=0.5) == pytest.approx(0.3 * 5_000 + 0.7 * 2_500)


# --- the drain law


def steps_of(law: DrainLaw, count: int, **measured: int) -> list[float]:
    return [law.update(**measured) for _ in range(count)]


def test_a_drop_in_capacity_is_answered_at_once() -> None:
    law = DrainLaw()
    steps_of(law, 30, drained=1_000, depth=3_500, depth_max=20_000)
    assert law.rate == pytest.approx(10_000, rel=0.02)
    before = law.rate
    first = law.update(drained=100, depth=12_000, depth_max=20_000)
    assert first == pytest.approx(FALL_MAX * before)
    assert steps_of(law, 10, drained=100, depth=12_000, depth_max=20_000)[-1] == 100


def test_an_increase_is_smoothed() -> None:
    law = DrainLaw()
    steps_of(law, 30, drained=1_000, depth=3_500, depth_max=20_000)
    rate = law.rate
    after = law.update(drained=1_000, depth=0, depth_max=20_000)
    assert after == pytest.approx(0.3 * 1.5 * rate + 0.7 * rate, rel=0.02)


def test_what_leaves_within_a_quarter_of_a_second_and_one_step_may_stand() -> None:
    law = DrainLaw()
    wanted = 10_000 // 4 + 1_000
    assert steps_of(law, 50, drained=1_000, depth=wanted, depth_max=20_000)[-1] == pytest.approx(10_000)
    small = DrainLaw()
    assert steps_of(small, 50, drained=1_000, depth=1_500, depth_max=3_000)[-1] == pytest.approx(10_000)


def test_nothing_is_decided_on_the_first_samples_but_near_the_bound() -> None:
    law = DrainLaw()
    assert steps_of(law, 2, drained=10, depth=500, depth_max=1_000) == [10_000, 10_000]
    fuller = DrainLaw()
    assert steps_of(fuller, 2, drained=10, depth=950, depth_max=1_000) == [5_000, 2_500]


@pytest.mark.parametrize("make", [DrainLaw, DepthLaw])
def test_no_time_no_step(make: MakeLaw) -> None:
    law = make()
    assert law.update(drained=10, depth=10, depth_max=10, elapsed_s=0.0) == 10_000  # type: ignore[attr-defined]
    assert law.drain_rate == 0


def test_a_late_step_is_measured_over_its_real_time() -> None:
    law = DrainLaw()
    for _ in range(10):
        law.update(drained=5_000, depth=3_500, depth_max=20_000, elapsed_s=0.5)
    assert law.drain_rate == pytest.approx(10_000)


def test_a_source_that_offers_less_does_not_make_the_rate_run_away() -> None:
    told = run(DrainLaw(), capacity=lambda _: 20_000, seconds=20, mailbox=20_000, demand=lambda _: 9_000)
    assert told.rates[-1] <= HEADROOM * 9_000 * 1.05
    assert told.rates[-1] >= 9_000
    assert per_second(told, 5, 20) == pytest.approx(9_000, rel=0.01)


def test_an_idle_source_keeps_its_rate() -> None:
    told = run(
        DrainLaw(),
        capacity=lambda _: 50_000,
        seconds=15,
        mailbox=20_000,
        demand=lambda now: 0 if 5 < now < 10 else 45_000,
    )
    assert min(told.rates[5 * 10 :]) >= 45_000  # neither idling nor coming back costs anything
    assert per_second(told, 10.2, 11) == pytest.approx(45_000, rel=0.02)


def test_a_starved_sink_is_not_offered_more_than_a_multiple_of_what_it_drained() -> None:
    law = DrainLaw()
    assert steps_of(law, 20, drained=10, depth=0, depth_max=20_000)[-1] == 10_000
    assert steps_of(law, 50, drained=1_500, depth=0, depth_max=20_000)[-1] == pytest.approx(
        HEADROOM * 15_000, rel=0.01
    )


def test_a_pause_of_the_source_is_no_measure_of_the_sink() -> None:
    told = run(
        DrainLaw(),
        capacity=lambda _: 20_000,
        seconds=15,
        mailbox=20_000,
        demand=lambda now: 100 if 5 < now < 10 else 200_000,
        batch=10,
        waiting_max=20_000,
    )
    assert min(told.rates[5 * 10 :]) >= 18_000


def test_few_deltas_at_a_time_say_nothing_about_capacity() -> None:
    told = run(
        DrainLaw(),
        capacity=lambda _: 20_000,
        seconds=5,
        mailbox=20_000,
        demand=lambda _: 60,
        batch=3,
        lumpy=True,
    )
    assert min(told.rates) == 10_000


@pytest.mark.parametrize("stall_s", [0.3, 1, 3])
def test_a_sink_that_stood_still_is_served_again_soon(stall_s: float) -> None:
    told = run(
        DrainLaw(), capacity=lambda now: 0 if 5 < now < 5 + stall_s else 20_000, seconds=12, mailbox=20_000
    )
    assert not told.credit_exceeded
    assert per_second(told, 5 + stall_s + 2, 12) == pytest.approx(20_000, rel=0.1)
    for start in range(round((5 + stall_s + 2) * 10), 110):
        assert per_second(told, start / 10, start / 10 + 1) >= 17_000


@pytest.mark.parametrize("call_s", [0.2, 1.0, 3.0])
def test_a_sink_with_long_calls_is_not_throttled_for_what_is_in_hand(call_s: float) -> None:
    told = run(
        DrainLaw(), capacity=lambda _: 1_000 / call_s, seconds=48, mailbox=20_000, lumpy=True, batch=100
    )
    assert per_second(told, 24, 48) == pytest.approx(1_000 / call_s, rel=0.05)
    # What stands: a quarter of a second's worth, one call that waits and one that is in hand.
    assert max(told.depths[24 * TICKS_A_SECOND :]) <= 0.25 * 1_000 / call_s + 2_600


def test_the_depth_that_stands_is_small_and_steady() -> None:
    told = run(DrainLaw(), capacity=lambda _: 10_000, seconds=30, mailbox=100_000)
    settled = told.depths[20 * TICKS_A_SECOND :]
    assert max(settled) <= 4_000
    assert min(settled) >= 2_500


def test_a_sink_slower_than_the_least_rate_is_held_by_its_credits() -> None:
    told = run(DrainLaw(), capacity=lambda _: 40, seconds=30, mailbox=500, batch=1)
    assert not told.credit_exceeded
    assert told.rates[-1] == 100
    assert per_second(told, 10, 30) == pytest.approx(40, rel=0.05)


def test_a_large_step_down_is_worked_off_and_then_followed() -> None:
    told = run(DrainLaw(), capacity=lambda now: 50_000 if now < 5 else 5_000, seconds=20, mailbox=100_000)
    assert max(told.depths) <= 50_000  # one second's worth at most, of 100,000 that the credits allow
    assert per_second(told, 14, 20) == pytest.approx(5_000, rel=0.05)


def test_with_a_longer_standing_time_many_calls_may_be_in_flight() -> None:
    rates = []
    for limits in (RateLimits(), RateLimits(standing_s=1.0)):
        law = DrainLaw(limits)
        flying = [0] * 6  # 0.6 s from the source to the acknowledgement, however much it is
        for _ in range(100):
            flying.append(round(law.rate / 10))
            law.update(drained=flying.pop(0), depth=sum(flying), depth_max=100_000)
        rates.append(law.rate)
    assert rates[0] < 5_000  # what is under way is taken for a queue
    assert rates[1] > 12_000


# --- the specification's law


def test_the_specifications_law_in_numbers() -> None:
    for depth, factor in ((95, 0.5), (80, 0.9), (50, 1.0), (10, 1.1)):
        law = DepthLaw()
        rate = law.update(drained=0, depth=depth, depth_max=100)
        assert rate == pytest.approx(0.3 * factor * 10_000 + 0.7 * 10_000)
    assert DepthLaw().update(drained=0, depth=0, depth_max=0) == pytest.approx(8_500)


# --- limits


@pytest.mark.parametrize(
    "wrong",
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
def test_limits_that_make_no_sense_are_told(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).removeprefix("rate_")):
        RateLimits(**wrong)


@pytest.mark.parametrize("told", [True, False])
def test_what_a_call_in_hand_has_done_evens_out_the_lumps(told: bool) -> None:
    """Calls of 1,000 at 4,700 a second: a second sees 4 of them end, or 5; the work goes on all the time."""
    law, speed, ended, rates = DrainLaw(), 4_700, 0, []
    for step in range(1, 101):
        work = speed * step // 10
        now_ended = work // 1_000 * 1_000
        law.update(
            drained=now_ended - ended,
            depth=2_000 + work - now_ended,
            depth_max=20_000,
            in_call=work - now_ended if told else None,
        )
        ended = now_ended
        rates.append(law.rate)
    spread = (max(rates[50:]) - min(rates[50:])) / speed
    assert (spread < 0.02) if told else (spread > 0.05)
