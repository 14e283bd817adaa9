"""Feeds of failing sinks: retries if they may help, else only this feed stops, with the reason."""

from __future__ import annotations

import traceback
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.delivery.feed_state import FeedState
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.delivery.support import (
    SMALL_LIMITS,
    Route,
    TinySink,
    TruncatedLog,
    sleep_for,
    until_quiet,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.sink import Delivery


def test_temporary_failure_is_retried_from_applied_offset() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            done_offsets: list[int | None] = [None, 1, 3, 4]

            async def before(deliveries: Sequence[Delivery]) -> None:
                if done_offsets:
                    done_offset = done_offsets.pop(0)
                    sink.note(deliveries, below=-1 if done_offset is None else done_offset)
                    raise TryAgain("busy", done_offset)

            sink.before = before
            feed = route.feed(sink)
            route.publish("a", "a")
            route.publish("a", "a", "a")
            applied_offsets = []
            with anyio.move_on_after(100):
                for offset in range(1, 6):
                    await feed.wait(offset)
                    applied_offsets.append((offset, feed.applied))
            assert applied_offsets == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
            assert sink.offsets == [0, 1, 2, 3, 4]
            assert [count for _, count in sink.calls] == [5, 2, 1, 1, 1, 1]
            assert feed.statistics().applied_deltas == 5
            assert feed.statistics().errors == feed.statistics().retries == 4

    run_virtual(main)


def test_retry_after_log_recovery_skips_rows_the_log_lost() -> None:
    async def main() -> None:
        async with Route.running() as route:
            log = route.log = TruncatedLog(bytes(16))
            sink = TinySink()

            async def before(_: Sequence[Delivery]) -> None:
                if len(sink.calls) == 1:
                    raise TryAgain("busy")
                if log.end is None and len(sink.calls) == 2:
                    log.end = 5
                    feed.note_recovered()

            sink.before = before
            feed = route.feed(sink)
            for _ in range(8):
                route.publish("a")
            await feed.wait(5)
            await anyio.sleep(1)
            assert [count for _, count in sink.calls] == [8, 4, 1]
            assert (sink.offsets, feed.applied) == ([0, 1, 2, 3, 4], 5)
            log.end = None
            feed.note_recovered()
            await feed.wait(8)
            assert (sink.offsets, feed.statistics().applied_deltas) == (list(range(8)), 8)

    run_virtual(main)


def test_failure_after_last_matching_row_is_not_retried() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def fail_at_end(deliveries: Sequence[Delivery]) -> None:
                sink.note(deliveries, below=2)
                raise TryAgain("busy", 2)

            sink.before = fail_at_end
            feed = route.feed(sink, "ns:a", keeps_cursor=True)
            route.publish("a", "a", "b")
            await feed.wait(3)
            assert (len(sink.calls), sink.offsets) == (1, [0, 1])
            assert (feed.statistics().applied_deltas, feed.statistics().skipped) == (2, 1)
            assert feed.committed == 0
            feed.cursor.note_committed(2)
            assert feed.committed == 3

    run_virtual(main)


def test_retries_back_off_then_breaker_opens_and_probes() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def fail_call(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = fail_call
            feed = route.feed(sink)
            route.publish("a")
            await anyio.sleep(13)
            assert feed.state is FeedState.RETRYING
            reason_text = (
                "TryAgain: down; offset 0 (vector 'v' in namespace 'a'), delivered alone, has failed"
            )
            assert feed.statistics().reason == f"{reason_text} 28 times"
            await anyio.sleep(587)
            call_times = [start_s for start_s, _ in sink.calls]
            gaps = [later - earlier for earlier, later in pairwise(call_times)]
            round_of_waits = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
            expected = [*(round_of_waits * 5)[:-1], *[30.0] * 30]
            for gap, wait_s in zip(gaps, expected, strict=False):
                assert gap == pytest.approx(wait_s, rel=0.101)
            assert len(gaps) == pytest.approx(29 + (600 - 14.2) / 30, abs=1)
            assert len({round(gap, 9) for gap in gaps[:29]}) == 29  # waits are jittered
            assert (feed.state, feed.statistics().breaker) == (FeedState.BREAKER_OPEN, "open")
            assert (feed.statistics().breaker_opened, feed.applied) == (1, 0)
            assert str(feed.statistics().reason).startswith(reason_text)
            assert feed.statistics().quarantined == 0
            sink.before = None
            await feed.wait(1)
            assert feed.statistics().reason is None
            assert anyio.current_time() < 631
            assert feed.statistics().breaker == "probing"
            for _ in range(2):
                route.publish("a")
                await feed.wait(route.log.high_watermark)
            assert feed.statistics().breaker == "closed"
            assert sink.offsets == [0, 1, 2]

    run_virtual(main)


def test_restart_with_open_breaker_retries_at_once() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def fail_call(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = fail_call
            feed = route.feed(sink)
            route.publish("a")
            await anyio.sleep(20)
            assert feed.state is FeedState.BREAKER_OPEN
            sink.before = None
            feed.control.restart()
            await until_quiet()
            assert (sink.offsets, feed.state) == ([0], FeedState.IDLE)

    run_virtual(main)


def test_overdue_call_is_cancelled_and_retried() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(100))
            feed = route.feed(sink, limits=replace(SMALL_LIMITS, apply_timeout_s=5))
            route.publish("a", "a")
            for _ in range(60):
                await anyio.sleep(0.1)
                feed.cancel_overdue_call(anyio.current_time())
            route.publish("a")
            assert len(sink.calls) == 2
            assert feed.statistics().reason is None  # the retry is in progress
            assert feed.statistics().errors == 1
            sink.before = None
            feed.cancel_overdue_call(anyio.current_time() + 10)
            await feed.wait(3)
            assert sink.offsets == [0, 1, 2]
            assert feed.statistics().applied_deltas == 3

    run_virtual(main)


def test_cancellation_leaked_by_sink_stops_feed() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def leak_cancellation(_: Sequence[Delivery]) -> None:
                raise anyio.get_cancelled_exc_class()

            sink.before = leak_cancellation
            feed = route.feed(sink)
            route.publish("a")
            with pytest.raises(Refused, match="leaked a cancellation"):
                await feed.wait(1)
            assert feed.state is FeedState.STOPPED

    run_virtual(main)


@pytest.mark.parametrize(
    ("failure", "reason_text"),
    [
        (RejectDelta(1, "no"), "rejected offset 1, which it was not given"),
        (StopSink("disk full"), "disk full"),
    ],
)
def test_stopped_sink_does_not_stop_others(failure: Exception, reason_text: str) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink, other = TinySink(), TinySink()
            refusals: list[Refused] = []

            async def fail(deliveries: Sequence[Delivery]) -> None:
                raise failure

            async def wait(offset: int, committed: bool) -> None:
                with pytest.raises(Refused) as caught:
                    await feed.wait(offset, committed=committed)
                refusals.append(caught.value)

            feed, other_feed = route.feed(sink), route.feed(other)
            await until_quiet()
            route.publish("a", "a")
            await feed.wait(2)
            sink.before = fail
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, 4, False)
                tasks.start_soon(wait, 3_000, True)
                await until_quiet()
                route.publish("a", "a", "a")
            assert {refusal.code for refusal in refusals} == {ErrorCode.PROCESSING_FAILED}
            assert all(
                reason_text in refusal.message and feed.name in refusal.message for refusal in refusals
            )
            with pytest.raises(Refused, match=reason_text):
                await feed.wait(4)

            route.publish("a")
            await other_feed.wait(6)
            await anyio.sleep(100)
            assert other.offsets == list(range(6))
            assert (feed.statistics().state, feed.statistics().lag) == ("stopped", 6 - feed.applied)
            assert reason_text in (feed.statistics().reason or "")

            sink.before = None
            feed.control.restart()
            assert feed.reason is None
            await feed.wait(6)
            assert sink.offsets == list(range(6))

    run_virtual(main)


def test_feed_stopped_while_lingering_delivers_nothing() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(0.001))
            feed = route.feed(sink)
            await until_quiet()
            route.publish("a")
            await until_quiet()
            route.publish("a")
            await anyio.sleep(0.003)
            assert feed.statistics().mailbox_deltas == 1
            feed.control.stop(Refused(ErrorCode.SHUTTING_DOWN, "paused"))
            await anyio.sleep(1)
            assert feed.state is FeedState.STOPPED
            assert sink.offsets == [0]
            feed.control.restart()
            await feed.wait(2)
            assert sink.offsets == [0, 1]

    run_virtual(main)


def test_stop_and_restart_during_call_delivers_nothing_twice() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(1))
            feed = route.feed(sink)
            await until_quiet()
            route.publish("a", "a")
            await until_quiet()
            feed.control.stop(Refused(ErrorCode.SHUTTING_DOWN, "paused"))
            feed.control.restart()
            route.publish("a")
            assert feed.applied == 0
            await feed.wait(3)
            assert sink.offsets == [0, 1, 2]

    run_virtual(main)


def test_feed_closed_while_retrying_ends() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def fail_call(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = fail_call
            feed = route.feed(sink)
            route.publish("a")
            await anyio.sleep(1)
            call_count = len(sink.calls)
            feed.control.close()
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "late"))
            feed.control.restart()
            await anyio.sleep(100)
            assert len(sink.calls) == call_count
            assert feed.state is FeedState.CLOSED
            with pytest.raises(Refused, match="detached"):
                await feed.wait(1)

    run_virtual(main)


def test_optional_feed_stops_when_log_dropped_its_next_row() -> None:
    async def main() -> None:
        async with Route.running(deltas_max=10) as route:
            sink = TinySink(sleep_for(5))
            feed = route.feed(sink, limits=replace(SMALL_LIMITS, mailbox_deltas_max=2), required=False)
            await until_quiet()
            for _ in range(40):
                route.publish("a")
            with pytest.raises(Refused, match="starts at 30") as caught:
                await feed.wait(40)
            assert caught.value.code == ErrorCode.CURSOR_TOO_OLD
            assert sink.offsets == [0, 1]
            await anyio.sleep(100)
            assert feed.state is FeedState.NEEDS_SNAPSHOT
            feed.control.restart()
            await anyio.sleep(100)
            assert feed.reason is not None
            assert feed.reason.code == ErrorCode.CURSOR_TOO_OLD

    run_virtual(main)


def test_many_waits_do_not_grow_the_refusal_traceback() -> None:
    async def main() -> None:
        async with Route.running() as route:
            feed = route.feed(TinySink())
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "stopped"))
            lengths = set()
            for _ in range(5):
                with pytest.raises(Refused) as caught:
                    await feed.wait(1)
                lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
            assert len(lengths) == 1

    run_virtual(main)
