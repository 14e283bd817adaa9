"""The log of a data directory, read from its files without a server, in parts that tasks read side by side.

Beside a process that writes too: what readers may see, and no more. Where the log has lost its beginning, its
snapshot tells what that came to. Every task must see the directory under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from delta_prop.commands.edge import existing_disk
from delta_prop.commands.opened import opened_log, snapshot_before
from delta_prop.commands.places import EARLIEST, LATEST, check_within, offset_of
from delta_prop.spark.arguments import at_of, check_session, path_of
from delta_prop.spark.reads.beyond import check_reached
from delta_prop.spark.reads.rows import merged
from delta_prop_broker.log.beside.follow import Follower
from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_broker.log.files.segment import Segment, segment_bases
from delta_prop_broker.log.files.snapshot import open_snapshot
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from delta_prop.commands.places import At
    from delta_prop.spark.arguments import When
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_wire.batch import LoggedBatch

PART_BYTES = 16 << 20
"""Segments that lie side by side are read by one task up to here; a larger one by itself."""
PARTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """The log from offset `begin`, where a segment begins, up to `end`; about so many bytes."""

    data: str
    begin: int
    end: int
    bytes: int

    def batches(self) -> Iterator[LoggedBatch]:
        """The batches of it; the last one may reach beyond `end`. Raises Refused, LogDamaged, OSError."""
        follower = Follower(existing_disk(self.data), self.begin, synced=self.end)
        try:
            for place in follower.read():
                if place.logged.offset >= self.end:
                    return
                yield place.logged
        finally:
            follower.close()


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Some frames of the snapshot at an offset, by their numbers; about so many bytes."""

    data: str
    offset: int
    begin: int
    stop: int
    bytes: int

    def batches(self) -> Iterator[LoggedBatch]:
        """The states in them. Raises Refused, LogDamaged, OSError."""
        try:
            snapshot = open_snapshot(existing_disk(self.data), DIRECTORY, self.offset)
        except FileNotFoundError:
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"the snapshot at offset {self.offset} has given way to a newer one while it was read: "
                "begin again",
            ) from None
        try:
            yield from snapshot.frames(self.begin, self.stop)
        finally:
            snapshot.close()


class Part(Protocol):
    """What a task reads; about so many bytes."""

    @property
    def bytes(self) -> int:
        """About how much it is."""
        ...

    def batches(self) -> Iterator[LoggedBatch]:
        """The batches in it, in order; the last one may reach beyond its end."""
        ...


@dataclass(frozen=True, slots=True)
class Log:
    """What there is to read of a log: `parts` hold what stands from offset `begin` up to `end`.

    `whole`: they tell of everything, by deltas or by the states of a snapshot, not only of what is left.
    """

    log_id: bytes
    epoch: int
    begin: int
    end: int
    whole: bool
    parts: Sequence[Part]

    @property
    def bytes(self) -> int:
        """About how much is to be read."""
        return sum(part.bytes for part in self.parts)


def deltas_of(spark: SparkSession, path: str, *, since: When = None, until: When = None) -> DataFrame:
    """The deltas in a data directory as a DataFrame, with the columns that a read from a service has.

    From `since` on, up to `until`, which is left out. Raises UsageError, Refused, LogDamaged, OSError.
    """
    from delta_prop.spark.columns import READ

    check_session(spark)
    begin = at_of(since, EARLIEST, name="since", ends=True)
    end = at_of(until, LATEST, name="until", ends=True)
    log = log_of(path_of("path", path), since=begin, until=end)
    return spark_parts(spark, log.parts, _rows(log.begin, log.end), READ)


def spark_parts(
    spark: SparkSession,
    parts: Sequence[Part],
    read: Callable[[Part], Iterator[pa.RecordBatch]],
    schema: object,
) -> DataFrame:
    """What `read` gives of each part, a task a part. Both are sent to the tasks."""

    def rows(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for some in numbers:
            for number in some.column(0).to_pylist():
                yield from read(parts[number])

    count = len(parts)
    return spark.range(0, count, 1, max(count, 1)).mapInArrow(rows, schema)


def log_of(path: str, *, since: At = EARLIEST, until: At = LATEST) -> Log:
    """The deltas from one place up to another. Raises UsageError, Refused, LogDamaged, OSError."""
    with opened_log(path) as (disk, log, _):
        begin, end = offset_of(since, log), min(offset_of(until, log), log.visible)
        check_reached("offset", begin, log.visible)
        if begin < log.first_offset:
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"offset {begin} is no longer in the log, which starts at {log.first_offset}",
                details={"offset": begin, "start_offset": log.first_offset},
            )
        parts = _segment_parts(disk, path, log, begin, end)
    return Log(log.log_id, log.epoch, begin, max(begin, end), log.first_offset == 0, parts)


def states_of(path: str, *, at: At = LATEST) -> Log:
    """What the state of every vector is folded from, as of a place; what stands there counts.

    From offset 0, or from the snapshot of a log that has lost its beginning; from what is left where there is
    none. Raises UsageError, Refused (CURSOR_TOO_OLD) where the place is before what is kept, LogDamaged,
    OSError.
    """
    before: list[SnapshotPart] = []
    with opened_log(path) as (disk, log, _), snapshot_before(log) as snapshot:
        if snapshot is None:
            begin = log.first_offset
        else:
            check_within(at, snapshot)
            begin, before = snapshot.offset, _snapshot_parts(path, snapshot)
        end = max(_end_of(at, log), begin)
        whole = log.first_offset == 0 if snapshot is None else snapshot.begin == 0
        parts: list[Part] = [*before, *_segment_parts(disk, path, log, begin, end)]
    return Log(log.log_id, log.epoch, begin, end, whole, parts)


def _end_of(at: At, log: DurableLog) -> int:
    """Behind the last delta that counts."""
    if at.offset is not None:
        if at.offset >= log.visible:
            raise UsageError(f"offset {at.offset} is beyond the log, which ends before offset {log.visible}")
        return at.offset + 1
    return log.offset_at(at.time_us + 1) if at.time_us is not None else log.visible


def _segment_parts(disk: Disk, path: str, log: DurableLog, begin: int, end: int) -> list[SegmentPart]:
    """The log from one offset up to another, cut where segments begin."""
    if end <= begin:
        return []
    bases = [base for base in segment_bases(disk.list(DIRECTORY)) if base < end]
    first = max((base for base in bases if base <= begin), default=begin)
    bases = [base for base in bases if base >= first]
    least = max(PART_BYTES, log.statistics().bytes // PARTS_MAX)
    parts: list[SegmentPart] = []
    for base, stop in zip(bases, [*bases[1:], end], strict=True):
        size = _bytes_of(disk, base)
        if parts and parts[-1].bytes + size <= least:
            before = parts.pop()
            parts.append(SegmentPart(path, before.begin, stop, before.bytes + size))
        else:
            parts.append(SegmentPart(path, max(base, begin), stop, size))
    return parts


def _bytes_of(disk: Disk, base: int) -> int:
    file = disk.open(Segment(DIRECTORY, base).path, read_only=True)
    try:
        return file.size()
    finally:
        file.close()


def _snapshot_parts(path: str, snapshot: Snapshot) -> list[SnapshotPart]:
    frames = snapshot.frame_count
    count = min(max(snapshot.bytes // PART_BYTES, 1), PARTS_MAX, max(frames, 1))
    cuts = [frames * number // count for number in range(count + 1)]
    size = snapshot.bytes // count
    return [
        SnapshotPart(path, snapshot.offset, begin, stop, size)
        for begin, stop in pairwise(cuts)
        if stop > begin
    ]


def _rows(begin: int, end: int) -> Callable[[Part], Iterator[pa.RecordBatch]]:
    def read(part: Part) -> Iterator[pa.RecordBatch]:
        for rows in merged(one for one in part.batches() if not one.batch.is_control):
            first, stop = np.searchsorted(rows.column("offset").to_numpy(), (begin, end)).tolist()
            yield rows.slice(first, stop - first)

    return read
