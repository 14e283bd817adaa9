"""`config check`, `config show`; and the configuration of `serve`: a file, the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.commands import edge
from delta_prop.configuration import make_sinks, read_configuration, to_json, to_toml
from delta_prop.server.tokens import Usual, parse_tokens
from delta_prop.tls_contexts import server_context
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.configuration import Configuration

OK = 0


def load(file: str | None) -> Configuration:
    """The configuration of a file (None: defaults) and the environment. Raises UsageError."""
    if file is None:
        return read_configuration(environment=edge.environment())
    text, folder = edge.read_settings(file)
    try:
        return read_configuration(text, folder=folder, environment=edge.environment())
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def check(file: str) -> int:
    """Tell whether a server would take this configuration. Raises UsageError."""
    configuration = load(file)
    try:
        make_sinks(configuration.sinks)
        _try_files(configuration)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    sinks = ", ".join(one.name for one in configuration.sinks) or "none"
    gib = configuration.memory_bytes_max() / (1 << 30)
    edge.put(f"{file}: sound; sinks: {sinks}; memory: at most {gib:,.1f} GiB, sinks' own on top")
    return OK


def _try_files(configuration: Configuration) -> None:
    """Read what a server reads at its start. Raises UsageError."""
    section = "access.tokens"
    try:
        if configuration.access.tokens is not None:
            text, _ = edge.read_settings(configuration.access.tokens, "the file of tokens")
            parse_tokens(text, usual(configuration))
        section = "tls"
        if configuration.served_tls is not None:
            server_context(configuration.served_tls)
    except UsageError as error:
        raise UsageError(f"{section}: {error}") from None


def usual(configuration: Configuration) -> Usual:
    """What holds where a token says nothing of its rate."""
    return Usual(configuration.server.token_rate, configuration.server.token_burst)


def show(file: str | None, *, as_json: bool) -> int:
    """Print every key with its value, defaults too. Raises UsageError."""
    configuration = load(file)
    edge.put(to_json(configuration) if as_json else to_toml(configuration).rstrip("\n"))
    return OK
