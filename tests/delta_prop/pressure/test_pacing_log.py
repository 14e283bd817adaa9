"""A lagging required sink paces producers before the log is full; at the limit, `on_log_full` decides."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks.sink import StopSink
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import PressureLevel
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.pressure.pacing import AdmittedRates, WorkingSink, publish_until
from tests.delta_prop.support import catch_refusal, make_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop_sinks.sink import Delivery

LOG_DELTAS_MAX = 40_000
DRAIN_RATE = 5_000.0


class StoppingSink(WorkingSink):
    """A sink that stops at its first call."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Stop the sink."""
        raise StopSink("out of order")


def log_settings(log_deltas_max: int = LOG_DELTAS_MAX) -> Settings:
    return Settings(log_deltas_max=log_deltas_max)


def paced_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "paces the source" in record.getMessage()]


def test_required_sink_paces_from_80_percent_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "delta_prop")

    async def main() -> None:
        slow, quick = WorkingSink("slow", [DRAIN_RATE]), WorkingSink("quick", [1e6])
        admitted, used_shares = AdmittedRates(), []

        async with Propagator(log_settings(), world=virtual_world()) as p:
            await p.attach(quick)
            await p.attach(slow)

            async def sample_used_share() -> None:
                while True:
                    await anyio.sleep(0.05)
                    used_shares.append(
                        (
                            anyio.current_time(),
                            p.internals().partition.log.used_share(
                                p.internals().sinks.feed("slow").committed
                            ),
                        )
                    )

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sample_used_share)
                await publish_until(p, admitted, until_s=15, batch=200)
                check_pressure(p.pressure(), p)
                await anyio.sleep(0.25)  # the demand falls
                assert p.pressure().level <= PressureLevel.WARN
                await anyio.sleep(30)
                tasks.cancel_scope.cancel()
            statistics = p.statistics()
            assert (statistics.refused, statistics.log.refused) == (0, 0)
            assert not statistics.sinks["slow"].pacing
            assert statistics.pressure.level is PressureLevel.OK
            assert statistics.pressure.rate_limit is None
            assert slow.rows == quick.rows == statistics.accepted
        # At first the source is not limited; then it follows the sink's rate without oscillating.
        settled = list(admitted.rates(5, 15))
        assert min(settled) >= 0.9 * DRAIN_RATE
        assert max(settled) <= 1.1 * DRAIN_RATE
        settled_shares = [share for time_s, share in used_shares if 1 < time_s < 15]
        assert 0.8 < min(settled_shares) <= max(settled_shares) < 0.95
        print(
            f"admitted {min(settled):.0f} to {max(settled):.0f}/s; "
            f"the log {min(settled_shares):.0%} to {max(settled_shares):.0%}"
        )

    def check_pressure(pressure: Pressure, p: Propagator) -> None:
        assert pressure.level is PressureLevel.THROTTLE
        assert pressure.paced_by == "slow (its share of the log)"
        assert pressure.rate_limit == pytest.approx(DRAIN_RATE, rel=0.1)
        assert "sink 'slow (its share of the log)' is pacing" in pressure.reason
        assert f"it drains {DRAIN_RATE:.0f} deltas/s" in pressure.reason
        assert pressure.retry_after_ms is not None
        assert 1 <= pressure.retry_after_ms <= 1_000
        statistics = p.statistics().sinks
        assert statistics["slow"].pacing
        assert not statistics["quick"].pacing

    run_virtual(main)
    lines = [line for line in paced_lines(caplog) if "'slow'" in line]
    assert [line.split("source")[0] for line in lines] == [
        "sink 'slow' paces the ",
    ]


def test_full_log_refuses_producers_and_names_the_sink() -> None:
    """The stopped sink's rows stay in the log, so producers are first slowed down, then refused."""

    async def main() -> None:
        async with Propagator(log_settings(1_000), world=virtual_world()) as p:
            await p.attach(StoppingSink("stopped", [1.0]), on_log_full="refuse")
            refusal = None
            while refusal is None and anyio.current_time() < 60:
                receipt = p.offer(*(make_delta(f"v{row}") for row in range(10)))
                with anyio.move_on_after(5):
                    try:
                        await receipt.wait()
                    except Refused as error:
                        refusal = error
                if p.statistics().log.deltas == 900:
                    assert p.pressure().level is PressureLevel.THROTTLE
                    assert p.pressure().paced_by == "stopped (its share of the log)"
            assert refusal is not None
            assert refusal.code is ErrorCode.LOG_FULL
            assert "sink 'stopped' still needs the oldest (offset 0)" in refusal.message
            assert refusal.details["blocked_by"] == "stopped"
            assert refusal.retry_after_ms
            assert p.statistics().sinks["stopped"].state == "stopped"
            assert (
                anyio.current_time() > 1
            )  # the source was paced before: at least 200 deltas at 100 per second
            await p.detach("stopped")
            assert (await p.publish(make_delta("after"))).offset == 1_000

    run_virtual(main)


def test_full_log_invalidates_only_the_evictable_sinks_cursor() -> None:
    async def main() -> None:
        quick, slow = WorkingSink("quick", [1e6]), WorkingSink("slow", [5_000.0])
        stopped = StoppingSink("stopped", [1.0])
        async with Propagator(log_settings(1_000), world=virtual_world()) as p:
            await p.attach(quick)
            await p.attach(slow)
            await p.attach(stopped, on_log_full="invalidate_cursor")
            times: list[float] = []
            for number in range(1, 301):
                await p.publish(*(make_delta(f"v{number}-{row}") for row in range(10)))
                times.append(anyio.current_time())
                await anyio.sleep(0.005)
                assert p.pressure().paced_by is None, number  # 2,000 per second: the others keep up
                assert not p.statistics().sinks["stopped"].pacing
                assert (p.statistics().sinks["stopped"].state == "needs snapshot") == (number > 100)
            assert times[-1] == pytest.approx(300 * 0.005, abs=0.01)  # no publisher was slowed down
            statistics = p.statistics()
            assert (statistics.refused, statistics.log.refused, statistics.accepted) == (0, 0, 3_000)
            assert "needs a snapshot" in (statistics.sinks["stopped"].reason or "")
            await p.wait_visible(3_000, sinks=["quick", "slow"])
            assert quick.rows == slow.rows == 3_000
            # After the sink is reattached, it reads the rows that are still in the log.
            await p.detach("stopped")
            restarted = WorkingSink("stopped", [1e6])
            await p.attach(restarted, start="earliest")
            first = p.statistics().log.start_offset
            await p.wait_visible(3_000, sinks=["stopped"])
            assert restarted.rows == 3_000 - first > 0

    run_virtual(main)


def test_evictable_stopped_sink_is_not_reported_as_pacing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "delta_prop")

    async def main() -> None:
        async with Propagator(log_settings(1_000), world=virtual_world()) as p:
            await p.attach(StoppingSink("stopped", [1.0]), on_log_full="invalidate_cursor")
            for number in range(150):
                await p.publish(*(make_delta(f"v{row}") for row in range(10)))
                await anyio.sleep(0.01)
                assert p.pressure().level is PressureLevel.OK, number

    run_virtual(main)
    assert paced_lines(caplog) == []


def test_publish_into_a_full_log_is_refused_at_its_timeout() -> None:
    async def main() -> None:
        async with Propagator(log_settings(1_000), world=virtual_world()) as p:
            await p.attach(StoppingSink("stopped", [1.0]))
            for row in range(1_000):
                await p.publish(make_delta(f"v{row}"))
            before = anyio.current_time()
            refusal = await catch_refusal(p.publish(make_delta("late"), timeout_s=3))
            assert refusal.code is ErrorCode.LOG_FULL
            assert anyio.current_time() == pytest.approx(before + 3)

    run_virtual(main)
