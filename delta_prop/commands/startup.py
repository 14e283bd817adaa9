"""Judges whether a server can start from a configuration: the one judge of `serve` and of `config check`.

It looks at what the configuration names on this machine, before anything is made, and leaves nothing behind.
What only a moment decides, a port that is taken or a directory that another process has, is for `serve`.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.checks import parse_topics
from delta_prop.client.addresses import parse_addresses
from delta_prop.commands import edge
from delta_prop.configuration import ForwardTerms, make_sinks
from delta_prop.configuration.values import placed
from delta_prop.local_places import check_apart, check_data_directory, check_file_place
from delta_prop.ports import Tls
from delta_prop.route.rebuild import can_be_rebuilt
from delta_prop.server.access import Access
from delta_prop.server.service import check_open_to_others, is_loopback
from delta_prop.server.tokens import Usual
from delta_prop.tls_contexts import client_context, server_context
from delta_prop_broker.log.files.identity import check_format
from delta_prop_sinks import JsonLinesSink, StorageSink
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.configuration import Attachment, Configuration
    from delta_prop.ports import World
    from delta_prop.server.settings import ServerSettings


class CannotListen(DeltaPropError):
    """A port is taken, or may not be had."""


class Startable(NamedTuple):
    """The parts that a server starts with."""

    access: Access
    sinks: tuple[Attachment, ...]


async def judge(configuration: Configuration, world: World, *, beside: bool = False) -> Startable:
    """Check all that a start needs. `beside`: a server may be running, so its ports may be taken.

    Raises UsageError that begins with the path of the key; CannotListen, FormatOutdated, FormatUnknown,
    LogDamaged.
    """
    access = _access(configuration, world)
    server = configuration.server
    await _check_open_to_others(configuration, world, access)
    if server.port == server.http_port != 0:
        raise UsageError(
            f"server.http_port: {server.http_port} is server.port too: give each its own, or 0 for any free"
        )
    with _at("tls"):
        if configuration.served_tls is not None:
            server_context(configuration.served_tls)
    sinks = make_sinks(configuration.sinks)
    for place, one in enumerate(sinks):
        _check_files(one, f"sinks[{place}]", configuration.data)
        _check_leads_elsewhere(one, f"sinks[{place}]", server)
    if configuration.data is not None:
        with _at("data"):
            check_data_directory(configuration.data)
        check_format(edge.disk_at(configuration.data))
    for key in ("http_port", "port"):
        await _try_to_listen(configuration, world, key, beside=beside)
    return Startable(access, sinks)


@contextmanager
def listening(key: str, host: str) -> Iterator[None]:
    """Tell what can be done where nothing can listen. Raises CannotListen."""
    try:
        yield
    except OSError as error:
        option = f"--{key.replace('_', '-')}"
        what = f"server.{key}"
        cure = f"stop what has it, or give another one with {option} (or server.{key}), 0 for any"
        if not is_taken(error):
            what = what if isinstance(error, PermissionError) else f"server.host {host!r}"
            cure = f"name an address of this machine with --host, and with {option} a port you may have"
        raise CannotListen(f"{what}: {error.strerror or error}: {cure}") from None


def is_taken(error: OSError) -> bool:
    """True if somebody else has the port."""
    return error.errno == EADDRINUSE


async def _check_open_to_others(configuration: Configuration, world: World, access: Access) -> None:
    try:
        check_open_to_others(configuration.server, access)
    except UsageError as error:
        with suppress(CannotListen):  # a name that has no address is the first mistake
            await _try_to_listen(configuration, world, "port", beside=True)
        raise placed(error, "server", ("host",)) from None


async def _try_to_listen(configuration: Configuration, world: World, key: str, *, beside: bool) -> None:
    network, server = world.network, configuration.server
    assert network is not None
    with _at("server", "host"), listening(key, server.host):
        try:
            listener = await network.listen(server.host, getattr(server, key))
        except OSError as error:
            if beside and is_taken(error):
                return
            raise
        await listener.aclose()


@contextmanager
def _at(section: str, *names: str) -> Iterator[None]:
    """Say where a mistake stands: at one of these keys of the section, where it begins with one."""
    try:
        yield
    except UsageError as error:
        raise placed(error, section, names) from None


def _access(configuration: Configuration, world: World) -> Access:
    """Read the rights of each token. Raises UsageError where the tokens cannot be read."""
    file = configuration.access.tokens
    server = configuration.server
    usual = Usual(server.token_rate, server.token_burst)
    with _at("access.tokens"):
        try:
            return Access(world, None if file is None else partial(edge.file_bytes, file), usual)
        except OSError as error:
            raise UsageError(f"{file!r} cannot be read ({error.strerror}): name a file of tokens") from None
        except UsageError as error:
            raise UsageError(f"{file!r}: {error}") from None


def _check_leads_elsewhere(attachment: Attachment, section: str, server: ServerSettings) -> None:
    """Refuse to forward a log to the server that has it. Raises UsageError."""
    if not isinstance(attachment.terms, ForwardTerms):
        return
    for to in parse_addresses(attachment.terms.to):
        if to.port == server.port and _is_same_host(to.host, server.host):
            raise UsageError(f"{section}.to: {to} is this server itself: name another one")


def _is_same_host(host: str, listening: str) -> bool:
    """True if `listening` takes connections to `host`, as far as can be told without a name service."""
    if not is_loopback(host):
        return host == listening
    return listening in (host, "0.0.0.0", "::") or (
        "localhost" in (host, listening) and is_loopback(listening)
    )


def _check_files(attachment: Attachment, section: str, data: str | None) -> None:
    sink, terms = attachment.sink, attachment.terms
    if terms.rebuild and not can_be_rebuilt(sink, parse_topics(terms.topics)):
        raise UsageError(
            f"{section}.rebuild: sink {terms.name!r} cannot be rebuilt: it is made of deltas, or its topics "
            "do not match whole vectors: leave it out, and --rebuild too"
        )
    path: str | None = getattr(terms, "path", None)
    if path is not None:
        with _at(f"{section}.path"):
            check_file_place(path)
            if data is not None:
                check_apart(path, data)
            if isinstance(sink, StorageSink | JsonLinesSink):
                sink.check_file()
    if isinstance(terms, ForwardTerms) and terms.authorities is not None:
        with _at(f"{section}.authorities"):
            client_context(Tls(authorities=terms.authorities))
