"""`serve`: serves one data directory on a port for 0xD3 and one for HTTP, until a signal ends it.

Standard output gets exactly one line, once clients are accepted; all else goes to the log on standard error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from shlex import quote
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from delta_prop.api.propagator import Propagator
from delta_prop.calls.refusals import ForeignSinkData
from delta_prop.commands.configure import load
from delta_prop.commands.server_logging import write_logs_to
from delta_prop.commands.startup import ServerParts, check_startup, explain_listen_failure
from delta_prop.configuration import Attachment, Configuration, configs_of_partition, make_sinks
from delta_prop.configuration.values import with_path
from delta_prop.directory.readonly_log import open_readonly_log
from delta_prop.hosting.streams import Streams
from delta_prop.platform import system
from delta_prop.platform.ports import World
from delta_prop.platform.world import real_world
from delta_prop.server.http import HttpPort
from delta_prop.server.server_status import ServerStatus
from delta_prop.server.service import Service
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_broker.segments.paths import FORMAT_PATH, LOCK_PATH
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0
_SERVER_OPTIONS = ("host", "port", "http_port", "advertise", "allow_anonymous")
logger = logging.getLogger("delta_prop.serve")


def run_serve(options: Namespace) -> Coroutine[Any, Any, int]:
    """Return the coroutine that serves as the command says. Raises UsageError."""
    given_options = {
        "": {"data": options.data},
        "server": {name: getattr(options, name) for name in _SERVER_OPTIONS},
        "log": {"read_level": options.read_level and AckLevel[options.read_level.upper()]},
        "access": {"tokens": options.tokens},
        "logging": {"level": options.log_level, "format": options.log_format},
    }
    configuration = build_configuration(options.config, given_options, rebuild=options.rebuild or ())
    return serve(configuration, command_line=options.command)


def build_configuration(
    file: str | None, options: Mapping[str, Mapping[str, Any]], *, rebuild: Collection[str] = ()
) -> Configuration:
    """Return the configuration to serve: a file and the environment, overridden by options.

    `options`: values by section ("" for the top level) and key; an option that was not given is None.
    `rebuild`: names of the sinks to rebuild. Raises UsageError.
    """
    configuration = load(file)
    changes: dict[str, Any] = {}
    for section, keys in options.items():
        given = {name: value for name, value in keys.items() if value is not None}
        try:
            changes |= {section: replace(getattr(configuration, section), **given)} if section else given
        except UsageError as error:
            raise with_path(error, section, keys) from None
    sinks = configuration.sinks
    for name in rebuild:
        if name not in [sink.name for sink in sinks]:
            known = ", ".join(sink.name for sink in sinks) or "none"
            raise UsageError(
                f"--rebuild {name!r}: the configuration has no such sink: name an existing one ({known})"
            )
    changes["sinks"] = tuple(replace(sink, rebuild=sink.rebuild or sink.name in rebuild) for sink in sinks)
    configuration = replace(configuration, **changes)
    if configuration.data is None:
        raise UsageError("no data directory: give --data DIR, or `data` in the configuration")
    return configuration


async def serve(configuration: Configuration, *, command_line: str = "delta-prop serve") -> int:
    """Serve until a signal. `command_line`: the command as typed, which messages repeat with more options.

    Raises UsageError, SinkDataMismatch, LogBusy, LogCorrupted, FormatUnknown, OSError.
    """
    log_settings = configuration.logging
    system.raise_open_files_limit()  # each open partition has some
    with (
        write_logs_to(system.standard_error(), level=log_settings.level, format_=log_settings.format),
        system.receive_signals() as signals,
    ):
        async with anyio.create_task_group() as tasks:
            world = real_world()
            server_run = _ServerRun(
                configuration, world, await check_startup(configuration, world), command_line
            )
            tasks.start_soon(server_run.handle_signals, signals)
            await server_run.run()
            tasks.cancel_scope.cancel()
    return OK


class SinkDataMismatch(DeltaPropError):
    """Sinks hold data that the log does not have, e.g. beside a log restored from a backup."""

    def __init__(
        self, refusals: Mapping[str, ForeignSinkData], command: str, paths: Mapping[str, str]
    ) -> None:
        """`refusals`: by sink name; `command`: the command that failed; `paths`: data paths by sink name."""
        problems = "; ".join(refusal.what for refusal in refusals.values())
        fixes = [
            f"move {paths.get(name, 'its data')} away, as sink {name!r} cannot be rebuilt but can start empty"
            for name, refusal in refusals.items()
            if not refusal.can_rebuild
        ]
        options = " ".join(
            f"--rebuild {quote(name)}" for name, refusal in refusals.items() if refusal.can_rebuild
        )
        start = f"{command} {options}".rstrip()
        effect = ", which replaces their data from the log" if options else ""
        fixes.append(f"start with `{start}`{effect}")
        super().__init__(
            f"{problems}: nothing was rebuilt; if this is the right directory, {', then '.join(fixes)}"
        )


class _ServerRun:
    """Run of one server, from start to end."""

    def __init__(self, configuration: Configuration, world: World, parts: ServerParts, command: str) -> None:
        self._configuration = configuration
        self._world = world
        self._access, self._sinks = parts
        self._command = command
        self._server_status = ServerStatus(version=version("delta-prop"), clock=world.clock)
        self._scope = anyio.CancelScope()
        self._service: Service | None = None

    async def run(self) -> None:
        """Open the HTTP port, then the log, the sinks and the port for 0xD3; close them in reverse order."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                http_port = await self._open_http(tasks)
                await self._serve(http_port)
                tasks.cancel_scope.cancel()
        logger.info("ended")

    async def handle_signals(self, signals: AsyncIterator[int]) -> None:
        """Act on signals: reload tokens, or drain and end; a second ending signal ends at once."""
        is_ending = False
        async for number in signals:
            if number == system.RELOAD_SIGNAL:
                await self._access.reload()
            elif is_ending:
                system.exit_by_signal(number)
            else:
                is_ending = True
                logger.info(
                    "ending: pending batches are answered, clients notified; another signal ends it at once"
                )
                self._stop()

    def _stop(self) -> None:
        if self._service is None:  # no client was accepted yet
            self._scope.cancel()
        else:
            self._service.stop()

    async def _open_http(self, tasks: TaskGroup) -> int:
        """Open the HTTP port, which reports the startup too; return its number."""
        server, network = self._configuration.server, self._world.network
        assert network is not None
        port = HttpPort(
            network,
            self._world,
            self._server_status,
            access=self._access,
            host=server.host,
            port=server.http_port,
            tls=self._configuration.served_tls,
            connections_max=server.http_connections_max,
        )
        with explain_listen_failure("http_port", server.host):
            _, http_port = await tasks.start(port.run)
        return int(http_port)

    async def _serve(self, http_port: int) -> None:
        """Open the log, attach sinks, listen, report ready, and serve until the service ends."""
        configuration, data = self._configuration, self._configuration.data
        assert data is not None
        hosted = Streams(configuration.settings, data=data, log=configuration.log, world=self._world)
        with remove_on_failure(data) as keep_directory:
            async with hosted as streams:
                p = self._server_status.propagator = await streams.open()
                try:
                    await self._serve_streams(streams, p, http_port, keep_directory)
                finally:
                    self._server_status.propagator = self._server_status.streams_open = None

    async def _serve_streams(
        self, streams: Streams, p: Propagator, http_port: int, keep_directory: Callable[[], None]
    ) -> None:
        configuration = self._configuration
        with p.internals().sinks.attach_together():
            await self._attach(p, [one for one in self._sinks if one.config.stream == DEFAULT_STREAM])
        await self._attach_to_partitions(streams)
        self._server_status.streams_open = streams
        service = Service(streams, configuration.server, access=self._access, tls=configuration.served_tls)
        async with anyio.create_task_group() as tasks:
            with explain_listen_failure("port", configuration.server.host):
                address = await tasks.start(service.run)
            self._service = self._server_status.service = service
            keep_directory()
            self._report_ready(address.port, http_port, p)

    async def _attach_to_partitions(self, streams: Streams) -> None:
        """Attach the sinks of other streams than the default one, to each of their partitions."""
        sinks = self._configuration.sinks
        for name in dict.fromkeys(config.stream for config in sinks if config.stream != DEFAULT_STREAM):
            if name not in streams.catalogue.streams:
                data = quote(str(self._configuration.data))
                command = f"delta-prop streams create {quote(name)} --data {data}"
                raise UsageError(f"sinks: stream {name!r} does not exist: create it first, with `{command}`")
            count = streams.catalogue.require(name).partitions
            for number in range(count):
                attachments = make_sinks(configs_of_partition(sinks, name, number, count))
                propagator = await streams.open(name, number)
                with propagator.internals().sinks.attach_together():
                    await self._attach(propagator, attachments)

    async def _attach(self, propagator: Propagator, attachments: Sequence[Attachment]) -> None:
        """Attach sinks of a partition. Raises one SinkDataMismatch with the fix for all of them."""
        remembered = propagator.internals().sinks.cursors.names
        refusals: dict[str, ForeignSinkData] = {}
        for attachment in attachments:
            config = attachment.config
            try:
                await attachment.attach(propagator, remembered)
            except ForeignSinkData as refusal:
                # `vectors` names the sink whose vectors this one shares: its rebuild mends this one, too.
                if getattr(config, "vectors", None) not in refusals:
                    refusals[config.name] = refusal
            except (DeltaPropError, OSError):
                if not refusals:  # else a refused sink may be the reason
                    raise
        if refusals:
            configs = [attachment.config for attachment in attachments]
            paths = {config.name: config.path for config in configs if hasattr(config, "path")}
            raise SinkDataMismatch(refusals, self._command, paths)

    def _report_ready(self, port: int, http_port: int, propagator: Propagator) -> None:
        configuration = self._configuration
        recovery = propagator.recovery
        warnings = [] if recovery is None else recovery.notes
        for line in str(recovery).splitlines():
            logger.log(logging.WARNING if line in warnings else logging.INFO, "%s", line)
        logger.info(
            "serving",
            extra={
                "data": configuration.data,
                "host": configuration.server.host,
                "port": port,
                "http": http_port,
                "address": configuration.server.advertise,
                "level_of_log": configuration.log.read_level.name.lower(),
                "sinks": [sink.name for sink in configuration.sinks],
                "memory_bytes_max": configuration.memory_bytes_max(),
            },
        )
        system.freeze_heap()
        system.confirm(f"ready port={port} http={http_port}")


@contextmanager
def remove_on_failure(data: str) -> Iterator[Callable[[], None]]:
    """Remove the data directory that the block creates, and created parent directories, if the block raises.

    Only a log without a single delta is removed, and only under the directory's lock, because another process
    may have started there meanwhile. Yields a function, which the block calls once the directory must stay.
    """
    was_absent = system.is_absent_or_empty(data)
    missing = system.find_missing_directories(data)
    stay_calls = list[bool]()
    try:
        yield lambda: stay_calls.append(True)
    except Exception:
        if was_absent and not stay_calls:
            with suppress(OSError, DeltaPropError):  # the start's own error is the one to raise
                _remove_log(data)
            for directory in missing:
                system.remove_empty_directory(directory)
        raise


def _remove_log(data: str) -> None:
    """Remove a log in which no delta was ever written. Raises DeltaPropError, OSError."""
    disk = system.open_disk_at(data)
    lock = disk.lock(LOCK_PATH)
    try:
        if FORMAT_PATH in disk.list(""):
            with open_readonly_log(data) as (_, log, report):
                pass  # the counts stay readable after the log is closed
            if log.next_offset or report.bytes:
                return
        system.remove_content(data)
    finally:
        lock.release()
