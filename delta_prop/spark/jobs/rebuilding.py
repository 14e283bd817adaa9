"""Rebuild: a storage sink's file made from the log, for a new sink or after a loss.

It is written beside nobody: a sink that has the file open keeps it. What an index loads is a table of what is
alive: `replay(…).where("alive").select(*CONTENT)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from delta_prop.checks import path_of
from delta_prop.spark.arguments import at_of, check_session
from delta_prop.spark.jobs.replaying import STATES, replayed
from delta_prop.spark.reads.segments import states_of
from delta_prop.spark.states.buckets import buckets_for
from delta_prop_sinks.storage_file import StorageFile
from delta_prop_wire.algebra import State
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import UsageError
from delta_prop_wire.states import StateRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from delta_prop.spark.arguments import When
    from delta_prop.spark.reads.segments import Log
    from delta_prop_sinks.storage_file import Opened

WAL_BYTES_MAX = 64 << 20


class Rebuilt(NamedTuple):
    """How many rows a file was given, how many of them are alive, and the offset that its cursor names."""

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
    tell: Callable[[int], None] = lambda _: None,
) -> Rebuilt:
    """Make a storage sink's file of the log in a data directory, with its cursor: a sink goes on from there.

    `at`: as of an offset or a time; the sink then takes what follows. `replace`: a file that is there already
    loses what it holds. `tell` is called with the rows done so far. Broken off, the file says that it is
    void, and is made anew by this or by the sink. Raises UsageError, Refused, FileFailed, LogDamaged,
    OSError.
    """
    check_session(spark)
    file = path_of("file", file)
    log = log_to_rebuild(path, at)
    return rebuilt(spark, log, file, replace=replace, tell=tell)


def log_to_rebuild(path: str, at: When = None) -> Log:
    """What a file is made of. Raises as `rebuild` does."""
    log = states_of(path_of("path", path), at=at_of(at))
    if not log.whole:
        raise UsageError(f"the log in {path!r} lost its beginning without a snapshot: it cannot tell of all")
    return log


def check_replaced(file: str, log: Log, *, replace: bool) -> None:
    """Raise UsageError where a file that is there is in use, is not a sink's, or must not be replaced."""
    if not Path(file).exists():
        return
    stored = StorageFile(file, wal_bytes_max=WAL_BYTES_MAX)
    try:
        _check_void(file, stored.connect(log.log_id), replace=replace)
    finally:
        stored.close()


def rebuilt(
    spark: SparkSession, log: Log, file: str, *, replace: bool, tell: Callable[[int], None]
) -> Rebuilt:
    """`rebuild` of a log that was looked at."""
    names = ("namespace", "vector_id")  # the order of the file: neighbours share pages
    states = replayed(spark, log).repartitionByRange(buckets_for(log.bytes), *names)
    blobs = states.sortWithinPartitions(*names).mapInArrow(_pack, "rows binary")
    stored = StorageFile(file, wal_bytes_max=WAL_BYTES_MAX)
    opened = stored.connect(log.log_id)
    try:
        _check_void(file, opened, replace=replace)
        stored.begin_rebuild()
        rows = alive = lamport = 0
        for blob in blobs.toLocalIterator(prefetchPartitions=True):
            some = pa.ipc.read_record_batch(pa.py_buffer(bytes(blob.rows)), STATES)
            stored.take_states(list(_rows(some)))
            stored.checkpoint()
            rows, alive = rows + some.num_rows, alive + some.column("alive").true_count
            lamport = max(lamport, *some.column("lamport").to_pylist())
            tell(rows)
        stored.end_rebuild(Cursor(log.log_id, log.epoch, log.end), lamport)
        stored.checkpoint(idle=True)
    finally:
        stored.close()
    return Rebuilt(rows, alive, log.end)


def _check_void(file: str, opened: Opened, *, replace: bool) -> None:
    if opened.cursor is not None and not opened.rebuilding and not replace:
        raise UsageError(f"{file} holds vectors already: name a new file, or say that it may be replaced")


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for some in batches:
        blob = some.cast(STATES).serialize().to_pybytes()
        yield pa.record_batch([pa.array([blob], pa.binary())], names=["rows"])


def _rows(states: pa.RecordBatch) -> Iterator[StateRow]:
    columns = [states.column(name).to_pylist() for name in STATES.names if name != "vector"]
    vectors = states.column("vector")
    bounds = np.concatenate([[0], np.cumsum(vectors.value_lengths().fill_null(0).to_numpy())])
    flat = vectors.flatten().to_numpy()
    for row, one in enumerate(zip(*columns, strict=True)):
        namespace, vector_id, alive, data, text, offset, lamport, origin, counter, ignored = one
        metadata: dict[str, Any] = {} if text is None else json.loads(text)
        vector = flat[bounds[row] : bounds[row + 1]] if alive and data is None else None
        key = (lamport, int(origin, 16), counter)
        yield StateRow(namespace, vector_id, State(alive, vector, data, metadata, ignored, key), offset)
