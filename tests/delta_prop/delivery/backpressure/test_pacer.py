"""The pacing gate: the smallest rate and the credits of pacing sinks limit the source."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery.backpressure.controller import INTERVAL_S, DrainLaw
from delta_prop.delivery.backpressure.pacer import RETRY_AFTER_MS_MAX, Credits, Measure, Mode, Pacer
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import PressureLevel


@dataclass
class FixedLaw:
    """A law whose rate the test sets; it records its measurements."""

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


def new_pacer(**laws: FixedLaw) -> Pacer:
    pacer = Pacer()
    for name, law in laws.items():
        pacer.pace(name, law, None, 0.0)
    return pacer


def admit_deltas(pacer: Pacer, now: float, count: int = 1, count_max: int = 100_000) -> int:
    admitted = 0
    while admitted < count_max and pacer.admits(count, count, now):
        pacer.note(count, count, now)
        admitted += count
    return admitted


# --- no pacing sink


def test_pacer_without_pacing_sinks_sets_no_limit() -> None:
    pacer = Pacer()
    assert admit_deltas(pacer, 0.0, count=1_000, count_max=1_000_000) == 1_000_000
    assert pacer.wait_s(1, 1, 0.0) == 0.0
    assert pacer.step(1.0, {"unknown": Measure(1, 1, 1)}) is None
    pressure = pacer.pressure(0, 100)
    assert (pressure.level, pressure.rate_limit, pressure.paced_by) == (PressureLevel.OK, None, None)
    assert pressure.retry_after_ms is None


def test_released_pacing_sink_no_longer_limits_rate() -> None:
    pacer = new_pacer(a=FixedLaw(10.0), b=FixedLaw(100.0))
    assert (pacer.rate, pacer.paced_by) == (10.0, "a")
    pacer.release("a", 0.0)
    assert (pacer.rate, pacer.paced_by) == (100.0, "b")
    pacer.release("b", 0.0)
    pacer.release("b", 0.0)
    assert admit_deltas(pacer, 0.0, count_max=1_000) == 1_000


# --- the rate


def test_admission_allows_one_interval_burst_then_rate() -> None:
    pacer = new_pacer(a=FixedLaw(1_000.0))
    assert admit_deltas(pacer, 0.0) == 100
    assert admit_deltas(pacer, 0.05) == 50
    assert admit_deltas(pacer, 60.0) == 100  # unused tokens beyond one burst are not saved


def test_batch_is_admitted_exactly_when_its_wait_ends() -> None:
    pacer = new_pacer(a=FixedLaw(300.0))
    assert admit_deltas(pacer, 0.0) == 30
    wait_s = pacer.wait_s(7, 1, 0.0)
    assert wait_s == pytest.approx(7 / 300)
    assert not pacer.admits(7, 1, wait_s * 0.99)
    assert pacer.admits(7, 1, wait_s)
    assert pacer.wait_s(7, 1, wait_s) == 0.0


def test_new_rate_applies_from_its_step_on() -> None:
    law = FixedLaw(1_000.0)
    pacer = new_pacer(a=law)
    assert admit_deltas(pacer, 0.0) == 100
    law.rate = 100_000.0
    pacer.step(0.05, {"a": Measure(0, 0, 10)})
    assert admit_deltas(pacer, 0.05) == 50
    law.rate = 100.0
    pacer.step(0.06, {"a": Measure(0, 0, 10)})
    assert admit_deltas(pacer, 0.06) == 10  # the bucket held 1,000 tokens, and shrank


def test_batch_larger_than_bucket_is_admitted_when_bucket_is_full() -> None:
    pacer = new_pacer(a=FixedLaw(100.0))
    assert pacer.admits(1_000, 1, 0.0)
    pacer.note(1_000, 1, 0.0)
    assert pacer.wait_s(1_000, 1, 0.0) == pytest.approx(10.0)
    assert not pacer.admits(1, 1, 9.9)
    assert pacer.admits(1_000, 1, 10.0)


def test_shrunken_bucket_admits_batch_and_leaves_debt() -> None:
    law = FixedLaw(110.0)
    pacer = new_pacer(a=law)
    pacer.note(1, 1, 0.0)
    law.rate = 100.0
    pacer.step(0.0, {"a": Measure(0, 0, 1)})
    assert pacer.admits(11, 1, 0.0)
    pacer.note(11, 1, 0.0)
    assert pacer.wait_s(1, 1, 0.0) == pytest.approx(0.02)


@given(
    rates=st.lists(st.floats(100, 1_000_000), min_size=1, max_size=12),
    requests=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 5_000)), min_size=1, max_size=60),
)
def test_admitted_total_never_exceeds_rate_times_time_plus_burst(
    rates: list[float], requests: list[tuple[float, int]]
) -> None:
    law = FixedLaw(rates[0])
    pacer = new_pacer(a=law)
    now, allowed, total = 0.0, 0.0, 0
    for turn, (pause_s, count) in enumerate(requests):
        now += pause_s
        allowed += law.rate * pause_s
        if pacer.admits(count, 1, now):
            pacer.note(count, 1, now)
            total += count
        else:
            wait_s = pacer.wait_s(count, 1, now)
            assert wait_s is not None
            assert 0 < wait_s <= 50 + 0.1  # 5,000 deltas at 100 a second, and a full bucket
        largest = max(count for _, count in requests[: turn + 1])
        bursts = [rate * INTERVAL_S for rate in rates]
        assert total <= allowed + max(*bursts, max(bursts) - min(bursts) + largest) * 1.000001
        law.rate = rates[turn % len(rates)]
        pacer.step(now, {"a": Measure(0, 0, 1)})
    # A batch that was held back is admitted after the wait.
    count = requests[-1][1]
    wait_s = pacer.wait_s(count, 1, now)
    assert wait_s is not None
    assert pacer.admits(count, 1, now + wait_s)


def test_clock_that_stops_or_goes_back_adds_no_tokens() -> None:
    pacer = new_pacer(a=FixedLaw(1_000.0))
    assert admit_deltas(pacer, 5.0) == 100
    assert admit_deltas(pacer, 5.0) == 0
    assert admit_deltas(pacer, 4.0) == 0
    assert admit_deltas(pacer, 5.01) == 10


# --- credits


def test_credits_of_every_sink_are_taken_and_released() -> None:
    pacer, wide, narrow = Pacer(), Credits(1_000, 10_000), Credits(10, 10_000)
    pacer.pace("wide", FixedLaw(1e6), wide, 0.0)
    pacer.pace("narrow", FixedLaw(1e6), narrow, 0.0)
    assert admit_deltas(pacer, 0.0, count=5) == 10
    assert (wide.deltas_outstanding, narrow.deltas_outstanding) == (10, 10)
    assert pacer.wait_s(5, 5, 0.0) is None
    narrow.release(5, 5)
    assert pacer.wait_s(5, 5, 0.0) == 0.0
    assert admit_deltas(pacer, 0.0, count=5) == 5


@given(
    requests=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 800), st.integers(0, 60)), max_size=60),
)
def test_credits_are_never_exceeded(requests: list[tuple[int, int, int]]) -> None:
    pacer, window = Pacer(), Credits(50, 500)
    pacer.pace("a", FixedLaw(1e6), window, 0.0)
    in_flight: list[tuple[int, int]] = []
    for turn, (count, size, applied) in enumerate(requests):
        if pacer.admits(count, size, turn * 1.0):
            pacer.note(count, size, turn * 1.0)
            in_flight.append((count, size))
        single_batch = len(in_flight) == 1
        assert single_batch or (window.deltas_outstanding <= 50 and window.bytes_outstanding <= 500)
        if in_flight and applied > 30:
            window.release(*in_flight.pop(0))
        assert (window.deltas_outstanding, window.bytes_outstanding) == (
            sum(count for count, _ in in_flight),
            sum(size for _, size in in_flight),
        )


# --- the measures that each law gets


def test_sink_that_holds_back_the_source_is_not_demand_limited() -> None:
    slow, unlimited = FixedLaw(100.0), FixedLaw(1_000.0)
    pacer = new_pacer(slow=slow, fast=unlimited)
    measures = {"slow": Measure(1, 0, 10), "fast": Measure(1, 0, 10)}
    assert admit_deltas(pacer, 0.0, count_max=5) == 5
    pacer.step(0.1, measures)
    assert (slow.demand_limited, unlimited.demand_limited) == (True, True)
    admit_deltas(pacer, 0.1)
    pacer.step(0.2, measures)
    assert (slow.demand_limited, unlimited.demand_limited) == (False, True)
    pacer.step(0.3, measures)  # no further request: the batch still waits
    assert slow.demand_limited is False
    assert pacer.admits(1, 1, 0.35)
    pacer.step(0.4, measures)
    pacer.step(0.5, measures)
    assert slow.demand_limited is True


def test_sink_without_credits_is_not_demand_limited() -> None:
    pacer, law = Pacer(), FixedLaw(1e6)
    window = Credits(10, 100)
    pacer.pace("a", law, window, 0.0)
    pacer.pace("b", FixedLaw(1e5), None, 0.0)
    admit_deltas(pacer, 0.0)
    pacer.step(0.1, {"a": Measure(0, 10, 10)})
    assert law.demand_limited is False


def test_law_is_stepped_with_time_since_its_last_step() -> None:
    law = FixedLaw()
    pacer = Pacer()
    pacer.pace("a", law, None, 7.0)
    pacer.step(7.25, {"a": Measure(1, 0, 10)})
    assert law.elapsed_s == pytest.approx(0.25)


# --- suspended, catching up


def test_suspended_sink_sets_no_limit() -> None:
    pacer, window = Pacer(), Credits(1, 1)
    law = FixedLaw(100.0)
    pacer.pace("a", law, window, 0.0)
    pacer.note(1, 1, 0.0)
    assert not pacer.admits(1, 1, 5.0)
    pacer.set_mode("a", Mode.SUSPENDED, 5.0)
    assert (pacer.mode("a"), pacer.rate, pacer.paced_by) == (Mode.SUSPENDED, None, None)
    assert admit_deltas(pacer, 5.0, count_max=1_000) == 1_000
    assert pacer.pressure(0, 100).level is PressureLevel.OK
    pacer.step(6.0, {"a": Measure(5, 5, 5)})
    assert law.demand_limited is None  # the law was not stepped
    window.set_outstanding(0, 0)
    pacer.set_mode("a", Mode.PACING, 6.0)
    assert pacer.admits(1, 1, 6.0)
    pacer.step(6.1, {"a": Measure(5, 5, 5)})
    assert law.elapsed_s == pytest.approx(0.1)  # the pause does not count as elapsed time


def test_catching_up_sink_limits_source_to_share_of_drain() -> None:
    pacer, window, law = Pacer(), Credits(10, 100), FixedLaw(5_000.0)
    pacer.pace("a", law, window, 0.0)
    window.set_outstanding(10, 100)
    pacer.set_mode("a", Mode.CATCHING_UP, 0.0)
    assert pacer.mode("a") is Mode.CATCHING_UP
    assert pacer.step(0.1, {"a": Measure(200, 50_000, 10)}) == pytest.approx(0.7 * 2_000)
    assert law.followed == 0.7
    assert admit_deltas(pacer, 1.0) == 140  # credits do not limit a sink that catches up
    assert window.deltas_outstanding == 10


def test_catching_up_sink_reaches_log_end() -> None:
    pacer, law = Pacer(), DrainLaw()
    pacer.pace("a", law, None, 0.0)
    pacer.set_mode("a", Mode.CATCHING_UP, 0.0)
    lag, now = 30_000, 0.0
    for step in range(1, 201):
        now = step * INTERVAL_S
        lag += admit_deltas(pacer, now)
        drained = min(lag, 800)
        lag -= drained
        pacer.step(now, {"a": Measure(drained, lag, 1_000)})
        if lag < 800:
            break
    assert now < 20  # 30,000 deltas at 30 % of 8,000 a second
    assert pacer.rate == pytest.approx(0.7 * 8_000, rel=0.1)


def test_suspend_of_sink_that_does_not_pace_is_rejected() -> None:
    pacer = new_pacer(index=FixedLaw())
    assert pacer.mode("cache") is None
    with pytest.raises(UsageError, match="'cache': not a pacing sink: name one of these: 'index'"):
        pacer.set_mode("cache", Mode.SUSPENDED, 0.0)


# --- two kinds of depth


def test_sink_backlog_is_held_below_half_of_its_limit() -> None:
    """An index takes rows at any rate and adds 4,000 per second to its graph in the background."""
    pacer = Pacer()
    pacer.pace("index", DrainLaw(), None, 0.0)
    backlog, backlog_limit, backlog_max, admitted = 9_000, 10_000, 0, 0
    for step in range(1, 301):
        now = step * INTERVAL_S
        arrived = admit_deltas(pacer, now, count=10)
        added = min(backlog + arrived, 400)
        backlog += arrived - added
        backlog_max = max(backlog_max, backlog)
        pacer.step(now, {"index": Measure(added, backlog, backlog_limit)})
        admitted += arrived if step > 200 else 0
    assert backlog_max <= 11_000  # the initial rate, until the first measurement
    assert backlog <= backlog_limit / 2
    assert admitted == pytest.approx(40_000, rel=0.05)


def test_filling_log_is_held_below_its_limit() -> None:
    """The depth of a required sink above 80 % of the log's limit is the part above that, not its mailbox."""
    pacer = Pacer()
    pacer.pace("storage", DrainLaw(), None, 0.0)
    depth, limit, depth_max = 0, 200_000, 0
    for step in range(1, 301):
        depth += admit_deltas(pacer, step * INTERVAL_S, count=100)
        drained = min(depth, 300)
        depth -= drained
        depth_max = max(depth_max, depth)
        pacer.step(step * INTERVAL_S, {"storage": Measure(drained, depth, limit)})
    assert depth_max < limit / 10
    assert depth < 3_000


# --- reported pressure


def test_pressure_levels_and_reasons_by_queue_depth() -> None:
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
    assert admit_deltas(pacer, 0.1) == 10
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


def test_gate_without_held_batch_for_an_interval_reports_ok() -> None:
    pacer = new_pacer(a=FixedLaw(1_000.0))
    admit_deltas(pacer, 0.0)
    assert pacer.pressure(5, 100).level is PressureLevel.THROTTLE
    assert pacer.admits(1, 1, 0.05)
    pacer.step(0.1, {"a": Measure(1, 0, 10)})
    assert (
        pacer.pressure(5, 100).level is PressureLevel.THROTTLE
    )  # a batch was held back in the last interval
    pacer.step(0.2, {"a": Measure(1, 0, 10)})
    assert pacer.pressure(5, 100).level is PressureLevel.OK
