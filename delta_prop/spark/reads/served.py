"""The log of a running service, read over the network in parts that tasks read side by side.

A service sends what is left of its log, one by one; a log that has lost its beginning is read from its
directory, where its snapshot lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from delta_prop.commands.places import EARLIEST, LATEST
from delta_prop.spark import edge
from delta_prop.spark.options import Remote, read_options
from delta_prop.spark.reach import asker_of, check_on_driver
from delta_prop.spark.reads.beyond import check_reached
from delta_prop.spark.reads.segments import Log
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.client.ranges import Bounds
    from delta_prop.commands.places import At
    from delta_prop_wire.batch import LoggedBatch

PART_ROWS = 100_000
ROW_BYTES = 256
"""About as large is a delta taken to be: nobody has looked yet."""


@dataclass(frozen=True, slots=True)
class ServicePart:
    """The offsets from `begin` up to `end` of one log, as it is in an epoch of it."""

    remote: Remote
    log: tuple[bytes, int]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """About how much that is."""
        return (self.end - self.begin) * ROW_BYTES

    def batches(self) -> Iterator[LoggedBatch]:
        """The batches of it. Raises Refused, UsageError, Unreachable."""
        return asker_of(self.remote).read(self.begin, self.end, log=self.log)


def remote_of(place: str | Remote) -> Remote | None:
    """The service that a place names, as `delta://host:port`; None: it is a directory. Raises UsageError."""
    if isinstance(place, Remote):
        return place
    if not place.startswith("delta://"):
        return None
    remote = read_options({"url": place}, edge.environment(), edge.wall_us()).remote
    check_on_driver(remote)
    return remote


def served_log(remote: Remote, *, at: At = LATEST) -> Log:
    """What a service has up to a place; what stands there counts. Raises UsageError, Refused, Unreachable."""
    asker = asker_of(remote)
    bounds = asker.bounds()
    end = bounds.end
    if at.offset is not None:
        if at.offset >= end:
            raise UsageError(f"offset {at.offset} is beyond the log, which ends before offset {end}")
        end = at.offset + 1
    elif at.time_us is not None:
        end = asker.offset_at(at.time_us + 1)
    return _log(remote, bounds, bounds.first, end)


def served_range(remote: Remote, *, since: At = EARLIEST, until: At = LATEST) -> Log:
    """What a service has from one place up to another. Raises UsageError, Refused, Unreachable."""
    asker = asker_of(remote)
    bounds = asker.bounds()

    def offset(at: At) -> int:
        if at.time_us is not None:
            return asker.offset_at(at.time_us)
        return at.offset if at.offset is not None else bounds.first if at.earliest else bounds.end

    begin = offset(since)
    check_reached("offset", begin, bounds.end)
    return _log(remote, bounds, begin, min(offset(until), bounds.end))


def _log(remote: Remote, bounds: Bounds, begin: int, end: int) -> Log:
    end = max(begin, end)
    marks = [*range(begin, end, PART_ROWS), end]
    log = (bounds.log_id, bounds.epoch)
    parts = [ServicePart(remote, log, start, stop) for start, stop in pairwise(marks)]
    return Log(*log, begin, end, bounds.first == 0, parts)
