"""When a commit begins: at once for who waits for each batch, after a group has gathered in a stream.

And where: on the thread, but for small groups that only go into the page cache.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

from delta_prop.committer import (
    CACHED_BYTES_MAX,
    CACHED_S_MAX,
    LINGER_BYTES,
    LINGER_S,
    OFFLOAD_S,
    Committer,
)
from delta_prop.testing import VirtualLoop, run_virtual
from delta_prop.tick_callbacks import TickCallbacks
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.files.segment import Segment
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Delta, Source, dense, make_origin
from delta_prop_wire.encode import encode_batch
from tests.broker.durable import Clock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import File

T = TypeVar("T")
COMMIT_S, TURN_S = 0.01, 0.0005


class SlowThread:
    """Every call takes 10 ms; notes when each began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    async def run(self, function: Callable[[], T]) -> T:
        self.began.append(anyio.current_time())
        await anyio.sleep(COMMIT_S)
        return function()


class BrokenFile:
    """A file that nothing can be written to."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        raise OSError(5, "broken")


class SlowFile:
    """A file whose writes take so long."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.took_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop._now += self.took_s
        return self._file.write(at, parts)


def opened(level: AckLevel = AckLevel.DURABLE) -> DurableLog:
    settings = LogSettings(read_level=level)
    log, _ = DurableLog.open(SimDisk(1), settings=settings, draw=bytes, clock=Clock())
    return log


def append(
    log: DurableLog, committer: Committer, numbers: int = 4, level: AckLevel = AckLevel.DURABLE
) -> None:
    batch = encode_batch(
        [Delta("v", dense([1.0] * numbers))],
        origin=make_origin(1, 0),
        base=log.next_offset + 1,
        ack_level=level,
    )
    log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL)
    committer.notify()


def committing(
    play: Callable[[DurableLog, Committer], Awaitable[None]],
    on_moved: Callable[[DurableLog, Committer], None] = lambda _log, _committer: None,
    level: AckLevel = AckLevel.DURABLE,
    turn: TickCallbacks | None = None,
) -> list[float]:
    """When the commits of a play began, from its start on, s."""

    async def main() -> list[float]:
        log, thread = opened(level), SlowThread()
        committer = Committer(
            log,
            on_moved=lambda: on_moved(log, committer),
            on_failed=lambda *_: pytest.fail("it failed"),
            now=anyio.current_time,
            tick_callbacks=turn or TickCallbacks(anyio.current_time),
        )
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(committer.run, thread)
            await anyio.lowlevel.checkpoint()
            await play(log, committer)
            await committer.drain()
            assert log.synced == log.next_offset
            tasks.cancel_scope.cancel()
        return [round(began - start, 6) for began in thread.began]

    return run_virtual(main)


def test_who_waits_for_each_batch_never_waits_for_a_group() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer)
        await anyio.sleep(1)
        assert log.synced == 5

    def answer(log: DurableLog, committer: Committer) -> None:
        if log.next_offset < 5:
            append(log, committer)

    assert committing(play, answer) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])


def test_what_came_during_a_commit_goes_at_once_where_nothing_more_comes() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer)
        await anyio.sleep(0.005)
        append(log, committer)
        await anyio.sleep(1)

    assert committing(play) == pytest.approx([0, 0.01])


def test_a_stream_gathers_for_so_long_at_most() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        await stream(log, committer, until=COMMIT_S * 2, numbers=4)

    assert committing(play)[:2] == pytest.approx([TURN_S, COMMIT_S + LINGER_S + 2 * TURN_S], abs=2 * TURN_S)


def test_a_stream_gathers_so_many_bytes_at_most() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer)
        await anyio.sleep(COMMIT_S / 2)
        for _ in range(5):
            append(log, committer, LINGER_BYTES // 4 // 4)  # four of them make a group
        await stream(log, committer, until=COMMIT_S * 2, numbers=4)

    assert committing(play)[:2] == pytest.approx([0, COMMIT_S + TURN_S], abs=2 * TURN_S)


LOGGED = AckLevel.LOGGED


def test_what_is_only_written_is_written_at_once_and_the_thread_is_not_asked() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        for level in (LOGGED, LOGGED, AckLevel.MEMORY):  # the first makes the file, on the thread
            append(log, committer, level=level)
            await anyio.sleep(1)
            assert log.written == log.next_offset
        append(log, committer, level=AckLevel.DURABLE)
        await anyio.sleep(1)
        append(log, committer, CACHED_BYTES_MAX // 4 - 100, level=LOGGED)
        await anyio.sleep(1)
        append(log, committer, CACHED_BYTES_MAX // 4, level=LOGGED)
        await anyio.sleep(1)
        assert log.synced < log.written == log.next_offset

    began = committing(play, level=LOGGED)
    assert began == pytest.approx([0, 3, 5, 6])  # the file, a sync, too many bytes, the sync in the end


def test_what_a_turn_appends_is_written_at_its_end_in_one_go() -> None:
    turn, moved = TickCallbacks(lambda: 0.0), list[int]()

    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer, level=LOGGED)
        await anyio.sleep(1)
        moved.clear()
        with turn:
            for _ in range(3):
                append(log, committer, level=LOGGED)
            assert log.written == 1
        assert log.written == 5
        assert moved == [4, 5]  # and what was appended when callers were told
        await anyio.sleep(1)
        with turn:
            append(log, committer, level=AckLevel.DURABLE)
        assert log.written == 5, "what waits for the disk is left to the thread"
        await anyio.sleep(1)
        with turn:
            append(log, committer, level=LOGGED)
            committer.request_sync()
        assert log.written == 6
        await anyio.sleep(1)
        assert log.synced == 7

    def answer(log: DurableLog, committer: Committer) -> None:
        moved.append(log.written)
        if log.next_offset == 4:
            append(log, committer, level=LOGGED)

    assert committing(play, answer, level=LOGGED, turn=turn) == pytest.approx([0, 2, 3])


def test_a_write_that_fails_at_the_end_of_a_turn_is_told_as_any_other() -> None:
    async def main() -> list[str]:
        log, turn, told = opened(LOGGED), TickCallbacks(anyio.current_time), list[str]()
        committer = Committer(
            log,
            on_moved=lambda: None,
            on_failed=lambda refusal, error: told.append(f"{refusal.code.name} {error}"),
            now=anyio.current_time,
            tick_callbacks=turn,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(committer.run, SlowThread())
            append(log, committer, level=LOGGED)
            await anyio.sleep(1)
            segment = log._segments.last
            assert segment is not None
            segment.file = BrokenFile(segment.file)  # type: ignore[arg-type]
            with turn:
                append(log, committer, level=LOGGED)
            assert log.failure is not None
            tasks.cancel_scope.cancel()
        return told

    assert run_virtual(main) == ["LOG_FAILED [Errno 5] broken"]


def test_what_is_removed_waits_for_the_thread() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer, level=LOGGED)
        await anyio.sleep(1)
        log._removed.append(Segment("gone", 0))
        append(log, committer, level=LOGGED)
        await anyio.sleep(1)

    assert committing(play, level=LOGGED)[:2] == pytest.approx([0, 1])


def test_a_disk_that_holds_writers_back_is_left_to_the_thread_for_a_while() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer, level=LOGGED)
        await anyio.sleep(1)
        segment = log._segments.last
        assert segment is not None
        assert segment.file is not None
        slow = segment.file = SlowFile(segment.file)
        for slow.took_s in (CACHED_S_MAX / 2, CACHED_S_MAX * 2, 0.0, 0.0):
            append(log, committer, level=LOGGED)
            await anyio.sleep(OFFLOAD_S / 4)
        await anyio.sleep(OFFLOAD_S)
        append(log, committer, level=LOGGED)
        await anyio.sleep(1)
        assert log.written == log.next_offset

    began = committing(play, level=LOGGED)
    assert len(began) == 4, "the first makes the file, the last one is the sync in the end"
    assert 1 < began[1] < began[2] < 1 + 2 * OFFLOAD_S


def test_a_disk_that_goes_on_holding_writers_back_is_left_to_the_thread_ever_longer() -> None:
    here: list[float] = []

    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer, level=LOGGED)
        await anyio.sleep(1)
        segment = log._segments.last
        assert segment is not None
        assert segment.file is not None
        slow = segment.file = SlowFile(segment.file)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(800):
            before = committer._offload_until
            slow.took_s = CACHED_S_MAX * 2 if loop.time() >= before else 0.0
            append(log, committer, level=LOGGED)
            await anyio.sleep(OFFLOAD_S / 4)
            if committer._offload_until != before:
                here.append(committer._offload_until - loop.time())

    committing(play, level=LOGGED)
    times = [round((seconds + OFFLOAD_S / 4) / OFFLOAD_S) for seconds in here]
    assert times[:4] == [1, 2, 4, 8]


async def stream(log: DurableLog, committer: Committer, *, until: float, numbers: int) -> None:
    """Append in each turn of the loop, and let each take time, as it does in a busy program."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    while loop.time() < until:
        append(log, committer, numbers)
        loop._now += TURN_S
        await anyio.lowlevel.checkpoint()
