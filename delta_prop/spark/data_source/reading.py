"""Readers of the data source: partitions are ranges of offsets, rows come as Arrow, without a loop over rows.

A reader holds no connection: Spark sends it to executors, which open one for each partition that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from delta_prop.spark.arguments import check_not_beyond
from delta_prop.spark.columns import check_read_schema
from delta_prop.spark.data_source.pushdown import ReadFilter, narrow
from delta_prop.spark.options import ReadOptions
from delta_prop.spark.service_checks import range_reader_of
from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    import pyarrow as pa

    from delta_prop.client.ranges import LogBounds, RangeReader

PARTITION_OFFSETS = 100_000
"""Number of offsets in a partition, if the user does not set the number of partitions."""
PARTITIONS_DEFAULT_MAX = 200
"""Maximum number of partitions if the user does not set it; each then has more offsets."""


@dataclass
class OffsetRange(InputPartition):
    """The offsets from `start` up to `end` (exclusive) of one log in one epoch."""

    start: int
    end: int
    log_id: bytes
    epoch: int


def split_range(start: int, end: int, bounds: LogBounds, partitions: int | None) -> list[OffsetRange]:
    """Split a range into `partitions` parts, at least one; None: into parts of `PARTITION_OFFSETS`."""
    size = max(end - start, 0)
    default_count = min(-(-size // PARTITION_OFFSETS), PARTITIONS_DEFAULT_MAX)
    count = max(min(default_count if partitions is None else partitions, size), 1)
    edges = [start + size * number // count for number in range(count + 1)]
    return [OffsetRange(first, stop, bounds.log_id, bounds.epoch) for first, stop in pairwise(edges)]


class _BaseReader:
    """Base of the batch reader and the stream reader."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_read_schema(schema)
        self._options = options
        self._columns = [(field.name, field.nullable) for field in schema]
        self._filter = ReadFilter(tuple(map(Topic.parse, options.topics)))

    def _range_reader(self) -> RangeReader:
        return range_reader_of(self._options.remote)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition; Spark calls this on an executor."""
        # Loaded here, since the driver, which only plans, starts quicker without Arrow.
        from delta_prop.spark.data_source.rows import merge_batches

        assert isinstance(partition, OffsetRange)
        log = (partition.log_id, partition.epoch)
        batches = self._range_reader().read(partition.start, partition.end, self._filter.topics, log=log)
        return merge_batches(batches, self._columns)


class Reader(_BaseReader, DataSourceReader):
    """Reads the log's present content."""

    def partitions(self) -> list[OffsetRange]:
        """Return ranges of offsets. Raises UsageError, Refused, Unreachable."""
        range_reader, options = self._range_reader(), self._options
        bounds = range_reader.bounds()
        start = _resolve_offset("start", options.start, range_reader, bounds)
        end = _resolve_offset("end", options.end, range_reader, bounds)
        if start > end:
            raise UsageError(
                f"options start and end: the read would begin at offset {start} and end before {end}: give "
                "an end that is not before start"
            )
        start, end = self._filter.clip(start, end)
        return split_range(start, end, bounds, options.partitions)


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
    """Reads a stream, whose position is the next offset, with the id and the epoch of its log."""

    _stream_end: int | None = None  # of a stream that processes only the rows available at its start

    def initialOffset(self) -> dict[str, Any]:
        """Return the position where a new stream begins."""
        range_reader = self._range_reader()
        bounds = range_reader.bounds()
        return _to_spark_offset(_resolve_offset("start", self._options.start, range_reader, bounds), bounds)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of one micro-batch."""
        rows = self._options.offsets_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch. Raises UsageError, Refused, Unreachable."""
        bounds = self._range_reader().bounds()
        next_offset = _check_spark_offset(start, bounds)
        end = bounds.end_offset
        if self._stream_end is not None:
            end = max(min(end, self._stream_end), next_offset)
        if isinstance(limit, ReadMaxRows):
            end = min(end, next_offset + limit.max_rows)
        return start if end <= next_offset else _to_spark_offset(end, bounds)

    def prepareForTriggerAvailableNow(self) -> None:
        """End the stream at the log's present end."""
        self._stream_end = self._range_reader().bounds().end_offset

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the log's end, for Spark's progress reports."""
        bounds = self._range_reader().bounds()
        return _to_spark_offset(bounds.end_offset, bounds)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetRange]:
        """Return ranges of offsets. Raises UsageError, Refused, Unreachable."""
        bounds = self._range_reader().bounds()
        first, stop = _check_spark_offset(start, bounds), _next_offset(end)
        if stop <= first:
            return []
        ranges = split_range(first, stop, bounds, self._options.partitions)
        ranges[0].epoch = int(start["epoch"])  # the service then reports if this position was lost since
        return ranges

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark has the position in its checkpoint, the service stores none."""

    def stop(self) -> None:
        """Do nothing: no connection is open."""


# --- positions


def _resolve_offset(option: str, at: LogPosition, range_reader: RangeReader, bounds: LogBounds) -> int:
    """Return the offset of an option. Raises UsageError if it is not in the log."""
    if at.time_us is not None:
        return min(max(range_reader.offset_at(at.time_us), bounds.start_offset), bounds.end_offset)
    if at.offset is None:
        return bounds.start_offset if at.earliest else bounds.end_offset
    check_not_beyond(f"option {option}", at.offset, bounds.end_offset)
    if at.offset < bounds.start_offset:
        raise UsageError(
            f"option {option} {at.offset}: the log has removed the offsets before {bounds.start_offset}: "
            "give that one, a later one, or earliest"
        )
    return at.offset


def _to_spark_offset(offset: int, bounds: LogBounds) -> dict[str, Any]:
    return {"0": offset, "log": bounds.log_id.hex(), "epoch": bounds.epoch}


def _next_offset(position: dict[str, Any]) -> int:
    return int(position["0"])


def _check_spark_offset(position: dict[str, Any], bounds: LogBounds) -> int:
    """Return the offset of a stream's position, if this log still has it. Raises UsageError."""
    offset, log_id = _next_offset(position), bounds.log_id.hex()
    if position["log"] != log_id:
        raise UsageError(
            f"the checkpoint is at offset {offset} of log {position['log']}, but the log here is {log_id}: "
            "give the url of the service that the stream was started on, or start another stream, with a new "
            "checkpointLocation"
        )
    if offset < bounds.start_offset:
        raise UsageError(
            f"the checkpoint is at offset {offset}, but the log has removed the offsets before "
            f"{bounds.start_offset}, so the stream misses {bounds.start_offset - offset} of them: rebuild "
            f"its target up to offset {bounds.start_offset}, and start another stream, with a new "
            f"checkpointLocation and start={bounds.start_offset}"
        )
    if offset > bounds.end_offset:
        raise UsageError(
            f"the checkpoint is at offset {offset}, but the log ends at {bounds.end_offset}, because a disk "
            "failure lost the later deltas: start another stream, with a new checkpointLocation"
        )
    return offset
