"""What the functions for Spark are called with: a session, a log, a place in it; refused with the cure."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING

from delta_prop.commands.places import LATEST, At, parse_at
from delta_prop.dates import EPOCH, EXAMPLES, US, check_past
from delta_prop.spark import edge
from delta_prop.spark.options import Remote
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from typing import TypeAlias

    Place: TypeAlias = str | PurePath | Remote
    When: TypeAlias = int | str | datetime | At | None


def check_session(spark: object) -> None:
    """Refuse what is no Spark session. Raises UsageError."""
    if not callable(getattr(spark, "range", None)):
        raise UsageError(
            f"spark: a {type(spark).__name__} is not a Spark session: create one with "
            "delta_prop.spark.session()"
        )


def check_table(field: str, table: object) -> None:
    """Refuse what is no DataFrame. Raises UsageError."""
    if not callable(getattr(table, "mapInArrow", None)):
        raise UsageError(
            f"{field}: a {type(table).__name__} is not a DataFrame: read one, as with "
            "spark.read.parquet(PATH)"
        )


def place_of(place: Place) -> str | Remote:
    """A data directory or a service. Raises UsageError."""
    if isinstance(place, Remote):
        return place
    if isinstance(place, str | PurePath) and str(place):
        return str(place)
    raise UsageError(f"place {place!r:.60}: give a data directory, or a service as delta://host:port")


def at_of(at: When, usual: At = LATEST, *, name: str = "at", ends: bool = False) -> At:
    """An offset or a time as the log's readers name it. Raises UsageError.

    `ends`: earliest and latest too.
    """
    if at is None or isinstance(at, At):
        return usual if at is None else at
    if isinstance(at, str):
        return parse_at(name, at, edge.wall_us(), ends=ends)
    if isinstance(at, datetime):
        time = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        time_us = (time - EPOCH) // US
        check_past(name, str(at), time_us, edge.wall_us())
        return At(time_us=time_us)
    if isinstance(at, bool) or not isinstance(at, int) or at < 0:
        raise UsageError(f"{name} {at!r:.60}: give an offset, from 0 on, a datetime, or {EXAMPLES}")
    return At(offset=at)
