"""Audit: compares a sink's contents with the log, gives each difference its reason, and repairs it.

A repair changes no sink directly. It republishes states of the log through the service, so that every sink
applies them in order with all other deltas, and the log still explains all contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePath

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from delta_prop import auditing
from delta_prop.auditing import RepairResult
from delta_prop.auditing.audit_scope import (
    check_sink_offset,
    lost_prefix_error,
    read_quarantined_keys,
    sink_offset_of,
)
from delta_prop.auditing.differences import Difference
from delta_prop.auditing.sink_file import StorageSinkFile
from delta_prop.calls.argument_checks import check_path
from delta_prop.client import SyncProducer
from delta_prop.spark.arguments import check_session, check_table
from delta_prop.spark.data_source.segments import LogView, states_of
from delta_prop.spark.jobs.replaying import partition_blobs, read_parts
from delta_prop.spark.states.buckets import BLOBS_DDL, bucket_count_for, spread_sink_states
from delta_prop.spark.states.differences import DIFFERENCES_DDL, find_differences
from delta_prop.spark.states.sink_contents import normalize_columns, to_states
from delta_prop.spark.states.storage_rows import read_states
from delta_prop_wire.delta import Delta


def audit(
    spark: SparkSession,
    path: str,
    sink: str | DataFrame,
    *,
    next_offset: int | None = None,
    name: str | None = None,
) -> DataFrame:
    """Return every difference between a sink and the log in a data directory, with reason and repair.

    `sink`: a storage sink's file, which may be in use, or a table of another sink's contents (`contents_of`).
    A sink is compared up to its own cursor: the file's, or `next_offset`, the offset after the last delta
    that it has applied (None: the log's end). `name`: the sink's name; vectors with deltas in its quarantine
    are reported as quarantined, and not repaired. The columns are `DIFFERENCES_DDL`; see `repair`.

    Raises UsageError if the file or the log lacks what the comparison needs; Refused, LogCorrupted, OSError.
    """
    check_session(spark)
    path = check_path("path", path)
    if not isinstance(sink, DataFrame):
        sink = check_path("sink", sink)
    log = log_to_audit(path)
    bucket_count = bucket_count_for(log.bytes)
    if isinstance(sink, DataFrame):
        spread = _make_table_spread(bucket_count, has_metadata="metadata" in sink.columns)
        sink_blobs = normalize_columns(sink).mapInArrow(spread, BLOBS_DDL)
        sink_offset = log.end if next_offset is None else next_offset
    else:
        sink_offset = sink_offset_in(sink, path, log)
        # All rows are read now, in one transaction, so that the log opened after it has their deltas.
        sink_blobs = (
            spark.range(0, 1, 1, 1)
            .mapInArrow(_make_file_spread(sink, bucket_count), BLOBS_DDL)
            .localCheckpoint()
        )
        log = states_of(path)
    check_sink_offset(sink_offset, log.start, log.end)
    quarantined = read_quarantined_keys(path, name)
    all_blobs = sink_blobs.unionByName(read_parts(spark, [log], bucket_count))
    return partition_blobs(all_blobs, bucket_count).mapInArrow(
        lambda blobs: find_differences(blobs, sink_offset, quarantined), DIFFERENCES_DDL
    )


def log_to_audit(path: str) -> LogView:
    """Return the log to compare a sink with. Raises as `audit` does."""
    log = states_of(path)
    if not log.is_complete:
        raise lost_prefix_error(path)
    return log


def sink_offset_in(sink: str, path: str, log: LogView) -> int:
    """Return the cursor of a storage sink's file. Raises UsageError if the file is of another log."""
    with StorageSinkFile(sink) as file:
        return sink_offset_of(file, path, log.log_id)


def differences_in(table: DataFrame) -> Iterator[Difference]:
    """Yield the differences in a table that `audit` returned."""
    for row in table.toLocalIterator():
        yield Difference(**row.asDict())


def repairs(differences: DataFrame) -> Iterator[Delta]:
    """Yield the deltas that repair an audit's differences, one each; see `delta_prop.auditing.repairs`."""
    check_table("differences", differences)
    return auditing.repairs(differences_in(differences.where("op is not null")))


def repair(
    differences: DataFrame, producer: SyncProducer, *, data: str | PurePath | None = None
) -> RepairResult:
    """Send the repairs of an audit's differences and wait for all outcomes; see `delta_prop.auditing.repair`.

    Raises UsageError, Refused, Unreachable.
    """
    return auditing.repair(repairs(differences), producer, data=data)


def _make_file_spread(
    path: str, bucket_count: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function with which a task yields all rows of a sink's file as blobs."""

    def spread(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        deque(rows, 0)  # Spark expects that its input is read
        with StorageSinkFile(path) as file:
            for states in read_states(file):
                yield spread_sink_states(states, bucket_count)

    return spread


def _make_table_spread(
    bucket_count: int, *, has_metadata: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function with which tasks yield the rows of a table as blobs."""
    return lambda rows: (
        spread_sink_states(to_states(batch, has_metadata=has_metadata), bucket_count) for batch in rows
    )
