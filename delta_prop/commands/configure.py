"""`config check`, `config show`; and the configuration of `serve`: a file, the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.commands import edge
from delta_prop.commands.startup import judge
from delta_prop.configuration import read_configuration, to_json, to_toml
from delta_prop.world import real_world
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


async def check(file: str) -> int:
    """Tell whether a server would take this configuration. Raises UsageError, and what `judge` raises."""
    configuration = load(file)
    try:
        await judge(configuration, real_world(), beside=True)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    sinks = ", ".join(one.name for one in configuration.sinks) or "none"
    gib = configuration.memory_bytes_max() / (1 << 30)
    edge.confirm(f"{file}: sound; sinks: {sinks}; memory: at most {gib:,.1f} GiB, sinks' own on top")
    return OK


def show(file: str | None, *, as_json: bool) -> int:
    """Print every key with its value, defaults too. Raises UsageError."""
    configuration = load(file)
    edge.put(to_json(configuration) if as_json else to_toml(configuration).rstrip("\n"))
    return OK
