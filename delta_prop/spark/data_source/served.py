"""Reads the log of a running service over the network, in parts that tasks read in parallel.

A service sends only the deltas that its log still has; a log that has lost its beginning must be read from
its directory, which has the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from delta_prop.directory.log_positions import EARLIEST, LATEST, LogPosition
from delta_prop.spark import system
from delta_prop.spark.arguments import check_not_beyond
from delta_prop.spark.data_source.segments import LogView
from delta_prop.spark.options import Remote, read_options
from delta_prop.spark.served_streams import find_served_stream
from delta_prop.spark.service_checks import check_on_driver, range_reader_of
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import UsageError
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from delta_prop.client.ranges import LogBounds
    from delta_prop.directory.readonly_log import PartitionName

PART_ROWS = 100_000
ROW_BYTES = 256
"""Assumed size of a delta, as sizes are unknown before the read."""


@dataclass(frozen=True, slots=True)
class ServicePart:
    """The offsets from `start` up to `end` of one log in one epoch; `name`: that of the log."""

    remote: Remote
    log: tuple[bytes, int]
    start: int
    end: int
    name: LogName = DEFAULT_LOG

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self.name.partition

    @property
    def bytes(self) -> int:
        """Approximate size."""
        return (self.end - self.start) * ROW_BYTES

    def batches(self) -> Iterator[LoggedBatch]:
        """Yield its batches. Raises Refused, UsageError, Unreachable."""
        return range_reader_of(self.remote, self.name).read(self.start, self.end, log=self.log)


def remote_of(source: str | Remote) -> Remote | None:
    """Return the service that `delta://host:port` names, None for a directory. Raises UsageError."""
    if isinstance(source, Remote):
        return source
    if not source.startswith("delta://"):
        return None
    remote = read_options({"url": source}, system.read_environment(), system.wall_us()).remote
    check_on_driver(remote)
    return remote


def partitions_at(remote: Remote, name: PartitionName) -> list[LogName]:
    """Return a partition of a service; if `name` has none, all of the stream.

    Raises UsageError, Refused, Unreachable.
    """
    stream = find_served_stream(remote, name.stream)
    return [stream.log_name(number) for number in stream.choose(name.partition)]


def served_log(remote: Remote, name: LogName = DEFAULT_LOG, *, at: LogPosition = LATEST) -> LogView:
    """Return a service's log up to a position (inclusive). Raises UsageError, Refused, Unreachable."""
    range_reader = range_reader_of(remote, name)
    bounds = range_reader.bounds()
    end = bounds.end_offset
    if at.offset is not None:
        if at.offset >= end:
            raise UsageError(f"offset {at.offset} is after the end of the log: give an offset below {end}")
        end = at.offset + 1
    elif at.time_us is not None:
        end = range_reader.offset_at(at.time_us + 1)
    return _make_log_view(remote, name, bounds, bounds.start_offset, end)


def served_range(
    remote: Remote,
    name: LogName = DEFAULT_LOG,
    *,
    start: LogPosition = EARLIEST,
    end: LogPosition = LATEST,
) -> LogView:
    """Return a service's log from one position up to another. Raises UsageError, Refused, Unreachable."""
    range_reader = range_reader_of(remote, name)
    bounds = range_reader.bounds()

    def offset_of(at: LogPosition) -> int:
        if at.time_us is not None:
            return range_reader.offset_at(at.time_us)
        return (
            at.offset if at.offset is not None else bounds.start_offset if at.earliest else bounds.end_offset
        )

    first = offset_of(start)
    check_not_beyond("offset", first, bounds.end_offset)
    return _make_log_view(remote, name, bounds, first, min(offset_of(end), bounds.end_offset))


def _make_log_view(remote: Remote, name: LogName, bounds: LogBounds, start: int, end: int) -> LogView:
    end = max(start, end)
    edges = [*range(start, end, PART_ROWS), end]
    log = (bounds.log_id, bounds.epoch)
    parts = [ServicePart(remote, log, first, stop, name) for first, stop in pairwise(edges)]
    return LogView(*log, start, end, bounds.start_offset == 0, parts, name.partition)
