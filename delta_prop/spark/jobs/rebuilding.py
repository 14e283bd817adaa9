"""Rebuild: creates a storage sink's file from the log, for a new sink or after a loss.

No sink may have the file open meanwhile. To fill an index, load the table of alive vectors into it:
`replay(…).where("alive").select(*CONTENT)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from delta_prop.calls.argument_checks import check_path
from delta_prop.client.partition_choice import DEFAULT_STREAM
from delta_prop.directory.readonly_log import DEFAULT_PARTITION, PartitionName
from delta_prop.spark.arguments import When, check_session, position_of
from delta_prop.spark.data_source.segments import LogView, states_of
from delta_prop.spark.jobs.replaying import replay_logs
from delta_prop.spark.states.buckets import bucket_count_for
from delta_prop.spark.states.changes import STATES
from delta_prop_sinks.storage_file import StorageFile, StorageFileState
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError
from delta_prop_wire.state_rows import StateRow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAL_BYTES_MAX = 64 << 20


class RebuildResult(NamedTuple):
    """Counts of a rebuilt file: its rows, the alive ones of them; and the offset of its cursor."""

    rows: int
    alive: int
    next_offset: int


def rebuild(
    spark: SparkSession,
    path: str,
    file: str,
    *,
    at: When = None,
    replace: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
    stream: str = DEFAULT_STREAM,
    partition: int | None = None,
) -> RebuildResult:
    """Create a storage sink's file, with its cursor, from the log in a data directory.

    `at`: as of an offset or a time; the sink continues from there. `replace`: replace the content of an
    existing file. `on_progress` is called with the rows written so far. `stream`, `partition`: the log of the
    sink; the partition may be left out if there is only one. The file of an interrupted rebuild is marked as
    incomplete; the next call, or the sink, rebuilds it. Raises UsageError, Refused, FileFailed, LogCorrupted,
    OSError.
    """
    check_session(spark)
    file = check_path("file", file)
    log = log_to_rebuild(path, at, PartitionName(stream, partition))
    return rebuild_from(spark, log, file, replace=replace, report=on_progress)


def log_to_rebuild(path: str, at: When = None, name: PartitionName = DEFAULT_PARTITION) -> LogView:
    """Return the log to rebuild from. Raises as `rebuild` does."""
    log = states_of(check_path("path", path), name, at=position_of(at))
    if not log.is_complete:
        raise UsageError(f"the log in {path!r} lost its beginning without a snapshot: restore a backup")
    return log


def check_replaceable(file: str, log: LogView, *, replace: bool) -> None:
    """Raise UsageError if an existing file is in use, is not a sink's, or must not be replaced."""
    if not Path(file).exists():
        return
    with closing(StorageFile(file, wal_bytes_max=WAL_BYTES_MAX)) as stored:
        _check_empty(file, stored.connect(log.log_id), replace=replace)


def rebuild_from(
    spark: SparkSession, log: LogView, file: str, *, replace: bool, report: Callable[[int], None]
) -> RebuildResult:
    """Rebuild from an opened log, as `rebuild` does."""
    names = ("namespace", "vector_id")  # the order of the file: neighbours share pages
    states = replay_logs(spark, [log]).repartitionByRange(bucket_count_for(log.bytes), *names)
    blobs = states.sortWithinPartitions(*names).mapInArrow(_pack, "rows binary")
    stored = StorageFile(file, wal_bytes_max=WAL_BYTES_MAX)
    opened = stored.connect(log.log_id)
    try:
        _check_empty(file, opened, replace=replace)
        stored.begin_rebuild()
        rows = alive = lamport = 0
        for blob in blobs.toLocalIterator(prefetchPartitions=True):
            states_batch = pa.ipc.read_record_batch(pa.py_buffer(bytes(blob.rows)), STATES)
            stored.load_states(list(_state_rows(states_batch)))
            stored.checkpoint()
            rows, alive = rows + states_batch.num_rows, alive + states_batch.column("alive").true_count
            lamport = max(lamport, *states_batch.column("lamport").to_pylist())
            report(rows)
        stored.end_rebuild(Cursor(log.log_id, log.epoch, log.end), lamport)
        stored.checkpoint(idle=True)
    finally:
        stored.close()
    return RebuildResult(rows, alive, log.end)


def _check_empty(file: str, opened: StorageFileState, *, replace: bool) -> None:
    if opened.cursor is not None and not opened.rebuilding and not replace:
        raise UsageError(f"{file} already holds vectors: name a new file, or allow it to be replaced")


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        serialized = batch.cast(STATES).serialize().to_pybytes()
        yield pa.record_batch([pa.array([serialized], pa.binary())], names=["rows"])


def _state_rows(states: pa.RecordBatch) -> Iterator[StateRow]:
    columns = [states.column(name).to_pylist() for name in STATES.names if name != "vector"]
    vectors = states.column("vector")
    bounds = np.concatenate([[0], np.cumsum(vectors.value_lengths().fill_null(0).to_numpy())])
    flat = vectors.flatten().to_numpy()
    for row, fields in enumerate(zip(*columns, strict=True)):
        namespace, vector_id, alive, data, text, offset, lamport, origin, counter, ignored = fields
        metadata: dict[str, Any] = {} if text is None else json.loads(text)
        vector = flat[bounds[row] : bounds[row + 1]] if alive and data is None else None
        key = (lamport, int(origin, 16), counter)
        yield StateRow(namespace, vector_id, VectorState(alive, vector, data, metadata, ignored, key), offset)
