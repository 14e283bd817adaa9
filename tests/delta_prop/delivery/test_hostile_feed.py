"""Misbehaving sinks and operators: wrong offsets, stops during calls, replays at any time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.delivery.feed_state import MOVES, FeedEvent, FeedState
from delta_prop.delivery.redelivery import ReplayRequest, ReplayResult
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.delivery.support import LIMITS, Route, TinySink, offsets_of, sleep_for, until_quiet
from tests.delta_prop.delivery.test_quarantine import (
    publish,
    quarantine_records,
    reject_offsets,
    request_replay,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.delivery.feed import Feed
    from delta_prop_sinks.sink import Delivery


def counts_add_up(feed: Feed) -> bool:
    """True if each row up to the applied offset is counted with one outcome."""
    statistics = feed.statistics()
    outcomes = statistics.applied_deltas + statistics.skipped + statistics.quarantined + statistics.dropped
    return statistics.skipped >= 0 and outcomes == statistics.applied_offset


# --- retryable failures


@pytest.mark.parametrize("topic", ["*", "ns:b"])
def test_sink_that_retries_at_same_offset_makes_no_progress(topic: str) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def retry_at_one(deliveries: Sequence[Delivery]) -> None:
                raise TryAgain("down", 1)

            sink.before = retry_at_one
            feed = route.feed(sink, topic)
            route.publish("a", "b", "b")
            await anyio.sleep(60)
            assert feed.state is FeedState.BREAKER_OPEN
            assert len(sink.calls) < 40
            assert counts_add_up(feed)

    run_virtual(main)


def test_retry_offset_in_skipped_rows_does_not_hold_cursor() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def retry_in_gap(deliveries: Sequence[Delivery]) -> None:
                sink.note(deliveries, below=2)
                raise TryAgain("busy", 3)

            sink.before = retry_in_gap
            feed = route.feed(sink, "ns:a", keeps_cursor=True)
            route.publish("a", "a", "b", "b")
            await feed.wait(4)
            feed.cursor.note_committed(2)
            assert (feed.committed, sink.offsets) == (4, [0, 1])

    run_virtual(main)


# --- wrong offsets


@pytest.mark.parametrize("offset", [-5, 0, 2, 4, 1000])
def test_rejection_of_undelivered_offset_stops_sink_and_applies_none(offset: int) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def reject_wrong_offset(deliveries: Sequence[Delivery]) -> None:
                raise RejectDelta(offset, "no")

            sink.before = reject_wrong_offset
            feed = route.feed(sink, "ns:a")
            route.publish("b", "a", "b", "a")  # rows 1 and 3 are delivered
            with pytest.raises(Refused, match=f"rejected offset {offset}, which it was not given: no"):
                await feed.wait(4)
            assert (feed.applied, feed.statistics().applied_deltas) == (0, 0)
            assert counts_add_up(feed)
            sink.before = None
            feed.control.restart()
            await feed.wait(4)
            assert sink.offsets == [1, 3]
            assert counts_add_up(feed)

    run_virtual(main)


@pytest.mark.parametrize("offset", [-5, 0, 2, 1000])
def test_wrong_rejection_of_redelivered_rows_loses_none(offset: int) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [1, 3])
            feed = route.feed(sink)
            publish(route, "a", "b", "c", "d")
            await feed.wait(4)

            async def reject_wrong_offset(deliveries: Sequence[Delivery]) -> None:
                raise RejectDelta(offset, "no")

            sink.before = reject_wrong_offset
            assert await request_replay(feed) == ReplayResult(0, 0, 2)
            assert feed.state is FeedState.STOPPED
            sink.before = None
            feed.control.restart()
            assert await request_replay(feed) == ReplayResult(2, 0, 0)
            assert sink.offsets == [0, 2, 1, 3]
            assert counts_add_up(feed)

    run_virtual(main)


# --- stops in the middle of a call, a wait or a replay


@pytest.mark.parametrize("event", [FeedEvent.STOP, FeedEvent.INVALIDATE])
@pytest.mark.parametrize("replay", [False, True])
def test_failure_after_stop_during_call_keeps_stop(event: FeedEvent, replay: bool) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0])
            feed = route.feed(sink)
            publish(route, "a")
            await feed.wait(1)

            async def slow(_: Sequence[Delivery]) -> None:
                await anyio.sleep(1)
                raise TryAgain("down")

            sink.before = slow
            request = ReplayRequest(None, drop=False)
            if replay:
                feed.add_request(request)
            else:
                publish(route, "b")
            await anyio.sleep(0.5)
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "its background work failed"), event)
            await anyio.sleep(100)
            assert (feed.state, len(sink.calls)) == (MOVES[FeedState.IDLE, event], 2)
            assert feed.statistics().reason == "its background work failed"
            if replay:
                assert await request.wait() == ReplayResult(0, 0, 1)

    run_virtual(main)


def test_stop_reason_that_replaced_a_full_quarantine_stays_after_drop_and_close() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0, 1])
            feed = route.feed(sink, limits=replace(LIMITS, quarantine_deltas_max=1))
            publish(route, "a", "b")
            await until_quiet()
            assert "quarantine is full" in (feed.statistics().reason or "")
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "its background work failed"))
            with pytest.raises(Refused, match="restart it"):
                await request_replay(feed, drop=True)
            assert feed.statistics().reason == "its background work failed"
            feed.control.close()
            assert feed.statistics().reason == "its background work failed"

    run_virtual(main)


def test_feed_with_invalidated_cursor_still_needs_snapshot_after_restart() -> None:
    async def main() -> None:
        async with Route.running() as route:
            feed = route.feed(TinySink(), required=False)
            feed.invalidate_cursor()
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "its background work failed"))
            feed.control.restart()
            assert feed.state is FeedState.NEEDS_SNAPSHOT

    run_virtual(main)


def test_hung_call_is_cancelled_after_stop_and_restart() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(1e6))
            feed = route.feed(sink, limits=replace(LIMITS, apply_timeout_s=5))
            publish(route, "a")
            await anyio.sleep(1)
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "stopped"))
            feed.control.restart()
            sink.before = None
            await anyio.sleep(10)
            feed.cancel_overdue_call(anyio.current_time())
            with anyio.fail_after(10):
                await feed.wait(1)
            assert sink.offsets == [0]

    run_virtual(main)


def test_restart_after_stop_with_open_breaker_retries_at_once() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def fail_call(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = fail_call
            feed = route.feed(sink)
            publish(route, "a")
            await anyio.sleep(20)
            assert feed.state is FeedState.BREAKER_OPEN
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "stopped"))
            sink.before = None
            feed.control.restart()
            feed.control.restart()
            await until_quiet()
            assert (sink.offsets, feed.state) == ([0], FeedState.IDLE)

    run_virtual(main)


# --- replays at unusual times


def test_withdrawn_replay_with_full_quarantine_loses_nothing() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            bad = reject_offsets(sink, [0, 1])
            feed = route.feed(sink, limits=replace(LIMITS, quarantine_deltas_max=1))
            publish(route, "a", "b", "c", "d")
            await until_quiet()
            assert feed.state is FeedState.STOPPED
            request = ReplayRequest(None, drop=False)
            feed.add_request(request)
            with anyio.move_on_after(0):
                await request.wait()
            await until_quiet()
            assert feed.state is FeedState.STOPPED
            assert "quarantine is full" in (feed.statistics().reason or "")
            bad.clear()
            assert await request_replay(feed) == ReplayResult(1, 0, 0)
            await feed.wait(4)
            assert sink.offsets == [0, 1, 2, 3]
            assert counts_add_up(feed)

    run_virtual(main)


def test_replay_does_not_overtake_rows_that_a_full_quarantine_blocks() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            bad = reject_offsets(sink, [0, 2])
            feed = route.feed(sink, limits=replace(LIMITS, quarantine_deltas_max=2))
            publish(route, "q")
            await feed.wait(1)
            rows = [("x", ()), ("w", ()), ("w", (0,))]  # 2 is rejected, 3 passes, 4 waits for 0
            await _publish_in_one_call(route, feed, sink, rows)
            assert feed.state is FeedState.STOPPED
            assert (feed.applied, quarantine_records(feed)) == (2, [(0, 0, "not 0")])
            assert counts_add_up(feed)
            bad.clear()
            assert await request_replay(feed) == ReplayResult(1, 0, 0)
            await feed.wait(5)
            assert sink.offsets == [1, 0, 2, 3, 4]
            assert counts_add_up(feed)

    run_virtual(main)


@pytest.mark.parametrize("failure", ["stop", "hang"])
def test_replay_does_not_overtake_failed_delivery(failure: str) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0])
            feed = route.feed(sink, limits=replace(LIMITS, apply_timeout_s=5))
            publish(route, "q")
            await feed.wait(1)

            async def fail(_: Sequence[Delivery]) -> None:
                if failure == "stop":
                    raise StopSink("no disk")
                await anyio.sleep_forever()

            sink.before = fail
            publish(route, "w")
            publish(route, "w", parents=[0])
            await until_quiet()
            assert counts_add_up(feed)
            sink.before = None
            request = ReplayRequest(None, drop=False)
            if failure == "stop":
                feed.control.restart()
            feed.add_request(request)
            feed.cancel_overdue_call(anyio.current_time() + 10)
            with anyio.fail_after(100):
                await request.wait()
                await feed.wait(3)
            if len(feed.quarantine):
                await request_replay(feed)
            assert sink.offsets.index(1) < sink.offsets.index(2)
            assert sorted(sink.offsets) == [0, 1, 2]
            assert counts_add_up(feed)

    run_virtual(main)


async def _publish_in_one_call(
    route: Route, feed: Feed, sink: TinySink, rows: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Publish rows one by one while the sink is busy, so that one call delivers them."""
    before, sink.before = sink.before, sleep_for(1)
    publish(route, "busy")
    await until_quiet()
    sink.before = before
    for vector, parents in rows:
        publish(route, vector, parents=parents)
    await anyio.sleep(2)


def test_concurrent_replay_requests_are_all_answered() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0, 1, 2])
            feed = route.feed(sink)
            publish(route, "a", "b", "c")
            await feed.wait(3)
            requests = [ReplayRequest(frozenset({n}), drop=n == 1) for n in range(3)]
            sink.before = None
            for request in requests:
                feed.add_request(request)
            with anyio.fail_after(1):
                assert [await request.wait() for request in requests] == [
                    ReplayResult(1, 0, 2),
                    ReplayResult(0, 1, 1),
                    ReplayResult(1, 0, 0),
                ]

    run_virtual(main)


def test_replay_on_closed_feed_is_refused_at_once() -> None:
    async def main() -> None:
        async with Route.running() as route:
            feed = route.feed(TinySink())
            feed.control.close()
            with pytest.raises(Refused, match="detached"), anyio.fail_after(1):
                await request_replay(feed)

    run_virtual(main)


def test_replayed_rows_are_no_longer_in_flight() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0])
            feed = route.feed(sink)
            publish(route, "a", "a")
            await feed.wait(2)
            sink.before = None
            assert await request_replay(feed) == ReplayResult(2, 0, 0)
            assert feed.in_flight == (0, 0)

    run_virtual(main)


def test_held_rows_name_new_blocker_after_first_is_dropped() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0, 2])
            feed = route.feed(sink)
            publish(route, "a", "a", "a", "a")
            publish(route, "b", parents=[3])
            await feed.wait(5)
            assert {blocked_by for _, blocked_by, _ in quarantine_records(feed)} == {0}
            assert await request_replay(feed, 0, drop=True) == ReplayResult(1, 1, 3)
            assert quarantine_records(feed) == [(2, 2, "not 2"), (3, 2, None), (4, 2, None)]
            publish(route, "a", "b")
            await feed.wait(7)
            assert quarantine_records(feed)[3:] == [(5, 2, None), (6, 2, None)]
            assert counts_add_up(feed)

    run_virtual(main)


def test_interrupted_replay_can_be_resumed() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0])
            feed = route.feed(sink, limits=replace(LIMITS, merge_deltas_max=2))
            publish(route, *"aaaaa")
            await feed.wait(5)

            async def allow_one_call(_: Sequence[Delivery]) -> None:
                async def stop(_: Sequence[Delivery]) -> None:
                    raise StopSink("no disk")

                sink.before = stop

            sink.before = allow_one_call
            assert await request_replay(feed, 0) == ReplayResult(2, 0, 3)
            assert quarantine_records(feed) == [
                (2, 2, None),
                (3, 2, None),
                (4, 2, None),
            ]  # 2 is not blocked by another row
            sink.before = None
            feed.control.restart()
            assert await request_replay(feed, 2) == ReplayResult(3, 0, 0)
            assert sink.offsets == [0, 1, 2, 3, 4]
            assert counts_add_up(feed)

    run_virtual(main)


def test_endless_rejections_yield_to_other_tasks() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def reject_first(deliveries: Sequence[Delivery]) -> None:
                raise RejectDelta(offsets_of(deliveries)[0], "no")

            sink.before = reject_first
            feed = route.feed(sink)
            publish(route, *(f"v{n}" for n in range(50)))
            turns = 0
            while feed.applied < 50:
                await anyio.lowlevel.checkpoint()
                turns += 1
            assert turns >= 50
            request = ReplayRequest(None, drop=False)
            feed.add_request(request)
            turns = 0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(request.wait)
                while not request.is_withdrawn:
                    await anyio.lowlevel.checkpoint()
                    turns += 1
            assert turns >= 50
            assert counts_add_up(feed)

    run_virtual(main)


def test_replay_of_500_rejected_rows_delivers_each_less_than_six_times() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, range(500))
            feed = route.feed(sink)
            publish(route, *(f"v{n}" for n in range(500)))
            await feed.wait(500)
            sink.calls.clear()
            assert await request_replay(feed) == ReplayResult(0, 0, 500)
            assert sum(row_count for _, row_count in sink.calls) < 3_000

    run_virtual(main)


def test_counts_add_up_while_a_call_runs() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [2])
            feed = route.feed(sink, "ns:default")
            route.publish("other", "other")
            publish(route, "q")
            route.publish("other")
            await feed.wait(route.log.high_watermark)
            sink.before = sleep_for(1)
            publish(route, "busy")
            await until_quiet()
            publish(route, "w")
            publish(route, "q")
            for _ in range(30):
                await anyio.sleep(0.1)
                assert counts_add_up(feed)
                assert feed.statistics().skipped == 3

    run_virtual(main)
