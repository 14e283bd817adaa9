"""Converts the values of a file to typed settings, and checks each against the type of its field.

Every error is a UsageError that begins with the path of the key, as it is written in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from delta_prop.platform.toml_text import parse_toml
from delta_prop_wire.errors import UsageError

T = TypeVar("T")
_FILE_MARKER = "a file"
File: TypeAlias = Annotated[str, _FILE_MARKER]
"""Name of a file or directory."""

_SHOWN_MAX = 60
"""Maximum characters of a value that a message shows."""
_NUMBER_MAX = 10**15
"""The largest number accepted: 30 million years in seconds, a petabyte in bytes. Some clocks take no more."""


class EnvironmentText(str):
    """The value of an environment variable, which may be the text of any type, and the variable's name."""

    __slots__ = ("variable",)
    variable: str

    @classmethod
    def of(cls, variable: str, text: str) -> EnvironmentText:
        """Create the value of a variable."""
        result = cls(text)
        result.variable = variable
        return result


@runtime_checkable
class TaggedUnion(Protocol):
    """A dataclass with several variants; a table names the one to create."""

    @classmethod
    def choose(cls, table: Mapping[str, Any], path: str) -> tuple[type, dict[str, Any]]:
        """Return the variant that the table names, and the rest of the table. Raises UsageError."""
        ...


def value_error(path: str, value: object, problem: str) -> UsageError:
    """Return an error about the value at a path, with the environment variable that set it, if any."""
    first = value
    while isinstance(first, dict | list) and first:  # keys of the file precede those of variables
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    source = f" ({first.variable})" if isinstance(first, EnvironmentText) else ""
    return UsageError(f"{path}{source}: {problem}")


def format_value(value: object) -> str:
    """Format a value as the file would have it, truncated for an error message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(str(value)) if isinstance(value, str) else str(value)
    except ValueError:  # more digits than Python prints
        text = "a number of thousands of digits"
    if isinstance(value, str) and "'" not in value and '"' not in value:
        text = f'"{text[1:-1]}"'
    return _truncate(text)


def _truncate(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…"


# --- tables


def build_dataclass(kind: type[T], table: Mapping[str, Any], path: str) -> T:
    """Create a dataclass from a table; missing keys have their defaults. Raises UsageError."""
    assert is_dataclass(kind)
    known = {field.name: field for field in fields(kind) if field.init}
    check_keys(table, known, path)
    hints = get_type_hints(kind, include_extras=True)
    given = {name: convert(value, hints[name], join_path(path, name)) for name, value in table.items()}
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{join_path(path, name)}: it is missing, and has no default: add it")
    try:
        return kind(**given)
    except UsageError as error:
        raise with_path(error, path, known) from None


def check_keys(table: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    """Refuse unknown keys. Raises UsageError."""
    names = list(known)
    for name, value in table.items():
        if name not in names:
            raise value_error(join_path(path, name), value, f"unknown key{suggest(name, names)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: a similar known name, or else all known names."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, 1, 0.6)
    return f": did you mean {near[0]}?" if near else f": use one of {', '.join(names)}"


def join_path(path: str, name: str) -> str:
    """Return the path of a key in the table at `path`."""
    bare = _truncate(name if name.replace("_", "a").replace("-", "a").isalnum() else repr(name))
    return f"{path}.{bare}" if path else bare


def with_path(error: UsageError, path: str, known: Iterable[str]) -> UsageError:
    """Prefix an error with the path of the table that it is about; `known`: the keys of that table."""
    text = str(error)
    first = text.partition(" ")[0].rstrip(":")
    if not path:
        return error
    return UsageError(f"{path}.{text}" if first in known else f"{path}: {text}")


# --- values


def convert(value: object, kind: Any, path: str) -> Any:
    """Convert a value to a type. Raises UsageError."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _convert_union(value, get_args(kind), path)
    if origin is Annotated:
        _, marker = get_args(kind)
        return (
            _read_path(value, path)
            if marker == _FILE_MARKER
            else _choose(value, _index_by_name(marker), path)
        )
    if origin is Literal:
        return _choose(value, _index_by_name(get_args(kind)), path)
    if origin is tuple:
        return _convert_list(value, get_args(kind)[0], path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choose(value, _index_by_name(kind), path)
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise value_error(
                path, value, f"{format_value(value)} is not a table: give keys and values below [{path}]"
            )
        if isinstance(kind, type) and issubclass(kind, TaggedUnion):
            kind, value = kind.choose(value, path)
        assert isinstance(kind, type)
        return build_dataclass(kind, value, path)
    return _READERS[kind](value, path)


def _convert_union(value: object, kinds: tuple[Any, ...], path: str) -> Any:
    """Convert to the first type that fits; if none fits, raise the error of the first type."""
    first_error: UsageError | None = None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in (isinstance(value, dict) and tuple(filter(is_dataclass, kinds))) or kinds:
        try:
            return convert(value, kind, path)
        except UsageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _index_by_name(choices: Iterable[object]) -> dict[str, object]:
    return {choice.name.lower() if isinstance(choice, Enum) else str(choice): choice for choice in choices}


def _choose(value: object, choices: Mapping[str, T], path: str) -> T:
    if not isinstance(value, str) or value.lower() not in choices:
        raise value_error(path, value, f"{format_value(value)}: give one of {', '.join(choices)}")
    return choices[value.lower()]


def _convert_list(value: object, kind: Any, path: str) -> tuple[Any, ...]:
    """Convert a list. From the environment: a list in TOML, or values separated by commas."""
    if is_dataclass(kind):
        return _convert_tables(value, kind, path)
    if isinstance(value, EnvironmentText):
        variable, parts = value.variable, [part.strip() for part in value.split(",")]
        if value.startswith("["):
            parts = _parse_toml_list(value, path)
        value = [EnvironmentText.of(variable, str(part)) for part in parts]
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise value_error(path, value, f"{format_value(value)}: give a list of at least one value")
    return _convert_each(value, kind, path)


def _convert_tables(value: object, kind: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(table, dict) for table in value):
        fix = f"write [[{path}]] above the keys of each"
        names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
        if names and issubclass(kind, TaggedUnion):
            fix += f", and kind = {format_value(names[0])} below it"
        raise value_error(path, value, f"{format_value(value)}: {fix}")
    return _convert_each(value, kind, path)


def _convert_each(values: list[Any], kind: Any, path: str) -> tuple[Any, ...]:
    return tuple(convert(value, kind, f"{path}[{index}]") for index, value in enumerate(values))


def _parse_toml_list(value: EnvironmentText, path: str) -> list[Any]:
    try:
        items: list[Any] = parse_toml(f"list = {value}", "this")["list"]
    except UsageError:
        raise value_error(
            path, value, f"{format_value(value)} is not a list: give a, b or ['a', 'b']"
        ) from None
    return items


def _read_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        fix = f'write {path} = "…" instead of [{path}]' if isinstance(value, dict) else "write it in quotes"
        raise value_error(path, value, f"{format_value(value)} is not a text: {fix}")
    return str(value)


def _read_path(value: object, path: str) -> str:
    name = _read_text(value, path)
    if not name or "\0" in name:
        raise value_error(
            path, value, f"{format_value(value)} is not a file name: give a name, or leave the key out"
        )
    return name


def _read_bool(value: object, path: str) -> bool:
    if isinstance(value, EnvironmentText) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise value_error(path, value, f"{format_value(value)}: give true or false")
    return value


def _read_int(value: object, path: str) -> int:
    number = _read_number(value, path)
    if not isinstance(number, int):
        raise value_error(path, value, f"{format_value(value)} is not an integer: leave the fraction out")
    return number


def _read_float(value: object, path: str) -> float:
    return float(_read_number(value, path))


def _read_number(value: object, path: str) -> int | float:
    number = _parse_number(value) if isinstance(value, EnvironmentText) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise value_error(
            path, value, f"{format_value(value)} is not a number: give one without quotes, such as 5"
        )
    if isinstance(number, float) and not math.isfinite(number):
        raise value_error(path, value, f"{format_value(value)} is not finite: give a large number instead")
    if abs(number) > _NUMBER_MAX:
        raise value_error(path, value, f"{format_value(value)}: give up to {_NUMBER_MAX:,}")
    return number


def _parse_number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


_READERS = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_text}
