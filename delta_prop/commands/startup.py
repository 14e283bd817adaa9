"""Checks that a server can start from a configuration, for `serve` and `config check` alike.

It inspects the files and ports that the configuration names, and creates nothing. Conditions that may change
at any moment, such as a taken port or a locked directory, are left to `serve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from typing import NamedTuple

from delta_prop.calls.argument_checks import parse_topics
from delta_prop.client.addresses import parse_addresses
from delta_prop.configuration import Attachment, Configuration, ForwardConfig, make_sinks
from delta_prop.configuration.values import with_path
from delta_prop.delivery.rebuild import can_be_rebuilt
from delta_prop.platform import system
from delta_prop.platform.path_checks import check_data_directory, check_file_writable, check_outside_data
from delta_prop.platform.ports import Tls, World
from delta_prop.platform.tls_contexts import client_context, server_context
from delta_prop.server.access import Access
from delta_prop.server.service import check_exposure, is_loopback
from delta_prop.server.settings import ServerSettings
from delta_prop.server.tokens import TokenDefaults
from delta_prop_broker.segments.identity import check_format
from delta_prop_sinks import JsonLinesSink, StorageSink
from delta_prop_wire.errors import DeltaPropError, UsageError


class ListenFailed(DeltaPropError):
    """A port is taken, or this user may not listen on it."""


class ServerParts(NamedTuple):
    """The parts that a server starts with."""

    access: Access
    sinks: tuple[Attachment, ...]


async def check_startup(
    configuration: Configuration, world: World, *, allow_taken_ports: bool = False
) -> ServerParts:
    """Check all that a start needs; `allow_taken_ports`: accept ports that a running server may have.

    Raises UsageError that starts with the path of the key; ListenFailed, FormatOutdated, FormatUnknown,
    LogCorrupted.
    """
    access = _read_access(configuration, world)
    server = configuration.server
    await _check_open_to_others(configuration, world, access)
    if server.port == server.http_port != 0:
        raise UsageError(
            f"server.http_port: {server.http_port} is also server.port: give each its own, or 0 for any free"
        )
    with _locate_error("tls"):
        if configuration.served_tls is not None:
            server_context(configuration.served_tls)
    sinks = make_sinks(configuration.sinks)
    for index, attachment in enumerate(sinks):
        _check_files(attachment, f"sinks[{index}]", configuration.data)
        _check_forwards_elsewhere(attachment, f"sinks[{index}]", server)
    if configuration.data is not None:
        with _locate_error("data"):
            check_data_directory(configuration.data)
        check_format(system.open_disk_at(configuration.data))
    for key in ("http_port", "port"):
        await _try_to_listen(configuration, world, key, allow_taken_ports=allow_taken_ports)
    return ServerParts(access, sinks)


@contextmanager
def explain_listen_failure(key: str, host: str) -> Iterator[None]:
    """Turn a failure to listen into ListenFailed with its fix."""
    try:
        yield
    except OSError as error:
        option = f"--{key.replace('_', '-')}"
        field = f"server.{key}"
        fix = f"stop the process that has it, or give another with {option} (or server.{key}), 0 for any"
        if not is_port_taken(error):
            field = field if isinstance(error, PermissionError) else f"server.host {host!r}"
            fix = f"name an address of this machine with --host, and a port this user may have with {option}"
        raise ListenFailed(f"{field}: {error.strerror or error}: {fix}") from None


def is_port_taken(error: OSError) -> bool:
    """True if another process has the port."""
    return error.errno == EADDRINUSE


async def _check_open_to_others(configuration: Configuration, world: World, access: Access) -> None:
    try:
        check_exposure(configuration.server, access)
    except UsageError as error:
        with suppress(ListenFailed):  # an unknown host name is reported first
            await _try_to_listen(configuration, world, "port", allow_taken_ports=True)
        raise with_path(error, "server", ("host",)) from None


async def _try_to_listen(
    configuration: Configuration, world: World, key: str, *, allow_taken_ports: bool
) -> None:
    network, server = world.network, configuration.server
    assert network is not None
    with _locate_error("server", "host"), explain_listen_failure(key, server.host):
        try:
            listener = await network.listen(server.host, getattr(server, key))
        except OSError as error:
            if allow_taken_ports and is_port_taken(error):
                return
            raise
        await listener.aclose()


@contextmanager
def _locate_error(section: str, *names: str) -> Iterator[None]:
    """Prefix a UsageError with the section; if the error starts with one of its keys, with the key's path."""
    try:
        yield
    except UsageError as error:
        raise with_path(error, section, names) from None


def _read_access(configuration: Configuration, world: World) -> Access:
    file = configuration.access.tokens
    server = configuration.server
    defaults = TokenDefaults(server.token_rate, server.token_burst)
    with _locate_error("access.tokens"):
        try:
            return Access(world, None if file is None else partial(system.read_file, file), defaults)
        except OSError as error:
            raise UsageError(f"{file!r} cannot be read ({error.strerror}): name a token file") from None
        except UsageError as error:
            raise UsageError(f"{file!r}: {error}") from None


def _check_forwards_elsewhere(attachment: Attachment, section: str, server: ServerSettings) -> None:
    """Refuse to forward a log to the server that has it. Raises UsageError."""
    if not isinstance(attachment.config, ForwardConfig):
        return
    for to in parse_addresses(attachment.config.to):
        if to.port == server.port and _is_same_host(to.host, server.host):
            raise UsageError(f"{section}.to: {to} is this server itself: name another one")


def _is_same_host(host: str, listen_host: str) -> bool:
    """True if connections to `host` reach a server on host `listen_host`, as far as known without DNS."""
    if not is_loopback(host):
        return host == listen_host
    return listen_host in (host, "0.0.0.0", "::") or (
        "localhost" in (host, listen_host) and is_loopback(listen_host)
    )


def _check_files(attachment: Attachment, section: str, data: str | None) -> None:
    sink, config = attachment.sink, attachment.config
    if config.rebuild and not can_be_rebuilt(sink, parse_topics(config.topics)):
        raise UsageError(
            f"{section}.rebuild: sink {config.name!r} cannot be rebuilt, as it stores deltas, or its topics "
            "do not match full vectors: leave it out, and --rebuild too"
        )
    path: str | None = getattr(config, "path", None)
    if path is not None:
        with _locate_error(f"{section}.path"):
            check_file_writable(path)
            if data is not None:
                check_outside_data(path, data)
            if isinstance(sink, StorageSink | JsonLinesSink):
                sink.check_file()
    if isinstance(config, ForwardConfig) and config.authorities is not None:
        with _locate_error(f"{section}.authorities"):
            client_context(Tls(authorities=config.authorities))
