"""Formats a configuration as TOML, which reads back as the same, or as JSON. Every key is included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from delta_prop.configuration.schema import Configuration
from delta_prop.configuration.sinks import SinkConfig


def to_json(configuration: Configuration) -> str:
    """Format as one JSON object; keys that are not set are null."""
    return json.dumps(_to_json_value(configuration), ensure_ascii=False)


def to_toml(configuration: Configuration) -> str:
    """Format as TOML with every key; keys that are not set are comments."""
    return "\n".join(_format_lines(_to_json_value(configuration))) + "\n"


def _to_json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if isinstance(value, SinkConfig) else {}
        return kind | {field.name: _to_json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name.lower()
    return [_to_json_value(member) for member in value] if isinstance(value, tuple) else value


def _format_lines(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ("", f"[{name}]", *_format_keys(value))
        elif value and isinstance(value, list) and all(isinstance(item, dict) for item in value):
            for item in value:
                yield from ("", f"[[{name}]]", *_format_keys(item))
        elif value != []:
            yield from _format_keys({name: value})


def _format_keys(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        yield f"# {name} is not set" if value is None else f"{name} = {_format_toml(value)}"


def _format_toml(value: Any) -> str:
    if isinstance(value, dict):
        members = (f"{name} = {_format_toml(member)}" for name, member in value.items() if member is not None)
        return "{ " + ", ".join(members) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    # A JSON text is a TOML text too, if no characters but these are escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
