"""The propagator as a program embeds it: sinks come and go, room, listening, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.config import Settings
from delta_prop.embedded import Propagator
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
from tests.delta_prop.support import Gate, expect_refusal, made, refused

if TYPE_CHECKING:
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


# --- the whole way, on every event loop


def test_read_your_own_write_everywhere(backend: dict[str, Any], tmp_path: Path) -> None:
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
        assert p.statistics().log.start_offset == 4
        seen: list[int] = []
        late = CallbackSink(lambda at, _: seen.append(at), name="late")
        refusal = await refused(p.attach(late))
        assert refusal.code is ErrorCode.CURSOR_TOO_OLD
        assert refusal.details["start_offset"] == 4
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
            tasks.start_soon(expect_refusal, lambda: p.wait_visible(published), "disk is full")
        assert p.statistics().sinks["callback"].state == "stopped"
        assert "disk is full" in (p.statistics().sinks["callback"].reason or "")
        await p.wait_visible(published, sinks=["recorder"])  # the others are not held up
        broken.clear()
        p.restart("callback")
        await p.wait_visible(published)

    run_propagator(main)


def test_a_detached_sink_tells_who_waits() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep_forever()))
        published = await p.publish(made("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_refusal, lambda: p.wait_visible(published, timeout_s=100), "detached")
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
        places: dict[str, int | None] = {}

        async def publish(key: str) -> None:
            places[key] = (await p.publish(made(key), timeout_s=1000)).offset

        async with anyio.create_task_group() as tasks:
            for n in range(30):
                tasks.start_soon(publish, f"v{n:02}")
                await anyio.sleep(0.001)
            refusal = p.offer(made("offered")).refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.LOG_FULL
            assert (refusal.details["depth"], refusal.details["capacity"]) == (10, 10)
            assert refusal.details["blocked_by"] == "callback"
            await anyio.sleep(100)
            assert len(places) == 10
            gate.opened.set()
        assert places == {f"v{n:02}": n for n in range(30)}
        await p.settle()
        assert p.recorder.vector_ids == sorted(places)
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


def test_a_subscription_is_waited_for_where_it_is_named() -> None:
    async def main(p: RecordedPropagator) -> None:
        read: list[int] = []

        async def listen(subscription: Subscription) -> None:
            async for one in subscription:
                await anyio.sleep(1)
                read.append(one.offset)

        async with anyio.create_task_group() as tasks, p.subscribe(name="listener") as subscription:
            tasks.start_soon(listen, subscription)
            published = await p.publish(made("a"), made("b"))
            await p.wait_visible(published)
            assert read == []
            await p.wait_visible(published, sinks=["listener", "recorder"])
            assert read == [0, 1]

    run_propagator(main)


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


def test_who_waits_for_room_is_told_that_it_closes() -> None:
    told: list[Refused] = []

    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep(5)))
        await p.publish(made("a"))

        async def publish() -> None:
            told.append(await refused(p.publish(made("b"), timeout_s=100)))

        p._tasks.start_soon(publish)
        await anyio.sleep(1)

    run_propagator(main, Settings(log_deltas_max=1))
    assert [one.code for one in told] == [ErrorCode.SHUTTING_DOWN]


def test_a_propagator_can_be_opened_again_and_begins_anew() -> None:
    async def main() -> None:
        p = RecordedPropagator()
        for _ in range(2):
            p.recorder = RecordingSink()
            async with p:
                assert (await p.publish(made("a"), made("b"))).offset == 0
                await p.settle()
                assert p.recorder.vector_ids == ["a", "b"]

    anyio.run(main)


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
