"""`serve`: one data directory behind a port for 0xD3 and one for HTTP, until a signal ends it.

Exactly one line goes to standard output, once clients are accepted; all else is the log on standard error.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from errno import EADDRINUSE
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.commands import edge
from delta_prop.commands.configure import load, usual
from delta_prop.commands.logs import logging_to
from delta_prop.configuration import make_sinks
from delta_prop.embedded import Propagator
from delta_prop.server.access import Access
from delta_prop.server.http import HttpPort
from delta_prop.server.overview import Overview
from delta_prop.server.service import Service
from delta_prop.world import real_world
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from anyio.abc import TaskGroup

    from delta_prop.configuration import Configuration
    from delta_prop.ports import World

OK = 0
logger = logging.getLogger("delta_prop.serve")


def configured(file: str | None, options: Mapping[str, Mapping[str, Any]]) -> Configuration:
    """What is to be served: a file and the environment, and what options say instead.

    `options`: values by section, "" for the top, and key; None: not given. Raises UsageError.
    """
    configuration = load(file)
    changes: dict[str, Any] = {}
    for section, keys in options.items():
        given = {name: value for name, value in keys.items() if value is not None}
        changes |= {section: replace(getattr(configuration, section), **given)} if section else given
    configuration = replace(configuration, **changes)
    if configuration.data is None:
        raise UsageError("no data directory: give --data DIR, or `data` in the configuration")
    return configuration


async def serve(configuration: Configuration) -> int:
    """Serve until a signal. Raises UsageError, LogBusy, LogDamaged, FormatUnknown, OSError."""
    wanted = configuration.logging
    with (
        logging_to(edge.standard_error(), level=wanted.level, format_=wanted.format),
        edge.signals() as asked,
    ):
        async with anyio.create_task_group() as tasks:
            serving = _Serving(configuration, real_world())
            tasks.start_soon(serving.obey, asked)
            await serving.run()
            tasks.cancel_scope.cancel()
    return OK


class CannotListen(DeltaPropError):
    """A port is taken, or may not be had."""


class _Serving:
    """One server from its start to its end."""

    def __init__(self, configuration: Configuration, world: World) -> None:
        self._configuration = configuration
        self._world = world
        self._access = _access(configuration, world)
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
        with _listening("http_port"):
            _, http_port = await tasks.start(port.run)
        return int(http_port)

    async def _serve(self, http_port: int) -> None:
        """Open, attach, listen, say so, and go on until the service ends."""
        wanted, overview = self._configuration, self._overview
        sinks = make_sinks(wanted.sinks)
        async with Propagator(wanted.settings, data=wanted.data, log=wanted.log, world=self._world) as p:
            overview.propagator = p
            try:
                remembered = frozenset(p.inside().sinks.cursors())
                for one in sinks:
                    await one.attach(p, remembered)
                service = Service(p, wanted.server, access=self._access, tls=wanted.served_tls)
                async with anyio.create_task_group() as tasks:
                    with _listening("port"):
                        address = await tasks.start(service.run)
                    self._service = overview.service = service
                    self._say_ready(address.port, http_port, p)
            finally:
                overview.propagator = None

    def _say_ready(self, port: int, http_port: int, propagator: Propagator) -> None:
        wanted = self._configuration
        found = str(propagator.recovery).splitlines()
        for line in found:
            logger.info("%s", line)
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
        edge.put(f"ready port={port} http={http_port}")


@contextmanager
def _listening(key: str) -> Iterator[None]:
    """Tell what can be done where nothing can listen. Raises CannotListen."""
    try:
        yield
    except OSError as error:
        option = f"--{key.replace('_', '-')}"
        cure = f"stop what has it, or give another one with {option} (or server.{key}), 0 for any"
        if error.errno != EADDRINUSE:
            cure = f"name an address of this machine with --host, and with {option} a port you may have"
        raise CannotListen(f"{error.strerror or error}: {cure}") from None


def _access(configuration: Configuration, world: World) -> Access:
    """Who may do what. Raises UsageError where the tokens cannot be read."""
    file = configuration.access.tokens
    try:
        read = None if file is None else partial(edge.file_bytes, file)
        return Access(world, read, usual(configuration))
    except OSError as error:
        raise UsageError(f"access.tokens: {file!r} cannot be read ({error.strerror})") from None
    except UsageError as error:
        raise UsageError(f"access.tokens: {error}") from None
