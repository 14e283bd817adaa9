"""Feeds in virtual time: rows are delivered once and in order, and no sink delays another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery.feed_state import FeedState
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import StopSink, TryAgain
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.delivery.support import (
    LIMITS,
    ORIGIN,
    SMALL_LIMITS,
    Route,
    TinySink,
    TruncatedLog,
    offsets_of,
    sleep_for,
    until_quiet,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop.delivery.feed import Feed
    from delta_prop_sinks.sink import Delivery
    from delta_prop_wire.batch import LoggedBatch

# --- when a sink is called


def test_idle_sink_gets_delta_at_once() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            route.feed(sink)
            for time_s in (5.0, 6.0, 6.001):
                await anyio.sleep_until(time_s)
                route.publish("a")
            await anyio.sleep(1)
            assert sink.calls == [(5.0, 1), (6.0, 1), (6.001, 1)]

    run_virtual(main)


def test_delta_during_call_lingers_10_ms_from_arrival() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(0.004))
            route.feed(sink)
            await anyio.sleep_until(1.0)
            route.publish("a")
            await anyio.sleep_until(1.001)
            route.publish("a")
            await anyio.sleep_until(1.006)  # the sink is idle again; this delta joins the batch
            route.publish("a")
            await anyio.sleep_until(2)
            assert sink.calls == [(1.0, 1), (pytest.approx(1.011), 2)]

    run_virtual(main)


def test_delta_older_than_linger_goes_when_sink_is_free() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(0.5))
            route.feed(sink)
            await anyio.sleep_until(1.0)
            route.publish("a")
            await anyio.sleep_until(1.1)
            route.publish("a")
            await anyio.sleep_until(9)
            assert sink.calls == [(1.0, 1), (1.5, 1)]

    run_virtual(main)


def test_full_batch_goes_before_linger_ends() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(0.004))
            route.feed(sink)
            await anyio.sleep_until(1.0)
            route.publish("a")
            await anyio.sleep_until(1.001)
            route.publish(*["a"] * 60)
            await anyio.sleep_until(1.005)
            route.publish(*["a"] * 39)
            await anyio.sleep_until(1.006)
            route.publish("a")
            await anyio.sleep_until(2)
            assert sink.calls == [(1.0, 1), (1.006, 100)]

    run_virtual(main)


def test_lingering_feed_wakes_when_batch_is_full_not_per_delta() -> None:
    turns = 0

    def count(now: float, runnable: int) -> None:
        nonlocal turns
        turns += 1

    async def main() -> None:
        nonlocal turns
        async with Route.running() as route:
            sink = TinySink(sleep_for(0.001))
            route.feed(sink, limits=replace(LIMITS, linger_ms=1000))
            await anyio.sleep_until(1.0)
            route.publish("a")
            await anyio.sleep_until(1.0005)
            route.publish("a")  # the sink is busy, so the feed lingers
            await anyio.sleep_until(1.01)
            turns = 0
            for number in range(98):
                route.publish("a")
                await anyio.sleep_until(1.011 + number / 1000)
            assert turns < 2.5 * 98  # the publisher takes two turns per delta
            assert sink.calls == [(1.0, 1)]
            route.publish("a")
            await anyio.sleep_until(1.2)
            assert sink.calls == [(1.0, 1), (pytest.approx(1.108), 100)]

    run_virtual(main, on_turn=count)


def test_waiting_batches_merge_up_to_merge_deltas_max() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(1))
            route.feed(sink, limits=replace(LIMITS, merge_deltas_max=10))
            for _ in range(9):
                route.publish("a", "a", "a")
            route.publish(*["a"] * 25)
            await anyio.sleep(60)
            assert [count for _, count in sink.calls] == [9, 9, 9, 25]

    run_virtual(main)


# --- one sink and the others


def test_stalled_sink_delays_no_other_and_mailbox_stays_bounded() -> None:
    async def main() -> None:
        async with Route.running() as route:
            stalled, fast = TinySink(sleep_for(3600)), TinySink()
            stalled_feed, fast_feed = (
                route.feed(stalled, limits=SMALL_LIMITS),
                route.feed(fast, limits=SMALL_LIMITS),
            )
            for _ in range(500):
                logged = route.publish("a", "b", "c")
                await fast_feed.wait(logged.next_offset)
                assert anyio.current_time() == 0
                assert stalled_feed.statistics().mailbox_deltas <= SMALL_LIMITS.mailbox_deltas_max
            assert fast.offsets == list(range(1500))
            assert stalled.offsets == []
            assert stalled_feed.applied == 0
            assert stalled_feed.statistics().catching_up

            stalled.before = None
            await stalled_feed.wait(1500)
            assert anyio.current_time() == 3600
            assert stalled.offsets == list(range(1500))

    run_virtual(main)


def test_sinks_that_never_wait_take_turns() -> None:
    async def main() -> None:
        async with Route.running() as route:
            for _ in range(50):
                route.publish("a")
            order: list[str] = []

            def recording_sink(name: str) -> TinySink:
                async def before(_: Sequence[Delivery]) -> None:
                    order.append(name)

                return TinySink(before)

            limits = replace(LIMITS, merge_deltas_max=1)
            feeds = [route.feed(recording_sink(name), limits=limits) for name in "xyz"]
            for feed in feeds:
                await feed.wait(50)
            assert "".join(order) == "xyz" * 50

    run_virtual(main)


def test_mailbox_is_limited_in_bytes() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(sleep_for(1))
            size = route.publish("a").batch.size
            feed = route.feed(sink, start=1, limits=replace(LIMITS, mailbox_bytes_max=3 * size))
            for _ in range(10):
                route.publish("a")
            statistics = feed.statistics()
            assert (statistics.mailbox_deltas, statistics.mailbox_bytes) == (3, 3 * size)
            assert statistics.pulled == 7
            await feed.wait(11)
            assert sink.offsets == list(range(1, 11))

    run_virtual(main)


def test_batch_larger_than_empty_mailbox_is_pushed() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            feed = route.feed(sink, limits=SMALL_LIMITS)
            await until_quiet()
            route.publish(*["a"] * 50)
            assert not feed.statistics().catching_up
            await feed.wait(50)
            assert sink.calls == [(pytest.approx(1e-6), 50)]

    run_virtual(main)


# --- nothing lost, nothing duplicated, in order


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what happens to a feed.

    `steps`: batches, each with the pause after it. `calls`: duration and outcome of the sink's calls, and the
    share of rows that a partly applied call applies. `topics`, `start`: of the feed. `batches_before`: number
    of batches in the log before the feed starts. `seed`: of the order of tasks. `keeps_cursor`: True if the
    sink has a cursor of its own. `restarts_after`: seconds until a stopped feed is restarted.
    """
    return {
        "steps": draw(
            st.lists(
                st.tuples(
                    st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
                    st.sampled_from([0, 0, 0, 0.001, 0.02, 0.3]),
                ),
                min_size=1,
                max_size=40,
            )
        ),
        "calls": draw(
            st.lists(
                st.tuples(
                    st.sampled_from([None, 0, 0.005, 0.1, 1.0]),
                    st.sampled_from(["success", "success", "success", "fail", "part", "defect", "stop"]),
                    st.floats(0, 1),
                ),
                max_size=12,
            )
        ),
        "topics": draw(st.sampled_from([["*"], ["ns:a"], ["ns:a", "ns:b"], ["op:create"], ["ns:nobody"]])),
        "start": draw(st.integers(0, 6)),
        "batches_before": draw(st.integers(1, 3)),
        "seed": draw(st.none() | st.integers(0, 100)),
        "keeps_cursor": draw(st.booleans()),
        "restarts_after": draw(st.sampled_from([0, 0.001, 2.0])),
    }


@given(schedule=schedules())
def test_matching_rows_come_once_and_in_order(schedule: dict[str, Any]) -> None:
    run_virtual(_check_schedule, schedule, seed=schedule["seed"])


async def _check_schedule(schedule: dict[str, Any]) -> None:
    async with Route.running(deltas_max=100_000) as route:
        expected: list[int] = []
        sink = TinySink()

        def publish(namespaces: list[str]) -> None:
            logged = route.publish(*namespaces)
            names = {topic.removeprefix("ns:") for topic in schedule["topics"]}
            expected.extend(
                logged.offset + row
                for row, name in enumerate(namespaces)
                if name in names or names & {"*", "op:create"}
            )

        async def restart() -> None:
            while True:
                await anyio.sleep(0.5)
                if feed.state is FeedState.STOPPED:
                    await anyio.sleep(schedule["restarts_after"])
                    feed.control.restart()

        for _ in range(schedule["batches_before"]):
            publish(["a", "b"])
        sink.before = _scheduled_calls(sink, schedule["calls"])
        start = min(schedule["start"], route.log.high_watermark)
        expected = [offset for offset in expected if offset >= start]
        feed = route.feed(
            sink,
            *schedule["topics"],
            start=start,
            limits=SMALL_LIMITS,
            keeps_cursor=schedule["keeps_cursor"],
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restart)
            tasks.start_soon(_watch, route, feed, sink, expected, schedule["keeps_cursor"])
            for namespaces, pause in schedule["steps"]:
                publish(namespaces)
                if pause:
                    await anyio.sleep(pause)
            with anyio.fail_after(300):
                await _wait_through_stops(feed, route.log.high_watermark)
            tasks.cancel_scope.cancel()
        assert sink.offsets == expected
        statistics = feed.statistics()
        assert statistics.applied_deltas == len(expected)
        assert statistics.applied_deltas + statistics.skipped == route.log.high_watermark - start
        assert (statistics.lag, statistics.mailbox_deltas, statistics.mailbox_bytes) == (0, 0, 0)


def _scheduled_calls(
    sink: TinySink, schedule: Sequence[tuple[float | None, str, float]]
) -> Callable[[Sequence[Delivery]], Awaitable[None]]:
    calls = list(schedule)

    async def before(deliveries: Sequence[Delivery]) -> None:
        if not calls:
            return
        call_s, outcome, applied_share = calls.pop(0)
        if call_s is not None:
            await anyio.sleep(call_s)
        offsets = offsets_of(deliveries)
        partial_offset = offsets[int(applied_share * (len(offsets) - 1))]
        if outcome == "fail":
            raise TryAgain("not now")
        if outcome == "defect":
            raise ZeroDivisionError
        if outcome == "stop":
            raise StopSink("until someone acts")
        if outcome == "part":
            sink.note(deliveries, below=partial_offset)
            raise TryAgain("later", partial_offset)

    return before


async def _watch(route: Route, feed: Feed, sink: TinySink, expected: list[int], keeps_cursor: bool) -> None:
    """Check the feed's invariants until cancelled; if `keeps_cursor`, commit between calls too."""
    applied, committed, pause = 0, 0, 0.001
    while True:
        assert applied <= feed.applied <= route.log.high_watermark
        assert committed <= feed.committed <= feed.applied
        applied, committed = feed.applied, feed.committed
        applied_count = sum(offset < applied for offset in expected)
        assert expected[:applied_count] == sink.offsets[:applied_count]
        if keeps_cursor and not sink.running:
            feed.cursor.note_committed(sink.offsets[-1] + 1 if sink.offsets else 0)
        await anyio.sleep(pause)
        pause *= 1.01


async def _wait_through_stops(feed: Feed, offset: int) -> None:
    try:
        await feed.wait(offset, committed=True)
    except Refused:
        await anyio.sleep(3)
        await _wait_through_stops(feed, offset)


def test_feed_starts_inside_a_batch() -> None:
    async def main() -> None:
        async with Route.running() as route:
            route.publish("a", "b", "a", "b")
            route.publish("b", "a")
            all_rows_sink, matching_sink = TinySink(), TinySink()
            all_rows_feed = route.feed(all_rows_sink, start=2)
            matching_feed = route.feed(matching_sink, "ns:a", start=3)
            await all_rows_feed.wait(6)
            await matching_feed.wait(6)
            assert all_rows_sink.offsets == [2, 3, 4, 5]
            assert matching_sink.offsets == [5]

    run_virtual(main)


class SizedSink(TinySink):
    """A sink with its own limit of deltas per call."""

    deltas_per_call = 5_000


def record_reads(route: Route, on_turn: Callable[[int], None]) -> list[int]:
    """Return a list that gets the row count of each log read; in each of 20 turns of the event loop, call
    `on_turn` with the number of reads so far.
    """
    read, row_counts = route.log.read, list[int]()

    def recorded_read(offset: int, **bounds: int) -> list[LoggedBatch]:
        batches = read(offset, **bounds)
        row_counts.append(sum(logged.count for logged in batches))
        return batches

    async def take_turns() -> None:
        for _ in range(20):
            on_turn(len(row_counts))
            await anyio.lowlevel.checkpoint()

    route.log.read = recorded_read  # type: ignore[method-assign,assignment]
    route.tasks.start_soon(take_turns)
    return row_counts


def test_large_read_is_split_and_yields_to_other_tasks() -> None:
    async def main() -> None:
        async with Route.running() as route:
            for _ in range(3_500):
                route.publish("a")
            sink, read_counts = SizedSink(), set[int]()
            row_counts = record_reads(route, read_counts.add)
            await route.feed(sink).wait(3_500)
            assert [count for _, count in sink.calls] == [3_500]
            assert row_counts == [1_000, 1_000, 1_000, 500]
            assert read_counts >= {1, 2, 3}, "no other task ran between two reads"
            assert sink.offsets == list(range(3_500))

    run_virtual(main)


def test_deltas_per_call_is_asked_for_before_each_call() -> None:
    async def main() -> None:
        async with Route.running() as route:

            async def before(_: object) -> None:
                sink.deltas_per_call = 0 if len(sink.calls) == 1 else 25

            sink = SizedSink(before)
            sink.deltas_per_call = 40
            for _ in range(100):
                route.publish("a")
            await route.feed(sink, limits=replace(LIMITS, merge_deltas_max=10)).wait(100)
            assert [count for _, count in sink.calls] == [40, 10, 25, 25]

    run_virtual(main)


def test_rows_read_before_a_log_recovery_are_discarded() -> None:
    async def main() -> None:
        async with Route.running() as route:
            log = route.log = TruncatedLog(bytes(16))
            for _ in range(2_500):
                route.publish("a")
            sink = SizedSink()

            def truncate_log(read_count: int) -> None:
                if read_count == 2 and log.end is None:
                    log.end = 1_500
                    feed.note_recovered()

            record_reads(route, truncate_log)
            feed = route.feed(sink)
            await feed.wait(1_500)
            assert sink.offsets == list(range(1_500))
            log.end = None
            feed.note_recovered()
            await feed.wait(2_500)
            assert sink.offsets == list(range(2_500))

    run_virtual(main)


# --- skipped rows


def test_cursor_passes_rows_that_do_not_match() -> None:
    async def main() -> None:
        async with Route.running(deltas_max=10) as route:
            sink = TinySink()
            feed = route.feed(sink, "ns:a")
            for number in range(25):
                route.publish("b", "b")  # the log holds ten rows, which leave only if this sink releases them
                assert feed.applied == feed.committed == 2 * number + 2
            sink.before = sleep_for(5)
            route.publish("a")
            assert feed.applied == feed.committed == 50
            await anyio.sleep(1)
            route.publish("b")
            assert feed.applied == 50
            await feed.wait(52)
            assert anyio.current_time() == 5
            assert feed.statistics().applied_deltas == 1
            assert feed.statistics().skipped == 51

    run_virtual(main)


def test_control_rows_are_skipped() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            noop = partial(encode_noop, origin=ORIGIN, count=2, code=ErrorCode.INVALID_DELTA)
            route.append(noop(base=1))
            feed = route.feed(sink)
            await feed.wait(2)
            route.publish("a")
            route.append(noop(base=4))
            await feed.wait(5)
            assert sink.offsets == [2]
            assert (feed.statistics().applied_deltas, feed.statistics().skipped) == (1, 4)

    run_virtual(main)


def test_restarted_feed_does_not_reread_skipped_rows() -> None:
    async def main() -> None:
        async with Route.running(deltas_max=10) as route:
            sink = TinySink()

            async def stop(_: Sequence[Delivery]) -> None:
                raise StopSink("full")

            sink.before = stop
            feed = route.feed(sink, "ns:a")
            await until_quiet()
            for _ in range(12):
                route.publish("b")
            route.publish("a")
            await until_quiet()
            assert feed.state is FeedState.STOPPED
            assert feed.applied == 12
            sink.before = None
            feed.control.restart()
            await feed.wait(13)
            assert sink.offsets == [12]

    run_virtual(main)


def test_read_that_skips_all_rows_reports_progress() -> None:
    async def main() -> None:
        async with Route.running() as route:
            for _ in range(30):
                route.publish("b")
            feed = route.feed(TinySink(), "ns:a", limits=SMALL_LIMITS)
            assert route.progress_count == 0
            await feed.wait(30)
            assert route.progress_count > 0

    run_virtual(main)


# --- holds on the log, waits


def test_log_retains_rows_until_sink_commits() -> None:
    async def main() -> None:
        async with Route.running(deltas_max=10) as route:
            feed = route.feed(TinySink(), keeps_cursor=True)
            for _ in range(10):
                route.publish("a")
            await feed.wait(10)
            assert feed.committed == 0
            with pytest.raises(Refused, match="still needs the oldest"):
                route.publish("a")
            feed.cursor.note_committed(4)
            feed.cursor.note_committed(3)
            assert feed.committed == 4
            for _ in range(4):
                route.publish("a")
            with pytest.raises(Refused):
                route.publish("a")

    run_virtual(main)


def test_wait_committed_returns_after_commit() -> None:
    async def main() -> None:
        async with Route.running() as route:
            feed = route.feed(TinySink(), "ns:a", keeps_cursor=True)
            await until_quiet()
            route.publish("a", "b")
            route.publish("b")
            with anyio.move_on_after(5) as scope:
                await feed.wait(3, committed=True)
            assert scope.cancelled_caught
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(feed.wait, 3, committed=True))
                await until_quiet()
                feed.cursor.note_committed(2)
            assert feed.committed == 3

    run_virtual(main)


def test_cancelled_waits_leave_no_waiters() -> None:
    async def main() -> None:
        async with Route.running() as route:
            feed = route.feed(TinySink(sleep_for(1e5)))
            route.publish("a")
            for _ in range(50):
                with anyio.move_on_after(0.1):
                    await feed.wait(1)
            assert len(feed.cursor.waiters) == 0

    run_virtual(main)


def test_cancelled_call_does_not_count_as_applied() -> None:
    async def main() -> None:
        sink = TinySink(sleep_for(10))
        async with Route.running() as route:
            feed = route.feed(sink)
            route.publish("a")
            await anyio.sleep(1)
        assert feed.applied == 0
        assert sink.offsets == []

    run_virtual(main)
