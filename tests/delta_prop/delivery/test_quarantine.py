"""Quarantine: rejected deltas are held with their dependents until a replay or a drop."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery.feed_state import FeedState
from delta_prop.delivery.redelivery import ReplayRequest, ReplayResult, row_numbers
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.delta import Delta, Dot, create, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from tests.delta_prop.delivery.support import (
    LIMITS,
    ORIGIN,
    SMALL_LIMITS,
    Route,
    TinySink,
    offsets_of,
    until_quiet,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop.delivery.feed import Feed
    from delta_prop_sinks.sink import Delivery
    from delta_prop_wire.batch import LoggedBatch


def publish(route: Route, *vectors: str, parents: Sequence[int] = ()) -> LoggedBatch:
    """Publish a row per vector id; the last one names the deltas at these offsets as its parents."""
    base = route.log.next_offset + 1
    parent_dots = tuple(Dot(ORIGIN, offset + 1) for offset in parents)
    deltas = [Delta(vector, sparse([0], [1.0])) for vector in vectors]
    deltas[-1] = replace(deltas[-1], parents=parent_dots)
    return route.append(encode_batch(deltas, origin=ORIGIN, base=base))


def reject_offsets(sink: TinySink, rejected_offsets: Iterable[int]) -> set[int]:
    """Let a sink reject the rows at these offsets, as long as they are in the returned set."""
    offsets_to_reject = set(rejected_offsets)

    async def before(deliveries: Sequence[Delivery]) -> None:
        for offset in offsets_of(deliveries):
            if offset in offsets_to_reject:
                sink.note(rows_before(deliveries, offset))
                raise RejectDelta(offset, f"not {offset}")

    sink.before = before
    return offsets_to_reject


def rows_before(deliveries: Sequence[Delivery], end: int) -> list[Delivery]:
    """Return the rows below offset `end`."""
    parts = []
    for delivery in deliveries:
        rows = row_numbers(delivery)
        rows = rows[rows < end - delivery.first_offset]
        if len(rows):
            parts.append(replace(delivery, rows=rows))
    return parts


async def request_replay(feed: Feed, *offsets: int, drop: bool = False) -> ReplayResult:
    request = ReplayRequest(frozenset(offsets) or None, drop=drop)
    feed.add_request(request)
    with anyio.fail_after(100):
        return await request.wait()


def quarantine_records(feed: Feed) -> list[tuple[int, int, str | None]]:
    return [(record.offset, record.blocked_by, record.reason) for record in feed.quarantine.records()]


def test_rejected_delta_holds_its_dependents_but_no_other_row() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            offsets_to_reject = reject_offsets(sink, [1])
            feed = route.feed(sink)
            publish(route, "a", "b", "c", "b")
            await feed.wait(4)
            assert sink.offsets == [0, 2]
            assert quarantine_records(feed) == [(1, 1, "not 1"), (3, 1, None)]
            publish(route, "d", parents=[3])  # this row names a held row as its parent
            publish(route, "d", "e")
            publish(route, "f", parents=[0])
            await feed.wait(8)
            assert sink.offsets == [0, 2, 6, 7]
            assert quarantine_records(feed) == [(1, 1, "not 1"), (3, 1, None), (4, 1, None), (5, 1, None)]
            statistics = feed.statistics()
            assert (
                statistics.applied_deltas,
                statistics.quarantined,
                statistics.rejected,
                statistics.skipped,
            ) == (4, 4, 1, 0)
            assert (statistics.state, statistics.lag, statistics.errors) == ("idle", 0, 1)

            assert await request_replay(feed) == ReplayResult(0, 0, 4)  # the delta is rejected a second time
            offsets_to_reject.clear()
            assert await request_replay(feed, 3) == ReplayResult(0, 0, 4)  # 3 is held, not rejected
            assert await request_replay(feed, 1) == ReplayResult(4, 0, 0)
            assert sink.offsets == [0, 2, 6, 7, 1, 3, 4, 5]
            statistics = feed.statistics()
            assert (
                statistics.applied_deltas,
                statistics.quarantined,
                statistics.replayed,
                statistics.skipped,
            ) == (8, 0, 4, 0)

    run_virtual(main)


def test_dropped_delta_releases_its_dependents() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0, 2])
            feed = route.feed(sink)
            publish(route, "a", "a", "a", "a")
            await feed.wait(4)
            assert await request_replay(feed, 0, drop=True) == ReplayResult(1, 1, 2)
            assert quarantine_records(feed) == [(2, 2, "not 2"), (3, 2, None)]
            assert await request_replay(feed, drop=True) == ReplayResult(1, 1, 0)
            assert sink.offsets == [1, 3]
            statistics = feed.statistics()
            assert (
                statistics.applied_deltas,
                statistics.dropped,
                statistics.quarantined,
                statistics.skipped,
            ) == (2, 2, 0, 0)

    run_virtual(main)


def test_replayed_rows_are_marked_and_come_between_deliveries() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink, redeliveries = TinySink(), []
            offsets_to_reject = reject_offsets(sink, [0])
            feed = route.feed(sink)
            publish(route, "a", "b", "a")
            await feed.wait(3)
            offsets_to_reject.clear()

            async def before(deliveries: Sequence[Delivery]) -> None:
                redeliveries.append(
                    [(delivery.redelivered, offsets_of([delivery])) for delivery in deliveries]
                )
                await anyio.sleep(1)

            sink.before = before
            publish(route, "c")
            await until_quiet()
            assert await request_replay(feed) == ReplayResult(2, 0, 0)
            assert redeliveries == [[(False, [3])], [(True, [0, 2])]]

    run_virtual(main)


def test_full_quarantine_stops_sink_until_replay() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink, other = TinySink(), TinySink()
            offsets_to_reject = reject_offsets(sink, [1])
            feed = route.feed(sink, limits=replace(LIMITS, quarantine_deltas_max=2))
            other_feed = route.feed(other)
            publish(route, "x", "a", "a", "y", "a", "z")
            await other_feed.wait(6)
            with pytest.raises(Refused, match=r"quarantine is full \(2 of 2 deltas.*offset 4"):
                await feed.wait(6)
            assert (feed.applied, sink.offsets, feed.state) == (4, [0, 3], FeedState.STOPPED)
            offsets_to_reject.clear()
            assert await request_replay(feed) == ReplayResult(2, 0, 0)
            await feed.wait(6)
            assert sink.offsets == [0, 3, 1, 2, 4, 5]
            assert feed.statistics().applied_deltas == 6

    run_virtual(main)


def test_quarantine_is_limited_in_bytes() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, range(100))
            size = publish(route, "probe", "probe2").batch.size
            feed = route.feed(sink, start=2, limits=replace(LIMITS, quarantine_bytes_max=2 * size))
            for number in range(4):
                publish(route, f"prob{number}", f"prob{number}")
            with pytest.raises(Refused, match="quarantine is full"):
                await feed.wait(10)
            assert feed.statistics().quarantined == 4  # two full batches
            assert feed.statistics().quarantined_bytes <= 2 * size
            assert feed.applied == 6

    run_virtual(main)


def test_replay_on_stopped_sink_is_refused() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0])
            feed = route.feed(sink)
            publish(route, "a")
            await feed.wait(1)

            async def stop(_: Sequence[Delivery]) -> None:
                raise StopSink("no disk")

            sink.before = stop
            publish(route, "b")
            await until_quiet()
            with pytest.raises(Refused, match="restart it"):
                await request_replay(feed)
            assert len(feed.quarantine) == 1

    run_virtual(main)


def test_cancelled_replay_wait_leaves_row_in_quarantine() -> None:
    async def main() -> None:
        async with Route.running() as route:
            sink = TinySink()
            reject_offsets(sink, [0])
            feed = route.feed(sink)
            publish(route, "a")
            await feed.wait(1)

            async def fail_call(_: Sequence[Delivery]) -> None:
                raise TryAgain("down")

            sink.before = fail_call
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
def scenarios(draw: st.DrawFn) -> dict[str, object]:
    """Draw what happens to a sink.

    `batches`: for each row a vector and the distances, in rows, back to its parents. `rejected`: how often
    the row at an offset is rejected. `actions`: the operator's action after each batch. `failures`: for each
    call, True if it fails before its last row.
    """
    rows = st.tuples(st.sampled_from("abcde"), st.lists(st.integers(1, 8), max_size=2))
    return {
        "batches": draw(st.lists(st.lists(rows, min_size=1, max_size=5), min_size=1, max_size=12)),
        "rejected": draw(st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=8)),
        "actions": draw(st.lists(st.sampled_from(["replay", "drop", "none"]), max_size=12)),
        "failures": draw(st.lists(st.booleans(), max_size=10)),
        "quarantine_deltas_max": draw(st.sampled_from([3, 100])),
    }


@given(scenarios())
def test_vectors_are_applied_in_order_and_nothing_is_lost(scenario: dict[str, object]) -> None:
    run_virtual(_check_scenario, scenario)


async def _check_scenario(scenario: dict[str, object]) -> None:
    async with Route.running() as route:
        sink = TinySink()
        rejections_left: dict[int, int] = dict(scenario["rejected"])  # type: ignore[call-overload]
        failures = list(scenario["failures"])  # type: ignore[call-overload]
        vectors: list[str] = []
        parent_offsets: list[list[int]] = []

        async def before(deliveries: Sequence[Delivery]) -> None:
            offsets = offsets_of(deliveries)
            for offset in offsets:
                if rejections_left.get(offset):
                    rejections_left[offset] -= 1
                    sink.note(rows_before(deliveries, offset))
                    raise RejectDelta(offset, "no")
            if failures and failures.pop():
                sink.note(rows_before(deliveries, offsets[-1]))
                raise TryAgain("later", offsets[-1])

        sink.before = before
        feed = route.feed(
            sink, limits=replace(SMALL_LIMITS, quarantine_deltas_max=scenario["quarantine_deltas_max"])
        )
        actions = list(scenario["actions"])  # type: ignore[call-overload]
        for batch in scenario["batches"]:  # type: ignore[attr-defined]
            base = route.log.next_offset
            deltas = []
            for row, (vector, distances) in enumerate(batch):
                parents = sorted(
                    {base + row - distance for distance in distances if base + row - distance >= 0}
                )
                parent_offsets.append(parents)
                vectors.append(vector)
                deltas.append(
                    Delta(vector, create([1.0]), parents=tuple(Dot(ORIGIN, parent + 1) for parent in parents))
                )
            route.append(encode_batch(deltas, origin=ORIGIN, base=base + 1))
            await anyio.sleep(1)
            await _run_action(feed, actions.pop() if actions else "none")
        for _ in range(100):
            await anyio.sleep(1)
            if feed.state is FeedState.STOPPED or len(feed.quarantine):
                await _run_action(feed, "replay")
        assert not any(
            rejections_left.get(offset, 0) for offset in range(len(vectors)) if offset in sink.offsets
        )
        dropped = set(range(len(vectors))) - set(sink.offsets)
        assert len(sink.offsets) == len(set(sink.offsets))
        assert len(dropped) == feed.statistics().dropped
        assert feed.statistics().applied_deltas == len(sink.offsets)
        assert feed.statistics().skipped == 0
        position = {offset: index for index, offset in enumerate(sink.offsets)}
        for offset, vector in enumerate(vectors):
            same_vector = [earlier for earlier in range(offset) if vectors[earlier] == vector]
            for cause in same_vector + parent_offsets[offset]:
                if offset in position and cause in position:
                    assert position[cause] < position[offset]


async def _run_action(feed: Feed, action: str) -> None:
    rejected = [record.offset for record in feed.quarantine.records() if record.reason is not None]
    if action == "none" or not rejected:
        return
    await request_replay(feed, rejected[0], drop=action == "drop")
