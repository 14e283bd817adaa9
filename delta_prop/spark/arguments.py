"""Checks the arguments of the functions for Spark: a session, a table, a log, a position in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePath
from typing import TypeAlias

from delta_prop.directory.log_positions import LATEST, LogPosition, parse_position
from delta_prop.platform.dates import EPOCH, TIME_EXAMPLES, US, check_past
from delta_prop.spark import system
from delta_prop.spark.options import Remote
from delta_prop_wire.errors import UsageError

LogSource: TypeAlias = str | PurePath | Remote
When: TypeAlias = int | str | datetime | LogPosition | None

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Formats of tables, by the suffixes of their names."""


def check_session(spark: object) -> None:
    """Raise UsageError unless the argument is a Spark session."""
    if not callable(getattr(spark, "range", None)):
        raise UsageError(
            f"spark: type {type(spark).__name__} is not a Spark session: create one with "
            "delta_prop.spark.session()"
        )


def check_table(field: str, table: object) -> None:
    """Raise UsageError unless the argument is a DataFrame."""
    if not callable(getattr(table, "mapInArrow", None)):
        raise UsageError(
            f"{field}: type {type(table).__name__} is not a DataFrame: read one, as with "
            "spark.read.parquet(PATH)"
        )


def normalize_source(source: LogSource) -> str | Remote:
    """Return a data directory as text, or a service unchanged. Raises UsageError."""
    if isinstance(source, Remote):
        return source
    if isinstance(source, str | PurePath) and str(source):
        return str(source)
    raise UsageError(f"source {source!r:.60}: give a data directory, or a service as delta://host:port")


def position_of(
    at: When, default: LogPosition = LATEST, *, name: str = "at", allow_ends: bool = False
) -> LogPosition:
    """Return the log position of an offset or a time; of None, `default`.

    `allow_ends`: a text may also be `earliest` or `latest`. Raises UsageError.
    """
    if at is None or isinstance(at, LogPosition):
        return default if at is None else at
    if isinstance(at, str):
        return parse_position(name, at, system.wall_us(), allow_ends=allow_ends)
    if isinstance(at, datetime):
        time = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        time_us = (time - EPOCH) // US
        check_past(name, str(at), time_us, system.wall_us())
        return LogPosition(time_us=time_us)
    if isinstance(at, bool) or not isinstance(at, int) or at < 0:
        raise UsageError(f"{name} {at!r:.60}: give an offset from 0, a datetime, or {TIME_EXAMPLES}")
    return LogPosition(offset=at)


def check_holds_for_each(option: str, at: LogPosition, partition_count: int) -> None:
    """Raise UsageError if a position is an offset, while several partitions are read."""
    if at.offset is not None and partition_count > 1:
        raise UsageError(
            f"{option} {at.offset} is an offset, but each of the {partition_count} partitions has its own: "
            "give a time, earliest or latest, or name one partition"
        )


def check_not_beyond(option: str, offset: int, end: int) -> None:
    """Raise UsageError if the bound of a read, from `option`, is after the log's next offset."""
    if offset <= end:
        return
    last = f"its last delta has offset {end - 1}, the next one will have {end}" if end else "it is empty"
    raise UsageError(
        f"{option} {offset} is after the end of the log ({last}): give an offset up to {end}, earliest or "
        "latest"
    )


def format_of(path: str, chosen: str | None = None) -> str:
    """Return the chosen format, else that of the name's suffix. Raises UsageError."""
    by_suffix = next(
        (name for suffix, name in FORMATS.items() if path.rstrip("/").lower().endswith(suffix)), None
    )
    format_name = chosen or by_suffix
    if format_name is None:
        raise UsageError(
            f"table {path!r:.300}: its name has no known suffix: give parquet, csv or json as format"
        )
    return format_name
