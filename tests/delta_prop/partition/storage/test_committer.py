"""When a commit starts: at once for a caller that waits for each batch, after a linger in a stream.

A commit runs on the thread, except for small groups that are only written to the page cache.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

from delta_prop.partition.storage.committer import (
    CACHED_BYTES_MAX,
    CACHED_S_MAX,
    LINGER_BYTES,
    LINGER_S,
    OFFLOAD_S,
    Committer,
)
from delta_prop.platform.tick_callbacks import TickCallbacks
from delta_prop.testing import VirtualLoop, run_virtual
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.segments.segment import Segment
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Delta, Source, dense, make_origin
from delta_prop_wire.encode import encode_batch
from tests.broker.durable import Clock, FixedRandomness

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import File
    from delta_prop_wire.errors import Refused

T = TypeVar("T")
COMMIT_S, TURN_S = 0.01, 0.0005


class SlowThread:
    """A thread whose calls take `COMMIT_S`; it records their start times."""

    def __init__(self) -> None:
        self.start_times: list[float] = []

    async def run(self, function: Callable[[], T]) -> T:
        self.start_times.append(anyio.current_time())
        await anyio.sleep(COMMIT_S)
        return function()


class BrokenFile:
    """A file whose writes fail."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        raise OSError(5, "broken")


class SlowFile:
    """A file whose writes take `write_s`."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.write_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop._now += self.write_s
        return self._file.write(at, parts)


class LoopClock:
    """The time of the running loop."""

    def now(self) -> float:
        return anyio.current_time()

    def wall_us(self) -> int:
        return 0


class Listener:
    """A listener that calls `moved`, and keeps the failures."""

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        self.note_moved = moved
        self.failures: list[str] = []

    def note_failed(self, refusal: Refused, error: Exception) -> None:
        self.failures.append(f"{refusal.code.name} {error}")


def open_durable_log(level: AckLevel = AckLevel.DURABLE) -> DurableLog:
    settings = LogSettings(read_level=level)
    log, _ = DurableLog.open(SimDisk(1), settings=settings, randomness=FixedRandomness(), clock=Clock())
    return log


def append_batch(
    log: DurableLog, committer: Committer, dimension: int = 4, level: AckLevel = AckLevel.DURABLE
) -> None:
    batch = encode_batch(
        [Delta("v", dense([1.0] * dimension))],
        origin=make_origin(1, 0),
        base=log.next_offset + 1,
        ack_level=level,
    )
    log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL)
    committer.notify()


def commit_times(
    scenario: Callable[[DurableLog, Committer], Awaitable[None]],
    on_moved: Callable[[DurableLog, Committer], None] = lambda _log, _committer: None,
    level: AckLevel = AckLevel.DURABLE,
    tick: TickCallbacks | None = None,
) -> list[float]:
    """Run a scenario; return the start times of its commits, in seconds from its own start."""

    async def main() -> list[float]:
        log, thread = open_durable_log(level), SlowThread()
        committer = Committer(
            log,
            Listener(lambda: on_moved(log, committer)),
            clock=LoopClock(),
            tick_callbacks=tick or TickCallbacks(anyio.current_time),
        )
        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(committer.run, thread)
            await anyio.lowlevel.checkpoint()
            await scenario(log, committer)
            await committer.drain()
            assert log.synced == log.next_offset
            tasks.cancel_scope.cancel()
        return [round(start_s - start, 6) for start_s in thread.start_times]

    return run_virtual(main)


def test_sequential_batches_commit_without_linger() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer)
        await anyio.sleep(1)
        assert log.synced == 5

    def append_on_move(log: DurableLog, committer: Committer) -> None:
        if log.next_offset < 5:
            append_batch(log, committer)

    assert commit_times(scenario, append_on_move) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])


def test_batch_appended_during_a_commit_is_committed_next_without_linger() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer)
        await anyio.sleep(0.005)
        append_batch(log, committer)
        await anyio.sleep(1)

    assert commit_times(scenario) == pytest.approx([0, 0.01])


def test_stream_lingers_up_to_linger_s() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        await append_stream(log, committer, until=COMMIT_S * 2, dimension=4)

    assert commit_times(scenario)[:2] == pytest.approx(
        [TURN_S, COMMIT_S + LINGER_S + 2 * TURN_S], abs=2 * TURN_S
    )


def test_stream_lingers_up_to_linger_bytes() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer)
        await anyio.sleep(COMMIT_S / 2)
        for _ in range(5):
            append_batch(log, committer, LINGER_BYTES // 4 // 4)  # four of these batches make a group
        await append_stream(log, committer, until=COMMIT_S * 2, dimension=4)

    assert commit_times(scenario)[:2] == pytest.approx([0, COMMIT_S + TURN_S], abs=2 * TURN_S)


LOGGED = AckLevel.LOGGED


def test_logged_level_is_written_at_once_without_the_thread() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        for level in (LOGGED, LOGGED, AckLevel.MEMORY):  # the first commit creates the file, on the thread
            append_batch(log, committer, level=level)
            await anyio.sleep(1)
            assert log.written == log.next_offset
        append_batch(log, committer, level=AckLevel.DURABLE)
        await anyio.sleep(1)
        append_batch(log, committer, CACHED_BYTES_MAX // 4 - 100, level=LOGGED)
        await anyio.sleep(1)
        append_batch(log, committer, CACHED_BYTES_MAX // 4, level=LOGGED)
        await anyio.sleep(1)
        assert log.synced < log.written == log.next_offset

    start_times = commit_times(scenario, level=LOGGED)
    assert start_times == pytest.approx([0, 3, 5, 6])  # file creation, a sync, too many bytes, the final sync


def test_appends_in_a_tick_are_written_together_at_its_end() -> None:
    tick, moved = TickCallbacks(lambda: 0.0), list[int]()

    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer, level=LOGGED)
        await anyio.sleep(1)
        moved.clear()
        with tick:
            for _ in range(3):
                append_batch(log, committer, level=LOGGED)
            assert log.written == 1
        assert log.written == 5
        assert moved == [4, 5]  # the second offset includes the batch that the callback appended
        await anyio.sleep(1)
        with tick:
            append_batch(log, committer, level=AckLevel.DURABLE)
        assert log.written == 5, "a durable batch must be left to the thread"
        await anyio.sleep(1)
        with tick:
            append_batch(log, committer, level=LOGGED)
            committer.request_sync()
        assert log.written == 6
        await anyio.sleep(1)
        assert log.synced == 7

    def append_on_move(log: DurableLog, committer: Committer) -> None:
        moved.append(log.written)
        if log.next_offset == 4:
            append_batch(log, committer, level=LOGGED)

    assert commit_times(scenario, append_on_move, level=LOGGED, tick=tick) == pytest.approx([0, 2, 3])


def test_failed_write_at_end_of_tick_is_reported() -> None:
    async def main() -> list[str]:
        log, tick, listener = open_durable_log(LOGGED), TickCallbacks(anyio.current_time), Listener()
        committer = Committer(
            log,
            listener,
            clock=LoopClock(),
            tick_callbacks=tick,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(committer.run, SlowThread())
            append_batch(log, committer, level=LOGGED)
            await anyio.sleep(1)
            segment = log.segments.last
            assert segment is not None
            segment.file = BrokenFile(segment.file)  # type: ignore[arg-type]
            with tick:
                append_batch(log, committer, level=LOGGED)
            assert log.failure is not None
            tasks.cancel_scope.cancel()
        return listener.failures

    assert run_virtual(main) == ["LOG_FAILED [Errno 5] broken"]


def test_segment_removal_is_left_to_the_thread() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer, level=LOGGED)
        await anyio.sleep(1)
        log.commit_queue.removed_segments.append(Segment("gone", 0))
        append_batch(log, committer, level=LOGGED)
        await anyio.sleep(1)

    assert commit_times(scenario, level=LOGGED)[:2] == pytest.approx([0, 1])


def test_slow_write_offloads_to_the_thread_for_a_while() -> None:
    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer, level=LOGGED)
        await anyio.sleep(1)
        segment = log.segments.last
        assert segment is not None
        assert segment.file is not None
        slow = segment.file = SlowFile(segment.file)
        for write_s in (CACHED_S_MAX / 2, CACHED_S_MAX * 2, 0.0, 0.0):
            slow.write_s = write_s
            append_batch(log, committer, level=LOGGED)
            await anyio.sleep(OFFLOAD_S / 4)
        await anyio.sleep(OFFLOAD_S)
        append_batch(log, committer, level=LOGGED)
        await anyio.sleep(1)
        assert log.written == log.next_offset

    start_times = commit_times(scenario, level=LOGGED)
    assert len(start_times) == 4, (
        "the thread must create the file, do two offloaded commits and the final sync"
    )
    assert 1 < start_times[1] < start_times[2] < 1 + 2 * OFFLOAD_S


def test_slow_writes_in_a_row_lengthen_the_offload() -> None:
    offload_s: list[float] = []

    async def scenario(log: DurableLog, committer: Committer) -> None:
        append_batch(log, committer, level=LOGGED)
        await anyio.sleep(1)
        segment = log.segments.last
        assert segment is not None
        assert segment.file is not None
        slow = segment.file = SlowFile(segment.file)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(800):
            before = committer._offload_until
            slow.write_s = CACHED_S_MAX * 2 if loop.time() >= before else 0.0
            append_batch(log, committer, level=LOGGED)
            await anyio.sleep(OFFLOAD_S / 4)
            if committer._offload_until != before:
                offload_s.append(committer._offload_until - loop.time())

    commit_times(scenario, level=LOGGED)
    multiples = [round((seconds + OFFLOAD_S / 4) / OFFLOAD_S) for seconds in offload_s]
    assert multiples[:4] == [1, 2, 4, 8]


async def append_stream(log: DurableLog, committer: Committer, *, until: float, dimension: int) -> None:
    """Append in each turn of the event loop, and let each turn take time, as in a busy program."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    while loop.time() < until:
        append_batch(log, committer, dimension)
        loop._now += TURN_S
        await anyio.lowlevel.checkpoint()
