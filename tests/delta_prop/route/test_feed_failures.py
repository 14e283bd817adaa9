"""Feeds whose sink fails: tried again where that may help, else stopped alone, and told."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.route.feed import FeedState
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.route.support import (
    SMALL,
    Route,
    TinySink,
    takes,
    until_quiet,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.sink import Delivery


def test_a_passing_failure_is_retried_from_where_it_was_done() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            done: list[int | None] = [None, 1, 3, 4]

            async def before(deliveries: Sequence[Delivery]) -> None:
                if done:
                    below = done.pop(0)
                    sink.note(deliveries, below=-1 if below is None else below)
                    raise TryAgain("busy", below)

            sink.before = before
            feed = route.feed(sink)
            route.publish("a", "a")
            route.publish("a", "a", "a")
            seen = []
            with anyio.move_on_after(100):
                for offset in range(1, 6):
                    await feed.wait(offset)
                    seen.append((offset, feed.applied))
            assert seen == [(1, 1), (2, 3), (3, 3), (4, 4), (5, 5)]
            assert sink.offsets == [0, 1, 2, 3, 4]
            assert [count for _, count in sink.calls] == [5, 5, 4, 2, 1]
            assert feed.statistics().success == 5
            assert feed.statistics().errors == feed.statistics().retries == 4

    run_virtual(main)


def test_a_failure_behind_the_last_row_that_matches_leaves_nothing_to_retry() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def at_the_end(deliveries: Sequence[Delivery]) -> None:
                sink.note(deliveries, below=2)
                raise TryAgain("busy", 2)

            sink.before = at_the_end
            feed = route.feed(sink, "ns:a", keeps_cursor=True)
            route.publish("a", "a", "b")
            await feed.wait(3)
            assert (len(sink.calls), sink.offsets) == (1, [0, 1])
            assert (feed.statistics().success, feed.statistics().skipped) == (2, 1)
            assert feed.committed == 0
            feed.note_committed(2)
            assert feed.committed == 3

    run_virtual(main)


def test_retries_come_ever_more_slowly_up_to_a_bound() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def never(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = never
            feed = route.feed(sink)
            route.publish("a")
            await anyio.sleep(600)
            gaps = [
                later - sooner for (sooner, _), (later, _) in zip(sink.calls, sink.calls[1:], strict=False)
            ]
            for number, gap in enumerate(gaps):
                assert gap == pytest.approx(min(0.05 * 2**number, 5), rel=0.101)
            assert len(set(gaps)) == len(gaps)  # jittered
            assert feed.state is FeedState.RETRYING
            assert feed.statistics().reason == "TryAgain: down"
            sink.before = None
            await feed.wait(1)
            assert feed.statistics().reason is None
            assert anyio.current_time() < 606

    run_virtual(main)


@pytest.mark.parametrize(
    ("failure", "told"),
    [(RejectDelta(3, "no such index"), "offset 3: no such index"), (StopSink("disk full"), "disk full")],
)
def test_a_sink_that_stops_stops_alone(failure: Exception, told: str) -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink, other = TinySink(), TinySink()
            waiting: list[Refused] = []

            async def fail(deliveries: Sequence[Delivery]) -> None:
                if isinstance(failure, RejectDelta):
                    sink.note(deliveries, below=failure.offset)
                raise failure

            async def wait(offset: int, committed: bool) -> None:
                with pytest.raises(Refused) as caught:
                    await feed.wait(offset, committed=committed)
                waiting.append(caught.value)

            feed, second = route.feed(sink), route.feed(other)
            await until_quiet()
            route.publish("a", "a")
            await feed.wait(2)
            sink.before = fail
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, 4, False)
                tasks.start_soon(wait, 3_000, True)
                await until_quiet()
                route.publish("a", "a", "a")
            assert {refusal.code for refusal in waiting} == {ErrorCode.PROCESSING_FAILED}
            assert all(told in refusal.message and feed.name in refusal.message for refusal in waiting)
            with pytest.raises(Refused, match=told):
                await feed.wait(4)

            route.publish("a")
            await second.wait(6)
            await anyio.sleep(100)
            assert other.offsets == list(range(6))
            assert (feed.statistics().state, feed.statistics().lag) == ("stopped", 6 - feed.applied)
            assert told in (feed.statistics().reason or "")

            sink.before = None
            feed.restart()
            assert feed.reason is None
            await feed.wait(6)
            assert sink.offsets == list(range(6))

    run_virtual(main)


def test_stopped_while_deltas_gather_it_delivers_no_more() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(takes(0.001))
            feed = route.feed(sink)
            await until_quiet()
            route.publish("a")
            await until_quiet()
            route.publish("a")
            await anyio.sleep(0.003)
            assert feed.statistics().mailbox_deltas == 1
            feed.stop(Refused(ErrorCode.SHUTTING_DOWN, "paused"))
            await anyio.sleep(1)
            assert feed.state is FeedState.STOPPED
            assert sink.offsets == [0]
            feed.restart()
            await feed.wait(2)
            assert sink.offsets == [0, 1]

    run_virtual(main)


def test_stopped_and_restarted_while_the_sink_is_busy_nothing_comes_twice() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink(takes(1))
            feed = route.feed(sink)
            await until_quiet()
            route.publish("a", "a")
            await until_quiet()
            feed.stop(Refused(ErrorCode.SHUTTING_DOWN, "paused"))
            feed.restart()
            route.publish("a")
            assert feed.applied == 0
            await feed.wait(3)
            assert sink.offsets == [0, 1, 2]

    run_virtual(main)


def test_given_up_while_it_retries_it_ends() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()

            async def never(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = never
            feed = route.feed(sink)
            route.publish("a")
            await anyio.sleep(1)
            calls = len(sink.calls)
            feed.give_up()
            feed.stop(Refused(ErrorCode.PROCESSING_FAILED, "late"))
            feed.restart()
            await anyio.sleep(100)
            assert len(sink.calls) == calls
            assert feed.state is FeedState.CLOSED
            with pytest.raises(Refused, match="detached"):
                await feed.wait(1)

    run_virtual(main)


def test_a_log_that_dropped_what_comes_next_stops_a_feed_that_nothing_waited_for() -> None:
    async def main() -> None:
        async with Route.running(deltas_max=10) as route:
            sink = TinySink(takes(5))
            feed = route.feed(sink, limits=replace(SMALL, mailbox_deltas_max=2), required=False)
            await until_quiet()
            for _ in range(40):
                route.publish("a")
            with pytest.raises(Refused, match="starts at 30") as caught:
                await feed.wait(40)
            assert caught.value.code == ErrorCode.CURSOR_TOO_OLD
            assert sink.offsets == [0, 1]
            await anyio.sleep(100)
            assert feed.state is FeedState.STOPPED
            feed.restart()
            await anyio.sleep(100)
            assert feed.reason is not None
            assert feed.reason.code == ErrorCode.CURSOR_TOO_OLD

    run_virtual(main)


def test_telling_the_same_reason_often_adds_nothing_to_it() -> None:
    async def main() -> None:
        async with Route.running() as route:
            feed = route.feed(TinySink())
            feed.stop(Refused(ErrorCode.PROCESSING_FAILED, "stopped"))
            lengths = set()
            for _ in range(5):
                with pytest.raises(Refused) as caught:
                    await feed.wait(1)
                lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
            assert len(lengths) == 1

    run_virtual(main)
