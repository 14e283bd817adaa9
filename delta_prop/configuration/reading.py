"""A configuration read from TOML text, with overrides from the environment.

`DELTA_PROP_SERVER__HEARTBEAT_S=3` is `heartbeat_s = 3` below `[server]`: two underscores stand for each dot,
`DELTA_PROP_SINKS__0__PATH` is of the first sink. Variables without two underscores are not looked at.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from delta_prop.configuration.shape import Configuration
from delta_prop.configuration.values import FromEnvironment, join, made_of
from delta_prop.toml_text import parse_toml
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX = "DELTA_PROP_"
_SEPARATOR = "__"
_FILES = {"": ("data",), "tls": ("certificate", "key", "authorities"), "access": ("tokens",)}
_FILES_OF_SINKS = ("path", "token_file", "certificate", "key", "authorities")


def read_configuration(
    text: str = "", *, folder: str | None = None, environment: Mapping[str, str] | None = None
) -> Configuration:
    """The configuration; keys that are not there keep their defaults.

    `folder`: from where names of files in the text count, the one that it lies in; in the environment they
    count from the working directory. Raises UsageError that begins with the path of the key.
    """
    table = parse_toml(text, "this")
    if folder is not None:
        _anchor(table, PurePath(folder))
    for variable in sorted(environment or {}, key=_by_place):
        if variable.startswith(ENVIRONMENT_PREFIX) and _SEPARATOR in variable:
            assert environment is not None
            _override(table, variable, FromEnvironment.of(variable, environment[variable]))
    return made_of(Configuration, table, "")


def _by_place(variable: str) -> list[str]:
    """Sinks come in the order of their numbers."""
    return [part.zfill(9) if part.isdigit() else part for part in variable.split(_SEPARATOR)]


# --- overrides


def _override(table: dict[str, Any], variable: str, value: FromEnvironment) -> None:
    """Put one value where its variable's name says. Raises UsageError."""
    place = variable.removeprefix(ENVIRONMENT_PREFIX)
    if place.startswith("_"):
        raise UsageError(
            f"{variable}: two underscores stand between a section and its key, as in "
            "DELTA_PROP_SERVER__PORT: correct its name; what is of no section, as data, give in the file"
        )
    *above, last = place.lower().split(_SEPARATOR)
    here: Any = table
    path = ""
    for part, below in zip(above, [*above[1:], last], strict=True):
        new: dict[str, Any] | list[Any] = [] if below.isdigit() else {}
        here, path = _below(here, part, new, variable), join(path, part)
        if not isinstance(here, dict | list):
            raise UsageError(
                f"{variable}: {path} is one value, and has no {below!r}: name a key of a section"
            )
    if isinstance(here, list):
        raise UsageError(
            f"{variable}: {path}[{last}] has keys of its own: name one, such as {variable}__PATH"
        )
    here[last] = value


def _below(
    here: dict[str, Any] | list[Any], part: str, new: dict[str, Any] | list[Any], variable: str
) -> Any:
    """What lies below a name or number; `new` where there is nothing yet."""
    if isinstance(here, dict):
        return here.setdefault(part, new)
    place = int(part) if part.isdigit() and part.isascii() and len(part) < 6 else -1
    if place == len(here):
        here.append({})
    if not 0 <= place < len(here):
        raise UsageError(f"{variable}: {part!r} is no place in the list: give 0 to {len(here)}")
    return here[place]


# --- files


def _anchor(table: dict[str, Any], folder: PurePath) -> None:
    """Have names of files count from the folder."""
    for section, names in _FILES.items():
        _anchor_in(table.get(section) if section else table, names, folder)
    sinks = table.get("sinks")
    for sink in sinks if isinstance(sinks, list) else []:
        _anchor_in(sink, _FILES_OF_SINKS, folder)


def _anchor_in(table: Any, names: tuple[str, ...], folder: PurePath) -> None:
    if not isinstance(table, dict):  # which is refused when it is read
        return
    for name in names:
        if isinstance(value := table.get(name), str) and value:
            table[name] = str(folder / value)
