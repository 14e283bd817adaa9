"""What holds in one partition holds in each of several: folds, dedup, fencing, quarantine, rebuild."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.client.stream_producer import StreamProducer
from delta_prop.client.stream_subscriber import StreamSubscriber
from delta_prop.hosting.streams import Streams
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink, RejectDelta, StorageSink
from delta_prop_wire.delta import Delta, create, dense, sparse_add
from delta_prop_wire.errors import Refused
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.hosting.hosts import keys_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delta_prop.platform.ports import World

COUNTS = (1, 3, 16)
DIMENSION, VECTORS, WRITERS, ROUNDS = 4, 30, 3, 40
POISON = "poison"
SMALL = LogSettings(
    free_bytes_min=0, reserve_bytes=0, segment_bytes_max=4_000, retention_bytes=8_000, checkpoint_frames=20
)


class Site:
    """A service of streams with a storage and a failing sink in each partition; tests stop and start it."""

    def __init__(self, disk: SimDisk, path: Path, count: int) -> None:
        self.disk, self.path, self.count = disk, path, count
        self.network = VirtualNetwork(1, host="server")
        self.client_world: World = virtual_world(9, network=self.network.at("client"))
        self.starts = 0
        self.streams: Streams
        self.service: Service
        self.rejected: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.starts += 1
        world = virtual_world(self.starts, thread_delay_s_max=0.002, network=self.network, disk=self.disk)
        async with (
            Streams(data="data", log=SMALL, world=world) as streams,
            anyio.create_task_group() as tasks,
        ):
            await streams.create("orders", self.count, if_not_exists=True)
            for number in range(self.count):
                p = await streams.open("orders", number)
                await p.attach(StorageSink(self.path / f"store-{self.count}-{number}", name="storage"))
                await p.attach(CallbackSink(self._check, name="picky"))
            service = Service(streams, ServerSettings(host="server", allow_anonymous=True))
            await tasks.start(service.run)
            self.streams, self.service = streams, service
            try:
                yield
            finally:
                service.stop()

    def _check(self, offset: int, delta: Delta) -> None:
        if delta.metadata and delta.metadata.get(POISON):
            self.rejected[delta.vector_id] += 1
            raise RejectDelta(offset, "poison")

    def producer(self, name: str) -> StreamProducer:
        return StreamProducer("server", name=name, stream="orders", world=self.client_world)

    def subscriber(self, **more: Any) -> StreamSubscriber:
        return StreamSubscriber("server", "*", stream="orders", world=self.client_world, **more)

    async def states(self) -> dict[str, tuple[float, ...]]:
        """Return each vector in the stores, after all that is in the logs."""
        found: dict[str, tuple[float, ...]] = {}
        for number in range(self.count):
            p = await self.streams.open("orders", number)
            end = p.statistics().log.next_offset
            await p.wait_visible(end, sinks=["storage"], committed=True, timeout_s=60)
            storage = p.sink("storage")
            async for _, vector_id, state in storage.rows():
                assert partition_of("default", vector_id, self.count) == number
                if state.alive:
                    found[vector_id] = tuple(state.vector.tolist())
        return found


def draw_calls(writer: int) -> list[list[Delta]]:
    """Return a writer's calls: sums that commute on shared vectors, and complete values of its own ones."""
    rng = Random(writer)
    calls = []
    for round_number in range(ROUNDS):
        deltas = []
        for _ in range(rng.choice((1, 1, 4))):
            if rng.random() < 0.6:
                indices, amounts = [rng.randrange(DIMENSION)], [float(rng.randrange(1, 5))]
                deltas.append(Delta(f"sum-{rng.randrange(VECTORS)}", sparse_add(indices, amounts)))
            else:
                values = [float(writer), float(round_number), 0.0, float(rng.randrange(100))]
                metadata = {POISON: True} if rng.random() < 0.1 else None
                vector_id = f"own-{writer}-{rng.randrange(VECTORS)}"
                deltas.append(Delta(vector_id, dense(values), metadata=metadata))
        calls.append(deltas)
    return calls


def expected_states() -> dict[str, tuple[float, ...]]:
    sums: dict[str, np.ndarray[Any, Any]] = {
        f"sum-{number}": np.zeros(DIMENSION, np.float32) for number in range(VECTORS)
    }
    own: dict[str, tuple[float, ...]] = {}
    for writer in range(WRITERS):
        for delta in (one for call in draw_calls(writer) for one in call):
            operation = delta.operation
            assert operation.values is not None
            if operation.indices is None:
                own[delta.vector_id] = tuple(operation.values.tolist())
            else:
                sums[delta.vector_id][operation.indices] += operation.values
    return {name: tuple(vector.tolist()) for name, vector in sums.items()} | own


async def create_sums(site: Site) -> None:
    async with site.producer("first") as p:
        await p.publish(*(Delta(f"sum-{n}", create([0.0] * DIMENSION)) for n in range(VECTORS)))


async def write(site: Site, writer: int) -> None:
    async with site.producer(f"writer-{writer}") as p:
        for call in draw_calls(writer):
            await p.publish(*call, timeout_s=200)
            await anyio.sleep(0.05)


async def read(site: Site, received: dict[int, list[int]]) -> None:
    """Read as a group, and note each acknowledged offset, until cancelled."""
    async with site.subscriber(group="all", ack="manual", start="earliest") as s:
        async for delivered in s:
            received[delivered.partition].append(delivered.offset)
            s.ack(delivered.partition, delivered.offset)


@pytest.mark.parametrize("count", COUNTS)
def test_each_partition_keeps_the_promises_of_one(count: int, tmp_path: Path) -> None:
    disk = SimDisk(count)
    site = Site(disk, tmp_path, count)
    received: dict[int, list[int]] = defaultdict(list)

    async def main() -> None:
        async with anyio.create_task_group() as clients:
            async with site.running():
                await create_sums(site)
                for writer in range(WRITERS):
                    clients.start_soon(write, site, writer)
                await anyio.sleep(0.7)
            async with site.running():  # the clients reconnect, and resend
                await anyio.sleep(0.5)
                site.network.cut("client", "server")
                await anyio.sleep(8)
                site.network.heal("client", "server")
                await anyio.sleep(60)
                clients.cancel_scope.deadline = anyio.current_time() + 1_000
                async with anyio.create_task_group() as readers:
                    readers.start_soon(read, site, received)
                    await anyio.sleep(5)
                    readers.cancel_scope.cancel()
        async with site.running():
            await check(site, received)

    run_virtual(main)


async def check(site: Site, received: dict[int, list[int]]) -> None:
    states = await site.states()
    assert states == expected_states()
    poisoned = {
        delta.vector_id
        for writer in range(WRITERS)
        for call in draw_calls(writer)
        for delta in call
        if delta.metadata
    }
    quarantined: set[str] = set()
    for number in range(site.count):
        p = await site.streams.open("orders", number)
        held = {one.delta.vector_id for one in p.quarantine("picky")}
        assert {partition_of("default", vector_id, site.count) for vector_id in held} <= {number}
        quarantined |= held
        p.rebuild("storage")
    assert quarantined == poisoned
    assert await site.states() == states, "the rebuilt stores must be equal"
    async with site.subscriber(group="all", ack="manual") as s:
        with anyio.move_on_after(20):
            while True:
                delivered = await anext(s)
                received[delivered.partition].append(delivered.offset)
    for number in range(site.count):
        p = await site.streams.open("orders", number)
        end, offsets = p.statistics().log.next_offset, received[number]
        first = offsets[0] if offsets else end  # retention has removed those before
        assert offsets == [*range(first, end)], "each once, in order"
    await check_dedup_and_fencing(site)


async def check_dedup_and_fencing(site: Site) -> None:
    counts = [len(keys_in(await site.streams.open("orders", number))) for number in range(site.count)]
    async with site.producer("fenced") as old:
        await old.publish(*(Delta(f"sum-{n}", sparse_add([0], [0.0])) for n in range(VECTORS)))
        async with site.producer("fenced") as new:
            await new.publish(*(Delta(f"sum-{n}", sparse_add([0], [0.0])) for n in range(VECTORS)))
            with pytest.raises(Refused) as refused:
                await old.publish(Delta("sum-0", sparse_add([0], [1.0])))
            assert refused.value.code is ErrorCode.FENCED
    after = [len(keys_in(await site.streams.open("orders", number))) for number in range(site.count)]
    assert sum(after) - sum(counts) == 2 * VECTORS
