"""Reads the log of a data directory from its files without a server, in parts that tasks read in parallel.

It also works while a process writes, up to the high watermark. If the log has lost its beginning, the
snapshot has the states that resulted from it. Every task must see the directory at the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from delta_prop.calls.argument_checks import check_path
from delta_prop.directory.log_positions import EARLIEST, LATEST, LogPosition, check_not_before, offset_of
from delta_prop.directory.readonly_log import (
    DEFAULT_PARTITION,
    PartitionName,
    find_place,
    open_disk,
    open_prefix_snapshot,
    open_readonly_log,
)
from delta_prop.platform.system import open_existing_disk
from delta_prop.spark.arguments import (
    When,
    check_holds_for_each,
    check_not_beyond,
    check_session,
    position_of,
)
from delta_prop.spark.data_source.rows import merge_batches
from delta_prop_broker.catalogue.store import PLACE_OF_DEFAULT, PartitionPlace, place_of, read_catalogue
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.readonly.follow import Follower
from delta_prop_broker.retention.snapshot import Snapshot, open_snapshot
from delta_prop_broker.segments.segment import Segment, segment_bases
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

PART_BYTES = 16 << 20
"""Size up to which one task reads adjacent segments; it reads a larger segment alone."""
PARTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """The log at `place` from offset `start` up to `end` (exclusive); `bytes`: the approximate size."""

    data: str
    start: int
    end: int
    bytes: int
    place: PartitionPlace = PLACE_OF_DEFAULT

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self.place.name.partition

    def batches(self) -> Iterator[LoggedBatch]:
        """Yield its batches; the last one may reach beyond `end`. Raises Refused, LogCorrupted, OSError."""
        disk = open_existing_disk(self.data)
        with closing(Follower(disk, self.start, self.place.log_path, synced=self.end)) as follower:
            for location in follower.read():
                if location.logged.offset >= self.end:
                    return
                yield location.logged


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Frames of the snapshot at `offset`: from `first_frame` up to `end_frame` (exclusive)."""

    data: str
    offset: int
    first_frame: int
    end_frame: int
    bytes: int
    place: PartitionPlace = PLACE_OF_DEFAULT

    @property
    def start(self) -> int:
        """The offset before which all deltas are in the states."""
        return self.offset

    @property
    def end(self) -> int:
        """The same offset: states are read whole."""
        return self.offset

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self.place.name.partition

    def batches(self) -> Iterator[LoggedBatch]:
        """Yield the states in the frames. Raises Refused, LogCorrupted, OSError."""
        try:
            snapshot = open_snapshot(open_existing_disk(self.data), self.place.log_path, self.offset)
        except FileNotFoundError:
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"the snapshot at offset {self.offset} was replaced by a newer one while it was read: "
                "start the job again",
            ) from None
        with closing(snapshot):
            yield from snapshot.frames(self.first_frame, self.end_frame)


class LogPart(Protocol):
    """A part of a log that one task reads: the rows from offset `start` up to `end` (exclusive)."""

    @property
    def start(self) -> int:
        """The first offset."""
        ...

    @property
    def end(self) -> int:
        """The offset after the last one."""
        ...

    @property
    def partition(self) -> int:
        """The number of the partition."""
        ...

    @property
    def bytes(self) -> int:
        """Approximate size."""
        ...

    def batches(self) -> Iterator[LoggedBatch]:
        """Yield its batches, in order; the last one may reach beyond its end."""
        ...


@dataclass(frozen=True, slots=True)
class LogView:
    """A range of a log to read: `parts` cover offsets from `start` up to `end`.

    `is_complete`: the parts, with the states of a snapshot, include everything since offset 0. `partition`:
    the number of the partition whose log it is.
    """

    log_id: bytes
    epoch: int
    start: int
    end: int
    is_complete: bool
    parts: Sequence[LogPart]
    partition: int = 0

    @property
    def bytes(self) -> int:
        """Approximate size of all parts."""
        return sum(part.bytes for part in self.parts)


def deltas_of(
    spark: SparkSession,
    path: str,
    *,
    start: When = None,
    end: When = None,
    stream: str | None = None,
    partition: int | None = None,
) -> DataFrame:
    """Return the deltas in a data directory as a DataFrame, with the columns of a read from a service.

    From `start` up to `end` (exclusive). `stream`: its name; if it is given, the rows have the column
    `partition`. `partition`: only this one. Raises UsageError, Refused, LogCorrupted, OSError.
    """
    from delta_prop.spark.columns import READ_SCHEMA, STREAM_READ_SCHEMA

    check_session(spark)
    begin = position_of(start, EARLIEST, name="start", allow_ends=True)
    end = position_of(end, LATEST, name="end", allow_ends=True)
    names = partitions_in(check_path("path", path), PartitionName(stream or DEFAULT_STREAM, partition))
    for option, at in (("start", begin), ("end", end)):
        check_holds_for_each(option, at, len(names))
    parts = [part for name in names for part in log_of(path, name, start=begin, end=end).parts]
    schema = READ_SCHEMA if stream is None else STREAM_READ_SCHEMA
    return spark_parts(spark, parts, _make_row_reader(schema), schema)


def partitions_in(path: str, name: PartitionName) -> list[PartitionName]:
    """Return a partition of a data directory; if `name` has none, all of the stream that were ever used.

    Raises UsageError, Refused (UNKNOWN_STREAM, WRONG_PARTITION), LogCorrupted, OSError.
    """
    disk = open_disk(path)
    if name == DEFAULT_PARTITION:
        return [name]
    if name.partition is not None:
        find_place(disk, name)  # raises if there is none
        return [name]
    stream = read_catalogue(disk).require(name.stream)
    numbers = range(stream.partitions)
    return [PartitionName(name.stream, one) for one in numbers if disk.list(place_of(stream, one).log_path)]


def spark_parts(
    spark: SparkSession,
    parts: Sequence[LogPart],
    read: Callable[[LogPart], Iterator[pa.RecordBatch]],
    schema: object,
) -> DataFrame:
    """Return the rows that `read` yields for each part; one task per part, which gets `parts` and `read`."""

    def rows(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from read(parts[number])

    count = len(parts)
    return spark.range(0, count, 1, max(count, 1)).mapInArrow(rows, schema)


def log_of(
    path: str,
    name: PartitionName = DEFAULT_PARTITION,
    *,
    start: LogPosition = EARLIEST,
    end: LogPosition = LATEST,
) -> LogView:
    """Return the range of a log's deltas. Raises UsageError, Refused, LogCorrupted, OSError."""
    with open_readonly_log(path, name) as (_, log, _):
        begin, stop = offset_of(start, log), min(offset_of(end, log), log.high_watermark)
        check_not_beyond("offset", begin, log.high_watermark)
        if begin < log.start_offset:
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"offset {begin} is no longer in the log: start at {log.start_offset} or later",
                details={"offset": begin, "start_offset": log.start_offset},
            )
        place = _place_of(path, name)
        parts = _segment_parts(path, place, log, begin, stop)
    partition = place.name.partition
    return LogView(log.log_id, log.epoch, begin, max(begin, stop), log.start_offset == 0, parts, partition)


def _place_of(path: str, name: PartitionName) -> PartitionPlace:
    return PLACE_OF_DEFAULT if name == DEFAULT_PARTITION else find_place(open_existing_disk(path), name)


def states_of(path: str, name: PartitionName = DEFAULT_PARTITION, *, at: LogPosition = LATEST) -> LogView:
    """Return the range of the log from which to fold all vectors, as of a position (inclusive).

    It begins at offset 0, or at the snapshot of a log that has lost its beginning; without a snapshot, at the
    log's start. Raises UsageError, Refused (CURSOR_TOO_OLD) if the log has compacted the deltas
    up to the position, LogCorrupted, OSError.
    """
    snapshot_parts: list[SnapshotPart] = []
    with open_readonly_log(path, name) as (_, log, _), open_prefix_snapshot(log) as snapshot:
        place = _place_of(path, name)
        if snapshot is None:
            begin = log.start_offset
        else:
            check_not_before(at, snapshot)
            begin, snapshot_parts = snapshot.offset, _snapshot_parts(path, place, snapshot)
        end = max(_end_of(at, log), begin)
        is_complete = log.start_offset == 0 if snapshot is None else snapshot.begin == 0
        parts: list[LogPart] = [*snapshot_parts, *_segment_parts(path, place, log, begin, end)]
    return LogView(log.log_id, log.epoch, begin, end, is_complete, parts, place.name.partition)


def _end_of(at: LogPosition, log: DurableLog) -> int:
    if at.offset is not None:
        if at.offset >= log.high_watermark:
            raise UsageError(
                f"offset {at.offset} is after the end of the log: give an offset below {log.high_watermark}"
            )
        return at.offset + 1
    return log.offset_at(at.time_us + 1) if at.time_us is not None else log.high_watermark


def _segment_parts(
    path: str, place: PartitionPlace, log: DurableLog, begin: int, end: int
) -> list[SegmentPart]:
    """Return the log from one offset up to another, split at segments."""
    if end <= begin:
        return []
    disk, directory = open_existing_disk(path), place.log_path
    bases = [base for base in segment_bases(disk.list(directory)) if base < end]
    first = max((base for base in bases if base <= begin), default=begin)
    bases = [base for base in bases if base >= first]
    part_bytes = max(PART_BYTES, log.statistics().bytes // PARTS_MAX)
    parts: list[SegmentPart] = []
    for base, stop in zip(bases, [*bases[1:], end], strict=True):
        size = _bytes_of(disk, Segment(directory, base))
        if parts and parts[-1].bytes + size <= part_bytes:
            previous = parts.pop()
            parts.append(SegmentPart(path, previous.start, stop, previous.bytes + size, place))
        else:
            parts.append(SegmentPart(path, max(base, begin), stop, size, place))
    return parts


def _bytes_of(disk: Disk, segment: Segment) -> int:
    with closing(disk.open(segment.path, read_only=True)) as file:
        return file.size()


def _snapshot_parts(path: str, place: PartitionPlace, snapshot: Snapshot) -> list[SnapshotPart]:
    frames = snapshot.frame_count
    count = min(max(snapshot.bytes // PART_BYTES, 1), PARTS_MAX, max(frames, 1))
    cuts = [frames * number // count for number in range(count + 1)]
    size = snapshot.bytes // count
    return [
        SnapshotPart(path, snapshot.offset, begin, stop, size, place)
        for begin, stop in pairwise(cuts)
        if stop > begin
    ]


def _make_row_reader(schema: StructType) -> Callable[[LogPart], Iterator[pa.RecordBatch]]:
    columns = [(field.name, field.nullable) for field in schema]

    def read(part: LogPart) -> Iterator[pa.RecordBatch]:
        batches = (logged for logged in part.batches() if not logged.batch.is_control)
        for rows in merge_batches(batches, columns, part.partition):
            bounds = (part.start, part.end)
            first, stop = np.searchsorted(rows.column("offset").to_numpy(), bounds).tolist()
            yield rows.slice(first, stop - first)

    return read
