"""A server on a thread, so that tests can run verbs against it in this process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.from_thread

from delta_prop.api.propagator import Propagator
from delta_prop.hosting.streams import Streams
from delta_prop.platform.world import real_world
from delta_prop.server.access import Access
from delta_prop.server.http import HttpPort
from delta_prop.server.server_status import ServerStatus
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop_sinks import CacheSink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from delta_prop.platform.ports import Tls

HOST = "127.0.0.1"


class ServerAddresses(NamedTuple):
    """The addresses of a running server: its protocol port and its HTTP port."""

    port: int
    http: int

    @property
    def protocol_address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def http_address(self) -> str:
        return f"{HOST}:{self.http}"


@contextmanager
def served(
    data: Path, *, tokens: bytes | None = None, tls: Tls | None = None, port: int = 0
) -> Iterator[ServerAddresses]:
    """Run a server on a thread until the block ends; yield its addresses."""

    async def run(started: Callable[[ServerAddresses], Awaitable[None]]) -> None:
        world = real_world()
        assert world.network is not None
        access = Access(world, None if tokens is None else lambda: tokens)
        server_status = ServerStatus(version="1.2.3", clock=world.clock)
        async with anyio.create_task_group() as tasks, Propagator(data=data, world=world) as propagator:
            await propagator.attach(CacheSink())
            service = Service(
                propagator, ServerSettings(port=port, drain_timeout_s=1), access=access, tls=tls
            )
            server_status.propagator, server_status.service = propagator, service
            http = HttpPort(world.network, world, server_status, access=access, tls=tls)
            _, http_port = await tasks.start(http.run)
            address = await tasks.start(service.run)
            await started(ServerAddresses(address.port, http_port))
            service.stop()
            tasks.cancel_scope.cancel()

    with _on_thread(run) as addresses:
        yield addresses


@contextmanager
def served_streams(data: Path, **limits: int) -> Iterator[str]:
    """Serve the streams of a directory on a thread until the block ends; yield the address."""
    with hosted_streams(data, None, **limits) as addresses:
        yield addresses.protocol_address


@contextmanager
def hosted_streams(
    data: Path, attach: Callable[[Streams], Awaitable[None]] | None = None, **limits: int
) -> Iterator[ServerAddresses]:
    """Serve the streams of a directory on a thread until the block ends; yield the addresses.

    `attach`: attaches sinks before the server starts. `limits`: settings of the server.
    """

    async def run(started: Callable[[ServerAddresses], Awaitable[None]]) -> None:
        world = real_world()
        assert world.network is not None
        server_status = ServerStatus(version="1.2.3", clock=world.clock)
        async with anyio.create_task_group() as tasks, Streams(data=data, world=world) as streams:
            if attach is not None:
                await attach(streams)
            settings = ServerSettings(port=0, drain_timeout_s=1, allow_anonymous=True, **limits)  # type: ignore[arg-type]
            service = server_status.service = Service(streams, settings)
            server_status.propagator, server_status.streams_open = await streams.open(), streams
            http = HttpPort(world.network, world, server_status, access=Access(world))
            _, http_port = await tasks.start(http.run)
            address = await tasks.start(service.run)
            await started(ServerAddresses(address.port, http_port))
            server_status.propagator = server_status.streams_open = None
            service.stop()
            tasks.cancel_scope.cancel()

    with _on_thread(run) as addresses:
        yield addresses


@contextmanager
def _on_thread(
    run: Callable[[Callable[[ServerAddresses], Awaitable[None]]], Awaitable[None]],
) -> Iterator[ServerAddresses]:
    """Run a server that calls `started` with its addresses, and ends when that returns."""
    addresses: list[ServerAddresses] = []
    ready, stop = threading.Event(), threading.Event()

    async def started(found: ServerAddresses) -> None:
        addresses.append(found)
        ready.set()
        await anyio.to_thread.run_sync(stop.wait)

    thread = threading.Thread(target=anyio.run, args=(run, started), name="server")
    thread.start()
    try:
        assert ready.wait(10)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
