"""Publish: dependencies, cancellation at every stage, invalid input, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import OfferState
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import (
    CacheSink,
)
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Kind,
    Operation,
    Priority,
    create,
    offset,
    opaque,
    sparse,
    transform,
)
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import catch_refusal, make_delta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


# --- cancellation: the receipt reports whether the delta was appended


def test_cancelled_pending_offer_is_never_appended() -> None:
    async def main(p: RecordedPropagator) -> None:
        receipt = p.offer(make_delta("child", parents=(b"p" * 16,)))
        assert receipt.state is OfferState.PENDING
        with anyio.move_on_after(1):
            await receipt
        assert receipt.state is OfferState.WITHDRAWN
        with pytest.raises(UsageError, match="withdrawn"):
            receipt.result()
        await p.publish(make_delta("parent", id=b"p" * 16))
        await p.settle()
        assert p.recorder.vector_ids == ["parent"]

    run_propagator(main)


def test_cancelled_queued_offer_is_never_appended() -> None:
    async def main(p: RecordedPropagator) -> None:
        log: Any = p.internals().partition.log
        log.is_accepting = False
        receipts = [p.offer(make_delta(name)) for name in ("a", "b", "c")]
        assert {receipt.state for receipt in receipts} == {OfferState.QUEUED}
        with anyio.move_on_after(1):
            await receipts[1]
        assert receipts[1].state is OfferState.WITHDRAWN
        assert p.statistics().queue.depth == 2
        log.is_accepting = True
        p.internals().partition.pipeline.pump(anyio.current_time())
        assert [receipt.state is OfferState.ACKNOWLEDGED for receipt in receipts] == [True, False, True]
        await p.settle()
        assert p.recorder.vector_ids == ["a", "c"]

    run_propagator(main)


def test_cancelled_publish_after_append_returns_its_ack() -> None:
    async def main(p: RecordedPropagator) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            published = await p.publish(
                make_delta("a")
            )  # the delta is appended at once, so the call returns despite the cancellation
            assert published.offset == 0
            await anyio.sleep(1)
        assert scope.cancelled_caught
        receipt = p.offer(make_delta("b"))
        assert receipt.state is OfferState.ACKNOWLEDGED
        assert not receipt.withdraw()
        assert receipt.result().offset == 1

    run_propagator(main)


def test_cancelled_wait_withdraws_receipt_for_other_waiter() -> None:
    async def main(p: RecordedPropagator) -> None:
        receipt = p.offer(make_delta("child", parents=(b"p" * 16,)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_no_result, receipt.wait)
            with anyio.move_on_after(1):
                await receipt
        assert receipt.state is OfferState.WITHDRAWN

    run_propagator(main)


async def _expect_no_result(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(UsageError, match="withdrawn"):
        await call()


def test_missing_parent_is_named_in_dep_timeout() -> None:
    async def main(p: RecordedPropagator) -> None:
        dot = Dot(77, 1)
        for timeout_s in (None, 100):
            refusal = await catch_refusal(p.publish(make_delta("child", parents=(dot,)), timeout_s=timeout_s))
            assert refusal.code is ErrorCode.DEP_TIMEOUT
            assert str(dot) in refusal.message
            assert refusal.details["missing"] == [str(dot)]
        refusal = await catch_refusal(p.publish(make_delta("child", parents=(dot,)), timeout_s=1))
        assert "withdrawn" in refusal.message
        assert p.statistics().pending.pending_deltas == 0

    run_propagator(main)


def test_draft_waits_for_its_clock_and_logs_it() -> None:
    async def main(p: RecordedPropagator) -> None:
        missing = Dot(77, 1)
        refusal = await catch_refusal(p.publish(make_delta("child", clock=(missing,))))
        assert (refusal.code, refusal.details["missing"]) == (ErrorCode.DEP_TIMEOUT, [str(missing)])
        producer = p.producer("other")
        first = (await producer.publish(make_delta("first"))).last_dot
        assert first is not None
        second = Dot(first.origin, first.counter + 1)
        child = p.offer(make_delta("child", clock=(second,)))
        assert child.state is OfferState.PENDING
        await producer.publish(make_delta("second"))
        await child
        assert p.internals().partition.log.read(2, rows_max=1, bytes_max=1 << 20)[0].batch.clock == (second,)

    run_propagator(main)


# --- causal dependencies


def test_after_option_orders_deltas_by_dependency() -> None:
    async def main(p: RecordedPropagator) -> None:
        parent = p.offer(make_delta("parent", parents=(b"x" * 16,)))
        child = p.offer(make_delta("child", priority=Priority.CRITICAL), after=[parent])
        grandchild = p.offer(make_delta("grandchild", priority=Priority.CRITICAL), after=[child])
        assert {receipt.state for receipt in (parent, child, grandchild)} == {OfferState.PENDING}
        await p.publish(make_delta("x", id=b"x" * 16))
        published = await grandchild
        await p.publish(make_delta("last"), after=[published, parent, b"x" * 16])
        await p.settle()
        assert p.recorder.vector_ids == ["x", "parent", "child", "grandchild", "last"]

    run_propagator(main)


# --- invalid input: refused with field and bound, and nothing changes


@pytest.mark.parametrize(
    ("delta", "field", "message"),
    [
        (Delta("", create([1.0])), "vector_id", "1"),
        (Delta("v" * 1025, create([1.0])), "vector_id", "bytes"),
        (Delta("v", create([])), "vector", "1"),
        (Delta("v", create([1.0, float("nan")])), "vector", "nan"),
        (Delta("v", create([3e39])), "vector", "inf"),
        (Delta("v", create([1.0, 2.0, 3.0])), "vector", "2"),
        (Delta("unknown", offset(1.0)), "vector_id", "create it first"),
        (Delta("known", sparse([2], [1.0])), "indices", "1"),
        (Delta("known", offset(float("inf"))), "amount", "inf"),
        (Delta("v", create([1.0]), id=b"short"), "id", "16"),
        (Delta("v", create([1.0]), metadata={"deep": float("nan")}), "metadata", "nan"),
        (Delta("v", create([1.0]), topics=("",)), "topics", ""),
        (Delta("v", create([1.0]), namespace="n" * 1000), "namespace", "bytes"),
        (Delta("known", create([1.0, 1.0]), parents=(b"short",)), "parents", "dot"),
        (Delta("known", transform("unheard")), "operation", "unheard"),
        (Delta("v", Operation(Kind.SPARSE, np.ones(1, np.float32), np.ones(2, np.uint32))), "indices", ""),
    ],
)
def test_invalid_delta_is_refused_by_field_and_changes_nothing(
    delta: Delta, field: str, message: str
) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(make_delta("known"))
        await p.settle()
        before = p.statistics()
        refusal = await catch_refusal(p.publish(delta))
        print(refusal)
        assert isinstance(refusal, InvalidDelta)
        assert refusal.field == field
        assert message in refusal.message
        after = p.statistics()
        assert (after.accepted, after.log, after.pending) == (before.accepted, before.log, before.pending)
        assert (after.queue.depth, after.sinks) == (before.queue.depth, before.sinks)
        assert (await p.publish(make_delta("next"))).offset == 1

    run_propagator(main)


def test_publish_many_folds_like_single_deltas() -> None:
    """Whole vectors, and elements with indices, fold so; a call without numbers changes nothing."""

    async def main(p: RecordedPropagator) -> None:
        cache = await p.attach(CacheSink())
        await p.publish_many(["a", "ä"], np.ones((2, 4), np.float32))
        published = await p.publish_many(["ä", "a"], [[5, 6], [7, 8]], indices=[[0, 3], [1, 1]])
        await p.publish_many(["a"], [[0.5]], indices=np.array([[2]], np.int64), kind=Kind.SPARSE_ADD)
        await p.publish_many(["a"], np.empty((1, 0)), indices=np.empty((1, 0), np.uint32))
        await p.wait_visible(4)
        states = [cache.peek("default", name) for name in ("a", "ä")]
        vectors = [
            state.vector.tolist() for state in states if state is not None and state.vector is not None
        ]
        assert vectors == [[1, 8, 1.5, 1], [5, 1, 1, 6]]
        assert (published.offset, published.count) == (2, 2)
        refusal = await catch_refusal(p.publish_many(["a", "ä"], [[1.0], [2.0]], indices=[[1], [4]]))
        assert (refusal.row, refusal.field) == (1, "indices")

    run_propagator(main)


def test_one_invalid_row_refuses_its_call() -> None:
    async def main(p: RecordedPropagator) -> None:
        refusal = await catch_refusal(p.publish(make_delta("a"), Delta("gone", offset(1.0)), make_delta("b")))
        assert (refusal.row, refusal.field) == (1, "vector_id")
        rows = np.ones((3, 2), np.float32)
        rows[2, 1] = np.inf
        refusal = await catch_refusal(p.publish_many(["a", "b", "c"], rows))
        assert refusal.field == "vector"
        assert p.statistics().log.next_offset == 0

    run_propagator(main)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.publish(), "give 1 to"),
        (lambda p: p.publish(make_delta("a"), make_delta("b", priority=Priority.LOW)), "a call of its own"),
        (lambda p: p.publish(make_delta("a"), make_delta("b", id=b"i" * 16)), "an id, or none"),
        (lambda p: p.publish_many(["a"], [[1.0], [2.0]]), "one row per id"),
        (lambda p: p.publish_many(["a"], [1.0]), "one row per id"),
        (lambda p: p.publish_many([], np.ones((0, 2))), "give 1 to"),
        (lambda p: p.publish_many(["a"], [[1.0]], kind=Kind.SCALE), "CREATE or DENSE"),
        (lambda p: p.publish_many([""], [[1.0]]), "vector_id"),
        (lambda p: p.publish(make_delta("a"), ack_level=AckLevel.DURABLE), "data directory"),
        (lambda p: p.publish(make_delta("a"), ack_level=9), "give memory, logged or durable"),
        (lambda p: p.publish("a"), "not a Delta: create one"),
        (lambda p: p.publish({"vector_id": "a"}), "not a Delta: create one"),
        (lambda p: p.publish(Delta("a", "create")), "not an operation: use"),
        (lambda p: p.publish(make_delta("a", parents=5)), "parents: 5 is of type int"),
        (lambda p: p.publish(make_delta("a", topics="abc")), "give a tuple"),
        (lambda p: p.publish(make_delta("a"), after=["x"]), "does not name a delta"),
        (lambda p: p.publish(make_delta("a"), after=[Dot(0, 0)]), "counters run from 1"),
        (lambda p: p.publish(make_delta("a"), after=[Dot(1, n) for n in range(1, 100)]), "parents"),
        (lambda p: p.publish_many("ab", [[1.0], [2.0]]), "give a list"),
        (lambda p: p.publish_many([5], [[1.0]]), "vector_id: 5 is of type int"),
        (lambda p: p.publish_many(["a", "b\n"], [[1.0], [2.0]]), "vector_id: character 1"),
        (lambda p: p.publish_many(["a", "b" * 2_000], [[1.0], [2.0]]), "vector_id: 2000 bytes"),
        (lambda p: p.publish_many(["a"], [[]]), "vector: 0 numbers"),
        (lambda p: p.publish_many(["a"], [[1.0]], indices=[[0]], kind=Kind.DENSE), "SPARSE or SPARSE_ADD"),
        (lambda p: p.publish_many(["a"], [[1.0]], indices=[[0, 1]]), r"in shape \(1, 1\)"),
        (lambda p: p.publish_many(["a"], [[1.0]], indices=[[-1]]), "give whole numbers"),
        (lambda p: p.publish_many(["a"], [[1.0]], indices=[[0.5]]), "give whole numbers"),
        (lambda p: p.publish_many(["a"], [["x"]]), "matrix: .* is not a type of real numbers"),
        (lambda p: p.publish_many(["a"], [[1j]]), "matrix: .* is not a type of real numbers"),
        (lambda p: p.publish_many(["a", "b"], [[1.0], [1.0, 2.0]]), "matrix: .*equal length"),
        (lambda p: p.publish_many(["a"], [[1.0]], priority=9), "priority"),
        (lambda p: p.attach(object()), "has no name"),
        (lambda p: p.attach(CacheSink(), topics=5), "topics 5"),
        (lambda p: p.attach(CacheSink(), start="never"), "give resume, earliest, latest"),
        (lambda p: p.attach(CacheSink(), batch_deltas=0), "batch_deltas 0"),
        (lambda p: p.attach(CacheSink(), linger_ms=-1), "linger_ms -1"),
        (lambda p: p.wait_visible("x"), "'x': give a publish result"),
    ],
)
def test_wrong_call_arguments_are_rejected(call: Callable[[Any], Awaitable[object]], message: str) -> None:
    async def main(p: RecordedPropagator) -> None:
        with pytest.raises((UsageError, Refused), match=message):
            await call(p)
        assert p.statistics().log.next_offset == 0

    run_propagator(main)


def test_unavailable_ack_level_is_refused() -> None:
    async def main(p: RecordedPropagator) -> None:
        refusal = await catch_refusal(p.publish(make_delta("a"), ack_level=AckLevel.DURABLE))
        assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
        assert (await p.publish(make_delta("a"))).level is AckLevel.MEMORY

    run_propagator(main)


# --- statistics


def test_statistics_count_outcomes_and_memory_limit() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(make_delta("a", id=b"a" * 16), make_delta("b", id=b"b" * 16))
        await p.publish(make_delta("a", id=b"a" * 16))
        await catch_refusal(p.publish(Delta("gone", offset(1.0))))
        p.offer(make_delta("child", parents=(b"p" * 16,)))
        await p.publish(Delta("fact", opaque(b"x")))
        await p.wait_visible(3)
        statistics = p.statistics()
        assert (statistics.accepted, statistics.duplicates, statistics.refused, statistics.noops) == (
            3,
            1,
            1,
            0,
        )
        assert (statistics.pending.pending_deltas, statistics.queue.depth) == (1, 0)
        assert (statistics.log.next_offset, statistics.log.deltas) == (3, 3)
        recorder = statistics.sinks["recorder"]
        assert (recorder.applied_offset, recorder.lag, recorder.applied_deltas, recorder.state) == (
            3,
            0,
            3,
            "idle",
        )
        print(f"worst case of one sink and all tables: {statistics.memory_bytes_max / 2**20:.0f} MiB")
        assert statistics.memory_bytes_max == Settings().memory_bytes_max(1)

    run_propagator(main)


def test_ids_of_columns_may_be_any_sequence_of_text() -> None:
    async def main(propagator: RecordedPropagator) -> None:
        for ids in (["a", "b"], ("c", "d"), np.array(["e", "f"])):
            published = await propagator.publish_many(ids, np.ones((2, 2), np.float32))
            assert published.count == 2
        await propagator.settle()
        assert list(propagator.recorder.vector_ids) == list("abcdef")

    run_propagator(main)
