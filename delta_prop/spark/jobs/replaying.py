"""Replay: computes the state of every vector of a log, now, or as of an offset or a time, as a table.

Tasks read parts of the log and spread the changes over buckets by vector; one task folds all vectors of a
bucket, in canonical order, by columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.client.partition_choice import DEFAULT_STREAM
from delta_prop.directory.log_positions import LogPosition
from delta_prop.directory.readonly_log import DEFAULT_PARTITION, PartitionName
from delta_prop.spark.arguments import (
    LogSource,
    When,
    check_holds_for_each,
    check_session,
    normalize_source,
    position_of,
)
from delta_prop.spark.data_source.segments import LogPart, LogView, partitions_in, spark_parts, states_of
from delta_prop.spark.data_source.served import partitions_at, remote_of, served_log
from delta_prop.spark.options import Remote
from delta_prop.spark.states.buckets import BLOBS_DDL, bucket_count_for, fold_blobs, spread
from delta_prop.spark.states.changes import STATE, STATES, STATES_DDL, split_keys
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import UsageError
from delta_prop_wire.stamp import LogName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CONTENT = ("namespace", "vector_id", "vector", "data", "metadata")
"""Columns of a vector's content, which `diff` accepts."""
_ROWS = 8_192


def replay(
    spark: SparkSession,
    source: LogSource,
    at: When = None,
    *,
    stream: str = DEFAULT_STREAM,
    partition: int | None = None,
) -> DataFrame:
    """Return the state of every vector in a stream, one row per vector, with the columns of `STATES`.

    `source`: a data directory, or a service as `delta://host:port`, whose log must still be complete. A
    deleted vector has a row that is not alive. `at`: as of an offset (inclusive) or a time; None: now.
    `partition`: only its vectors. Raises UsageError, Refused (CURSOR_TOO_OLD) if a log no longer reaches back
    there, LogCorrupted, OSError, Unreachable.
    """
    check_session(spark)
    return replay_logs(spark, logs_at(source, at, PartitionName(stream, partition)))


def logs_at(source: LogSource, at: When = None, name: PartitionName = DEFAULT_PARTITION) -> list[LogView]:
    """Return the logs to fold, of a directory or a service. Raises as `replay` does."""
    path_or_service, end = normalize_source(source), position_of(at)
    remote = remote_of(path_or_service)
    if remote is None:
        assert isinstance(path_or_service, str)
        names = partitions_in(path_or_service, name)
        check_holds_for_each("at", end, len(names))
        return [states_of(path_or_service, one, at=end) for one in names]
    served = partitions_at(remote, name)
    check_holds_for_each("at", end, len(served))
    return [_complete_log(remote, log, end) for log in served]


def _complete_log(remote: Remote, name: LogName, end: LogPosition) -> LogView:
    log = served_log(remote, name, at=end)
    if not log.is_complete:
        raise UsageError(
            f"the service has its log from offset {log.start} on, and earlier deltas only in its snapshot: "
            "replay its directory"
        )
    return log


def replay_logs(spark: SparkSession, logs: Sequence[LogView]) -> DataFrame:
    """Replay opened logs, as `replay` does; no vector is in two of them."""
    bucket_count = bucket_count_for(sum(log.bytes for log in logs))
    return partition_blobs(read_parts(spark, logs, bucket_count), bucket_count).mapInArrow(_fold, STATES_DDL)


def read_parts(spark: SparkSession, logs: Sequence[LogView], bucket_count: int) -> DataFrame:
    """Return the changes in logs as blobs; see `buckets.py`."""
    parts = [part for log in logs for part in log.parts]
    return spark_parts(spark, parts, _make_spread(bucket_count), BLOBS_DDL)


def partition_blobs(blobs: DataFrame, bucket_count: int) -> DataFrame:
    """Return the blobs with one partition per bucket, sorted within it."""
    return blobs.repartitionById(bucket_count, "bucket").sortWithinPartitions("first")


def to_rows(states: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield states as rows of `STATES`."""
    for batch in states.to_batches(_ROWS):
        yield _to_rows(batch)


def _make_spread(bucket_count: int) -> Callable[[LogPart], Iterator[pa.RecordBatch]]:
    return lambda part: spread(part.batches(), bucket_count, part.end)


def _fold(blobs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from to_rows(fold_blobs(blobs))


def _to_rows(states: pa.RecordBatch) -> pa.RecordBatch:
    namespaces, vector_ids = split_keys(states.column("key"))
    kinds = states.column("kind").to_numpy() & np.uint8(STATE - 1)
    vectors, opaque = (pa.array(kinds == kind) for kind in (Kind.CREATE, Kind.OPAQUE))
    origins, origin_of = np.unique(states.column("origin").to_numpy(), return_inverse=True)
    origin_texts = pa.array([f"{origin:016x}" for origin in origins.tolist()], pa.string())
    columns: dict[str, Any] = {
        "namespace": namespaces,
        "vector_id": vector_ids,
        "alive": pa.array(kinds != Kind.DELETE),
        "vector": pc.if_else(vectors, states.column("values"), pa.scalar(None, pa.list_(pa.float32()))),
        "data": pc.if_else(opaque, states.column("data"), pa.scalar(None, pa.binary())),
        "metadata": _unpack_metadata(states.column("patch")),
        "origin": origin_texts.take(pa.array(origin_of)),
    }
    for name in ("offset", "lamport", "counter", "ignored"):
        columns[name] = states.column(name).cast(pa.int64())
    return pa.RecordBatch.from_arrays([columns[name] for name in STATES.names], schema=STATES)


def _unpack_metadata(packed: pa.Array) -> pa.Array:
    if packed.null_count == len(packed):
        return pa.nulls(len(packed), pa.string())
    return pa.array([None if one is None else _to_json(one) for one in packed.to_pylist()], pa.string())


def _to_json(packed: bytes) -> str:
    return json.dumps(msgpack.unpackb(packed, strict_map_key=True), ensure_ascii=False, separators=(",", ":"))
