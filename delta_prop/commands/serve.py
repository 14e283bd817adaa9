"""`serve`: one data directory behind a port for 0xD3 and one for HTTP, until a signal ends it.

Exactly one line goes to standard output, once clients are accepted; all else is the log on standard error.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from shlex import quote
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.commands import edge
from delta_prop.commands.configure import load
from delta_prop.commands.leftovers import removing_if_failed
from delta_prop.commands.logs import logging_to
from delta_prop.commands.startup import judge, listening
from delta_prop.configuration.values import placed
from delta_prop.embedded import Propagator
from delta_prop.refusals import HoldsOtherData
from delta_prop.server.http import HttpPort
from delta_prop.server.overview import Overview
from delta_prop.server.service import Service
from delta_prop.world import real_world
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping

    from anyio.abc import TaskGroup

    from delta_prop.commands.startup import Startable
    from delta_prop.configuration import Configuration
    from delta_prop.ports import World

OK = 0
logger = logging.getLogger("delta_prop.serve")


def configured(
    file: str | None, options: Mapping[str, Mapping[str, Any]], *, rebuild: Collection[str] = ()
) -> Configuration:
    """What is to be served: a file and the environment, and what options say instead.

    `options`: values by section, "" for the top, and key; None: not given. `rebuild`: names of sinks. Raises
    UsageError.
    """
    configuration = load(file)
    changes: dict[str, Any] = {}
    for section, keys in options.items():
        given = {name: value for name, value in keys.items() if value is not None}
        try:
            changes |= {section: replace(getattr(configuration, section), **given)} if section else given
        except UsageError as error:
            raise placed(error, section, keys) from None
    sinks = configuration.sinks
    for name in rebuild:
        if name not in [one.name for one in sinks]:
            known = ", ".join(one.name for one in sinks) or "none"
            raise UsageError(
                f"--rebuild {name!r}: no sink of the configuration has that name; there are {known}"
            )
    changes["sinks"] = tuple(replace(one, rebuild=one.rebuild or one.name in rebuild) for one in sinks)
    configuration = replace(configuration, **changes)
    if configuration.data is None:
        raise UsageError("no data directory: give --data DIR, or `data` in the configuration")
    return configuration


async def serve(configuration: Configuration, *, command: str = "delta-prop serve") -> int:
    """Serve until a signal. `command`: what was typed, for whoever has to type more.

    Raises UsageError, SinksHoldOtherData, LogBusy, LogDamaged, FormatUnknown, OSError.
    """
    wanted = configuration.logging
    with (
        logging_to(edge.standard_error(), level=wanted.level, format_=wanted.format),
        edge.signals() as asked,
    ):
        async with anyio.create_task_group() as tasks:
            world = real_world()
            serving = _Serving(configuration, world, await judge(configuration, world), command)
            tasks.start_soon(serving.obey, asked)
            await serving.run()
            tasks.cancel_scope.cancel()
    return OK


class SinksHoldOtherData(DeltaPropError):
    """Sinks hold what the log does not have, as beside a log from a backup."""

    def __init__(
        self, refusals: Mapping[str, HoldsOtherData], command: str, paths: Mapping[str, str]
    ) -> None:
        """`paths`: where sinks have their data, of those that have a place."""
        what = "; ".join(one.what for one in refusals.values())
        cures = [
            f"move {paths.get(name, 'its data')} away, as sink {name!r} cannot be rebuilt and begins anew "
            "then"
            for name, one in refusals.items()
            if not one.rebuilds
        ]
        options = " ".join(f"--rebuild {quote(name)}" for name, one in refusals.items() if one.rebuilds)
        start = f"{command} {options}".rstrip()
        replaces = ", which replaces what is held by what the log has" if options else ""
        cures.append(f"start with `{start}`{replaces}")
        super().__init__(
            f"{what}: nothing was rebuilt; if this is the right directory, {', then '.join(cures)}"
        )


class _Serving:
    """One server from its start to its end."""

    def __init__(self, configuration: Configuration, world: World, judged: Startable, command: str) -> None:
        self._configuration = configuration
        self._world = world
        self._access, self._sinks = judged
        self._command = command
        self._overview = Overview(version=version("delta-prop"), now=world.clock.now)
        self._whole = anyio.CancelScope()
        self._service: Service | None = None

    async def run(self) -> None:
        """HTTP from the first moment on, then the log, the sinks, the port for 0xD3; back in that order."""
        with self._whole:
            async with anyio.create_task_group() as tasks:
                http_port = await self._open_http(tasks)
                await self._serve(http_port)
                tasks.cancel_scope.cancel()
        logger.info("ended")

    async def obey(self, asked: AsyncIterator[int]) -> None:
        """Do what signals ask: read tokens anew; drain and end, at the second one at once."""
        ending = False
        async for number in asked:
            if number == edge.RELOAD_SIGNAL:
                await self._access.reload()
            elif ending:
                edge.end_at_once(number)
            else:
                ending = True
                logger.info(
                    "ending: what was taken is answered, clients are told; another signal ends it at once"
                )
                self._end()

    def _end(self) -> None:
        if self._service is None:  # nobody was accepted yet
            self._whole.cancel()
        else:
            self._service.stop()

    async def _open_http(self, tasks: TaskGroup) -> int:
        """Tell from now on how it goes; the port."""
        server, network = self._configuration.server, self._world.network
        assert network is not None
        port = HttpPort(
            network,
            self._world,
            self._overview,
            access=self._access,
            host=server.host,
            port=server.http_port,
            tls=self._configuration.served_tls,
            connections_max=server.http_connections_max,
        )
        with listening("http_port", server.host):
            _, http_port = await tasks.start(port.run)
        return int(http_port)

    async def _serve(self, http_port: int) -> None:
        """Open, attach, listen, say so, and go on until the service ends."""
        data = self._configuration.data
        assert data is not None
        with removing_if_failed(data) as keep:
            await self._serve_log(http_port, keep)

    async def _serve_log(self, http_port: int, keep: Callable[[], None]) -> None:
        wanted, overview = self._configuration, self._overview
        async with Propagator(wanted.settings, data=wanted.data, log=wanted.log, world=self._world) as p:
            overview.propagator = p
            try:
                with p.inside().sinks.together():
                    await self._attach(p)
                service = Service(p, wanted.server, access=self._access, tls=wanted.served_tls)
                async with anyio.create_task_group() as tasks:
                    with listening("port", wanted.server.host):
                        address = await tasks.start(service.run)
                    self._service = overview.service = service
                    keep()
                    self._say_ready(address.port, http_port, p)
            finally:
                overview.propagator = None

    async def _attach(self, propagator: Propagator) -> None:
        """Attach all sinks. Raises SinksHoldOtherData with a cure for all of them at once."""
        remembered = frozenset(propagator.inside().sinks.cursors())
        refusals: dict[str, HoldsOtherData] = {}
        for one in self._sinks:
            try:
                await one.attach(propagator, remembered)
            except HoldsOtherData as refusal:
                if getattr(one.terms, "vectors", None) not in refusals:  # else it is rebuilt with that sink
                    refusals[one.terms.name] = refusal
            except (DeltaPropError, OSError):
                if not refusals:  # else it may be for want of a sink that is to be rebuilt
                    raise
        if refusals:
            paths = {one.terms.name: one.terms.path for one in self._sinks if hasattr(one.terms, "path")}
            raise SinksHoldOtherData(refusals, self._command, paths)

    def _say_ready(self, port: int, http_port: int, propagator: Propagator) -> None:
        wanted = self._configuration
        recovery = propagator.recovery
        damaged = [] if recovery is None else recovery.notes
        for line in str(recovery).splitlines():
            logger.log(logging.WARNING if line in damaged else logging.INFO, "%s", line)
        logger.info(
            "serving",
            extra={
                "data": wanted.data,
                "host": wanted.server.host,
                "port": port,
                "http": http_port,
                "level_of_log": wanted.log.level.name.lower(),
                "sinks": [one.name for one in wanted.sinks],
                "memory_bytes_max": wanted.memory_bytes_max(),
            },
        )
        edge.settle_memory()
        edge.confirm(f"ready port={port} http={http_port}")
