"""Positions in a log as callers name them: an end, an offset, a time or a cursor. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TypeAlias

from delta_prop.platform.dates import TIME_EXAMPLES, check_past, parse_time
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Start, StartAt

StartPosition: TypeAlias = str | int | datetime | Cursor
"""The position to start at: an end of the log (`earliest`, `latest`), an offset, a time (a datetime, or text
such as `1h`, `yesterday`, `2026-01-31T12:00:00Z`), or a cursor.
"""


def parse_position(name: str, position: StartPosition) -> Start:
    """Return a position as a request names it. `name`: that of the argument.

    A time as text becomes 0: `resolve_time` sets it once the present time is known. Raises UsageError.
    """
    if isinstance(position, Cursor):
        return Start(StartAt.CURSOR, position)
    if isinstance(position, datetime):
        return time_start(name, position)
    if isinstance(position, int) and not isinstance(position, bool) and position >= 0:
        return Start(StartAt.OFFSET, position)
    if position in ("earliest", "latest"):
        return Start(StartAt(position))
    if isinstance(position, str) and parse_time(position, 0) is not None:
        return Start(StartAt.TIME, 0)
    raise UsageError(
        f"{name} {position!r:.60}: give earliest, latest, an offset, a datetime, a Cursor, or {TIME_EXAMPLES}"
    )


def time_start(name: str, time: datetime) -> Start:
    """Return a time as a request names it. Raises UsageError if it has no time zone."""
    if not isinstance(time, datetime):
        raise UsageError(f"{name} {time!r:.60}: give a datetime")
    if time.tzinfo is None:
        raise UsageError(f"{name} {time}: no time zone: give one, such as datetime.timezone.utc")
    return Start(StartAt.TIME, max(round(time.timestamp() * 1_000_000), 0))


def resolve_time(name: str, position: object, start: Start, now_us: int) -> Start:
    """Return `start`, the parsed `position`, with its time. Raises UsageError if that lies in the future."""
    if start.kind is not StartAt.TIME:
        return start
    time_us = parse_time(position, now_us) if isinstance(position, str) else start.value
    assert isinstance(time_us, int), "`parse_position` has checked it"
    check_past(name, str(position), time_us, now_us)
    return Start(StartAt.TIME, max(time_us, 0))
