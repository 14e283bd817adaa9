"""`config check`, `config show`; reads the configuration of `serve` from a file and the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.commands.startup import check_startup
from delta_prop.configuration import Configuration, read_configuration, to_json, to_toml
from delta_prop.platform import system
from delta_prop.platform.world import real_world
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0


def load(file: str | None) -> Configuration:
    """Return the configuration from a file (None: defaults) and the environment. Raises UsageError."""
    if file is None:
        return read_configuration(environment=system.read_environment())
    text, folder = system.read_settings(file)
    try:
        return read_configuration(text, folder=folder, environment=system.read_environment())
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


async def check(options: Namespace) -> int:
    """Check that a server would start with this configuration.

    Raises UsageError, and what `check_startup` raises.
    """
    configuration = load(options.file)
    try:
        await check_startup(configuration, real_world(), allow_taken_ports=True)
    except UsageError as error:
        raise UsageError(f"{options.file}: {error}") from None
    sinks = ", ".join(sink.name for sink in configuration.sinks) or "none"
    gib = configuration.memory_bytes_max() / (1 << 30)
    system.confirm(
        f"{options.file}: valid; sinks: {sinks}; memory: up to {gib:,.1f} GiB, plus the sinks' own"
    )
    return OK


def show(options: Namespace) -> int:
    """Print every key with its value, defaults too. Raises UsageError."""
    configuration = load(options.file)
    system.put(to_json(configuration) if options.json else to_toml(configuration).rstrip("\n"))
    return OK
