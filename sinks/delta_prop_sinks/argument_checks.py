"""Checks the arguments of sinks' constructors. An error names the argument, its value and the bound."""

from __future__ import annotations

from pathlib import PurePath
from typing import TypeVar

from delta_prop_wire.errors import UsageError

T = TypeVar("T")


def check_at_least(minimum: int, **values: float) -> None:
    """Check that no value is below `minimum`. Raises UsageError."""
    for name, value in values.items():
        if not check_number(name, value) >= minimum:
            raise UsageError(f"{name} {value}: give at least {minimum}")


def check_above_zero(**values: float) -> None:
    """Check that each value is above 0. Raises UsageError."""
    for name, value in values.items():
        if not check_number(name, value) > 0:
            raise UsageError(f"{name} {value}: give a number above 0")


def check_sink_name(name: object) -> str:
    """Return a sink's name if it is valid. Raises UsageError."""
    if not isinstance(name, str):
        raise UsageError(f"name {name!r:.60} is of type {type(name).__name__}: give text")
    if not name:
        raise UsageError('name "" names no sink: give a name, or leave it out')
    return name


def check_path(path: object) -> None:
    """Check that `path` can be the path of a file. Raises UsageError."""
    if not isinstance(path, str | PurePath):
        raise UsageError(
            f"path {path!r:.60} is of type {type(path).__name__}: give a file's path as text or Path"
        )
    if not str(path) or "\0" in str(path):
        raise UsageError(f"path {str(path)!r:.60} names no file: give the path of a file")


def check_texts(**values: object) -> None:
    """Check that each value is text. Raises UsageError."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} {value!r:.60} is of type {type(value).__name__}: give text")


def check_number(name: str, value: object) -> float:
    """Return the value if it is a number. Raises UsageError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UsageError(f"{name} {value!r:.60} is of type {type(value).__name__}: give a number")
    return value


def check_kind(name: str, value: object, kind: type[T]) -> T:
    """Return the value if it is an instance of `kind`. Raises UsageError."""
    if not isinstance(value, kind):
        raise UsageError(
            f"{name} {value!r:.60} is of type {type(value).__name__}: give a {kind.__name__}, or leave it out"
        )
    return value
