"""The propagator as a program embeds it: sinks, publishing, waiting, cancelling, leaving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.config import Settings
from delta_prop.embedded import Propagator
from delta_prop.receipt import State
from delta_prop.testing import RecordedPropagator, RecordingSink, run_propagator
from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    IndexSink,
    JsonLinesSink,
    Resident,
    StopSink,
    StorageSink,
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

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from delta_prop.route.subscription import Subscription
    from delta_prop_sinks import Delivery, SinkContext

BACKENDS: list[dict[str, Any]] = [
    {"backend": "asyncio"},
    {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    {"backend": "trio"},
]


@pytest.fixture(params=BACKENDS, ids=("asyncio", "uvloop", "trio"))
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


def made(key: str, **more: Any) -> Delta:
    return Delta(key, create([1.0, 2.0]), **more)


async def refused(waited: Awaitable[object]) -> Refused:
    with pytest.raises(Refused) as caught:
        await waited
    return caught.value


@dataclass
class Gate:
    """A sink's function that waits until the test lets it go on."""

    def __post_init__(self) -> None:
        self.opened = anyio.Event()
        self.seen: list[int] = []

    async def __call__(self, at: int, _delta: Delta) -> None:
        await self.opened.wait()
        self.seen.append(at)


# --- the whole way, on every event loop


def test_read_your_own_write_everywhere(backend: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        resident = Resident()
        storage = StorageSink(tmp_path / "vectors.db", resident=resident, flush_s=0.01)
        index, cache = IndexSink(resident=resident), CacheSink()
        async with Propagator() as p:
            for sink in (storage, index, cache):
                await p.attach(sink)
            async with p.subscribe("*") as listener:
                await p.publish(Delta("v", create([0.0, 1.0])), Delta("w", create([1.0, 0.0])))
                published = await p.publish(Delta("v", sparse([0], [5.0]), metadata={"n": 1}))
                await p.wait_visible(published)
                state = await storage.get("default", "v")
                assert state is not None
                assert (state.vector.tolist(), state.metadata) == ([5.0, 1.0], {"n": 1})  # type: ignore[union-attr]
                assert cache.peek("default", "v") is not None
                assert [hit.vector_id for hit in index.search([1.0, 0.2], k=1)] == ["v"]
                assert [(await anext(listener)).offset for _ in range(3)] == [0, 1, 2]
                assert published.dot is not None
                assert p.head("v") == published.dot
                await p.wait_visible(published, sinks=["storage"], committed=True)
                assert storage.statistics().committed_offset == 3

    anyio.run(main, **backend)


def test_columns_repeats_and_cancellation(backend: dict[str, Any]) -> None:
    async def main() -> None:
        async with Propagator() as p:
            rows = np.arange(200, dtype=np.float32).reshape(100, 2)
            columns = await p.publish_many([f"v{n}" for n in range(100)], rows)
            assert (columns.offset, columns.count, columns.next_offset) == (0, 100, 100)
            first = await p.publish(made("a", id=b"a" * 16))
            again = await p.publish(made("a", id=b"a" * 16))
            assert (first.duplicate, again.duplicate, again.duplicates) == (False, True, {0: 100})
            with anyio.move_on_after(0.01) as scope:
                await p.publish(made("never", parents=(b"?" * 16,)))
            assert scope.cancelled_caught
            assert p.statistics().accepted == 101
            assert p.statistics().pending.pending_deltas == 0

    anyio.run(main, **backend)


def test_an_exception_in_the_block_comes_through_and_sinks_are_closed(
    backend: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "vectors.db"

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(StorageSink(path))
            await p.publish(made("kept"))
            raise KeyError("the program's own")

    async def look() -> None:
        async with Propagator() as p:
            storage = await p.attach(StorageSink(path))
            assert await storage.get("default", "kept") is not None

    with pytest.raises(KeyError, match="the program's own"):
        anyio.run(main, **backend)
    anyio.run(look, **backend)


# --- sinks come and go


def test_a_sink_goes_on_where_it_was_detached() -> None:
    async def main(p: RecordedPropagator) -> None:
        seen: list[int] = []
        await p.attach(CallbackSink(lambda at, _: seen.append(at)))
        await p.publish(made("a"))
        await p.detach("callback")
        assert seen == [0]  # what the log held was brought before it went
        await p.publish(made("b"))
        assert seen == [0]
        await p.attach(CallbackSink(lambda at, _: seen.append(at)))
        await p.settle()
        assert seen == [0, 1]
        with pytest.raises(UsageError, match="attached already"):
            await p.attach(CallbackSink(print))
        with pytest.raises(UsageError, match=r"no sink named 'other'.*'callback', 'recorder'"):
            await p.detach("other")

    run_propagator(main)


@pytest.mark.parametrize(
    ("start", "expected"), [("resume", [0, 1, 2]), ("earliest", [0, 1, 2]), ("latest", [2]), (1, [1, 2])]
)
def test_where_a_later_sink_starts(start: Any, expected: list[int]) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(made("a"), made("b"))  # one batch, so that 1 is within it
        seen: list[int] = []
        await p.attach(CallbackSink(lambda at, _: seen.append(at)), start=start)
        await p.publish(made("c"))
        await p.settle()
        assert seen == expected

    run_propagator(main)


def test_a_sink_that_needs_what_is_gone_is_refused_unless_told_to_start_later() -> None:
    async def main(p: RecordedPropagator) -> None:
        for n in range(8):
            await p.publish(made(f"v{n}"))
            await p.settle()
        assert p.statistics().log.first_offset == 4
        seen: list[int] = []
        late = CallbackSink(lambda at, _: seen.append(at), name="late")
        refusal = await refused(p.attach(late))
        assert refusal.code is ErrorCode.CURSOR_TOO_OLD
        assert refusal.details["first_offset"] == 4
        assert 'start="earliest"' in refusal.message
        with pytest.raises(UsageError, match="offset from 0 to 8"):
            await p.attach(late, start=9)
        assert list(p.statistics().sinks) == ["recorder"]
        await p.attach(late, start="earliest")
        await p.settle()
        assert seen == [4, 5, 6, 7]

    run_propagator(main, Settings(log_deltas_max=4))


def test_topics_bring_a_sink_its_own_rows_once() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = await p.attach(RecordingSink(name="some"), topics=["ns:docs", "v:b", "op:offset"])
        await p.publish(made("a"), made("b", namespace="docs"), made("c", namespace="docs"))
        await p.publish(Delta("b", offset(1.0), namespace="docs"))
        await p.publish(made("z"))
        await p.settle()
        assert [one.offset for one in sink.received] == [1, 2, 3]
        with pytest.raises(UsageError, match="no topics"):
            await p.attach(RecordingSink(name="none"), topics=[])

    run_propagator(main)


def test_a_stopped_sink_tells_who_waits_and_goes_on_when_restarted() -> None:
    async def main(p: RecordedPropagator) -> None:
        broken = [True]

        async def spend(_at: int, _delta: Delta) -> None:
            await anyio.sleep(1)
            if broken:
                raise StopSink("the disk is full: make room, then restart")

        await p.attach(CallbackSink(spend))
        async with anyio.create_task_group() as tasks:
            published = await p.publish(made("a"))
            tasks.start_soon(_expect_refusal, lambda: p.wait_visible(published), "disk is full")
        assert p.statistics().sinks["callback"].state == "stopped"
        assert "disk is full" in (p.statistics().sinks["callback"].reason or "")
        await p.wait_visible(published, sinks=["recorder"])  # the others are not held up
        broken.clear()
        p.restart("callback")
        await p.wait_visible(published)

    run_propagator(main)


async def _expect_refusal(call: Callable[[], Awaitable[object]], words: str) -> None:
    assert words in (await refused(call())).message


def test_a_detached_sink_tells_who_waits() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep_forever()))
        published = await p.publish(made("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_refusal, lambda: p.wait_visible(published, timeout_s=100), "detached")
            await anyio.sleep(1)
            await p.detach("callback")

    run_propagator(main)


def test_waiting_ends_in_time() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep(100)))
        published = await p.publish(made("a"))
        with pytest.raises(TimeoutError):
            await p.wait_visible(published, timeout_s=5)
        with pytest.raises(UsageError, match="no sink named 'x'"):
            await p.wait_visible(published, sinks=["x"])
        await p.wait_visible(published, timeout_s=100)
        assert anyio.current_time() == pytest.approx(100, abs=1)

    run_propagator(main)


def test_a_sink_publishes_from_within() -> None:
    async def main(p: RecordedPropagator) -> None:
        async def follow(at: int, delta: Delta) -> None:
            if at < 20:
                await p.publish(Delta(delta.vector_id, offset(1.0)))  # offers nest nowhere, so no recursion
                p.offer(made(f"{delta.vector_id}'"))

        await p.attach(CallbackSink(follow))
        await p.publish(made("v"))
        await p.settle()
        assert [one.offset for one in p.recorder.received] == list(range(41))

    run_propagator(main)


# --- room


def test_publish_waits_for_room_in_order_and_offer_is_refused_with_numbers() -> None:
    async def main(p: RecordedPropagator) -> None:
        gate = Gate()
        await p.attach(CallbackSink(gate), batch_deltas=1)
        order: list[str] = []

        async def publish(key: str) -> None:
            await p.publish(made(key), timeout_s=1000)
            order.append(key)

        async with anyio.create_task_group() as tasks:
            for n in range(30):
                tasks.start_soon(publish, f"v{n:02}")
                await anyio.sleep(0.001)
            refusal = p.offer(made("offered")).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.LOG_FULL
            assert (refusal.details["depth"], refusal.details["capacity"]) == (10, 10)
            assert refusal.details["held_by"] == "callback"
            await anyio.sleep(100)
            assert len(order) == 10
            gate.opened.set()
        assert order == sorted(order)
        await p.settle()
        assert p.recorder.vector_ids == order
        assert gate.seen == list(range(30))

    run_propagator(main, Settings(log_deltas_max=10, merge_deltas_max=100))


def test_publish_gives_up_in_time_and_nothing_happened() -> None:
    async def main(p: RecordedPropagator) -> None:
        gate = Gate()
        await p.attach(CallbackSink(gate))
        await p.publish(made("a"), made("b"))
        refusal = await refused(p.publish(made("late"), timeout_s=5))
        assert refusal.code is ErrorCode.LOG_FULL
        assert refusal.retry_after_ms
        assert anyio.current_time() == pytest.approx(5, abs=0.1)
        with anyio.move_on_after(1) as scope:  # cancelled in line
            await p.publish(made("never"))
        assert scope.cancelled_caught
        gate.opened.set()
        await p.settle()
        await p.publish(made("c"))
        await p.settle()
        assert p.recorder.vector_ids == ["a", "b", "c"]

    run_propagator(main, Settings(log_deltas_max=2))


def test_a_sink_that_is_not_required_holds_nothing_back() -> None:
    async def main(p: RecordedPropagator) -> None:
        gate = Gate()
        await p.attach(CallbackSink(gate), required=False)
        for n in range(50):
            await p.publish(made(f"v{n}"))
            await p.wait_visible(n + 1, sinks=["recorder"])
        gate.opened.set()
        refusal = await refused(p.wait_visible(50))
        assert refusal.code is ErrorCode.CURSOR_TOO_OLD

    run_propagator(main, Settings(log_deltas_max=5, mailbox_deltas_max=3))


# --- cancellation: it happened or it did not, and the caller can tell


def test_cancelled_before_its_place_it_never_happens() -> None:
    async def main(p: RecordedPropagator) -> None:
        receipt = p.offer(made("child", parents=(b"p" * 16,)))
        assert receipt.state is State.PENDING
        with anyio.move_on_after(1):
            await receipt
        assert receipt.state is State.WITHDRAWN
        with pytest.raises(UsageError, match="withdrawn"):
            receipt.result()
        await p.publish(made("parent", id=b"p" * 16))
        await p.settle()
        assert p.recorder.vector_ids == ["parent"]

    run_propagator(main)


def test_cancelled_in_the_queue_it_never_happens() -> None:
    async def main(p: RecordedPropagator) -> None:
        log: Any = p._log
        log.accepting = False
        receipts = [p.offer(made(name)) for name in ("a", "b", "c")]
        assert {receipt.state for receipt in receipts} == {State.QUEUED}
        with anyio.move_on_after(1):
            await receipts[1]
        assert receipts[1].state is State.WITHDRAWN
        assert p.statistics().queue.depth == 2
        log.accepting = True
        p._chain.pump(anyio.current_time())
        assert [receipt.state is State.ACKNOWLEDGED for receipt in receipts] == [True, False, True]
        await p.settle()
        assert p.recorder.vector_ids == ["a", "c"]

    run_propagator(main)


def test_cancelled_after_its_place_the_caller_is_told_that_it_happened() -> None:
    async def main(p: RecordedPropagator) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            published = await p.publish(made("a"))  # at once in its place: it returns, whatever else
            assert published.offset == 0
            await anyio.sleep(1)
        assert scope.cancelled_caught
        receipt = p.offer(made("b"))
        assert receipt.state is State.ACKNOWLEDGED
        assert not receipt.withdraw()
        assert receipt.result().offset == 1

    run_propagator(main)


def test_two_wait_for_one_receipt_and_one_goes() -> None:
    async def main(p: RecordedPropagator) -> None:
        receipt = p.offer(made("child", parents=(b"p" * 16,)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_no_result, receipt.wait)
            with anyio.move_on_after(1):
                await receipt
        assert receipt.state is State.WITHDRAWN

    run_propagator(main)


async def _expect_no_result(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(UsageError, match="withdrawn"):
        await call()


def test_a_parent_that_never_comes_is_named_in_time() -> None:
    async def main(p: RecordedPropagator) -> None:
        dot = Dot(77, 1)
        for timeout_s in (None, 100):
            refusal = await refused(p.publish(made("child", parents=(dot,)), timeout_s=timeout_s))
            assert refusal.code is ErrorCode.DEP_TIMEOUT
            assert str(dot) in refusal.message
            assert refusal.details["waits_for"] == [str(dot)]
        refusal = await refused(p.publish(made("child", parents=(dot,)), timeout_s=1))
        assert "withdrawn" in refusal.message
        assert p.statistics().pending.pending_deltas == 0

    run_propagator(main)


# --- causes


def test_named_causes_come_first() -> None:
    async def main(p: RecordedPropagator) -> None:
        parent = p.offer(made("parent", parents=(b"x" * 16,)))
        child = p.offer(made("child", priority=Priority.CRITICAL), after=[parent])
        grandchild = p.offer(made("grandchild", priority=Priority.CRITICAL), after=[child])
        assert {one.state for one in (parent, child, grandchild)} == {State.PENDING}
        await p.publish(made("x", id=b"x" * 16))
        published = await grandchild
        await p.publish(made("last"), after=[published, parent, b"x" * 16])
        await p.settle()
        assert p.recorder.vector_ids == ["x", "parent", "child", "grandchild", "last"]

    run_propagator(main)


# --- bad input: told with field and bound, and nothing changes


@pytest.mark.parametrize(
    ("delta", "field", "words"),
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
def test_bad_input_is_named_and_changes_nothing(delta: Delta, field: str, words: str) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(made("known"))
        await p.settle()
        before = p.statistics()
        refusal = await refused(p.publish(delta))
        print(refusal)
        assert isinstance(refusal, InvalidDelta)
        assert refusal.field == field
        assert words in refusal.message
        after = p.statistics()
        assert (after.accepted, after.log, after.pending) == (before.accepted, before.log, before.pending)
        assert (after.queue.depth, after.sinks) == (before.queue.depth, before.sinks)
        assert (await p.publish(made("next"))).offset == 1

    run_propagator(main)


def test_one_bad_row_refuses_its_call() -> None:
    async def main(p: RecordedPropagator) -> None:
        refusal = await refused(p.publish(made("a"), Delta("gone", offset(1.0)), made("b")))
        assert (refusal.row, refusal.field) == (1, "vector_id")
        rows = np.ones((3, 2), np.float32)
        rows[2, 1] = np.inf
        refusal = await refused(p.publish_many(["a", "b", "c"], rows))
        assert refusal.field == "vector"
        assert p.statistics().log.next_offset == 0

    run_propagator(main)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.publish(), "give 1 to"),
        (lambda p: p.publish(made("a"), made("b", priority=Priority.LOW)), "calls? of its own|call of"),
        (lambda p: p.publish(made("a"), made("b", id=b"i" * 16)), "an id, or none"),
        (lambda p: p.publish_many(["a"], [[1.0], [2.0]]), "one row an id"),
        (lambda p: p.publish_many(["a"], [1.0]), "one row an id"),
        (lambda p: p.publish_many([], np.ones((0, 2))), "give 1 to"),
        (lambda p: p.publish_many(["a"], [[1.0]], kind=Kind.SCALE), "CREATE or DENSE"),
        (lambda p: p.publish_many([""], [[1.0]]), "vector_id"),
        (lambda p: p.publish(made("a"), ack_level=AckLevel.DURABLE), "data directory"),
    ],
)
def test_misuse_is_told(call: Callable[[Propagator], Awaitable[object]], words: str) -> None:
    async def main(p: RecordedPropagator) -> None:
        with pytest.raises((UsageError, Refused), match=words):
            await call(p)
        assert p.statistics().log.next_offset == 0

    run_propagator(main)


def test_a_level_that_is_not_granted_names_the_cure() -> None:
    async def main(p: RecordedPropagator) -> None:
        refusal = await refused(p.publish(made("a"), ack_level=AckLevel.DURABLE))
        assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
        assert (await p.publish(made("a"))).level is AckLevel.MEMORY

    run_propagator(main)


# --- listening


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 3), (2, 2)])
def test_where_a_subscription_starts(start: Any, first: int) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(made("a"), made("b"), made("c"))
        subscription = p.subscribe(start=start)  # latest is now, not when it is first read
        await p.publish(made("d"))
        async with subscription:
            one = await anext(subscription)
            assert one.offset == first
            assert one.lamport == first + 1
            assert one.delta.vector_id == "abcd"[first]

    run_propagator(main)


def test_a_slow_reader_holds_nobody_back_and_is_told_what_it_lost() -> None:
    async def main(p: RecordedPropagator) -> None:
        async with p.subscribe(start="earliest") as subscription:
            await p.publish(made("first"))
            assert (await anext(subscription)).offset == 0
            for n in range(30):
                await p.publish(made(f"v{n}"))
                await p.settle()
            lost = await refused(_read_to_the_end(subscription))
            assert lost.code is ErrorCode.CURSOR_TOO_OLD
        assert len(p.recorder.received) == 31

    run_propagator(main, Settings(log_deltas_max=5, mailbox_deltas_max=2))


async def _read_to_the_end(subscription: Subscription) -> None:
    async for _ in subscription:
        pass


def test_a_slow_reader_gets_everything_that_the_log_holds() -> None:
    async def main(p: RecordedPropagator) -> None:
        read: list[int] = []
        async with p.subscribe("op:create", start="earliest") as subscription:
            for n in range(300):
                await p.publish(made(f"v{n}"), made(f"w{n}"))
                await p.publish(Delta(f"v{n}", offset(1.0)))
            async for one in subscription:
                read.append(one.offset)
                await anyio.sleep(0.001)
                if len(read) == 600:
                    break
        assert read == [at for at in range(900) if at % 3 != 2]
        assert list(p.statistics().sinks) == ["recorder"]

    run_propagator(main, Settings(mailbox_deltas_max=10))


def test_an_iteration_ends_when_it_is_closed() -> None:
    async def main(p: RecordedPropagator) -> None:
        subscription = p.subscribe()
        read: list[str] = []

        async def listen() -> None:
            async for one in subscription:
                read.append(one.delta.vector_id)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.sleep(1)
            await p.publish(made("a"))
            await anyio.sleep(1)
            await subscription.close()
        assert read == ["a"]
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)

    run_propagator(main)


def test_an_iteration_ends_with_the_propagator() -> None:
    read: list[str] = []

    async def main(p: RecordedPropagator) -> None:
        async def listen() -> None:
            async for one in p.subscribe(start="earliest"):
                read.append(one.delta.vector_id)

        p._tasks.start_soon(listen)
        await p.publish(made("a"))
        await anyio.sleep(1)

    run_propagator(main)
    assert read == ["a"]


# --- the end


def test_leaving_brings_sinks_what_they_have_not_got() -> None:
    seen: list[int] = []

    async def main(p: RecordedPropagator) -> None:
        async def slow(delivery: Delivery) -> None:
            await anyio.sleep(0.5)
            seen.append(delivery.count)

        await p.attach(CallbackSink(slow, per="delivery"))
        for n in range(10):
            p.offer(made(f"v{n}"))

    run_propagator(main)
    assert sum(seen) == 10


def test_leaving_waits_for_a_stuck_sink_only_so_long() -> None:
    async def main(p: RecordedPropagator) -> float:
        await p.attach(CallbackSink(lambda *_: anyio.sleep_forever()))
        p.offer(made("a"))
        return anyio.current_time()

    assert run_propagator(main, Settings(close_timeout_s=5)) == 0


def test_leaving_refuses_what_waits() -> None:
    receipts = []

    async def main(p: RecordedPropagator) -> None:
        receipts.append(p.offer(made("child", parents=(b"p" * 16,))))
        receipts.append(p.offer(made("behind", parents=(b"p" * 16,))))

    run_propagator(main)
    refusals = [receipt.refusal() for receipt in receipts]
    assert all(one is not None and one.code is ErrorCode.SHUTTING_DOWN for one in refusals)


def test_a_closed_propagator_says_so() -> None:
    async def main() -> None:
        closed = Propagator()
        with pytest.raises(UsageError, match="async with"):
            await closed.publish(made("a"))
        async with closed:
            await closed.publish(made("a"))
            with pytest.raises(UsageError, match="open already"):
                await closed.__aenter__()
        for call in (lambda: closed.publish(made("a")), lambda: closed.attach(RecordingSink())):
            with pytest.raises(UsageError, match="not open"):
                await call()
        with pytest.raises(UsageError, match="not open"):
            closed.producer("p")

    anyio.run(main)


# --- numbers


def test_statistics_tell_what_happened_and_what_it_may_cost() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(made("a", id=b"a" * 16), made("b", id=b"b" * 16))
        await p.publish(made("a", id=b"a" * 16))
        await refused(p.publish(Delta("gone", offset(1.0))))
        p.offer(made("child", parents=(b"p" * 16,)))
        await p.publish(Delta("fact", opaque(b"x")))
        await p.wait_visible(3)
        told = p.statistics()
        assert (told.accepted, told.duplicates, told.refused, told.voided) == (3, 1, 1, 0)
        assert (told.pending.pending_deltas, told.queue.depth) == (1, 0)
        assert (told.log.next_offset, told.log.deltas) == (3, 3)
        recorder = told.sinks["recorder"]
        assert (recorder.applied, recorder.lag, recorder.deltas, recorder.state) == (3, 0, 3, "idle")
        print(f"worst case of one sink and all tables: {told.memory_bytes_max / 2**20:.0f} MiB")
        assert told.memory_bytes_max == Settings().memory_bytes_max(1)

    run_propagator(main)


# --- sinks with defects


class Defective(RecordingSink):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(name=f"defective {where}")
        self._where = where

    async def background(self) -> None:
        if self._where == "background":
            await anyio.sleep(1)
            raise ValueError("a defect")
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        if self._where == "aclose":
            raise ValueError("the disk is full")


def test_background_work_that_fails_stops_its_sink_alone() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = await p.attach(Defective("background"))
        await anyio.sleep(2)
        published = await p.publish(made("a"))
        await p.wait_visible(published, sinks=["recorder"])
        refusal = await refused(p.wait_visible(published))
        assert "a defect" in refusal.message
        await p.detach(sink.name)
        await p.settle()

    run_propagator(main)


def test_a_sink_that_cannot_close_is_told_once_all_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"

    async def main(p: RecordedPropagator) -> None:
        await p.attach(Defective("aclose"))
        await p.attach(JsonLinesSink(path))
        await p.publish(made("a"))

    with pytest.raises(ValueError, match="disk is full"):
        run_propagator(main)
    assert len(path.read_text().splitlines()) == 1

    async def with_an_error(p: RecordedPropagator) -> None:
        await main(p)
        raise KeyError("the program's own")

    path.unlink()
    with pytest.raises(KeyError):
        run_propagator(with_an_error)


def test_a_sink_that_is_not_attached_in_the_end_is_closed() -> None:
    class Slow(RecordingSink):
        closed = False

        async def open(self, context: SinkContext) -> None:
            await anyio.sleep(1)

        async def aclose(self) -> None:
            self.closed = True

    async def main(p: RecordedPropagator) -> None:
        first, second, third = Slow(name="slow"), Slow(name="slow"), Slow(name="other")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.attach, first)
            await anyio.sleep(0.5)
            with pytest.raises(UsageError, match="meanwhile"):
                await p.attach(second)
        with pytest.raises(UsageError, match="start 9"):
            await p.attach(third, start=9)
        assert (first.closed, second.closed, third.closed) == (False, True, True)

    run_propagator(main)
