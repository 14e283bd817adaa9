"""A server on a thread, so that tests can run verbs against it in this process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.from_thread

from delta_prop.api.propagator import Propagator
from delta_prop.platform.world import real_world
from delta_prop.server.access import Access
from delta_prop.server.http import HttpPort
from delta_prop.server.server_status import ServerStatus
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop_sinks import CacheSink

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    addresses: list[ServerAddresses] = []
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
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
            addresses.append(ServerAddresses(address.port, http_port))
            ready.set()
            await anyio.to_thread.run_sync(stop.wait)
            service.stop()
            tasks.cancel_scope.cancel()

    thread = threading.Thread(target=anyio.run, args=(run,), name="server")
    thread.start()
    try:
        assert ready.wait(10)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
