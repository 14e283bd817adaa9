"""A server killed repeatedly under load delivers every acknowledged delta exactly once.

Clients notice only lost connections. A proxy holds back the last answers before each kill, so producers
resend batches that were accepted.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from delta_prop import Delta, opaque
from delta_prop.client import ClientSettings, Producer, Subscriber
from tests.delta_prop.server.process import Served, served
from tests.net.proxy import proxy_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from delta_prop.calls.outcomes import PublishAck

PRODUCERS = 2
CALLERS = 32
"""Concurrent callers of each producer."""
WAIT_S_MAX = 60.0
LOAD_S_MAX, UNACKED_S_MAX = 0.3, 0.1
"""Maximum time under load before each kill; maximum time before it without acknowledgements."""
PATIENT = ClientSettings(publish_timeout_s=WAIT_S_MAX)


class ReceivedRows:
    """Vector ids that subscribers received, by offset; no offset repeats."""

    def __init__(self) -> None:
        self.keys: dict[int, str] = {}
        self.row_count = 0
        self.epochs: set[int] = set()  # epochs of the log: each kill starts a new one

    async def follow(self, address: str) -> None:
        """Read from the start of the log."""
        async with Subscriber(address, "*", start="earliest", settings=PATIENT) as subscriber:
            await self._read(subscriber)

    async def resume(self, address: str, rng: random.Random) -> None:
        """Read with one subscriber after the other, each from the cursor of the previous one."""
        cursor = None
        while True:
            async with Subscriber(address, "*", start=cursor or "earliest", settings=PATIENT) as subscriber:
                assert subscriber.cursor is not None
                self.epochs.add(subscriber.cursor.epoch)
                with anyio.move_on_after(rng.uniform(0.05, 0.5)):
                    await self._read(subscriber)
                cursor = subscriber.cursor

    async def _read(self, subscriber: Subscriber) -> None:
        async for offset, _, delta in subscriber:
            assert offset not in self.keys, f"offset {offset} should come once"
            assert not self.keys or offset > next(reversed(self.keys)), "offsets should rise"
            self.keys[offset] = delta.vector_id
            self.row_count += 1


class Load:
    """Producers under load, and the offset of each acknowledged delta."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.is_done = False
        self.reconnects = self.resent = self.lost = 0

    async def publish(self, address: str, name: str) -> None:
        async with Producer(address, name=name, settings=PATIENT) as producer:
            async with anyio.create_task_group() as tasks:
                for caller in range(CALLERS):
                    tasks.start_soon(self._publish_until_done, producer, f"{name}-{caller}")
            self.reconnects += producer.reconnects
            self.resent += producer.statistics().resent
            self.lost += producer.statistics().lost

    async def _publish_until_done(self, producer: Producer, name: str) -> None:
        number = 0
        while not self.is_done:
            keys = [f"{name}-{number}-{row}" for row in range(1 + number % 5)]
            ack = await producer.publish(*(Delta(key, opaque(b"x" * 100)) for key in keys))
            self._note(keys, ack)
            number += 1

    def _note(self, keys: list[str], ack: PublishAck) -> None:
        assert ack.offset is not None
        assert not ack.duplicates
        self.offsets.update((key, ack.offset + row) for row, key in enumerate(keys))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_acknowledged_deltas_are_delivered_exactly_once(tmp_path: Path, full: bool) -> None:
    kills = 20 if full else 2
    levels = ["logged"] * (kills // 2) + ["durable"] * (
        kills - kills // 2 + 1
    )  # kill -9 ends only the process, so written rows survive
    rng = random.Random("kills")
    load, follower, resumed = Load(), ReceivedRows(), ReceivedRows()
    with ExitStack() as servers:

        async def start(port: int) -> Served:
            level = levels.pop(0)

            def enter() -> Served:
                return servers.enter_context(served(tmp_path / "data", "--read-level", level, port=port))

            return await anyio.to_thread.run_sync(enter)

        server = await start(0)
        address = f"127.0.0.1:{server.port}"
        async with (
            proxy_to(("127.0.0.1", server.port)) as proxy,
            anyio.create_task_group() as readers,
        ):
            readers.start_soon(follower.follow, address)
            readers.start_soon(resumed.resume, address, rng)
            async with anyio.create_task_group() as writers:
                for number in range(PRODUCERS):
                    writers.start_soon(load.publish, "{}:{}".format(*proxy.address), f"p{number}")
                for _ in range(kills):
                    await wait_for_more_acks(load)
                    await anyio.sleep(rng.uniform(0, LOAD_S_MAX))
                    proxy.stall("back")  # from here on, acknowledgements do not reach the producer
                    await anyio.sleep(rng.uniform(0, UNACKED_S_MAX))
                    server.kill()
                    proxy.cut()
                    proxy.resume("back")
                    server = await start(server.port)
                await wait_for_more_acks(load)
                load.is_done = True
            await wait_until(lambda: min(len(follower.keys), len(resumed.keys)) >= len(load.offsets))
            await anyio.sleep(0.1)  # no further row may arrive
            readers.cancel_scope.cancel()
    print(
        f"{kills} kills, {load.reconnects} reconnects of producers, {len(load.offsets)} deltas "
        f"acknowledged, {load.resent} batches resent, {follower.row_count} deltas delivered"
    )
    assert load.reconnects >= kills
    assert load.resent
    assert load.lost == 0
    assert max(resumed.epochs) == kills + 1
    for delivered in (follower, resumed):
        offsets = {key: offset for offset, key in delivered.keys.items()}
        assert len(offsets) == len(delivered.keys), "each delta should be delivered once"
        assert offsets == load.offsets


async def wait_for_more_acks(load: Load) -> None:
    """Wait until 500 more deltas are acknowledged, so that clients have reconnected."""
    target = len(load.offsets) + 500
    await wait_until(lambda: len(load.offsets) >= target)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, with a timeout."""
    with anyio.fail_after(WAIT_S_MAX):
        while True:
            if condition():
                return
            await anyio.sleep(0.01)
