"""Checks of the arguments that every client takes: each error names the argument and the fix.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from delta_prop.calls.argument_checks import check_instance
from delta_prop.client.settings import ClientSettings
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Credit

if TYPE_CHECKING:
    E = TypeVar("E", bound=IntEnum)


def settings_or_default(settings: ClientSettings | None) -> ClientSettings:
    """Return the settings given, or the defaults. Raises UsageError."""
    if settings is None:
        return ClientSettings()
    return check_instance("settings", settings, ClientSettings, "delta_prop.client.ClientSettings(…)")


def check_connection(token: str | None, tls: Tls | None, world: World | None = None) -> None:
    """Check the arguments of a connection. Raises UsageError, which never shows the token."""
    if token is not None and not isinstance(token, str):
        raise UsageError(f"token: it is of type {type(token).__name__}: give text")
    if tls is not None:
        check_instance("tls", tls, Tls, "delta_prop.platform.ports.Tls(authorities=FILE)")
    if world is not None:
        check_instance("world", world, World, "delta_prop.platform.world.real_world(), or leave it out")


def parse_member(field: str, value: object, kind: type[E]) -> E:
    """Return `value` as a member of the enum `kind`. Raises UsageError."""
    if isinstance(value, int) and not isinstance(value, bool) and value in set(kind):
        return kind(value)
    names = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    raise UsageError(f"{field} {value!r:.60}: give one of {names}")


def parse_members(field: str, values: Iterable[object], kind: type[E]) -> tuple[E, ...]:
    """Return `values` as members of the enum `kind`. Raises UsageError."""
    if isinstance(values, str) or not isinstance(values, (list, tuple, set, frozenset)):
        names = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise UsageError(f"{field} {values!r:.60}: give a list of some of {names}")
    return tuple(parse_member(field, value, kind) for value in values)


def parse_credit(credit: tuple[int, int]) -> Credit:
    """Return the credit: the deltas and bytes that may be unread. Raises UsageError."""
    if not isinstance(credit, tuple) or len(credit) != len(Credit._fields):
        raise UsageError(f"credit {credit!r:.60}: give deltas and bytes, such as (10_000, 8_388_608)")
    return Credit(*credit)
