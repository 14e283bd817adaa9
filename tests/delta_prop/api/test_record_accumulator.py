"""Coalesced calls: each has its own outcome, and together they have the effects of separate calls."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_prop.calls.receipt import PublishAck, Receipt
from delta_prop.partition.core.coalesced_draft import ROWS_MAX, draft_from_columns, group_calls
from delta_prop.partition.ingest.work import Draft, MatrixDraft
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CacheSink
from delta_prop_wire.delta import AckLevel, Delta, Kind, Priority, create, scale, sparse, sparse_add
from delta_prop_wire.errors import Refused
from tests.native_core import coalesces_calls, needs_native_core

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


async def publish_concurrently(p: RecordedPropagator, calls: Sequence[Any]) -> list[PublishAck | Refused]:
    """Return the results of calls made in one tick, in the order of the calls."""
    results: dict[int, PublishAck | Refused] = {}

    async def publish(index: int, call: Any) -> None:
        try:
            if isinstance(call, Delta):
                results[index] = await p.publish(call)
            else:
                results[index] = await p.publish_many(call, np.ones((len(call), 3), np.float32))
        except Refused as refused:
            results[index] = refused

    async with anyio.create_task_group() as tasks:
        for index, call in enumerate(calls):
            tasks.start_soon(publish, index, call)
    return [results[index] for index in range(len(calls))]


@coalesces_calls
def test_concurrent_callers_share_a_batch_with_own_offsets() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish_many(NAMES, np.ones((3, 3)))
        calls = [Delta(NAMES[number % 3], sparse([0], [number])) for number in range(30)]
        results = await publish_concurrently(p, calls)
        frames = p.internals().partition.log.read(3, rows_max=100, bytes_max=1 << 20)
        assert len(frames) < 5
        assert sum(frame.count for frame in frames) == 30
        for call, published in zip(calls, results, strict=True):
            assert isinstance(published, PublishAck)
            assert published.offset is not None
            frame = max(
                (logged for logged in frames if logged.offset <= published.offset),
                key=lambda logged: logged.offset,
            )
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
def test_concurrent_calls_end_like_single_ones(calls: list[Any]) -> None:
    def outcomes(results: list[PublishAck | Refused]) -> list[Any]:
        return [result.code if isinstance(result, Refused) else result.count for result in results]

    async def concurrent(p: RecordedPropagator) -> tuple[Any, ...]:
        await p.publish_many(NAMES, np.zeros((3, 3)))
        results = await publish_concurrently(p, calls)
        statistics = p.statistics()
        return outcomes(results), statistics.accepted, statistics.refused

    async def single(p: RecordedPropagator) -> tuple[Any, ...]:
        await p.publish_many(NAMES, np.zeros((3, 3)))
        results: list[PublishAck | Refused] = []
        for call in calls:
            results += await publish_concurrently(p, [call])
            await anyio.sleep(1)
        statistics = p.statistics()
        return outcomes(results), statistics.accepted, statistics.refused

    assert run_propagator(concurrent) == run_propagator(single)


def test_refused_call_does_not_affect_the_others() -> None:
    async def main(p: RecordedPropagator) -> None:
        cache = await p.attach(CacheSink())
        await p.publish_many(NAMES, np.ones((3, 3)))
        bad = Delta("nobody", sparse([0], [1]))
        results = await publish_concurrently(
            p, [Delta("a", sparse([0], [5])), bad, Delta("b", sparse([0], [6]))]
        )
        assert [isinstance(result, Refused) for result in results] == [False, True, False]
        await p.settle()
        states = [cache.peek("default", name) for name in "ab"]
        vectors = [state.vector[0] for state in states if state is not None and state.vector is not None]
        assert vectors == [5, 6]
        assert p.statistics().refused == 1

    run_propagator(main)


@coalesces_calls
def test_call_cancelled_before_its_batch_is_never_applied() -> None:
    async def main(p: RecordedPropagator) -> bool:
        await p.publish_many(NAMES, np.ones((3, 3)))
        outcome = ""

        async def publish() -> None:
            nonlocal outcome
            outcome = "cancelled"
            await p.publish(Delta("b", sparse([0], [1])))  # the batch would be sent in the next tick
            outcome = "published"

        async with anyio.create_task_group() as tasks:
            p._publisher.accumulator.caller_count += 1  # as with a second, slow caller
            tasks.start_soon(publish)
            while not (p._publisher.accumulator._calls or outcome == "published"):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await p.settle()
        assert ("b" in p.recorder.vector_ids[3:]) is (outcome == "published")
        return outcome == "cancelled"

    assert any(run_propagator(main, seed=seed) for seed in range(40))


def test_accumulated_calls_are_sent_before_close() -> None:
    async def main(p: RecordedPropagator) -> list[PublishAck | Refused]:
        calls = [Delta(name, create([1.0])) for name in NAMES]
        return await publish_concurrently(p, calls)

    assert all(isinstance(result, PublishAck) for result in run_propagator(main))


def columns_call(count: int, width: int, priority: Priority = Priority.NORMAL) -> MatrixDraft:
    return draft_from_columns(
        ["k"] * count, np.zeros((count, width), np.float32), None,
        namespace="n", kind=Kind.DENSE, priority=priority, ack_level=AckLevel.LOGGED,
    )  # fmt: skip


@coalesces_calls
@needs_native_core
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 2), st.integers(0, 1)), max_size=20))
def test_call_groups_keep_order_key_and_limits(call_parameters: list[tuple[int, int, int]]) -> None:
    calls: list[Draft | MatrixDraft] = [
        columns_call(count, width, Priority(lane)) for count, width, lane in call_parameters
    ]
    groups = [draft.calls for draft in group_calls(calls)]
    assert [call for group in groups for call in group] == calls
    for group in groups:
        assert len({(call.matrix.shape[1], call.priority) for call in group}) == 1  # type: ignore[union-attr]
        assert len(group) == 1 or sum(call.count for call in group) <= ROWS_MAX
    for before, after in pairwise(groups):  # no group could have taken the next call
        first = after[0]
        assert (
            (first.matrix.shape[1], first.priority) != (before[0].matrix.shape[1], before[0].priority)  # type: ignore[union-attr]
            or sum(call.count for call in before) + first.count > ROWS_MAX
            or sum(call.size for call in before) + first.size > 1 << 20
        )


def test_columns_do_not_join_single_deltas() -> None:
    singles: list[Draft | MatrixDraft] = [
        Draft([delta], Receipt(), Priority.NORMAL, AckLevel.LOGGED)
        for delta in (Delta("a", sparse([0], [1])), Delta("a", create([1.0, 2.0, 3.0])))
    ]
    columns = columns_call(2, 3)
    assert [draft.calls for draft in group_calls([*singles, columns])] == [singles, [columns]]
    assert [draft.count for draft in group_calls([*singles, columns])] == [2, 2]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(DELTAS, st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)),
            st.sampled_from([None, None, AckLevel.MEMORY, AckLevel.LOGGED]),
            st.sampled_from(["", "", "", *NAMES]),  # the vector that another producer changes first
        ),
        max_size=10,
    )
)
@example([(["c"], None, "a"), (["b"], None, "b"), (Delta("a", sparse([0], [3])), AckLevel.MEMORY, "")])
def test_coalesced_calls_end_like_uncoalesced_ones(steps: list[Any]) -> None:
    async def run_steps(p: RecordedPropagator) -> list[Any]:
        outcomes: list[Any] = []
        await p.publish_many(NAMES, np.zeros((3, 3)))
        other = p.producer("other")
        for call, level, other_vector in steps:
            if other_vector:
                await other.publish(Delta(other_vector, sparse([1], [4])))
            try:
                if isinstance(call, Delta):
                    outcomes.append(await p.publish(call, ack_level=level))
                else:
                    outcomes.append(await p.publish_many(call, np.ones((len(call), 3)), ack_level=level))
            except Refused as refused:
                outcomes.append((refused.code, refused.message, refused.row, refused.field))
        frames = p.internals().partition.log.read(0, rows_max=1000, bytes_max=1 << 20)
        statistics = p.statistics()
        logged = [(frame.offset, frame.lamport, frame.source, bytes(frame.batch.raw)) for frame in frames]
        counts = statistics.accepted, statistics.refused, statistics.concurrent_updates, statistics.log
        heads = [p.head(namespace, name) for namespace in ("default", "n") for name in NAMES]
        return [outcomes, logged, counts, heads, p.recorder.vector_ids]

    async def run_uncoalesced(p: RecordedPropagator) -> list[Any]:
        p.internals().partition.pipeline.offer_coalesced = lambda _draft, _now: False  # type: ignore[method-assign]
        return await run_steps(p)

    assert run_propagator(run_steps) == run_propagator(run_uncoalesced)
