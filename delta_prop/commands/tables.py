"""Tables of several partitions, and the options that name a partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop.directory.readonly_log import PartitionName
from delta_prop.platform import system
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping

_WIDTH = 16
_RANGES_MAX = 10


class Table:
    """Prints lines; `has_partitions`: begins each with its partition."""

    def __init__(self, *, has_partitions: bool) -> None:
        self._has_partitions = has_partitions

    def put_head(self, line: str) -> None:
        """Print the names of the columns."""
        system.put(f"{'partition':{_WIDTH}}  {line}" if self._has_partitions else line)

    def put(self, row: Mapping[str, Any], line: str) -> None:
        """Print a row's line; the row's fields name the partition."""
        label = f"{row['stream']}/{row['partition']}" if self._has_partitions else ""
        system.put((f"{label:{_WIDTH}}  {line}" if label else line).rstrip())


def name_of(options: Namespace) -> PartitionName:
    """Return the partition that the options name; without --stream one of the default stream."""
    return PartitionName(options.stream or DEFAULT_STREAM, options.partition)


def select_rows(rows: Iterable[Mapping[str, Any]], options: Namespace) -> list[Mapping[str, Any]]:
    """Return the rows of a server's response in the partitions that the options name."""
    stream = options.stream or (None if options.partition is None else DEFAULT_STREAM)
    return [
        row
        for row in rows
        if stream in (None, row["stream"]) and options.partition in (None, row["partition"])
    ]


def find_closed(streams: Iterable[Mapping[str, Any]], options: Namespace) -> list[Mapping[str, Any]]:
    """Return a row for each partition that the options name and that a server has not open.

    `streams`: of the server's status.
    """
    rows: list[Mapping[str, Any]] = []
    for stream in streams:
        opened = {each["partition"] for each in stream["open"]}
        closed = (number for number in range(stream["partitions"]) if number not in opened)
        rows += ({"stream": stream["name"], "partition": number, "state": "closed"} for number in closed)
    return select_rows(rows, options)


def describe_closed(rows: Iterable[Mapping[str, Any]]) -> str:
    """Say which partitions are not open, and how to see them; the rows are in order."""
    ranges: list[list[Any]] = []  # stream, first and last partition
    for row in rows:
        if ranges and ranges[-1][0] == row["stream"] and ranges[-1][2] == row["partition"] - 1:
            ranges[-1][2] = row["partition"]
        else:
            ranges.append([row["stream"], row["partition"], row["partition"]])
    names = [f"{stream}/{first}" + (f" to {last}" if last > first else "") for stream, first, last in ranges]
    more = f" and {len(names) - _RANGES_MAX:,} more" if len(names) > _RANGES_MAX else ""
    return (
        f"the server has partitions that are not open, and knows nothing of them: "
        f"{', '.join(names[:_RANGES_MAX])}{more}: --data DIR shows them, also beside a running server"
    )


def are_of_several(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if a row is not of the default partition, so that a table needs the column."""
    return any(row["stream"] != DEFAULT_STREAM for row in rows)
