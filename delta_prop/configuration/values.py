"""Values of a file made into typed settings: each is checked against the type of the field it is for.

Every mistake is a UsageError that begins with the path of the key, as it is written in the file.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import (
    TYPE_CHECKING,
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

from delta_prop.toml_text import parse_toml
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from dataclasses import Field

T = TypeVar("T")
_A_FILE = "a file"
File: TypeAlias = Annotated[str, _A_FILE]
"""The name of a file or directory."""

_SHOWN_MAX = 60
_NUMBER_MAX = 10**15
"""Seconds of 30 million years, bytes of a petabyte: more is a slip, and too much for some clocks."""


class FromEnvironment(str):
    """A text from the environment, which may stand for any type; it knows its variable."""

    __slots__ = ("variable",)
    variable: str

    @classmethod
    def of(cls, variable: str, text: str) -> FromEnvironment:
        """The text of that variable."""
        made = cls(text)
        made.variable = variable
        return made


@runtime_checkable
class OneOfKinds(Protocol):
    """A dataclass that stands for several, of which a table names one."""

    @classmethod
    def chosen(cls, table: Mapping[str, Any], path: str) -> tuple[type, dict[str, Any]]:
        """The one named, and the rest of the table. Raises UsageError."""
        ...


def fault(path: str, value: object, what: str) -> UsageError:
    """What is wrong with the value at a path."""
    first = value
    while isinstance(first, dict | list) and first:  # keys of the file stand before those of variables
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    source = f" ({first.variable})" if isinstance(first, FromEnvironment) else ""
    return UsageError(f"{path}{source}: {what}")


def shown(value: object) -> str:
    """A value as the file has it, as far as it fits into a line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(str(value)) if isinstance(value, str) else str(value)
    except ValueError:  # more digits than Python prints
        text = "a number of thousands of digits"
    if isinstance(value, str) and "'" not in value and '"' not in value:
        text = f'"{text[1:-1]}"'
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…"


# --- tables


def made_of(kind: type[T], table: Mapping[str, Any], path: str) -> T:
    """A dataclass of a table's values; keys that are not there keep their defaults. Raises UsageError."""
    assert is_dataclass(kind)
    known = {one.name: one for one in fields(kind) if one.init}
    check_keys(table, known, path)
    hints = get_type_hints(kind, include_extras=True)
    given = {name: converted(value, hints[name], join(path, name)) for name, value in table.items()}
    for name, one in known.items():
        if name not in given and one.default is MISSING and one.default_factory is MISSING:
            raise UsageError(f"{join(path, name)}: it is missing, and has no default: add it")
    try:
        return kind(**given)
    except UsageError as error:
        raise placed(error, path, known) from None


def check_keys(table: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    """Refuse a key that nobody reads. Raises UsageError."""
    names = list(known)
    for name, value in table.items():
        if name not in names:
            raise fault(join(path, name), value, f"there is no such key{suggested(name, names)}")


def suggested(name: str, known: Iterable[str]) -> str:
    """What was perhaps meant, else all that there is."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, 1, 0.6)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"


def join(path: str, name: str) -> str:
    """The path of a key in the table at `path`."""
    bare = _cut(name if name.replace("_", "a").replace("-", "a").isalnum() else repr(name))
    return f"{path}.{bare}" if path else bare


def default_of(one: Field[Any]) -> object:
    """A field's default; MISSING where it has none."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def placed(error: UsageError, path: str, known: Iterable[str]) -> UsageError:
    """Make an error about some fields one that says where they stand."""
    text = str(error)
    first = text.partition(" ")[0].rstrip(":")
    if not path:
        return error
    return UsageError(f"{path}.{text}" if first in known else f"{path}: {text}")


# --- values


def converted(value: object, kind: Any, path: str) -> Any:
    """The value as that type. Raises UsageError."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _one_of(value, get_args(kind), path)
    if origin is Annotated:
        _, meant = get_args(kind)
        return _file(value, path) if meant == _A_FILE else _chosen(value, _by_name(meant), path)
    if origin is Literal:
        return _chosen(value, _by_name(get_args(kind)), path)
    if origin is tuple:
        return _several(value, get_args(kind)[0], path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _chosen(value, _by_name(kind), path)
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise fault(path, value, f"{shown(value)} is no table: give keys and values below [{path}]")
        if isinstance(kind, type) and issubclass(kind, OneOfKinds):
            kind, value = kind.chosen(value, path)
        assert isinstance(kind, type)
        return made_of(kind, value, path)
    return _READERS[kind](value, path)


def _one_of(value: object, kinds: tuple[Any, ...], path: str) -> Any:
    """As the first of these types that it has; where it has none, what the first of them says."""
    told: UsageError | None = None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in (isinstance(value, dict) and tuple(filter(is_dataclass, kinds))) or kinds:
        try:
            return converted(value, kind, path)
        except UsageError as error:
            told = told or error
    assert told is not None
    raise told


def _by_name(choices: Iterable[object]) -> dict[str, object]:
    return {one.name.lower() if isinstance(one, Enum) else str(one): one for one in choices}


def _chosen(value: object, choices: Mapping[str, T], path: str) -> T:
    if not isinstance(value, str) or value.lower() not in choices:
        raise fault(path, value, f"{shown(value)}: give one of {', '.join(choices)}")
    return choices[value.lower()]


def _several(value: object, kind: Any, path: str) -> tuple[Any, ...]:
    """A list; from the environment a list in TOML, or one text with commas between."""
    if is_dataclass(kind):
        return _tables(value, kind, path)
    if isinstance(value, FromEnvironment):
        variable, parts = value.variable, [part.strip() for part in value.split(",")]
        if value.startswith("["):
            parts = _toml_list(value, path)
        value = [FromEnvironment.of(variable, str(part)) for part in parts]
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fault(path, value, f"{shown(value)}: give a list of at least one")
    return _each(value, kind, path)


def _tables(value: object, kind: Any, path: str) -> tuple[Any, ...]:
    """Return several tables of one kind. Raises UsageError."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        how = f"write [[{path}]] above the keys of each"
        names = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        if names and issubclass(kind, OneOfKinds):
            how += f", and kind = {shown(names[0])} below it"
        raise fault(path, value, f"{shown(value)}: {how}")
    return _each(value, kind, path)


def _each(values: list[Any], kind: Any, path: str) -> tuple[Any, ...]:
    return tuple(converted(one, kind, f"{path}[{place}]") for place, one in enumerate(values))


def _toml_list(value: FromEnvironment, path: str) -> list[Any]:
    try:
        found: list[Any] = parse_toml(f"list = {value}", "this")["list"]
    except UsageError:
        raise fault(path, value, f"{shown(value)} is no list: give a, b or ['a', 'b']") from None
    return found


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        cure = f'write {path} = "…" instead of [{path}]' if isinstance(value, dict) else "write it in quotes"
        raise fault(path, value, f"{shown(value)} is no text: {cure}")
    return str(value)


def _file(value: object, path: str) -> str:
    name = _text(value, path)
    if not name or "\0" in name:
        raise fault(path, value, f"{shown(value)} names no file: give a name, or leave the key out")
    return name


def _truth(value: object, path: str) -> bool:
    if isinstance(value, FromEnvironment) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise fault(path, value, f"{shown(value)}: give true or false")
    return value


def _whole(value: object, path: str) -> int:
    number = _number(value, path)
    if not isinstance(number, int):
        raise fault(path, value, f"{shown(value)} is no whole number: leave the fraction out")
    return number


def _real(value: object, path: str) -> float:
    return float(_number(value, path))


def _number(value: object, path: str) -> int | float:
    number = _parsed(value) if isinstance(value, FromEnvironment) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise fault(path, value, f"{shown(value)} is no number: give one without quotes, such as 5")
    if isinstance(number, float) and not math.isfinite(number):
        raise fault(path, value, f"{shown(value)} is not finite: give a large number instead")
    if abs(number) > _NUMBER_MAX:
        raise fault(path, value, f"{shown(value)}: give at most {_NUMBER_MAX:,}")
    return number


def _parsed(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


_READERS = {bool: _truth, int: _whole, float: _real, str: _text}
