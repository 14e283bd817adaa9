"""Pacing by a sink's own backlog, by a sink that stopped or fails, and by a sink that catches up."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from delta_prop import Propagator, Settings
from delta_prop.delivery.backpressure.pacer import Mode
from delta_prop.delivery.pacing import MailboxGauge
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_sinks.sink import Backlog, StopSink
from delta_prop_wire.frames import PressureLevel
from tests.delta_prop.pressure.pacing import IDS, MATRIX, AdmittedRates, WorkingSink, publish_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.delivery.feed import Feed
    from delta_prop_sinks.sink import Delivery

BACKLOG_MAX = 20_000
WORK_RATE = 4_000.0
LIMITS = Settings().feed_limits(None, None)


@dataclass(slots=True)
class BacklogSink(WorkingSink):
    """A sink that accepts rows at once and works on them later; `apply` waits while the backlog is full."""

    backlog_rows: int = 0
    backlog_peak: int = 0
    worked: anyio.Event | None = None

    def backlog(self) -> Backlog:
        """Return the backlog."""
        return Backlog(self.backlog_rows, BACKLOG_MAX)

    async def background(self) -> None:
        """Work off 40 rows at a time."""
        while True:
            work = min(40, self.backlog_rows)
            await anyio.sleep(max(work, 1) / WORK_RATE)
            self.backlog_rows -= work
            if self.worked is not None:
                self.worked.set()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Accept the rows, after waiting while the backlog is full."""
        rows = sum(delivery.count for delivery in deliveries)
        while self.backlog_rows + rows > BACKLOG_MAX:
            self.worked = anyio.Event()
            await self.worked.wait()
        self.backlog_rows += rows
        self.rows += rows
        self.backlog_peak = max(self.backlog_peak, self.backlog_rows)


@pytest.mark.parametrize("demand_max", [10 * WORK_RATE, inf], ids=["fast", "endless"])
def test_source_is_paced_at_the_rate_of_backlog_work(demand_max: float) -> None:
    """Endless demand fills the log before the sink is polled, so the sink first catches up."""
    log_deltas_max, until_s = (1_000_000, 20) if demand_max < inf else (40_000, 40)

    async def main() -> None:
        backlog_sink, admitted = BacklogSink("index", [1e6]), AdmittedRates()
        backlogs: list[tuple[float, int]] = []
        async with Propagator(Settings(log_deltas_max=log_deltas_max), world=virtual_world()) as p:
            await p.attach(backlog_sink)

            async def sample() -> None:
                while True:
                    await anyio.sleep(0.05)
                    backlogs.append((anyio.current_time(), backlog_sink.backlog_rows))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sample)
                # Below the mark, no sink paces.
                for _ in range(15):
                    await p.publish_many(IDS, MATRIX)
                await anyio.sleep(0.5)
                assert p.pressure().paced_by is None
                await publish_until(p, admitted, until_s=until_s, batch=200, rate_max=demand_max)
                pressure = p.pressure()
                assert pressure.level is PressureLevel.THROTTLE
                assert pressure.paced_by == "index (its backlog)"
                assert pressure.rate_limit == pytest.approx(WORK_RATE, rel=0.1)
                assert p.statistics().sinks["index"].pacing
                tasks.cancel_scope.cancel()
            await anyio.sleep(10)
            assert not p.statistics().sinks["index"].pacing
            assert p.pressure().rate_limit is None
            assert p.statistics().log.refused == 0
        lowest_rate = min(admitted.rates(5, until_s))
        settled = list(admitted.rates(until_s - 10, until_s))
        settled_backlogs = [rows for time_s, rows in backlogs if until_s - 10 < time_s < until_s]
        print(
            f"\nadmitted {min(settled):.0f} to {max(settled):.0f}/s; "
            f"backlog {min(settled_backlogs)} to {max(settled_backlogs)}"
        )
        assert lowest_rate >= 0.25 * WORK_RATE
        assert min(settled) >= 0.85 * WORK_RATE
        assert max(settled) <= 1.15 * WORK_RATE
        assert min(settled_backlogs) > 0.75 * BACKLOG_MAX
        assert max(settled_backlogs) < BACKLOG_MAX  # the backlog stays above the mark and below the bound
        assert backlog_sink.backlog_peak <= BACKLOG_MAX

    run_virtual(main)


@dataclass(slots=True)
class FailingSink(WorkingSink):
    """A sink that works while `failure` is None, and else raises it."""

    failure: Exception | None = None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Work, or fail."""
        if self.failure is not None:
            raise self.failure
        await WorkingSink.apply(self, deliveries)


@pytest.mark.parametrize(
    ("failure", "state"), [(StopSink("out of order"), "stopped"), (OSError("gone"), "breaker open")]
)
def test_stalled_pacing_sink_limits_nobody_until_it_resumes(failure: Exception, state: str) -> None:
    async def main() -> None:
        sink, admitted = FailingSink("slow", [2_000.0]), AdmittedRates()
        async with Propagator(Settings(mailbox_deltas_max=5_000), world=virtual_world()) as p:
            await p.attach(sink, pacing=True, required=False)
            await publish_until(p, admitted, until_s=5)
            assert p.pressure().paced_by == "slow"
            assert p.statistics().sinks["slow"].pacing
            sink.failure = failure
            before = p.statistics().accepted
            await anyio.sleep(60)
            assert p.statistics().sinks["slow"].state == state
            # Nothing waits, whatever is offered, and no pressure is reported.
            assert p.pressure().rate_limit is None
            assert p.pressure().level is PressureLevel.OK
            assert not p.statistics().sinks["slow"].pacing
            started = anyio.current_time()
            for _ in range(50):
                await p.publish_many(IDS[:200], MATRIX[:200])
            assert anyio.current_time() == started
            assert p.statistics().accepted == before + 10_000
            # After the restart, the sink paces the source: at first to a fraction of its rate, while it
            # catches up.
            sink.failure = None
            p.restart("slow")
            await anyio.sleep(0.3)
            assert p.statistics().sinks["slow"].pacing
            assert p.pressure().paced_by == "slow"
            assert p.internals().sinks.pacing.pacer.mode("slow") is Mode.CATCHING_UP
            started = anyio.current_time()
            await publish_until(p, admitted, until_s=started + 40, batch=200)
            assert not p.statistics().sinks["slow"].catching_up
            assert max(admitted.rates(started + 30, started + 40)) <= 2_000 * 1.15
            assert min(admitted.rates(started + 30, started + 40)) >= 2_000 * 0.85
            assert p.internals().sinks.feed("slow").in_flight[0] <= 5_000

    run_virtual(main)


def test_late_sink_catches_up_while_producers_continue() -> None:
    earlier_deltas, capacity, mailbox = 30_000, 5_000.0, 5_000

    async def main() -> None:
        sink, admitted = WorkingSink("late", [capacity]), AdmittedRates()
        lags: list[tuple[float, int, bool]] = []
        async with Propagator(Settings(mailbox_deltas_max=mailbox), world=virtual_world()) as p:
            for _ in range(earlier_deltas // 1_000):
                await p.publish_many(IDS, MATRIX)
            sink.observe(p)
            await p.attach(sink, pacing=True, start=0)

            async def sample() -> None:
                while True:
                    await anyio.sleep(0.05)
                    statistics = p.statistics().sinks["late"]
                    lags.append((anyio.current_time(), statistics.lag, statistics.catching_up))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sample)
                await publish_until(p, admitted, until_s=45, batch=250)
                tasks.cancel_scope.cancel()
        caught_up_at = next(time_s for time_s, _, catching_up in lags if not catching_up)
        shares = [rate / capacity for rate in admitted.rates(5, caught_up_at - 1)]
        print(
            f"\ncaught up after {caught_up_at:.1f} s; "
            f"admitted {min(shares):.0%} to {max(shares):.0%} meanwhile"
        )
        # Producers get 0.7 of the sink's rate, so it catches up on 30,000 deltas at 0.3 of its rate, in
        # some 20 s.
        assert 15 < caught_up_at < 28
        assert min(shares) > 0.5
        assert max(shares) < 0.85
        # From then on, the credit limit applies, and the sink does not lag a second time.
        assert not any(catching_up for time_s, _, catching_up in lags if time_s > caught_up_at)
        assert max(lag for time_s, lag, _ in lags if time_s > caught_up_at) <= mailbox
        assert sink.in_flight_max <= mailbox
        settled = [rate / capacity for rate in admitted.rates(caught_up_at + 10, 45)]
        assert 0.85 < min(settled) <= max(settled) < 1.15

    run_virtual(main)


def test_gauge_of_a_catching_up_sink_measures_its_lag() -> None:
    """While a sink catches up, its lag is its depth, even if nothing is in flight."""
    log = MemoryLog(bytes(16))
    feed = cast(
        "Feed",
        SimpleNamespace(name="late", is_catching_up=True, applied=0, in_flight=(1_000, 0), limits=LIMITS),
    )
    gauge = MailboxGauge(feed, log)
    log.next_offset = 50_000
    assert gauge.measure(0.0, 0.8)[1].depth == 50_000
    feed.in_flight = (0, 0)  # type: ignore[misc]
    full, measure = gauge.measure(0.1, 0.8)
    assert (full, measure.depth, measure.drained) == (1, 50_000, 0)
    feed.is_catching_up = False  # type: ignore[misc]  # the rows between are for other sinks
    assert gauge.measure(0.2, 0.8)[1].depth == 0
