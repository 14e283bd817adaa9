"""`ConnectionWriter`: writes at the end of a tick, and writes left to its loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.platform.tick_callbacks import TickCallbacks
from delta_prop.server.connection_writer import WRITES_PER_TICK, ConnectionWriter
from delta_prop.server.consumer_session import SendChunk
from delta_prop.server.server_context import Counters
from delta_prop.testing import run_virtual
from delta_prop_wire.frames import Ack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


@dataclass
class FakeStream:
    """A stream: `send_now` accepts up to `capacity_bytes`, `send` takes a second; `written` records all."""

    capacity_bytes: int = 1_000
    written: list[bytes] = field(default_factory=list)
    broken: bool = False

    def send_now(self, parts: Sequence[Buffer]) -> int:
        if self.broken:
            raise ConnectionError("broken")
        raw = b"".join(parts)[: self.capacity_bytes]
        self.written.append(raw)
        return len(raw)

    async def send(self, parts: Sequence[Buffer]) -> None:
        await anyio.sleep(1)
        self.written.append(b"late " + b"".join(parts))

    async def send_file(self, part: Any) -> None:
        await anyio.sleep(1)
        self.written.append(b"file")


@dataclass
class FakeSource:
    """A fake connection handler with frames to be written."""

    frames: list[Ack] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    not_before: float | None = None
    ended: bool = False
    take_count: int = 0

    @property
    def deliveries(self) -> FakeSource:
        return self

    def take_answers(self) -> list[Ack]:
        self.take_count += 1
        taken, self.frames = self.frames, []
        return taken

    def next_chunk(self, now: float) -> SendChunk | None:
        is_early = self.not_before is not None and now < self.not_before
        return SendChunk([self.chunks.pop(0)], 1, 1, 1) if self.chunks and not is_early else None

    def is_idle(self) -> bool:
        return not (self.frames or self.chunks or self.ended)

    def wait_s(self, now: float) -> float | None:
        return None if self.not_before is None or now >= self.not_before else self.not_before - now

    def is_finished(self) -> bool:
        return self.ended


class WriterFixture:
    def __init__(self) -> None:
        self.tick, self.stream, self.source = TickCallbacks(anyio.current_time), FakeStream(), FakeSource()
        partition = SimpleNamespace(tick_callbacks=self.tick)
        settings = SimpleNamespace(send_timeout_s=10)
        self.context: Any = SimpleNamespace(
            clock=SimpleNamespace(now=anyio.current_time),
            partition=partition,
            counters=Counters(),
            settings=settings,
        )
        connection: Any = SimpleNamespace(send=lambda ack: b"ack%d " % ack.sequence)
        stream: Any = self.stream
        self.writer = ConnectionWriter(stream, connection, self.context, self.source)

    def write_in_a_tick(self, *chunks: bytes, acks: Sequence[int] = ()) -> None:
        with self.tick:
            self.source.chunks += chunks
            self.source.frames += [Ack(number) for number in acks]
            self.writer.notify()
            self.writer.notify()


def run_scenario(scenario: Any) -> None:
    async def main() -> None:
        fixture = WriterFixture()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fixture.writer.run)
            await anyio.sleep(1)
            await scenario(fixture)
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_tick_ends_with_one_write_of_answers_then_deliveries() -> None:
    async def scenario(fixture: WriterFixture) -> None:
        take_count_before = fixture.source.take_count
        fixture.write_in_a_tick(b"one", acks=[1, 2])
        assert fixture.stream.written == [b"ack1 ack2 one"]
        assert fixture.source.take_count - take_count_before == 1, (
            "an idle source should not be polled a second time"
        )
        await anyio.sleep(1)
        assert fixture.source.take_count - take_count_before == 1, "the loop should not be woken"
        fixture.writer.send(Ack(3))
        assert len(fixture.stream.written) == 1, "outside a tick, the loop should write"
        await anyio.sleep(1)
        assert fixture.stream.written[1:] == [b"ack3 "]
        assert fixture.context.counters.bytes_out == 13 + 5
        assert fixture.context.counters.deltas_out == 1

    run_scenario(scenario)


def test_unwritten_rest_is_left_to_the_loop() -> None:
    async def scenario(fixture: WriterFixture) -> None:
        fixture.stream.capacity_bytes = 4
        fixture.write_in_a_tick(b"first", b"second")
        assert fixture.stream.written == [b"firs"]
        fixture.stream.capacity_bytes = 100
        fixture.write_in_a_tick(acks=[1])
        assert fixture.stream.written == [b"firs"], "nothing should overtake the unwritten rest"
        await anyio.sleep(2)
        assert fixture.stream.written == [b"firs", b"late t", b"ack1 second"]

    run_scenario(scenario)


def test_writes_per_tick_are_bounded() -> None:
    async def scenario(fixture: WriterFixture) -> None:
        fixture.write_in_a_tick(*[b"x"] * (WRITES_PER_TICK + 2))
        assert len(fixture.stream.written) == WRITES_PER_TICK
        await anyio.sleep(1)
        assert len(fixture.stream.written) == WRITES_PER_TICK + 2

    run_scenario(scenario)


def test_connection_broken_in_a_tick_ends_its_own_loop() -> None:
    async def main() -> None:
        fixture = WriterFixture()
        fixture.stream.broken = True

        async def end() -> None:
            await anyio.sleep(1)
            fixture.write_in_a_tick(acks=[1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            with pytest.raises(ConnectionError, match="broken"):
                await fixture.writer.run()

    run_virtual(main)


def test_end_reached_in_a_tick_ends_the_loop() -> None:
    async def main() -> None:
        for flag in ("is_ending", "ended"):
            fixture = WriterFixture()

            async def end(fixture: WriterFixture = fixture, flag: str = flag) -> None:
                await anyio.sleep(1)
                with fixture.tick:
                    fixture.writer.send(Ack(1))
                    setattr(fixture.writer if flag == "is_ending" else fixture.source, flag, True)

            with anyio.fail_after(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(end)
                    await fixture.writer.run()
            assert fixture.stream.written == [b"ack1 "]

    run_virtual(main)


def test_loop_wakes_by_itself_for_delayed_chunks() -> None:
    async def scenario(fixture: WriterFixture) -> None:
        began = anyio.current_time()
        fixture.source.not_before = began + 2
        fixture.write_in_a_tick(b"later", acks=[1])
        assert fixture.stream.written == [b"ack1 "]
        await anyio.sleep(1)
        take_count_before = fixture.source.take_count
        fixture.write_in_a_tick(acks=[2])
        await anyio.sleep(0.5)
        assert fixture.source.take_count == take_count_before + 2, (
            "a wake-up at that time should be scheduled already"
        )
        fixture.source.not_before = began + 1.7
        fixture.write_in_a_tick()
        await anyio.sleep(0.1)
        assert len(fixture.stream.written) == 2
        await anyio.sleep(0.15)
        assert fixture.stream.written[2:] == [b"later"]

    run_scenario(scenario)
