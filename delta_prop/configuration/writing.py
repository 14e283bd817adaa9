"""A configuration as text: TOML that reads back as the same, or JSON. Every key is there."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from delta_prop.configuration.sinks import SinkTerms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.configuration.shape import Configuration


def to_json(configuration: Configuration) -> str:
    """One JSON object; null where nothing is set."""
    return json.dumps(_plain(configuration), ensure_ascii=False)


def to_toml(configuration: Configuration) -> str:
    """TOML with every key; those that are not set stand in comments."""
    return "\n".join(_lines(_plain(configuration))) + "\n"


def _plain(value: Any) -> Any:
    """What JSON can hold of a value."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if isinstance(value, SinkTerms) else {}
        return kind | {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Enum):
        return value.name.lower()
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _lines(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ("", f"[{name}]", *_keys(value))
        elif value and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for one in value:
                yield from ("", f"[[{name}]]", *_keys(one))
        elif value != []:
            yield from _keys({name: value})


def _keys(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        yield f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = (f"{name} = {_toml(one)}" for name, one in value.items() if one is not None)
        return "{ " + ", ".join(inside) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # A text of JSON is one of TOML as well, where no other characters than these are escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
