"""Reads a configuration from TOML text, with overrides from the environment.

`DELTA_PROP_SERVER__HEARTBEAT_INTERVAL_S=3` is `heartbeat_interval_s = 3` below `[server]`: two underscores
stand for each dot, and `DELTA_PROP_SINKS__0__PATH` is the `path` of the first sink. Variables without two
underscores are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from delta_prop.configuration.schema import Configuration
from delta_prop.configuration.values import EnvironmentText, build_dataclass, join_path
from delta_prop.platform.toml_text import parse_toml
from delta_prop_wire.errors import UsageError

ENVIRONMENT_PREFIX = "DELTA_PROP_"
_SEPARATOR = "__"
# Keys that hold file names, by section; "" is the part outside sections.
_PATH_KEYS = {"": ("data",), "tls": ("certificate", "key", "authorities"), "access": ("tokens",)}
_SINK_PATH_KEYS = ("path", "token_file", "certificate", "key", "authorities")


def read_configuration(
    text: str = "", *, folder: str | None = None, environment: Mapping[str, str] | None = None
) -> Configuration:
    """Return the configuration; missing keys have their defaults.

    `folder`: the base of relative file names in the text, usually the folder of its file; file names in the
    environment are relative to the working directory. Raises UsageError that begins with the path of the key.
    """
    table = parse_toml(text, "this")
    if folder is not None:
        _resolve_paths(table, PurePath(folder))
    for variable in sorted(environment or {}, key=_variable_sort_key):
        if variable.startswith(ENVIRONMENT_PREFIX) and _SEPARATOR in variable:
            assert environment is not None
            _override(table, variable, EnvironmentText.of(variable, environment[variable]))
    return build_dataclass(Configuration, table, "")


def _variable_sort_key(variable: str) -> list[str]:
    """Return a sort key that orders sinks by number."""
    return [part.zfill(9) if part.isdigit() else part for part in variable.split(_SEPARATOR)]


# --- overrides


def _override(table: dict[str, Any], variable: str, value: EnvironmentText) -> None:
    """Set the value at the path that the variable names. Raises UsageError."""
    key_path = variable.removeprefix(ENVIRONMENT_PREFIX)
    if key_path.startswith("_"):
        raise UsageError(
            f"{variable}: two underscores separate a section and its key, as in "
            "DELTA_PROP_SERVER__PORT: correct the name; give keys outside sections, such as data, in the file"
        )
    *parents, last = key_path.lower().split(_SEPARATOR)
    node: Any = table
    path = ""
    for part, next_part in zip(parents, [*parents[1:], last], strict=True):
        new: dict[str, Any] | list[Any] = [] if next_part.isdigit() else {}
        node, path = _descend(node, part, new, variable), join_path(path, part)
        if not isinstance(node, dict | list):
            raise UsageError(
                f"{variable}: {path} is a single value and has no key {next_part!r}: name a key of a section"
            )
    if isinstance(node, list):
        raise UsageError(
            f"{variable}: {path}[{last}] has keys of its own: name one, such as {variable}__PATH"
        )
    node[last] = value


def _descend(
    node: dict[str, Any] | list[Any], part: str, new: dict[str, Any] | list[Any], variable: str
) -> Any:
    """Return the value at the key or index `part`.

    If it is missing, add it: `new` if `node` is a table, an empty table if it is a list.
    """
    if isinstance(node, dict):
        return node.setdefault(part, new)
    index = int(part) if part.isdigit() and part.isascii() and len(part) < 6 else -1
    if index == len(node):
        node.append({})
    if not 0 <= index < len(node):
        raise UsageError(f"{variable}: {part!r} is not an index of the list: give 0 to {len(node)}")
    return node[index]


# --- files


def _resolve_paths(table: dict[str, Any], folder: PurePath) -> None:
    for section, names in _PATH_KEYS.items():
        _resolve_paths_in(table.get(section) if section else table, names, folder)
    sinks = table.get("sinks")
    for sink in sinks if isinstance(sinks, list) else []:
        _resolve_paths_in(sink, _SINK_PATH_KEYS, folder)


def _resolve_paths_in(table: Any, names: tuple[str, ...], folder: PurePath) -> None:
    if not isinstance(table, dict):  # refused later
        return
    for name in names:
        if isinstance(value := table.get(name), str) and value:
            table[name] = str(folder / value)
