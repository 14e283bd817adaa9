"""Readers of the data source: Spark's partitions are ranges of offsets of the stream's partitions.

Rows come as Arrow, without a loop over rows.

A reader holds no connection: Spark sends it to executors, which open one for each partition that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from delta_prop.directory.log_positions import LogPosition
from delta_prop.spark.arguments import check_holds_for_each, check_not_beyond
from delta_prop.spark.columns import check_read_schema
from delta_prop.spark.data_source.pushdown import ReadFilter, narrow
from delta_prop.spark.data_source.stream_positions import (
    StreamPosition,
    check_positions,
    format_positions,
    parse_positions,
    share_limit,
)
from delta_prop.spark.options import ReadOptions
from delta_prop.spark.served_streams import ServedStream, find_served_stream, read_bounds
from delta_prop.spark.service_checks import check_on_worker, range_reader_of
from delta_prop_wire.errors import UsageError
from delta_prop_wire.stamp import DEFAULT_LOG, LogName
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    import pyarrow as pa

    from delta_prop.client.ranges import LogBounds

PARTITION_OFFSETS = 100_000
"""Number of offsets in a partition, if the user does not set the number of partitions."""
PARTITIONS_DEFAULT_MAX = 200
"""Maximum number of partitions if the user does not set it; each then has more offsets."""


@dataclass
class OffsetRange(InputPartition):
    """The offsets from `start` up to `end` (exclusive) of one log in one epoch; `log`: its name."""

    start: int
    end: int
    log_id: bytes
    epoch: int
    log: LogName = DEFAULT_LOG

    @property
    def size(self) -> int:
        """The number of offsets."""
        return max(self.end - self.start, 0)


def split_ranges(ranges: Sequence[OffsetRange], partitions: int | None) -> list[OffsetRange]:
    """Split ranges of several logs into about `partitions` parts; None: into parts of `PARTITION_OFFSETS`.

    Every log with rows has at least one part; there is at least one part in all.
    """
    total = sum(one.size for one in ranges)
    with_rows = [one for one in ranges if one.size] or ranges[:1]
    return [part for one in with_rows for part in _split_range(one, partitions, total)]


def _split_range(offset_range: OffsetRange, partitions: int | None, total: int) -> list[OffsetRange]:
    size, count = offset_range.size, partitions
    if count is None:
        share = max(PARTITIONS_DEFAULT_MAX * size // max(total, 1), 1)
        count = min(-(-size // PARTITION_OFFSETS), share)
    else:
        count = count * size // max(total, 1)
    count = max(min(count, size), 1)
    edges = [offset_range.start + size * number // count for number in range(count + 1)]
    return [replace(offset_range, start=first, end=stop) for first, stop in pairwise(edges)]


class _BaseReader:
    """Base of the batch reader and the stream reader."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_read_schema(schema)
        self._options = options
        self._columns = [(field.name, field.nullable) for field in schema]
        self._filter = ReadFilter(tuple(map(Topic.parse, options.topics)))
        self._served: ServedStream | None = None  # known once it was needed

    @property
    def _stream(self) -> ServedStream:
        check_on_worker(self._options.remote)
        if self._served is None:
            self._served = find_served_stream(self._options.remote, self._options.stream)
        return self._served

    def _bounds(self) -> dict[int, LogBounds]:
        """Return the bounds of each partition to read, by its number."""
        stream = self._stream
        return read_bounds(self._options.remote, stream, stream.choose(self._options.partition))

    def _resolve_offset(self, option: str, partition: int, bounds: LogBounds) -> int:
        """Return the offset of the option `start` or `end` in a partition. Raises UsageError."""
        options, stream = self._options, self._stream
        at: LogPosition = getattr(options, option)
        if options.partition is None:
            check_holds_for_each(f"option {option}", at, stream.count)
        if at.time_us is None:
            return _resolve_position(option, at, bounds)
        found = range_reader_of(options.remote, stream.log_name(partition)).offset_at(at.time_us)
        return min(max(found, bounds.start_offset), bounds.end_offset)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range; Spark calls this on an executor."""
        # Loaded here, since the driver, which only plans, starts quicker without Arrow.
        from delta_prop.spark.data_source.rows import merge_batches

        assert isinstance(partition, OffsetRange)
        range_reader = range_reader_of(self._options.remote, partition.log)
        log = (partition.log_id, partition.epoch)
        batches = range_reader.read(partition.start, partition.end, self._filter.topics, log=log)
        return merge_batches(batches, self._columns, partition.log.partition)


class Reader(_BaseReader, DataSourceReader):
    """Reads the log's present content."""

    def partitions(self) -> list[OffsetRange]:
        """Return ranges of offsets. Raises UsageError, Refused, Unreachable."""
        ranges = [self._range_of(number, bounds) for number, bounds in self._bounds().items()]
        wanted = [one for one in ranges if self._filter.passes(one.log.partition)]
        return split_ranges(wanted or [replace(ranges[0], end=ranges[0].start)], self._options.partitions)

    def _range_of(self, partition: int, bounds: LogBounds) -> OffsetRange:
        start = self._resolve_offset("start", partition, bounds)
        end = self._resolve_offset("end", partition, bounds)
        if start > end:
            raise UsageError(
                f"options start and end: the read would begin at offset {start} and end before {end}: give "
                "an end that is not before start"
            )
        start, end = self._filter.clip(start, end)
        return OffsetRange(start, end, bounds.log_id, bounds.epoch, self._stream.log_name(partition))


class PushingReader(Reader):
    """A reader to which Spark passes its filters before the read.

    It is a class of its own, because Spark fails every read of a reader that takes filters, unless its
    setting spark.sql.python.filterPushdown.enabled is true.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Let the service omit rows that cannot pass; Spark applies all filters again."""
        self._filter = narrow(self._filter, filters)
        return filters


class StreamReader(_BaseReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads continuously. Its position is, of each partition, the next offset, the log's id and its epoch."""

    _stream_ends: dict[int, int] | None = None  # of a query that ends there

    def initialOffset(self) -> dict[str, Any]:
        """Return the position where a new query begins."""
        return format_positions(
            {
                number: StreamPosition.within(bounds, self._resolve_offset("start", number, bounds))
                for number, bounds in self._bounds().items()
            }
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of one micro-batch."""
        rows = self._options.offsets_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch. Raises UsageError, Refused, Unreachable."""
        all_bounds = self._bounds()
        positions = check_positions(start, all_bounds)
        ends = {number: bounds.end_offset for number, bounds in all_bounds.items()}
        if self._stream_ends is not None:
            ends = {number: min(end, self._stream_ends[number]) for number, end in ends.items()}
        shares = {number: max(ends[number] - at.offset, 0) for number, at in positions.items()}
        if isinstance(limit, ReadMaxRows):
            turn = sum(at.offset for at in positions.values())
            shares = share_limit(shares, limit.max_rows, turn)
        moved = {
            number: StreamPosition.within(all_bounds[number], positions[number].offset + share)
            for number, share in shares.items()
            if share
        }
        return format_positions({**positions, **moved}) if moved else start

    def prepareForTriggerAvailableNow(self) -> None:
        """End the query at the present ends of the logs."""
        self._stream_ends = {number: bounds.end_offset for number, bounds in self._bounds().items()}

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the ends of the logs, for Spark's progress reports."""
        ends = {n: StreamPosition.within(one, one.end_offset) for n, one in self._bounds().items()}
        return format_positions(ends)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetRange]:
        """Return ranges of offsets. Raises UsageError, Refused, Unreachable."""
        all_bounds = self._bounds()
        first, stop = check_positions(start, all_bounds), parse_positions(end)
        ranges = [
            OffsetRange(
                first[number].offset, at.offset, bounds.log_id, bounds.epoch, self._stream.log_name(number)
            )
            for number, at in stop.items()
            if at.offset > first[number].offset and (bounds := all_bounds[number])
        ]
        parts = split_ranges(ranges, self._options.partitions)
        for part in parts:
            at = first[part.log.partition]
            if part.start == at.offset:
                part.epoch = at.epoch  # the service then reports if this position was lost since
        return parts

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark has the position in its checkpoint, the service stores none."""

    def stop(self) -> None:
        """Do nothing: no connection is open."""


def _resolve_position(option: str, at: LogPosition, bounds: LogBounds) -> int:
    """Return the offset of an option that names no time. Raises UsageError if it is not in the log."""
    if at.offset is None:
        return bounds.start_offset if at.earliest else bounds.end_offset
    check_not_beyond(f"option {option}", at.offset, bounds.end_offset)
    if at.offset < bounds.start_offset:
        raise UsageError(
            f"option {option} {at.offset}: the log has removed the offsets before {bounds.start_offset}: "
            "give that one, a later one, or earliest"
        )
    return at.offset
