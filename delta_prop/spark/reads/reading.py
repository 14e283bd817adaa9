"""Readers of the data source: partitions are ranges of offsets, rows come as Arrow, no row is looked at.

A reader holds no connection: it travels to the executors, which open one for each partition they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from delta_prop.spark.columns import check_read
from delta_prop.spark.reach import asker_of
from delta_prop.spark.reads.beyond import check_reached
from delta_prop.spark.reads.pushing import Narrowed, narrowed
from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from delta_prop.client.ranges import Asker, Bounds
    from delta_prop.commands.places import At
    from delta_prop.spark.options import ReadOptions

PARTITION_ROWS = 100_000
"""About how many offsets one partition reads, where nobody says how many partitions there are to be."""
PARTITIONS_USUAL_MAX = 200


@dataclass
class OffsetRange(InputPartition):
    """The offsets from `start` up to `end`, which is left out, of one log, as it is in an epoch of it."""

    start: int
    end: int
    log_id: bytes
    epoch: int


def cut_up(start: int, end: int, bounds: Bounds, partitions: int | None) -> list[OffsetRange]:
    """A range as so many partitions, at least one; None: by size."""
    rows = max(end - start, 0)
    usual = min(-(-rows // PARTITION_ROWS), PARTITIONS_USUAL_MAX)
    count = max(min(usual if partitions is None else partitions, rows), 1)
    marks = [start + rows * at // count for at in range(count + 1)]
    return [OffsetRange(one, two, bounds.log_id, bounds.epoch) for one, two in pairwise(marks)]


class _Reads:
    """What both kinds of reader do."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_read(schema)
        self._options = options
        self._columns = [(one.name, one.nullable) for one in schema]
        self._narrowed = Narrowed(tuple(map(Topic.parse, options.topics)))

    def _asker(self) -> Asker:
        return asker_of(self._options.remote)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, on an executor."""
        from delta_prop.spark.reads.rows import (
            merged,  # the driver, which only plans, starts quicker without Arrow
        )

        assert isinstance(partition, OffsetRange)
        log = (partition.log_id, partition.epoch)
        batches = self._asker().read(partition.start, partition.end, self._narrowed.topics, log=log)
        return merged(batches, self._columns)


class Reader(_Reads, DataSourceReader):
    """Reads what is in the log now."""

    def partitions(self) -> list[OffsetRange]:
        """Ranges of offsets. Raises UsageError, Refused, Unreachable."""
        asker, options = self._asker(), self._options
        bounds = asker.bounds()
        start = _offset("since", options.since, asker, bounds)
        end = _offset("until", options.until, asker, bounds)
        if start > end:
            raise UsageError(
                f"options since and until: the read would begin at offset {start} and end before {end}: give "
                "an until that is not before since"
            )
        start, end = self._narrowed.within(start, end)
        return cut_up(start, end, bounds, options.partitions)


class PushingReader(Reader):
    """The same, told of filters before it reads.

    A class of its own: Spark fails every read of one that takes filters, unless its setting
    spark.sql.python.filterPushdown.enabled is true.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Have the service leave out what cannot pass; Spark looks at all of them again."""
        self._narrowed = narrowed(self._narrowed, filters)
        return filters


class StreamReader(_Reads, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on and on. A stream's place is the next offset, with the id and the epoch of its log."""

    _until: int | None = None  # of a stream that ends there

    def initialOffset(self) -> dict[str, Any]:
        """Where a new stream begins."""
        asker = self._asker()
        bounds = asker.bounds()
        return _place(_offset("since", self._options.since, asker, bounds), bounds)

    def getDefaultReadLimit(self) -> ReadLimit:
        """How much one micro-batch may read."""
        rows = self._options.rows_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends. Raises UsageError, Refused, Unreachable."""
        bounds = self._asker().bounds()
        at = _checked(start, bounds)
        end = bounds.end if self._until is None else max(min(bounds.end, self._until), at)
        if isinstance(limit, ReadMaxRows):
            end = min(end, at + limit.max_rows)
        return start if end <= at else _place(end, bounds)

    def prepareForTriggerAvailableNow(self) -> None:
        """End at what there is now."""
        self._until = self._asker().bounds().end

    def reportLatestOffset(self) -> dict[str, Any]:
        """Where the log ends, for Spark's progress reports."""
        bounds = self._asker().bounds()
        return _place(bounds.end, bounds)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetRange]:
        """Ranges of offsets. Raises UsageError, Refused, Unreachable."""
        bounds = self._asker().bounds()
        first, stop = _checked(start, bounds), _next_offset(end)
        if stop <= first:
            return []
        ranges = cut_up(first, stop, bounds, self._options.partitions)
        ranges[0].epoch = int(start["epoch"])  # so that a place which was lost since then is told
        return ranges

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has it in its checkpoint: there is nothing to be told, the service holds no place for it."""

    def stop(self) -> None:
        """Nothing is open."""


# --- places


def _offset(option: str, at: At, asker: Asker, bounds: Bounds) -> int:
    """The offset that an option means. Raises UsageError where the log does not reach there."""
    if at.time_us is not None:
        return min(max(asker.offset_at(at.time_us), bounds.first), bounds.end)
    if at.offset is None:
        return bounds.first if at.earliest else bounds.end
    check_reached(f"option {option}", at.offset, bounds.end)
    if at.offset < bounds.first:
        raise UsageError(
            f"option {option} {at.offset}: the log has let go of what lies before offset {bounds.first}: "
            "give that one or a later one, or earliest"
        )
    return at.offset


def _place(offset: int, bounds: Bounds) -> dict[str, Any]:
    return {"0": offset, "log": bounds.log_id.hex(), "epoch": bounds.epoch}


def _next_offset(place: dict[str, Any]) -> int:
    return int(place["0"])


def _checked(place: dict[str, Any], bounds: Bounds) -> int:
    """The offset of a stream's place, if it is one of this log that is still there. Raises UsageError."""
    at, here = _next_offset(place), bounds.log_id.hex()
    if place["log"] != here:
        raise UsageError(
            f"the checkpoint is at offset {at} of log {place['log']}, and the log here is {here}: give the "
            "url of the service that the stream was started on, or start another stream, with a new "
            "checkpointLocation"
        )
    if at < bounds.first:
        raise UsageError(
            f"the checkpoint is at offset {at}, and the log has let go of what lies before {bounds.first}: "
            f"{bounds.first - at} offsets are lost to this stream; start another one, with a new "
            f"checkpointLocation and since={bounds.first}, and bring what it feeds up to there by a rebuild"
        )
    if at > bounds.end:
        raise UsageError(
            f"the checkpoint is at offset {at}, and the log ends at {bounds.end}: what lay behind was lost "
            "with a failure of its disk; start another stream, with a new checkpointLocation"
        )
    return at
