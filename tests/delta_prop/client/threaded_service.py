"""A service on a thread of its own, for tests of blocking clients."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from delta_prop.api.propagator import Propagator
from delta_prop.platform.world import real_world
from delta_prop.server.access import Access
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop_sinks.storage import StorageSink
from tests.delta_prop.server.tokens import TokenFile
from tests.full_log import read_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from delta_prop.platform.ports import Tls
    from delta_prop.server.connection_handler import ConnectionHandler
    from delta_prop_broker.disk import Disk

T = TypeVar("T")


class Served:
    """A service on a thread of its own."""

    def __init__(self, portal: Any, propagator: Propagator, service: Service) -> None:
        self._portal = portal
        self.propagator = propagator
        self._service = service
        assert service.address is not None
        self.address = f"{service.address.host}:{service.address.port}"

    def keys(self) -> list[str]:
        def read() -> list[str]:
            log = self.propagator.internals().partition.log
            batches = read_all(log)
            return [key for one in batches if not one.batch.is_control for key in one.batch.keys]

        return self._portal.call(read)  # type: ignore[no-any-return]

    def peers(self) -> list[ConnectionHandler]:
        return list(self._service._handlers.values())

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the service's thread."""
        return self._portal.call(function)  # type: ignore[no-any-return]

    def store(self, path: Path) -> None:
        """Attach a storage sink that writes to `path`."""
        self._portal.call(self.propagator.attach, StorageSink(path))

    def drop_connections(self) -> None:
        self.call(lambda: [peer.abort() for peer in self.peers()])


@asynccontextmanager
async def run_service(
    tls: Tls | None,
    propagator: dict[str, Any],
    settings: dict[str, Any],
    tokens: str | None = None,
    open_disk: Callable[[str], Disk] | None = None,
) -> AsyncIterator[tuple[Propagator, Service]]:
    world = real_world()
    if open_disk is not None:
        world = replace(world, open_disk=open_disk)
    async with Propagator(**propagator, world=world) as p, anyio.create_task_group() as tasks:
        access = None if tokens is None else Access(p.internals().partition.world, TokenFile(tokens))
        service = Service(p, ServerSettings(port=0, **settings), access=access, tls=tls)
        await tasks.start(service.run)
        try:
            yield p, service
        finally:
            service.stop()


@contextmanager
def served(
    tls: Tls | None = None,
    *,
    propagator: dict[str, Any] | None = None,
    tokens: str | None = None,
    open_disk: Callable[[str], Disk] | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Run a service on a thread of its own.

    `propagator`: the arguments of the `Propagator`; without them the log is in memory. `tokens`: the text of
    the token file. `open_disk`: opens the disk below its directory; by default the machine's.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(
            run_service(tls, propagator or {}, settings, tokens, open_disk)
        ) as (
            embedded,
            service,
        ),
    ):
        yield Served(portal, embedded, service)
