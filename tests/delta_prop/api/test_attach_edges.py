"""Attach and detach in rare cases: holds on the log, names, cursors that pass rows of other topics,
shared vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from delta_prop import Delta, Dot, Priority, Propagator, Refused, Settings, UsageError, create
from delta_prop.api.propagator import PublishAck
from delta_prop.sinks import (
    CacheSink,
    CallbackSink,
    Delivery,
    IndexSink,
    JsonLinesSink,
    ResidentVectors,
    StorageSink,
)
from delta_prop.testing import run_propagator
from delta_prop_wire.spec import ErrorCode

SMALL = Settings(log_deltas_max=20)


def make_delta(key: str, **more: object) -> Delta:
    return Delta(key, create([1.0]), **more)  # type: ignore[arg-type]


class GatedSink(CallbackSink):
    """A sink that applies only while open, and may fail to close."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(lambda _offset, _delta: None, name="gate")
        self.opened = anyio.Event()
        self.fails = fails

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await self.opened.wait()
        await super().apply(deliveries)

    async def aclose(self) -> None:
        await super().aclose()
        if self.fails:
            raise OSError("no space left")


def test_failed_detach_leaves_no_hold_on_the_log() -> None:
    async def main(p: Propagator) -> None:
        gate = await p.attach(GatedSink(fails=True))
        gate.opened.set()
        await p.publish(make_delta("a"))
        with pytest.raises(OSError, match="no space"):
            await p.detach("gate")
        for number in range(50):
            await p.publish(make_delta(f"v{number}"), timeout_s=1)
        await p.attach(CallbackSink(lambda _offset, _delta: None, name="gate"), start="latest")

    run_propagator(main, SMALL)


def test_sink_name_is_taken_until_detach_ends() -> None:
    async def main(p: Propagator) -> None:
        gate = await p.attach(GatedSink())
        await p.publish(make_delta("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.detach, "gate")
            await anyio.sleep(0.1)
            with pytest.raises(UsageError, match="gate"):
                await p.attach(GatedSink())
            with pytest.raises(UsageError, match="detached already"):
                await p.detach("gate")
            gate.opened.set()
        await p.attach(GatedSink())

    run_propagator(main, SMALL)


def test_sink_reattaches_after_log_removed_rows_of_other_topics(tmp_path: Path) -> None:
    async def main() -> None:
        async with Propagator(SMALL) as p:
            storage = await p.attach(StorageSink(tmp_path / "a.db"), topics="ns:a")
            first = await p.publish(make_delta("a", namespace="a"))
            await p.wait_visible(first, committed=True)
            for number in range(50):
                await p.publish(make_delta(f"b{number}", namespace="b"))
            for _ in range(2):
                await p.detach(storage.name)
                reattached = await p.attach(StorageSink(tmp_path / "a.db"), topics="ns:a")
            last = await p.publish(make_delta("a2", namespace="a"))
            await p.wait_visible(last, committed=True)
            assert [key async for _, key, _ in reattached.rows()] == ["a", "a2"]

    anyio.run(main)


def test_sinks_that_keep_up_do_not_hold_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with Propagator(SMALL) as p:
            resident = ResidentVectors()
            await p.attach(StorageSink(tmp_path / "a.db", resident=resident))
            await p.attach(IndexSink(resident=resident))
            await p.attach(CacheSink())
            await p.attach(JsonLinesSink(tmp_path / "a.jsonl"))
            await p.attach(CallbackSink(lambda _offset, _delta: None))
            for number in range(100):
                last = await p.publish(make_delta(f"v{number}"), timeout_s=5)
            await p.wait_visible(last, committed=True, timeout_s=5)
            assert p.statistics().log.dropped >= 80
            assert {sink.committed_offset for sink in p.statistics().sinks.values()} == {100}

    anyio.run(main)


@pytest.mark.parametrize("content", [b"precious text", b"text\n", b'{"a":1}\nlast words', b"\x00\x01"])
def test_foreign_file_is_rejected_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)

    async def main() -> None:
        async with Propagator() as p:
            with pytest.raises(UsageError, match="did not write"):
                await p.attach(JsonLinesSink(path))

    anyio.run(main)
    assert path.read_bytes() == content


def test_sinks_that_share_vectors_need_the_same_topics(tmp_path: Path) -> None:
    async def main() -> None:
        async with Propagator() as p:
            resident = ResidentVectors()
            await p.attach(StorageSink(tmp_path / "a.db", resident=resident), topics="ns:a")
            with pytest.raises(UsageError, match="same topics"):
                await p.attach(IndexSink(resident=resident))
            await p.attach(IndexSink(resident=resident), topics=["ns:a"])

    anyio.run(main)


def test_waiting_children_block_neither_others_nor_parent() -> None:
    async def main(p: Propagator) -> float:
        producer = p.producer("root")
        parent = Dot(producer.offer(make_delta("first")).result().dot.origin, 2)  # type: ignore[union-attr]
        acks: list[PublishAck] = []

        async def wait(number: int) -> None:
            acks.append(await p.publish(make_delta(f"c{number}", parents=(parent,)), timeout_s=60))

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(wait, number)
            await anyio.sleep(1)
            start_s = anyio.current_time()
            await p.publish(make_delta("independent"), timeout_s=1)
            publish_s = anyio.current_time() - start_s
            await producer.publish(make_delta("parent"))
        assert len(acks) == 40
        return publish_s

    assert run_propagator(main, Settings(pending_deltas_max=16)) < 0.1


def test_admission_queue_serves_urgent_first_and_starves_none() -> None:
    async def main(p: Propagator) -> list[str]:
        gate = await p.attach(GatedSink())
        for number in range(20):
            await p.publish(make_delta(f"v{number}"))
        with pytest.raises(Refused) as caught:
            await p.publish(make_delta("refused"), timeout_s=0.05)
        assert caught.value.code is ErrorCode.LOG_FULL
        order: list[str] = []

        async def publish(key: str, priority: Priority) -> None:
            await p.publish(make_delta(key, priority=priority), timeout_s=60)
            order.append(key)

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(publish, f"low{number}", Priority.LOW)
            await anyio.sleep(0.2)
            tasks.start_soon(publish, "urgent", Priority.CRITICAL)
            await anyio.sleep(0.2)
            gate.opened.set()
        return order

    order = run_propagator(main, SMALL)
    assert order.index("urgent") <= 2
    assert len(order) == 51


def test_sink_that_detaches_itself_is_removed_in_time() -> None:
    async def main(p: Propagator) -> float:
        async def leave(_offset: int, _delta: Delta) -> None:
            await p.detach("leaver")

        await p.attach(CallbackSink(leave, name="leaver"))
        start_s = anyio.current_time()
        await p.publish(make_delta("a"))
        with anyio.move_on_after(60):
            while "leaver" in p.statistics().sinks:  # noqa: ASYNC110 - virtual time
                await anyio.sleep(0.1)
        return anyio.current_time() - start_s

    assert run_propagator(main, Settings(close_timeout_s=1.0)) < 10
