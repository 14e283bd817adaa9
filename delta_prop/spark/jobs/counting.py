"""Stats: a log's traffic, its most changed vectors, the sparsity of changes, the lags of its readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.client.partition_choice import DEFAULT_STREAM
from delta_prop.directory.log_positions import EARLIEST, LATEST, LogPosition
from delta_prop.directory.readonly_log import DEFAULT_PARTITION, PartitionName
from delta_prop.directory.stored_partitions import find_partition
from delta_prop.directory.stored_sinks import read_sinks
from delta_prop.spark.arguments import (
    LogSource,
    When,
    check_holds_for_each,
    check_session,
    normalize_source,
    position_of,
)
from delta_prop.spark.arrays import schema_of
from delta_prop.spark.data_source.segments import LogPart, LogView, log_of, partitions_in, spark_parts
from delta_prop.spark.data_source.served import partitions_at, remote_of, served_range
from delta_prop.spark.options import Remote
from delta_prop.spark.states.changes import CHANGES, changes_of, split_keys
from delta_prop.spark.states.folding import column_of
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

COUNTS_DDL = (
    "namespace string not null, vector_id string, op string, deltas long not null, bytes long not null, "
    "numbers long not null, dimension long not null"
)
COUNTS = schema_of(COUNTS_DDL)
"""Counts of a part of the log: a row counts either one vector, or one operation in one namespace.

`numbers`: how many numbers the deltas carry; `dimension`: that of the longest vector.
"""
_ROWS_PER_COUNT = 100_000
_KIND_CODES = 256
"""Number of codes that the kind of an operation can have."""


class OffsetsRead(NamedTuple):
    """The range of a partition's log that was counted: up to `next_offset` (exclusive)."""

    partition: int
    start_offset: int
    next_offset: int


class Stats(NamedTuple):
    """Statistics of a stream.

    `ranges`: what was counted of each partition. `traffic`: per namespace and op, the deltas, their bytes,
    how many numbers a delta has on average, and which share of its vector a sparse delta changes on average.
    `vectors`: deltas and bytes per vector, most deltas first. `sinks`: the sinks and groups of a directory,
    with their partitions and lags.
    """

    ranges: list[OffsetsRead]
    traffic: DataFrame
    vectors: DataFrame
    sinks: list[dict[str, Any]]


def stats(
    spark: SparkSession,
    source: LogSource,
    *,
    start: When = None,
    end: When = None,
    stream: str = DEFAULT_STREAM,
    partition: int | None = None,
) -> Stats:
    """Count a stream's deltas in a data directory, or of a service, from `start` up to `end` (exclusive).

    `partition`: only those in it. Raises UsageError, Refused, LogCorrupted, OSError, Unreachable.
    """
    check_session(spark)
    first = position_of(start, EARLIEST, name="start", allow_ends=True)
    end = position_of(end, LATEST, name="end", allow_ends=True)
    name = PartitionName(stream, partition)
    return count_logs(spark, *open_logs_for_counting(normalize_source(source), first, end, name))


def open_logs_for_counting(
    source: str | Remote, start: LogPosition, end: LogPosition, name: PartitionName = DEFAULT_PARTITION
) -> tuple[list[LogView], list[dict[str, Any]]]:
    """Open the logs to count; return them with their sinks and groups. Raises as `stats` does."""
    remote = remote_of(source)
    if remote is None:
        assert isinstance(source, str)
        return _open_directory(source, start, end, name)
    served = partitions_at(remote, name)
    _check_ends(start, end, len(served))
    return [served_range(remote, one, start=start, end=end) for one in served], []


def _open_directory(
    path: str, start: LogPosition, end: LogPosition, name: PartitionName
) -> tuple[list[LogView], list[dict[str, Any]]]:
    names = partitions_in(path, name)
    _check_ends(start, end, len(names))
    logs, sinks = [], []
    for one in names:
        partition = find_partition(path, one)
        with partition.open_log() as (_, log, _):
            logs.append(log_of(path, one, start=start, end=end))
            sinks += read_sinks(partition, log)
    return logs, sinks


def _check_ends(start: LogPosition, end: LogPosition, partition_count: int) -> None:
    check_holds_for_each("start", start, partition_count)
    check_holds_for_each("end", end, partition_count)


def count_logs(spark: SparkSession, logs: Sequence[LogView], sinks: list[dict[str, Any]]) -> Stats:
    """Count opened logs, as `stats` does."""
    from pyspark.sql import functions as F

    parts = [part for log in logs for part in log.parts]
    counts = spark_parts(spark, parts, _count_part, COUNTS_DDL).localCheckpoint()
    sums = [F.sum(name).alias(name) for name in ("deltas", "bytes", "numbers")]
    by_op = counts.where("op is not null").groupBy("namespace", "op").agg(*sums)
    dimension = counts.groupBy("namespace").agg(F.max("dimension").alias("dimension"))
    share = F.when(F.col("op").startswith("sparse"), F.col("numbers") / F.col("deltas") / F.col("dimension"))
    traffic = by_op.join(dimension, "namespace").select(
        "namespace",
        "op",
        "deltas",
        "bytes",
        (F.col("numbers") / F.col("deltas")).alias("numbers"),
        F.when(F.col("dimension") > 0, share).alias("share"),
    )
    by_vector = counts.where("vector_id is not null").groupBy("namespace", "vector_id").agg(*sums[:2])
    vectors = by_vector.orderBy(F.desc("deltas"), F.desc("bytes"), "namespace", "vector_id")
    ranges = [OffsetsRead(log.partition, log.start, log.end) for log in logs]
    return Stats(ranges, traffic.orderBy("namespace", "op"), vectors, sinks)


def count_rows(batches: Iterable[LoggedBatch], start: int, end: int) -> Iterator[pa.RecordBatch]:
    """Yield counts of the rows from `start` up to `end` (exclusive), each of about `_ROWS_PER_COUNT`."""
    pending: list[pa.RecordBatch] = []
    row_count = 0
    for logged in batches:
        pending.append(changes_of(logged, end))
        row_count += pending[-1].num_rows
        if row_count >= _ROWS_PER_COUNT:
            yield _count_batches(pending, start)
            pending, row_count = [], 0
    if row_count:
        yield _count_batches(pending, start)


def _count_part(part: LogPart) -> Iterator[pa.RecordBatch]:
    return count_rows(part.batches(), part.start, part.end)


def _count_batches(pending: list[pa.RecordBatch], start: int) -> pa.RecordBatch:
    table = pa.Table.from_batches(pending, CHANGES).combine_chunks()
    table = table.filter(pc.greater_equal(table.column("offset"), start)).combine_chunks()
    coded = pc.dictionary_encode(column_of(table, "key"))
    namespaces, ids = split_keys(coded.dictionary)
    coded_names = pc.dictionary_encode(namespaces)
    codes = coded.indices.to_numpy()
    kinds, numbers = column_of(table, "kind").to_numpy(), _list_lengths(table, "values")
    sizes = pc.binary_length(column_of(table, "key")).to_numpy() + 4 * numbers
    sizes += 4 * _list_lengths(table, "indices")
    sizes += _binary_lengths(table, "data") + _binary_lengths(table, "patch")
    by_key, by_kind = (
        _Sums(codes, len(ids)),
        _Sums(coded_names.indices.to_numpy()[codes] * _KIND_CODES + kinds),
    )
    used = by_kind.deltas.nonzero()[0]
    longest = np.zeros(len(by_kind.deltas), np.int64)
    np.maximum.at(longest, by_kind.codes, np.where(np.isin(kinds, (0, 2)), numbers, 0))
    zeros = np.zeros(len(ids), np.int64)
    columns = {
        "namespace": pa.concat_arrays(
            [namespaces, coded_names.dictionary.take(pa.array(used // _KIND_CODES))]
        ),
        "vector_id": pa.concat_arrays([ids, pa.nulls(len(used), pa.string())]),
        "op": pa.array(
            [None] * len(ids) + [kind_name(code % _KIND_CODES) for code in used.tolist()], pa.string()
        ),
        "deltas": np.concatenate([by_key.deltas, by_kind.deltas[used]]),
        "bytes": np.concatenate([by_key.sum(sizes), by_kind.sum(sizes)[used]]),
        "numbers": np.concatenate([zeros, by_kind.sum(numbers)[used]]),
        "dimension": np.concatenate([zeros, longest[used]]),
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[name]) for name in COUNTS.names], schema=COUNTS)


class _Sums:
    """Sums over the rows that have the same code; `codes` has the code of each row."""

    def __init__(self, codes: NDArray[Any], count_min: int = 0) -> None:
        self.codes = codes
        self.deltas = np.bincount(codes, minlength=count_min)

    def sum(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the sum of the values by code."""
        return np.bincount(self.codes, values, len(self.deltas)).astype(np.int64)


def _list_lengths(table: pa.Table, name: str) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.list_value_length(column_of(table, name)).to_numpy().astype(np.int64)
    return lengths


def _binary_lengths(table: pa.Table, name: str) -> NDArray[np.int64]:
    lengths = pc.fill_null(pc.binary_length(column_of(table, name)), 0)
    return lengths.to_numpy().astype(np.int64)  # type: ignore[no-any-return]
