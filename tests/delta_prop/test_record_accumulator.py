"""Calls that go down the chain together: each keeps its fate, and what is applied is what came one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_prop.coalesced_draft import ROWS_MAX, can_coalesce, group_calls
from delta_prop.ingest.work import Draft, MatrixDraft
from delta_prop.receipt import PublishAck, Receipt
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CacheSink
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Priority, create, scale, sparse, sparse_add
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ["a", "b", "c"]
OPERATIONS = st.one_of(
    st.builds(create, st.just([1.0, 2.0, 3.0])),
    st.builds(sparse, st.just([0, 2]), st.lists(st.integers(-9, 9), min_size=2, max_size=2)),
    st.builds(sparse, st.just([7]), st.just([1])),  # no vector has that element
    st.builds(sparse_add, st.just([1]), st.just([1.5])),
    st.builds(scale, st.just(2.0)),
    st.builds(create, st.just([math.nan])),
)
DELTAS = st.builds(Delta, st.sampled_from([*NAMES, "unknown", "\n"]), OPERATIONS)


async def all_at_once(p: RecordedPropagator, calls: Sequence[Any]) -> list[PublishAck | Refused]:
    """Return the results of calls made in one turn, in this order."""
    told: dict[int, PublishAck | Refused] = {}

    async def publish(place: int, call: Any) -> None:
        try:
            if isinstance(call, Delta):
                told[place] = await p.publish(call)
            else:
                told[place] = await p.publish_many(call, np.ones((len(call), 3), np.float32))
        except Refused as refused:
            told[place] = refused

    async with anyio.create_task_group() as tasks:
        for place, call in enumerate(calls):
            tasks.start_soon(publish, place, call)
    return [told[place] for place in range(len(calls))]


def test_many_callers_share_a_batch_and_each_has_its_own_place() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish_many(NAMES, np.ones((3, 3)))
        calls = [Delta(NAMES[number % 3], sparse([0], [number])) for number in range(30)]
        told = await all_at_once(p, calls)
        frames = p._log.read(3, rows_max=100, bytes_max=1 << 20)
        assert len(frames) < 5
        assert sum(frame.count for frame in frames) == 30
        for call, published in zip(calls, told, strict=True):
            assert isinstance(published, PublishAck)
            assert published.offset is not None
            frame = max((one for one in frames if one.offset <= published.offset), key=lambda one: one.offset)
            row = published.offset - frame.offset
            assert published.dot == frame.batch.dot(row)
            assert (frame.batch.keys[row], frame.batch.values[row]) == (
                call.vector_id,
                call.operation.values,
            )
        assert p.statistics().accepted == 33

    run_propagator(main)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(DELTAS, st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)), max_size=12))
def test_together_each_call_fares_as_alone(calls: list[Any]) -> None:
    def fates(told: list[PublishAck | Refused]) -> list[Any]:
        return [one.code if isinstance(one, Refused) else one.count for one in told]

    async def together(p: RecordedPropagator) -> tuple[Any, ...]:
        await p.publish_many(NAMES, np.zeros((3, 3)))
        told = await all_at_once(p, calls)
        placed = [one for one in told if isinstance(one, PublishAck)]
        order = sorted(range(len(placed)), key=lambda at: placed[at].offset or 0)
        numbers = p.statistics()
        return fates(told), sorted(order), numbers.accepted, numbers.refused

    async def alone(p: RecordedPropagator) -> tuple[Any, ...]:
        await p.publish_many(NAMES, np.zeros((3, 3)))
        told: list[PublishAck | Refused] = []
        for call in calls:
            told += await all_at_once(p, [call])
            await anyio.sleep(1)
        numbers = p.statistics()
        placed = sum(isinstance(one, PublishAck) for one in told)
        return fates(told), list(range(placed)), numbers.accepted, numbers.refused

    assert run_propagator(together) == run_propagator(alone)


def test_one_that_is_refused_leaves_the_others_alone() -> None:
    async def main(p: RecordedPropagator) -> None:
        cache = await p.attach(CacheSink())
        await p.publish_many(NAMES, np.ones((3, 3)))
        bad = Delta("nobody", sparse([0], [1]))
        told = await all_at_once(p, [Delta("a", sparse([0], [5])), bad, Delta("b", sparse([0], [6]))])
        assert [isinstance(one, Refused) for one in told] == [False, True, False]
        await p.settle()
        states = [cache.peek("default", name) for name in "ab"]
        vectors = [state.vector[0] for state in states if state is not None and state.vector is not None]
        assert vectors == [5, 6]
        assert p.statistics().refused == 1

    run_propagator(main)


def test_cancelled_before_its_turn_it_never_happened() -> None:
    async def main(p: RecordedPropagator) -> bool:
        await p.publish_many(NAMES, np.ones((3, 3)))
        fate = ""

        async def publish() -> None:
            nonlocal fate
            fate = "cancelled"
            await p.publish(Delta("b", sparse([0], [1])))  # would be sent in the next turn
            fate = "published"

        async with anyio.create_task_group() as tasks:
            p._accumulator.callers += 1  # another one, that is slow
            tasks.start_soon(publish)
            while not (p._accumulator._calls or fate == "published"):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await p.settle()
        assert ("b" in p.recorder.vector_ids[3:]) is (fate == "published")
        return fate == "cancelled"

    assert any(run_propagator(main, seed=seed) for seed in range(40))


def test_what_was_gathered_is_sent_before_the_end() -> None:
    async def main(p: RecordedPropagator) -> list[PublishAck | Refused]:
        calls = [Delta(name, create([1.0])) for name in NAMES]
        return await all_at_once(p, calls)

    assert all(isinstance(one, PublishAck) for one in run_propagator(main))


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ({}, True),
        ({"namespace": "n", "priority": Priority.HIGH}, True),
        ({"id": b"i" * 16}, False),
        ({"dot": Dot(1, 1)}, False),
        ({"expect": Dot(1, 1)}, False),
        ({"parents": (b"p" * 16,)}, False),
        ({"clock": (Dot(1, 1),)}, False),
        ({"topics": ("t",)}, False),
        ({"timestamp": 1}, False),
        ({"metadata": {}}, False),
        ({"source": 1}, False),
        ({"operation": scale(2.0)}, False),
    ],
)
def test_only_what_says_numbers_alone_is_gathered(more: dict[str, Any], may: bool) -> None:
    assert can_coalesce(Delta(**({"vector_id": "a", "operation": create([1.0])} | more))) is may


@given(st.lists(st.tuples(st.integers(1, 600), st.booleans(), st.integers(0, 1)), max_size=20))
def test_groups_keep_order_likeness_and_bounds(shapes: list[tuple[int, bool, int]]) -> None:
    calls: list[Draft | MatrixDraft] = [
        MatrixDraft(
            ["k"] * count, np.zeros((count, 1 + wide), np.float32), "n", Kind.DENSE, Receipt(),
            Priority(lane), AckLevel.LOGGED,
        )
        for count, wide, lane in shapes
    ]  # fmt: skip
    found = list(group_calls(calls))
    assert [call for group in found for call in group] == calls
    for group in found:
        assert len({(call.matrix.shape[1], call.priority) for call in group}) == 1  # type: ignore[union-attr]
        assert len(group) == 1 or sum(call.count for call in group) <= ROWS_MAX


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(DELTAS, st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)),
            st.sampled_from([None, None, AckLevel.MEMORY, AckLevel.LOGGED]),
            st.sampled_from(["", "", "", *NAMES]),  # what another producer changes before
        ),
        max_size=10,
    )
)
@example([(["c"], None, "a"), (["b"], None, "b"), (Delta("a", sparse([0], [3])), AckLevel.MEMORY, "")])
def test_the_short_way_of_a_call_leads_where_the_long_one_does(story: list[Any]) -> None:
    async def play(p: RecordedPropagator) -> list[Any]:
        told: list[Any] = []
        await p.publish_many(NAMES, np.zeros((3, 3)))
        other = p.producer("other")
        for call, level, others in story:
            if others:
                await other.publish(Delta(others, sparse([1], [4])))
            try:
                if isinstance(call, Delta):
                    told.append(await p.publish(call, ack_level=level))
                else:
                    told.append(await p.publish_many(call, np.ones((len(call), 3)), ack_level=level))
            except Refused as refused:
                told.append((refused.code, refused.message, refused.row, refused.field))
        frames = p._log.read(0, rows_max=1000, bytes_max=1 << 20)
        numbers = p.statistics()
        logged = [(one.offset, one.lamport, one.source, bytes(one.batch.raw)) for one in frames]
        counted = numbers.accepted, numbers.refused, numbers.concurrent_updates, numbers.log
        heads = [p.head("n" if at else "default", name) for at in range(2) for name in NAMES]
        return [told, logged, counted, heads, p.recorder.vector_ids]

    async def long(p: RecordedPropagator) -> list[Any]:
        p._pipeline.offer_coalesced = lambda _draft, _now: False  # type: ignore[method-assign]
        return await play(p)

    assert run_propagator(play) == run_propagator(long)
