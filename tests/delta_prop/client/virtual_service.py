"""A service in virtual time that clients reach over a virtual network; a test can stop and restart it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.server.access import Access
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from tests.full_log import read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.platform.ports import World
    from delta_prop.testing.network_path import NetworkConditions
    from tests.delta_prop.server.tokens import TokenFile

ADDRESS = "server:7373"


class Site:
    """The hosts of a server and of a client."""

    def __init__(
        self,
        seed: int,
        conditions: NetworkConditions | None,
        server_settings: dict[str, Any],
        propagator_settings: Settings | None = None,
        tokens: TokenFile | None = None,
    ) -> None:
        self.network = VirtualNetwork(seed, conditions, host="server")
        self.world: World = virtual_world(seed, network=self.network.at("client"))
        self.server_world = virtual_world(seed + 1, network=self.network)
        self.server_settings = ServerSettings(host="server", allow_anonymous=True, **server_settings)
        self._propagator_settings = propagator_settings
        self._tokens = tokens
        self.propagator: Propagator
        self.service: Service
        self._scope = anyio.CancelScope()
        self._stopped = anyio.Event()

    async def run(self, *, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, or until the task is cancelled."""
        self._stopped = anyio.Event()
        with anyio.CancelScope() as self._scope:
            async with Propagator(self._propagator_settings, world=self.server_world) as self.propagator:
                access = None if self._tokens is None else Access(self.server_world, self._tokens)
                self.service = Service(self.propagator, self.server_settings, access=access)
                async with anyio.create_task_group() as tasks:
                    await tasks.start(self.service.run)
                    task_status.started()
        self._stopped.set()

    async def stop(self) -> None:
        """Drain the service and wait for its end."""
        self.service.stop()
        await self._stopped.wait()

    def keys(self) -> list[str]:
        """Return the vector ids in the log, in order."""
        log = self.propagator.internals().partition.log
        batches = read_all(log)
        return [key for one in batches if not one.batch.is_control for key in one.batch.keys]


def with_service(
    scenario: Callable[[Site], Awaitable[None]],
    *,
    seed: int = 1,
    conditions: NetworkConditions | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
    log_deltas_max: int = 1_000_000,
    tokens: TokenFile | None = None,
    **settings: Any,
) -> None:
    """Run a service in virtual time and a scenario that uses it; then cancel the service."""

    async def run() -> None:
        site = Site(seed, conditions, settings, Settings(log_deltas_max=log_deltas_max), tokens)
        async with anyio.create_task_group() as tasks:
            await tasks.start(site.run)
            with anyio.fail_after(3_600):
                await scenario(site)
            tasks.cancel_scope.cancel()

    run_virtual(run, backend=backend)
