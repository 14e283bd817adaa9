"""A service of streams in virtual time, on a simulated disk, that clients reach over a virtual network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import anyio

from delta_prop.client.stream_producer import StreamProducer
from delta_prop.client.stream_subscriber import StreamSubscriber
from delta_prop.hosting.streams import Streams
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.stamp import LogName
from tests.delta_prop.hosting.hosts import NO_RESERVE, keys_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.api.propagator import Propagator
    from delta_prop.platform.ports import World
    from delta_prop_broker.catalogue.stream import Stream

ADDRESS = "server:7373"
STREAM = "orders"


class HeldStreams(Streams):
    """Streams of which a test can hold partitions back: these do not open until they are released."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: dict[int, anyio.Event] = {}

    async def hold(self, stream: str, *partitions: int) -> None:
        """Close all partitions of a stream; these do not open again until `release`."""
        self._held.update({partition: anyio.Event() for partition in partitions})
        await self.alter(stream, {"compress": None})  # closes all: a setting for their next opening

    def release_held(self) -> None:
        """Let all partitions open."""
        for event in self._held.values():
            event.set()
        self._held.clear()

    async def open_partition(self, stream: Stream, number: int) -> Propagator:
        """Open a partition once it is released."""
        if stream.name == STREAM and number in self._held:
            await self._held[number].wait()
        return await super().open_partition(stream, number)


class StreamSite:
    """The hosts of a server of streams and of a client. `run` serves."""

    def __init__(self) -> None:
        self.network = VirtualNetwork(1, host="server")
        self.world: World = virtual_world(1, network=self.network.at("client"))
        self._server_world = virtual_world(2, disk=SimDisk(1), network=self.network)
        self.streams: HeldStreams

    async def run(self, partitions: int, *, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve the stream with this number of partitions, until cancelled."""
        async with HeldStreams(data="data", log=NO_RESERVE, world=self._server_world) as self.streams:
            await self.streams.create(STREAM, partitions)
            service = Service(self.streams, ServerSettings(host="server", allow_anonymous=True))
            async with anyio.create_task_group() as tasks:
                await tasks.start(service.run)
                task_status.started()

    def producer(self, **more: Any) -> StreamProducer:
        return StreamProducer(ADDRESS, **{"name": "shop", "stream": STREAM, "world": self.world} | more)

    def subscriber(self, *topics: str, **more: Any) -> StreamSubscriber:
        options = {"stream": STREAM, "world": self.world} | more
        return StreamSubscriber(ADDRESS, *(topics or ("*",)), **options)

    def logged_keys(self, stream: str = STREAM) -> list[list[str]]:
        """Return the vector ids in the log of each partition that is open, in order."""
        found, opened = self.streams.catalogue.require(stream), self.streams.open_partitions()
        names = [LogName(found.stream_id, number) for number in range(found.partitions)]
        return [keys_in(opened[name]) if name in opened else [] for name in names]


def with_streams(
    scenario: Callable[[StreamSite], Awaitable[None]],
    *,
    partitions: int = 3,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> None:
    """Serve a stream in virtual time, and run a scenario that uses it."""

    async def run() -> None:
        site = StreamSite()
        async with anyio.create_task_group() as tasks:
            await tasks.start(site.run, partitions)
            with anyio.fail_after(3_600):
                await scenario(site)
            tasks.cancel_scope.cancel()

    run_virtual(run, backend=backend)
