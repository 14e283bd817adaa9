"""When a commit begins: at once for who waits for each batch, after a group has gathered in a stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel
import pytest

from delta_prop.committing import GATHER_BYTES, GATHER_S, Committer
from delta_prop.testing import VirtualLoop, run_virtual
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.retention import LogSettings
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Delta, Source, dense, make_origin
from delta_prop_wire.encode import encode_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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


def opened() -> DurableLog:
    log, _ = DurableLog.open(SimDisk(1), settings=LogSettings(), draw=bytes, wall_us=lambda: 1)
    return log


def append(log: DurableLog, committer: Committer, numbers: int = 4) -> None:
    batch = encode_batch(
        [Delta("v", dense([1.0] * numbers))],
        origin=make_origin(1, 0),
        base=log.next_offset + 1,
        ack_level=AckLevel.DURABLE,
    )
    log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL)
    committer.ring()


def committing(
    play: Callable[[DurableLog, Committer], Awaitable[None]],
    on_moved: Callable[[DurableLog, Committer], None] = lambda _log, _committer: None,
) -> list[float]:
    """When the commits of a play began, from its start on, s."""

    async def main() -> list[float]:
        log, thread = opened(), SlowThread()
        committer = Committer(
            log, on_moved=lambda: on_moved(log, committer), on_failed=lambda *_: pytest.fail("it failed")
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

    assert committing(play)[:2] == pytest.approx([TURN_S, COMMIT_S + GATHER_S + 2 * TURN_S], abs=2 * TURN_S)


def test_a_stream_gathers_so_many_bytes_at_most() -> None:
    async def play(log: DurableLog, committer: Committer) -> None:
        append(log, committer)
        await anyio.sleep(COMMIT_S / 2)
        for _ in range(5):
            append(log, committer, GATHER_BYTES // 4 // 4)  # four of them make a group
        await stream(log, committer, until=COMMIT_S * 2, numbers=4)

    assert committing(play)[:2] == pytest.approx([0, COMMIT_S + TURN_S], abs=2 * TURN_S)


async def stream(log: DurableLog, committer: Committer, *, until: float, numbers: int) -> None:
    """Append in each turn of the loop, and let each take time, as it does in a busy program."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    while loop.time() < until:
        append(log, committer, numbers)
        loop._now += TURN_S
        await anyio.lowlevel.checkpoint()
