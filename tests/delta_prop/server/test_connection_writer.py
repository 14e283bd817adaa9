"""Writes of a connection writer at the end of a turn, and those left to its loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.server.connection_writer import WRITES_PER_TICK, ConnectionWriter
from delta_prop.server.consumer_session import SendChunk
from delta_prop.server.counters import Counters
from delta_prop.testing import run_virtual
from delta_prop.tick_callbacks import TickCallbacks
from delta_prop_wire.frames import Ack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


@dataclass
class Wire:
    """Takes so many bytes at once; what it waits for is taken after a second. `said` is what came."""

    room: int = 1_000
    said: list[bytes] = field(default_factory=list)
    broken: bool = False

    def send_now(self, parts: Sequence[Buffer]) -> int:
        if self.broken:
            raise ConnectionError("broken")
        raw = b"".join(parts)[: self.room]
        self.said.append(raw)
        return len(raw)

    async def send(self, parts: Sequence[Buffer]) -> None:
        await anyio.sleep(1)
        self.said.append(b"late " + b"".join(parts))

    async def send_file(self, part: Any) -> None:
        await anyio.sleep(1)
        self.said.append(b"file")


@dataclass
class Source:
    """A fake peer with frames to be written."""

    frames: list[Ack] = field(default_factory=list)
    sendings: list[bytes] = field(default_factory=list)
    not_before: float | None = None
    ended: bool = False
    asked: int = 0

    def take_answers(self) -> list[Ack]:
        self.asked += 1
        told, self.frames = self.frames, []
        return told

    def next_chunk(self, now: float) -> SendChunk | None:
        early = self.not_before is not None and now < self.not_before
        return SendChunk([self.sendings.pop(0)], 1, 1, 1) if self.sendings and not early else None

    def is_idle(self) -> bool:
        return not (self.frames or self.sendings or self.ended)

    def wait_s(self, now: float) -> float | None:
        return None if self.not_before is None or now >= self.not_before else self.not_before - now

    def is_finished(self) -> bool:
        return self.ended


class Play:
    def __init__(self) -> None:
        self.turn, self.wire, self.source = TickCallbacks(anyio.current_time), Wire(), Source()
        internals = SimpleNamespace(tick_callbacks=self.turn)
        settings = SimpleNamespace(send_timeout_s=10)
        self.hub: Any = SimpleNamespace(
            now=anyio.current_time, internals=internals, counters=Counters(), settings=settings
        )
        connection: Any = SimpleNamespace(send=lambda ack: b"ack%d " % ack.sequence)
        stream: Any = self.wire
        self.outbox = ConnectionWriter(stream, connection, self.hub, self.source)

    def in_a_turn(self, *sendings: bytes, acks: Sequence[int] = ()) -> None:
        with self.turn:
            self.source.sendings += sendings
            self.source.frames += [Ack(number) for number in acks]
            self.outbox.notify()
            self.outbox.notify()


def played(play: Any) -> None:
    async def main() -> None:
        given = Play()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(given.outbox.run)
            await anyio.sleep(1)
            await play(given)
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_a_turn_is_told_at_its_end_by_one_call_answers_first() -> None:
    async def play(given: Play) -> None:
        asked = given.source.asked
        given.in_a_turn(b"one", acks=[1, 2])
        assert given.wire.said == [b"ack1 ack2 one"]
        assert given.source.asked - asked == 1, "it rests then"
        await anyio.sleep(1)
        assert given.source.asked - asked == 1, "the loop was not woken"
        given.outbox.send(Ack(3))
        assert len(given.wire.said) == 1, "not in a turn: by the loop"
        await anyio.sleep(1)
        assert given.wire.said[1:] == [b"ack3 "]
        assert given.hub.counters.bytes_out == 13 + 5
        assert given.hub.counters.deltas_out == 1

    played(play)


def test_what_the_system_does_not_take_at_once_is_left_to_the_loop() -> None:
    async def play(given: Play) -> None:
        given.wire.room = 4
        given.in_a_turn(b"first", b"second")
        assert given.wire.said == [b"firs"]
        given.wire.room = 100
        given.in_a_turn(acks=[1])
        assert given.wire.said == [b"firs"], "nothing overtakes what is left"
        await anyio.sleep(2)
        assert given.wire.said == [b"firs", b"late t", b"ack1 second"]

    played(play)


def test_one_connection_gets_so_many_calls_in_a_turn() -> None:
    async def play(given: Play) -> None:
        given.in_a_turn(*[b"x"] * (WRITES_PER_TICK + 2))
        assert len(given.wire.said) == WRITES_PER_TICK
        await anyio.sleep(1)
        assert len(given.wire.said) == WRITES_PER_TICK + 2

    played(play)


def test_a_connection_that_broke_in_a_turn_ends_its_own_loop() -> None:
    async def main() -> None:
        given = Play()
        given.wire.broken = True

        async def end() -> None:
            await anyio.sleep(1)
            given.in_a_turn(acks=[1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            with pytest.raises(ConnectionError, match="broken"):
                await given.outbox.run()

    run_virtual(main)


def test_what_is_over_at_the_end_of_a_turn_ends_the_loop() -> None:
    async def main() -> None:
        for how in ("is_ending", "ended"):
            given = Play()

            async def end(given: Play = given, how: str = how) -> None:
                await anyio.sleep(1)
                with given.turn:
                    given.outbox.send(Ack(1))
                    setattr(given.outbox if how == "is_ending" else given.source, how, True)

            with anyio.fail_after(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(end)
                    await given.outbox.run()
            assert given.wire.said == [b"ack1 "]

    run_virtual(main)


def test_the_loop_wakes_by_itself_when_there_is_more_to_deliver() -> None:
    async def play(given: Play) -> None:
        began = anyio.current_time()
        given.source.not_before = began + 2
        given.in_a_turn(b"later", acks=[1])
        assert given.wire.said == [b"ack1 "]
        await anyio.sleep(1)
        asked = given.source.asked
        given.in_a_turn(acks=[2])
        await anyio.sleep(0.5)
        assert given.source.asked == asked + 2, "it waits for that time already"
        given.source.not_before = began + 1.7
        given.in_a_turn()
        await anyio.sleep(0.1)
        assert len(given.wire.said) == 2
        await anyio.sleep(0.15)
        assert given.wire.said[2:] == [b"later"]

    played(play)
