"""The gate: the smallest rate of the pacing sinks holds, and their credits, and nothing for the others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.backpressure.controller import INTERVAL_S, DrainLaw
from delta_prop.backpressure.credit import Credits
from delta_prop.backpressure.pacer import RETRY_AFTER_MS_MAX, Measure, Mode, Pacer
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import PressureLevel


@dataclass
class FixedLaw:
    """A rate that the test sets; it remembers what it was told."""

    rate: float = 1_000.0
    drain_rate: float = 0.0
    demand_limited: bool | None = None
    elapsed_s: float = 0.0
    followed: float | None = None

    def update(
        self,
        *,
        drained: int,
        depth: int,
        depth_max: int,
        elapsed_s: float = 0.1,
        demand_limited: bool = False,
        in_call: int | None = None,
    ) -> float:
        self.demand_limited, self.elapsed_s, self.drain_rate = (
            demand_limited,
            elapsed_s,
            drained / (elapsed_s or 1.0),
        )
        return self.rate

    def follow(self, *, drained: int, share: float, elapsed_s: float = 0.1) -> float:
        self.followed, self.drain_rate = share, drained / (elapsed_s or 1.0)
        self.rate = share * self.drain_rate
        return self.rate


def a_pacer(**laws: FixedLaw) -> Pacer:
    pacer = Pacer()
    for name, law in laws.items():
        pacer.pace(name, law, None, 0.0)
    return pacer


def admitted(pacer: Pacer, now: float, count: int = 1, most: int = 100_000) -> int:
    taken = 0
    while taken < most and pacer.admits(count, count, now):
        pacer.note(count, count, now)
        taken += count
    return taken


# --- nobody paces


def test_without_a_pacing_sink_there_is_no_limit() -> None:
    pacer = Pacer()
    assert admitted(pacer, 0.0, count=1_000, most=1_000_000) == 1_000_000
    assert pacer.wait_s(1, 1, 0.0) == 0.0
    assert pacer.step(1.0, {"unknown": Measure(1, 1, 1)}) is None
    pressure = pacer.pressure(0, 100)
    assert (pressure.level, pressure.rate_limit, pressure.paced_by) == (PressureLevel.OK, None, None)
    assert pressure.retry_after_ms is None


def test_the_last_one_that_goes_takes_the_limit_along() -> None:
    pacer = a_pacer(a=FixedLaw(10.0), b=FixedLaw(100.0))
    assert (pacer.rate, pacer.paced_by) == (10.0, "a")
    pacer.release("a", 0.0)
    assert (pacer.rate, pacer.paced_by) == (100.0, "b")
    pacer.release("b", 0.0)
    pacer.release("b", 0.0)
    assert admitted(pacer, 0.0, most=1_000) == 1_000


# --- the rate


def test_a_burst_of_one_interval_then_the_rate() -> None:
    pacer = a_pacer(a=FixedLaw(1_000.0))
    assert admitted(pacer, 0.0) == 100
    assert admitted(pacer, 0.05) == 50
    assert admitted(pacer, 60.0) == 100  # what was not used is not saved up


def test_the_wait_is_when_it_goes() -> None:
    pacer = a_pacer(a=FixedLaw(300.0))
    assert admitted(pacer, 0.0) == 30
    wait_s = pacer.wait_s(7, 1, 0.0)
    assert wait_s == pytest.approx(7 / 300)
    assert not pacer.admits(7, 1, wait_s * 0.99)
    assert pacer.admits(7, 1, wait_s)
    assert pacer.wait_s(7, 1, wait_s) == 0.0


def test_a_new_rate_holds_from_its_step_on() -> None:
    law = FixedLaw(1_000.0)
    pacer = a_pacer(a=law)
    assert admitted(pacer, 0.0) == 100
    law.rate = 100_000.0
    pacer.step(0.05, {"a": Measure(0, 0, 10)})
    assert admitted(pacer, 0.05) == 50
    law.rate = 100.0
    pacer.step(0.06, {"a": Measure(0, 0, 10)})
    assert admitted(pacer, 0.06) == 10  # 1,000 were gathered, and the bucket shrank


def test_a_batch_larger_than_the_bucket_goes_when_it_is_full_and_is_paid_for() -> None:
    pacer = a_pacer(a=FixedLaw(100.0))
    assert pacer.admits(1_000, 1, 0.0)
    pacer.note(1_000, 1, 0.0)
    assert pacer.wait_s(1_000, 1, 0.0) == pytest.approx(10.0)
    assert not pacer.admits(1, 1, 9.9)
    assert pacer.admits(1_000, 1, 10.0)


def test_beside_a_large_batch_goes_what_the_bucket_shrank_by_and_no_more() -> None:
    law = FixedLaw(110.0)
    pacer = a_pacer(a=law)
    pacer.note(1, 1, 0.0)
    law.rate = 100.0
    pacer.step(0.0, {"a": Measure(0, 0, 1)})
    assert pacer.admits(11, 1, 0.0)
    pacer.note(11, 1, 0.0)
    assert pacer.wait_s(1, 1, 0.0) == pytest.approx(0.02)


@given(
    rates=st.lists(st.floats(100, 1_000_000), min_size=1, max_size=12),
    asked=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 5_000)), min_size=1, max_size=60),
)
def test_never_more_than_rate_times_time_and_a_burst(
    rates: list[float], asked: list[tuple[float, int]]
) -> None:
    law = FixedLaw(rates[0])
    pacer = a_pacer(a=law)
    now, allowed, total = 0.0, 0.0, 0
    for turn, (later_s, count) in enumerate(asked):
        now += later_s
        allowed += law.rate * later_s
        if pacer.admits(count, 1, now):
            pacer.note(count, 1, now)
            total += count
        else:
            wait_s = pacer.wait_s(count, 1, now)
            assert wait_s is not None
            assert 0 < wait_s <= 50 + 0.1  # 5,000 deltas at 100 a second, and a full bucket
        largest = max(count for _, count in asked[: turn + 1])
        bursts = [rate * INTERVAL_S for rate in rates]
        assert total <= allowed + max(*bursts, max(bursts) - min(bursts) + largest) * 1.000001
        law.rate = rates[turn % len(rates)]
        pacer.step(now, {"a": Measure(0, 0, 1)})
    # Whatever was held back goes when the wait is over.
    count = asked[-1][1]
    wait_s = pacer.wait_s(count, 1, now)
    assert wait_s is not None
    assert pacer.admits(count, 1, now + wait_s)


def test_a_clock_that_stands_still_or_back_gives_nothing() -> None:
    pacer = a_pacer(a=FixedLaw(1_000.0))
    assert admitted(pacer, 5.0) == 100
    assert admitted(pacer, 5.0) == 0
    assert admitted(pacer, 4.0) == 0
    assert admitted(pacer, 5.01) == 10


# --- credits


def test_credits_are_taken_of_every_sink_and_come_back_with_progress() -> None:
    pacer, wide, narrow = Pacer(), Credits(1_000, 10_000), Credits(10, 10_000)
    pacer.pace("wide", FixedLaw(1e6), wide, 0.0)
    pacer.pace("narrow", FixedLaw(1e6), narrow, 0.0)
    assert admitted(pacer, 0.0, count=5) == 10
    assert (wide.deltas_out, narrow.deltas_out) == (10, 10)
    assert pacer.wait_s(5, 5, 0.0) is None
    narrow.release(5, 5)
    assert pacer.wait_s(5, 5, 0.0) == 0.0
    assert admitted(pacer, 0.0, count=5) == 5


@given(
    asked=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 800), st.integers(0, 60)), max_size=60),
)
def test_credits_are_never_exceeded(asked: list[tuple[int, int, int]]) -> None:
    pacer, window = Pacer(), Credits(50, 500)
    pacer.pace("a", FixedLaw(1e6), window, 0.0)
    out: list[tuple[int, int]] = []
    for turn, (count, size, applied) in enumerate(asked):
        if pacer.admits(count, size, turn * 1.0):
            pacer.note(count, size, turn * 1.0)
            out.append((count, size))
        alone = len(out) == 1
        assert alone or (window.deltas_out <= 50 and window.bytes_out <= 500)
        if out and applied > 30:
            window.release(*out.pop(0))
        assert (window.deltas_out, window.bytes_out) == (sum(c for c, _ in out), sum(s for _, s in out))


# --- what each law is told


def test_only_who_held_the_source_back_is_told_so() -> None:
    slow, fast = FixedLaw(100.0), FixedLaw(1_000.0)
    pacer = a_pacer(slow=slow, fast=fast)
    measures = {"slow": Measure(1, 0, 10), "fast": Measure(1, 0, 10)}
    assert admitted(pacer, 0.0, most=5) == 5
    pacer.step(0.1, measures)
    assert (slow.demand_limited, fast.demand_limited) == (True, True)
    admitted(pacer, 0.1)
    pacer.step(0.2, measures)
    assert (slow.demand_limited, fast.demand_limited) == (False, True)
    pacer.step(0.3, measures)  # nobody asked again: it still waits
    assert slow.demand_limited is False
    assert pacer.admits(1, 1, 0.35)
    pacer.step(0.4, measures)
    pacer.step(0.5, measures)
    assert slow.demand_limited is True


def test_who_lacks_credits_held_the_source_back() -> None:
    pacer, law = Pacer(), FixedLaw(1e6)
    window = Credits(10, 100)
    pacer.pace("a", law, window, 0.0)
    pacer.pace("b", FixedLaw(1e5), None, 0.0)
    admitted(pacer, 0.0)
    pacer.step(0.1, {"a": Measure(0, 10, 10)})
    assert law.demand_limited is False


def test_a_law_is_stepped_with_the_time_since_its_last_step() -> None:
    law = FixedLaw()
    pacer = Pacer()
    pacer.pace("a", law, None, 7.0)
    pacer.step(7.25, {"a": Measure(1, 0, 10)})
    assert law.elapsed_s == pytest.approx(0.25)


# --- suspended, catching up


def test_a_suspended_sink_limits_nothing() -> None:
    pacer, window = Pacer(), Credits(1, 1)
    law = FixedLaw(100.0)
    pacer.pace("a", law, window, 0.0)
    pacer.note(1, 1, 0.0)
    assert not pacer.admits(1, 1, 5.0)
    pacer.suspend("a", 5.0)
    assert (pacer.mode("a"), pacer.rate, pacer.paced_by) == (Mode.SUSPENDED, None, None)
    assert admitted(pacer, 5.0, most=1_000) == 1_000
    assert pacer.pressure(0, 100).level is PressureLevel.OK
    pacer.step(6.0, {"a": Measure(5, 5, 5)})
    assert law.demand_limited is None  # not stepped
    window.set_out(0, 0)
    pacer.resume("a", 6.0)
    assert pacer.admits(1, 1, 6.0)
    pacer.step(6.1, {"a": Measure(5, 5, 5)})
    assert law.elapsed_s == pytest.approx(0.1)  # the pause is no measure


def test_a_sink_that_catches_up_lets_the_source_have_a_share() -> None:
    pacer, window, law = Pacer(), Credits(10, 100), FixedLaw(5_000.0)
    pacer.pace("a", law, window, 0.0)
    window.set_out(10, 100)
    pacer.catch_up("a", 0.0, share=0.6)
    assert pacer.mode("a") is Mode.CATCHING_UP
    assert pacer.step(0.1, {"a": Measure(200, 50_000, 10)}) == pytest.approx(0.6 * 2_000)
    assert law.followed == 0.6
    assert admitted(pacer, 1.0) == 120  # credits are no matter
    assert window.deltas_out == 10
    with pytest.raises(UsageError, match="between 0 and 1"):
        pacer.catch_up("a", 1.0, share=1.0)


def test_a_sink_that_catches_up_arrives() -> None:
    pacer, law = Pacer(), DrainLaw()
    pacer.pace("a", law, None, 0.0)
    pacer.catch_up("a", 0.0)
    lag, now = 30_000, 0.0
    for step in range(1, 201):
        now = step * INTERVAL_S
        lag += admitted(pacer, now)
        drained = min(lag, 800)
        lag -= drained
        pacer.step(now, {"a": Measure(drained, lag, 1_000)})
        if lag < 800:
            break
    assert now < 20  # 30,000 deltas at 30 % of 8,000 a second
    assert pacer.rate == pytest.approx(0.7 * 8_000, rel=0.1)


def test_modes_are_for_sinks_that_pace() -> None:
    pacer = a_pacer(index=FixedLaw())
    assert pacer.mode("cache") is None
    with pytest.raises(UsageError, match="'cache': it does not pace: name one that does: 'index'"):
        pacer.suspend("cache", 0.0)


# --- two shapes of depth


def test_a_backlog_of_the_sinks_own_holds_the_source_near_its_half() -> None:
    """An index that links 4,000 rows a second in the background, and takes rows at any rate."""
    pacer = Pacer()
    pacer.pace("index", DrainLaw(), None, 0.0)
    backlog, bound, worst, taken = 9_000, 10_000, 0, 0
    for step in range(1, 301):
        now = step * INTERVAL_S
        arrived = admitted(pacer, now, count=10)
        linked = min(backlog + arrived, 400)
        backlog += arrived - linked
        worst = max(worst, backlog)
        pacer.step(now, {"index": Measure(linked, backlog, bound)})
        taken += arrived if step > 200 else 0
    assert worst <= 11_000  # the rate that it started with, until it was measured
    assert backlog <= bound / 2
    assert taken == pytest.approx(40_000, rel=0.05)


def test_a_log_that_runs_full_is_held_below_its_limit() -> None:
    """A required sink at 80 % of the log's limit: depth is the part above, and it is no mailbox."""
    pacer = Pacer()
    pacer.pace("storage", DrainLaw(), None, 0.0)
    above, space, worst = 0, 200_000, 0
    for step in range(1, 301):
        above += admitted(pacer, step * INTERVAL_S, count=100)
        drained = min(above, 300)
        above -= drained
        worst = max(worst, above)
        pacer.step(step * INTERVAL_S, {"storage": Measure(drained, above, space)})
    assert worst < space / 10
    assert above < 3_000


# --- what is told


def test_the_levels_and_their_reasons() -> None:
    law = FixedLaw(1_000.0)
    pacer, window = Pacer(), Credits(10, 1_000)
    pacer.pace("index", law, window, 0.0)
    assert pacer.pressure(0, 100).level is PressureLevel.OK
    assert pacer.pressure(80, 100).level is PressureLevel.WARN
    assert pacer.pressure(80, 100).retry_after_ms is None
    pacer.step(0.1, {"index": Measure(10, 8, 10)})
    warned = pacer.pressure(0, 100)
    assert (warned.level, warned.paced_by, warned.rate_limit) == (PressureLevel.WARN, "index", 1_000.0)
    assert "'index' is pacing: 8 of 10 deltas" in warned.reason
    assert admitted(pacer, 0.1) == 10
    throttled = pacer.pressure(49, 100)
    assert (throttled.level, throttled.retry_after_ms) == (PressureLevel.THROTTLE, 50)
    assert "drains 100 deltas/s; the source may send 1000 deltas/s" in throttled.reason
    full = pacer.pressure(100, 100)
    assert (full.level, full.reason) == (PressureLevel.STOP, "the queue holds 100 of 100 deltas")
    pacer.step(0.2, {"index": Measure(0, 10, 10)})
    stalled = pacer.pressure(50, 100)
    assert stalled.level is PressureLevel.STOP
    assert "nothing leaves it" in stalled.reason
    law.rate = 1.0
    pacer.step(0.3, {"index": Measure(0, 10, 10)})
    assert pacer.pressure(100, 100).retry_after_ms == RETRY_AFTER_MS_MAX


def test_a_gate_that_held_nothing_back_for_an_interval_is_open() -> None:
    pacer = a_pacer(a=FixedLaw(1_000.0))
    admitted(pacer, 0.0)
    assert pacer.pressure(5, 100).level is PressureLevel.THROTTLE
    assert pacer.admits(1, 1, 0.05)
    pacer.step(0.1, {"a": Measure(1, 0, 10)})
    assert pacer.pressure(5, 100).level is PressureLevel.THROTTLE  # in the last interval
    pacer.step(0.2, {"a": Measure(1, 0, 10)})
    assert pacer.pressure(5, 100).level is PressureLevel.OK
    assert pacer.rates() == {"a": (1_000.0, pytest.approx(10.0))}
