"""The embedded propagator: attach, detach, a full log, subscriptions, close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.testing import RecordedPropagator, RecordingSink, run_propagator
from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    IndexSink,
    JsonLinesSink,
    ResidentVectors,
    StopSink,
    StorageSink,
)
from delta_prop_wire.delta import (
    Delta,
    create,
    offset,
    sparse,
)
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import Gate, catch_refusal, expect_refusal, make_delta

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop.delivery.subscription import Subscription
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


# --- publish to sinks, on every event loop


def test_published_delta_is_visible_in_every_sink(backend: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        resident = ResidentVectors()
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


def test_publish_many_known_id_and_cancelled_publish_report_their_outcomes(backend: dict[str, Any]) -> None:
    async def main() -> None:
        async with Propagator() as p:
            rows = np.arange(200, dtype=np.float32).reshape(100, 2)
            matrix_ack = await p.publish_many([f"v{n}" for n in range(100)], rows)
            assert (matrix_ack.offset, matrix_ack.count, matrix_ack.next_offset) == (0, 100, 100)
            first = await p.publish(make_delta("a", id=b"a" * 16))
            second = await p.publish(make_delta("a", id=b"a" * 16))
            assert (first.duplicate, second.duplicate, second.duplicates) == (False, True, {0: 100})
            with anyio.move_on_after(0.01) as scope:
                await p.publish(make_delta("never", parents=(b"?" * 16,)))
            assert scope.cancelled_caught
            assert p.statistics().accepted == 101
            assert p.statistics().pending.pending_deltas == 0

    anyio.run(main, **backend)


def test_exception_in_block_propagates_and_sinks_are_closed(backend: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "vectors.db"

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(StorageSink(path))
            await p.publish(make_delta("kept"))
            raise KeyError("the program's own")

    async def reopen() -> None:
        async with Propagator() as p:
            storage = await p.attach(StorageSink(path))
            assert await storage.get("default", "kept") is not None

    with pytest.raises(KeyError, match="the program's own"):
        anyio.run(main, **backend)
    anyio.run(reopen, **backend)


# --- attach and detach


def test_reattached_sink_resumes_where_it_was_detached() -> None:
    async def main(p: RecordedPropagator) -> None:
        seen: list[int] = []
        await p.attach(CallbackSink(lambda at, _: seen.append(at)))
        await p.publish(make_delta("a"))
        await p.detach("callback")
        assert seen == [0]  # the rows of the log are delivered before the detach
        await p.publish(make_delta("b"))
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
def test_attached_sink_begins_at_its_start_option(start: Any, expected: list[int]) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(make_delta("a"), make_delta("b"))  # a single batch, so that offset 1 is inside it
        seen: list[int] = []
        await p.attach(CallbackSink(lambda at, _: seen.append(at)), start=start)
        await p.publish(make_delta("c"))
        await p.settle()
        assert seen == expected

    run_propagator(main)


def test_attach_below_log_start_is_refused_without_earliest() -> None:
    async def main(p: RecordedPropagator) -> None:
        for n in range(8):
            await p.publish(make_delta(f"v{n}"))
            await p.settle()
        assert p.statistics().log.start_offset == 4
        seen: list[int] = []
        late_sink = CallbackSink(lambda at, _: seen.append(at), name="late")
        refusal = await catch_refusal(p.attach(late_sink))
        assert refusal.code is ErrorCode.CURSOR_TOO_OLD
        assert refusal.details["start_offset"] == 4
        assert 'start="earliest"' in refusal.message
        with pytest.raises(UsageError, match="offset from 0 to 8"):
            await p.attach(late_sink, start=9)
        assert list(p.statistics().sinks) == ["recorder"]
        await p.attach(late_sink, start="earliest")
        await p.settle()
        assert seen == [4, 5, 6, 7]

    run_propagator(main, Settings(log_deltas_max=4))


def test_topics_deliver_matching_rows_once() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = await p.attach(RecordingSink(name="topics"), topics=["ns:docs", "v:b", "op:offset"])
        await p.publish(make_delta("a"), make_delta("b", namespace="docs"), make_delta("c", namespace="docs"))
        await p.publish(Delta("b", offset(1.0), namespace="docs"))
        await p.publish(make_delta("z"))
        await p.settle()
        assert [delivered.offset for delivered in sink.received] == [1, 2, 3]
        with pytest.raises(UsageError, match="no topics"):
            await p.attach(RecordingSink(name="none"), topics=[])

    run_propagator(main)


def test_stopped_sink_refuses_waiters_and_resumes_on_restart() -> None:
    async def main(p: RecordedPropagator) -> None:
        failing = [True]

        async def spend(_at: int, _delta: Delta) -> None:
            await anyio.sleep(1)
            if failing:
                raise StopSink("the disk is full: make room, then restart")

        await p.attach(CallbackSink(spend))
        async with anyio.create_task_group() as tasks:
            published = await p.publish(make_delta("a"))
            tasks.start_soon(expect_refusal, lambda: p.wait_visible(published), "disk is full")
        assert p.statistics().sinks["callback"].state == "stopped"
        assert "disk is full" in (p.statistics().sinks["callback"].reason or "")
        await p.wait_visible(published, sinks=["recorder"])  # other sinks are not blocked
        failing.clear()
        p.restart("callback")
        await p.wait_visible(published)

    run_propagator(main)


def test_detached_sink_refuses_waiters() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep_forever()))
        published = await p.publish(make_delta("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_refusal, lambda: p.wait_visible(published, timeout_s=100), "detached")
            await anyio.sleep(1)
            await p.detach("callback")

    run_propagator(main)


def test_wait_visible_times_out() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep(100)))
        published = await p.publish(make_delta("a"))
        with pytest.raises(TimeoutError):
            await p.wait_visible(published, timeout_s=5)
        with pytest.raises(UsageError, match="no sink named 'x'"):
            await p.wait_visible(published, sinks=["x"])
        await p.wait_visible(published, timeout_s=100)
        assert anyio.current_time() == pytest.approx(100, abs=1)

    run_propagator(main)


def test_sink_can_publish_during_apply() -> None:
    async def main(p: RecordedPropagator) -> None:
        async def follow(at: int, delta: Delta) -> None:
            if at < 20:
                await p.publish(Delta(delta.vector_id, offset(1.0)))  # nested offers cause no recursion
                p.offer(make_delta(f"{delta.vector_id}'"))

        await p.attach(CallbackSink(follow))
        await p.publish(make_delta("v"))
        await p.settle()
        assert [delivered.offset for delivered in p.recorder.received] == list(range(41))

    run_propagator(main)


# --- a full log


def test_full_log_queues_publish_in_order_and_refuses_offer() -> None:
    async def main(p: RecordedPropagator) -> None:
        gate = Gate()
        await p.attach(CallbackSink(gate), batch_deltas=1)
        offsets: dict[str, int | None] = {}

        async def publish(key: str) -> None:
            offsets[key] = (await p.publish(make_delta(key), timeout_s=1000)).offset

        async with anyio.create_task_group() as tasks:
            for n in range(30):
                tasks.start_soon(publish, f"v{n:02}")
                await anyio.sleep(0.001)
            refusal = p.offer(make_delta("offered")).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.LOG_FULL
            assert (refusal.details["depth"], refusal.details["capacity"]) == (10, 10)
            assert refusal.details["blocked_by"] == "callback"
            await anyio.sleep(100)
            assert len(offsets) == 10
            gate.opened.set()
        assert offsets == {f"v{n:02}": n for n in range(30)}
        await p.settle()
        assert p.recorder.vector_ids == sorted(offsets)
        assert gate.seen == list(range(30))

    run_propagator(main, Settings(log_deltas_max=10, merge_deltas_max=100))


def test_publish_timeout_on_full_log_appends_nothing() -> None:
    async def main(p: RecordedPropagator) -> None:
        gate = Gate()
        await p.attach(CallbackSink(gate))
        await p.publish(make_delta("a"), make_delta("b"))
        refusal = await catch_refusal(p.publish(make_delta("late"), timeout_s=5))
        assert refusal.code is ErrorCode.LOG_FULL
        assert refusal.retry_after_ms
        assert anyio.current_time() == pytest.approx(5, abs=0.1)
        with anyio.move_on_after(1) as scope:  # the call is cancelled in the admission queue
            await p.publish(make_delta("never"))
        assert scope.cancelled_caught
        gate.opened.set()
        await p.settle()
        await p.publish(make_delta("c"))
        await p.settle()
        assert p.recorder.vector_ids == ["a", "b", "c"]

    run_propagator(main, Settings(log_deltas_max=2))


def test_sink_not_required_does_not_hold_the_log() -> None:
    async def main(p: RecordedPropagator) -> None:
        gate = Gate()
        await p.attach(CallbackSink(gate), required=False)
        for n in range(50):
            await p.publish(make_delta(f"v{n}"))
            await p.wait_visible(n + 1, sinks=["recorder"])
        gate.opened.set()
        refusal = await catch_refusal(p.wait_visible(50))
        assert refusal.code is ErrorCode.CURSOR_TOO_OLD

    run_propagator(main, Settings(log_deltas_max=5, mailbox_deltas_max=3))


# --- subscriptions


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 3), (2, 2)])
def test_subscription_begins_at_its_start_option(start: Any, first: int) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.publish(make_delta("a"), make_delta("b"), make_delta("c"))
        subscription = p.subscribe(start=start)  # the end at `subscribe`, not at the first read
        await p.publish(make_delta("d"))
        async with subscription:
            delivered = await anext(subscription)
            assert delivered.offset == first
            assert delivered.lamport == first + 1
            assert delivered.delta.vector_id == "abcd"[first]

    run_propagator(main)


def test_slow_reader_blocks_no_other_and_gets_cursor_too_old() -> None:
    async def main(p: RecordedPropagator) -> None:
        async with p.subscribe(start="earliest") as subscription:
            await p.publish(make_delta("first"))
            assert (await anext(subscription)).offset == 0
            for n in range(30):
                await p.publish(make_delta(f"v{n}"))
                await p.settle()
            lost = await catch_refusal(_read_all(subscription))
            assert lost.code is ErrorCode.CURSOR_TOO_OLD
        assert len(p.recorder.received) == 31

    run_propagator(main, Settings(log_deltas_max=5, mailbox_deltas_max=2))


async def _read_all(subscription: Subscription) -> None:
    async for _ in subscription:
        pass


def test_slow_reader_gets_every_matching_row_of_the_log() -> None:
    async def main(p: RecordedPropagator) -> None:
        read: list[int] = []
        async with p.subscribe("op:create", start="earliest") as subscription:
            for n in range(300):
                await p.publish(make_delta(f"v{n}"), make_delta(f"w{n}"))
                await p.publish(Delta(f"v{n}", offset(1.0)))
            async for delivered in subscription:
                read.append(delivered.offset)
                await anyio.sleep(0.001)
                if len(read) == 600:
                    break
        assert read == [number for number in range(900) if number % 3 != 2]
        assert list(p.statistics().sinks) == ["recorder"]

    run_propagator(main, Settings(mailbox_deltas_max=10))


def test_wait_visible_includes_a_subscription_only_by_name() -> None:
    async def main(p: RecordedPropagator) -> None:
        read: list[int] = []

        async def listen(subscription: Subscription) -> None:
            async for delivered in subscription:
                await anyio.sleep(1)
                read.append(delivered.offset)

        async with anyio.create_task_group() as tasks, p.subscribe(name="listener") as subscription:
            tasks.start_soon(listen, subscription)
            published = await p.publish(make_delta("a"), make_delta("b"))
            await p.wait_visible(published)
            assert read == []
            await p.wait_visible(published, sinks=["listener", "recorder"])
            assert read == [0, 1]

    run_propagator(main)


def test_iteration_ends_when_subscription_closes() -> None:
    async def main(p: RecordedPropagator) -> None:
        subscription = p.subscribe()
        read: list[str] = []

        async def listen() -> None:
            async for delivered in subscription:
                read.append(delivered.delta.vector_id)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.sleep(1)
            await p.publish(make_delta("a"))
            await anyio.sleep(1)
            await subscription.close()
        assert read == ["a"]
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)

    run_propagator(main)


def test_iteration_ends_when_propagator_closes() -> None:
    read: list[str] = []

    async def main(p: RecordedPropagator) -> None:
        async def listen() -> None:
            async for delivered in p.subscribe(start="earliest"):
                read.append(delivered.delta.vector_id)

        p._tasks.start_soon(listen)
        await p.publish(make_delta("a"))
        await anyio.sleep(1)

    run_propagator(main)
    assert read == ["a"]


# --- close


def test_close_delivers_remaining_rows_to_sinks() -> None:
    seen: list[int] = []

    async def main(p: RecordedPropagator) -> None:
        async def slow(delivery: Delivery) -> None:
            await anyio.sleep(0.5)
            seen.append(delivery.count)

        await p.attach(CallbackSink(slow, per="delivery"))
        for n in range(10):
            p.offer(make_delta(f"v{n}"))

    run_propagator(main)
    assert sum(seen) == 10


def test_close_with_stuck_sink_ends() -> None:
    async def main(p: RecordedPropagator) -> float:
        await p.attach(CallbackSink(lambda *_: anyio.sleep_forever()))
        p.offer(make_delta("a"))
        return anyio.current_time()

    assert run_propagator(main, Settings(close_timeout_s=5)) == 0


def test_close_refuses_pending_deltas() -> None:
    receipts = []

    async def main(p: RecordedPropagator) -> None:
        receipts.append(p.offer(make_delta("child", parents=(b"p" * 16,))))
        receipts.append(p.offer(make_delta("second child", parents=(b"p" * 16,))))

    run_propagator(main)
    refusals = [receipt.refusal() for receipt in receipts]
    assert all(refusal is not None and refusal.code is ErrorCode.SHUTTING_DOWN for refusal in refusals)


def test_close_refuses_publish_that_waits_for_log_space() -> None:
    refusals: list[Refused] = []

    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep(5)))
        await p.publish(make_delta("a"))

        async def publish() -> None:
            refusals.append(await catch_refusal(p.publish(make_delta("b"), timeout_s=100)))

        p._tasks.start_soon(publish)
        await anyio.sleep(1)

    run_propagator(main, Settings(log_deltas_max=1))
    assert [refusal.code for refusal in refusals] == [ErrorCode.SHUTTING_DOWN]


def test_reopened_propagator_starts_empty() -> None:
    async def main() -> None:
        p = RecordedPropagator()
        for _ in range(2):
            p.recorder = RecordingSink()
            async with p:
                assert (await p.publish(make_delta("a"), make_delta("b"))).offset == 0
                await p.settle()
                assert p.recorder.vector_ids == ["a", "b"]

    anyio.run(main)


def test_calls_on_closed_propagator_are_rejected() -> None:
    async def main() -> None:
        closed = Propagator()
        with pytest.raises(UsageError, match="async with"):
            await closed.publish(make_delta("a"))
        async with closed:
            await closed.publish(make_delta("a"))
            with pytest.raises(UsageError, match="open already"):
                await closed.__aenter__()
        for call in (lambda: closed.publish(make_delta("a")), lambda: closed.attach(RecordingSink())):
            with pytest.raises(UsageError, match="not open"):
                await call()
        with pytest.raises(UsageError, match="not open"):
            closed.producer("p")

    anyio.run(main)


# --- sinks with defects


class FaultySink(RecordingSink):
    """A sink that fails in the given method."""

    def __init__(self, faulty_method: str) -> None:
        super().__init__(name=f"defective {faulty_method}")
        self._faulty_method = faulty_method

    async def background(self) -> None:
        if self._faulty_method == "background":
            await anyio.sleep(1)
            raise ValueError("a defect")
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        if self._faulty_method == "aclose":
            raise ValueError("the disk is full")


def test_failed_background_work_stops_only_its_sink() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = await p.attach(FaultySink("background"))
        await anyio.sleep(2)
        published = await p.publish(make_delta("a"))
        await p.wait_visible(published, sinks=["recorder"])
        refusal = await catch_refusal(p.wait_visible(published))
        assert "a defect" in refusal.message
        await p.detach(sink.name)
        await p.settle()

    run_propagator(main)


def test_sink_close_error_is_raised_after_all_sinks_close(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"

    async def main(p: RecordedPropagator) -> None:
        await p.attach(FaultySink("aclose"))
        await p.attach(JsonLinesSink(path))
        await p.publish(make_delta("a"))

    with pytest.raises(ValueError, match="disk is full"):
        run_propagator(main)
    assert len(path.read_text().splitlines()) == 1

    async def main_with_error(p: RecordedPropagator) -> None:
        await main(p)
        raise KeyError("the program's own")

    path.unlink()
    with pytest.raises(KeyError):
        run_propagator(main_with_error)


def test_sink_whose_attach_fails_is_closed() -> None:
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
