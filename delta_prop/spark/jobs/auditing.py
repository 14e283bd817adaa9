"""Audit: what a sink holds against what the log makes of it; each difference with its reason, and its repair.

A repair changes no sink by itself. It sends deltas that say again what the log says, through the service, so
that every sink takes them in order with all others, and the log still tells why each holds what it holds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from delta_prop import auditing
from delta_prop.auditing.differences import Difference
from delta_prop.auditing.reach import check_come, lost_beginning, reached_by, set_aside
from delta_prop.auditing.stored import StoredFile
from delta_prop.checks import path_of
from delta_prop.spark.arguments import check_session, check_table
from delta_prop.spark.jobs.replaying import placed, read_parts
from delta_prop.spark.reads.segments import states_of
from delta_prop.spark.states.buckets import BLOBS_DDL, buckets_for, spread_held
from delta_prop.spark.states.differences import DIFFERENCES_DDL, differences
from delta_prop.spark.states.held import held_of, told_columns
from delta_prop.spark.states.stored import stored_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import PurePath

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from delta_prop.auditing import Repaired
    from delta_prop.client import SyncProducer
    from delta_prop.spark.reads.segments import Log
    from delta_prop_wire.delta import Delta


def audit(
    spark: SparkSession,
    path: str,
    sink: str | DataFrame,
    *,
    come: int | None = None,
    name: str | None = None,
) -> DataFrame:
    """Every difference between a sink and the log in a data directory, with its reason and what mends it.

    `sink`: a storage sink's file, which may be in use; or a table of what another one holds (`contents_of`).
    A sink is held to what it has come to: the file's cursor, or `come`, the offset behind the last delta that
    it has applied (None: all). The columns are those of `differences.py`; see `repair`. `name`: what the sink
    is attached as: vectors of which its quarantine holds deltas are told as set aside, and not repaired.

    Raises UsageError where the file, or the log, cannot tell; Refused, LogDamaged, OSError.
    """
    check_session(spark)
    path = path_of("path", path)
    if not isinstance(sink, DataFrame):
        sink = path_of("sink", sink)
    log = log_to_audit(path)
    buckets = buckets_for(log.bytes)
    if isinstance(sink, DataFrame):
        spread = _spread_table(buckets, metadata="metadata" in sink.columns)
        held = told_columns(sink).mapInArrow(spread, BLOBS_DDL)
        reached = log.end if come is None else come
    else:
        reached = reached_in(sink, path, log)
        # All rows are read now, in one transaction; then the log has what made them.
        held = spark.range(0, 1, 1, 1).mapInArrow(_spread_file(sink, buckets), BLOBS_DDL).localCheckpoint()
        log = states_of(path)
    check_come(reached, log.begin, log.end)
    aside = set_aside(path, name)
    both = held.unionByName(read_parts(spark, log, buckets))
    return placed(both, buckets).mapInArrow(lambda blobs: differences(blobs, reached, aside), DIFFERENCES_DDL)


def log_to_audit(path: str) -> Log:
    """What a sink is held to. Raises as `audit` does."""
    log = states_of(path)
    if not log.whole:
        raise lost_beginning(path)
    return log


def reached_in(sink: str, path: str, log: Log) -> int:
    """The offset behind what a storage sink has taken. Raises UsageError where its file is of another log."""
    with StoredFile(sink) as file:
        return reached_by(file, path, log.log_id)


def found_in(rows: DataFrame) -> Iterator[Difference]:
    """The differences that such a table holds."""
    for row in rows.toLocalIterator():
        yield Difference(**row.asDict())


def repairs(found: DataFrame) -> Iterator[Delta]:
    """The deltas that mend the differences an audit found, one each; see `delta_prop.auditing.repairs`."""
    check_table("found", found)
    return auditing.repairs(found_in(found.where("op is not null")))


def repair(found: DataFrame, producer: SyncProducer, *, data: str | PurePath | None = None) -> Repaired:
    """Send these deltas through the service, and wait for all outcomes; see `delta_prop.auditing.repair`.

    Raises UsageError, Refused, Unreachable.
    """
    return auditing.repair(repairs(found), producer, data=data)


def _spread_file(path: str, buckets: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def spread(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        deque(numbers, 0)
        with StoredFile(path) as file:
            for states in stored_states(file):
                yield spread_held(states, buckets)

    return spread


def _spread_table(
    buckets: int, *, metadata: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    return lambda rows: (spread_held(held_of(some, metadata=metadata), buckets) for some in rows)
