"""Rejected deltas are set aside; what must not overtake them lines up; a replay or a drop lets it go on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.route.redelivery import ReplayRequest, ReplayResult
from delta_prop.route.status import FeedState
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.delta import Delta, Dot, create, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from tests.delta_prop.route.support import LIMITS, ORIGIN, SMALL, Route, TinySink, offsets_of, until_quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop.route.feed import Feed
    from delta_prop_sinks.sink import Delivery
    from delta_prop_wire.batch import LoggedBatch


def publish(route: Route, *vectors: str, parents: Sequence[int] = ()) -> LoggedBatch:
    """One row for each vector id; the last one names the deltas at these offsets as its parents."""
    base = route.log.next_offset + 1
    named = tuple(Dot(ORIGIN, offset + 1) for offset in parents)
    deltas = [Delta(vector, sparse([0], [1.0])) for vector in vectors]
    deltas[-1] = replace(deltas[-1], parents=named)
    return route.append(encode_batch(deltas, origin=ORIGIN, base=base))


def rejecting(sink: TinySink, rejects: Iterable[int]) -> set[int]:
    """Have a sink reject the rows at these offsets, for as long as they stay in the set that is returned."""
    bad = set(rejects)

    async def before(deliveries: Sequence[Delivery]) -> None:
        for offset in offsets_of(deliveries):
            if offset in bad:
                sink.note(only_before(deliveries, offset))
                raise RejectDelta(offset, f"not {offset}")

    sink.before = before
    return bad


def only_before(deliveries: Sequence[Delivery], stop: int) -> list[Delivery]:
    """The rows that come before the one at `stop`."""
    return [
        replace(delivery, rows=rows)
        for delivery in deliveries
        if len(
            rows := (delivery.rows if delivery.rows is not None else _all(delivery))[
                (delivery.rows if delivery.rows is not None else _all(delivery))
                < stop - delivery.first_offset
            ]
        )
    ]


def _all(delivery: Delivery):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.arange(delivery.logged.count)


async def ask(feed: Feed, *offsets: int, drop: bool = False) -> ReplayResult:
    request = ReplayRequest(frozenset(offsets) or None, drop=drop)
    feed.add_request(request)
    with anyio.fail_after(100):
        return await request.wait()


def held(feed: Feed) -> list[tuple[int, int, str | None]]:
    return [(one.offset, one.blocked_by, one.reason) for one in feed.quarantine.records()]


def test_what_must_not_overtake_a_rejected_delta_lines_up_and_the_rest_goes_on() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            bad = rejecting(sink, [1])
            feed = route.feed(sink)
            publish(route, "a", "b", "c", "b")
            await feed.wait(4)
            assert sink.offsets == [0, 2]
            assert held(feed) == [(1, 1, "not 1"), (3, 1, None)]
            publish(route, "d", parents=[3])  # names what lines up
            publish(route, "d", "e")
            publish(route, "f", parents=[0])
            await feed.wait(8)
            assert sink.offsets == [0, 2, 6, 7]
            assert held(feed) == [(1, 1, "not 1"), (3, 1, None), (4, 1, None), (5, 1, None)]
            told = feed.statistics()
            assert (told.applied_deltas, told.quarantined, told.rejected, told.skipped) == (4, 4, 1, 0)
            assert (told.state, told.lag, told.errors) == ("idle", 0, 1)

            assert await ask(feed) == ReplayResult(0, 0, 4)  # rejected again
            bad.clear()
            assert await ask(feed, 3) == ReplayResult(0, 0, 4)  # not what was rejected
            assert await ask(feed, 1) == ReplayResult(4, 0, 0)
            assert sink.offsets == [0, 2, 6, 7, 1, 3, 4, 5]
            told = feed.statistics()
            assert (told.applied_deltas, told.quarantined, told.replayed, told.skipped) == (8, 0, 4, 0)

    run_virtual(main)


def test_a_dropped_delta_lets_the_others_go_on() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            rejecting(sink, [0, 2])
            feed = route.feed(sink)
            publish(route, "a", "a", "a", "a")
            await feed.wait(4)
            assert await ask(feed, 0, drop=True) == ReplayResult(1, 1, 2)
            assert held(feed) == [(2, 2, "not 2"), (3, 2, None)]
            assert await ask(feed, drop=True) == ReplayResult(1, 1, 0)
            assert sink.offsets == [1, 3]
            told = feed.statistics()
            assert (told.applied_deltas, told.dropped, told.quarantined, told.skipped) == (2, 2, 0, 0)

    run_virtual(main)


def test_late_rows_are_marked_and_come_between_deliveries() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink, late = TinySink(), []
            bad = rejecting(sink, [0])
            feed = route.feed(sink)
            publish(route, "a", "b", "a")
            await feed.wait(3)
            bad.clear()

            async def before(deliveries: Sequence[Delivery]) -> None:
                late.append([(one.redelivered, offsets_of([one])) for one in deliveries])
                await anyio.sleep(1)

            sink.before = before
            publish(route, "c")
            await until_quiet()
            assert await ask(feed) == ReplayResult(2, 0, 0)
            assert late == [[(False, [3])], [(True, [0, 2])]]

    run_virtual(main)


def test_a_full_quarantine_stops_the_sink_until_there_is_room() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink, other = TinySink(), TinySink()
            bad = rejecting(sink, [1])
            feed = route.feed(sink, limits=replace(LIMITS, quarantine_deltas_max=2))
            second = route.feed(other)
            publish(route, "x", "a", "a", "y", "a", "z")
            await second.wait(6)
            with pytest.raises(Refused, match=r"quarantine is full \(2 of 2 deltas.*offset 4"):
                await feed.wait(6)
            assert (feed.applied, sink.offsets, feed.state) == (4, [0, 3], FeedState.STOPPED)
            bad.clear()
            assert await ask(feed) == ReplayResult(2, 0, 0)
            await feed.wait(6)
            assert sink.offsets == [0, 3, 1, 2, 4, 5]
            assert feed.statistics().applied_deltas == 6

    run_virtual(main)


def test_a_quarantine_is_bounded_in_bytes_of_what_it_keeps_in_memory() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            rejecting(sink, range(100))
            size = publish(route, "probe", "probe2").batch.size
            feed = route.feed(sink, start=2, limits=replace(LIMITS, quarantine_bytes_max=2 * size))
            for number in range(4):
                publish(route, f"prob{number}", f"prob{number}")
            with pytest.raises(Refused, match="quarantine is full"):
                await feed.wait(10)
            assert feed.statistics().quarantined == 4  # two whole batches
            assert feed.statistics().quarantined_bytes <= 2 * size
            assert feed.applied == 6

    run_virtual(main)


def test_a_stopped_sink_replays_nothing_and_says_so() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            rejecting(sink, [0])
            feed = route.feed(sink)
            publish(route, "a")
            await feed.wait(1)

            async def stop(_: Sequence[Delivery]) -> None:
                raise StopSink("no disk")

            sink.before = stop
            publish(route, "b")
            await until_quiet()
            with pytest.raises(Refused, match="restart it"):
                await ask(feed)
            assert len(feed.quarantine) == 1

    run_virtual(main)


def test_waiting_for_a_replay_can_be_given_up() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            rejecting(sink, [0])
            feed = route.feed(sink)
            publish(route, "a")
            await feed.wait(1)

            async def never(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = never
            request = ReplayRequest(None, drop=False)
            feed.add_request(request)
            with anyio.move_on_after(0.3):
                await request.wait()
            await anyio.sleep(1)
            sink.before = None
            publish(route, "b")
            await feed.wait(2)
            assert sink.offsets == [1]
            assert len(feed.quarantine) == 1

    run_virtual(main)


# --- against a model


@st.composite
def stories(draw: st.DrawFn) -> dict[str, object]:
    """Batches with causes, which rows are rejected how often, what an operator does when."""
    rows = st.tuples(st.sampled_from("abcde"), st.lists(st.integers(1, 8), max_size=2))
    return {
        "batches": draw(st.lists(st.lists(rows, min_size=1, max_size=5), min_size=1, max_size=12)),
        "rejected": draw(st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=8)),
        "acts": draw(st.lists(st.sampled_from(["replay", "drop", "none"]), max_size=12)),
        "fails": draw(st.lists(st.booleans(), max_size=10)),
        "room": draw(st.sampled_from([3, 100])),
    }


@given(stories())
def test_each_vector_is_applied_in_order_and_nothing_is_lost(story: dict[str, object]) -> None:
    run_virtual(_check_story, story)


async def _check_story(story: dict[str, object]) -> None:
    async with Route.running() as route:
        sink = TinySink()
        left: dict[int, int] = dict(story["rejected"])  # type: ignore[call-overload]
        fails = list(story["fails"])  # type: ignore[call-overload]
        vectors: list[str] = []
        causes: list[list[int]] = []

        async def before(deliveries: Sequence[Delivery]) -> None:
            offsets = offsets_of(deliveries)
            for offset in offsets:
                if left.get(offset):
                    left[offset] -= 1
                    sink.note(only_before(deliveries, offset))
                    raise RejectDelta(offset, "no")
            if fails and fails.pop():
                sink.note(only_before(deliveries, offsets[-1]))
                raise TryAgain("later", offsets[-1])

        sink.before = before
        feed = route.feed(sink, limits=replace(SMALL, quarantine_deltas_max=story["room"]))
        acts = list(story["acts"])  # type: ignore[call-overload]
        for batch in story["batches"]:  # type: ignore[attr-defined]
            base = route.log.next_offset
            deltas = []
            for row, (vector, back) in enumerate(batch):
                named = sorted({base + row - one for one in back if base + row - one >= 0})
                causes.append(named)
                vectors.append(vector)
                deltas.append(
                    Delta(vector, create([1.0]), parents=tuple(Dot(ORIGIN, one + 1) for one in named))
                )
            route.append(encode_batch(deltas, origin=ORIGIN, base=base + 1))
            await anyio.sleep(1)
            await _act(feed, acts.pop() if acts else "none")
        for _ in range(100):
            await anyio.sleep(1)
            if feed.state is FeedState.STOPPED or len(feed.quarantine):
                await _act(feed, "replay")
        assert not any(left.get(offset, 0) for offset in range(len(vectors)) if offset in sink.offsets)
        dropped = set(range(len(vectors))) - set(sink.offsets)
        assert len(sink.offsets) == len(set(sink.offsets))
        assert len(dropped) == feed.statistics().dropped
        assert feed.statistics().applied_deltas == len(sink.offsets)
        assert feed.statistics().skipped == 0
        place = {offset: at for at, offset in enumerate(sink.offsets)}
        for offset, vector in enumerate(vectors):
            earlier = [one for one in range(offset) if vectors[one] == vector] + causes[offset]
            for cause in earlier:
                if offset in place and cause in place:
                    assert place[cause] < place[offset]


async def _act(feed: Feed, act: str) -> None:
    heads = [one.offset for one in feed.quarantine.records() if one.reason is not None]
    if act == "none" or not heads:
        return
    await ask(feed, heads[0], drop=act == "drop")
