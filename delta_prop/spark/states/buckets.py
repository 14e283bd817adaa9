"""Shuffles changes into buckets by vector, as few large blobs.

Spark moves the blobs, a column of bytes, without decoding them: rows of numbers would cost many times as
much. Needs pyarrow, not Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from delta_prop.spark.states.changes import CHANGES, EMPTY, buckets_of, changes_of
from delta_prop.spark.states.folding import fold
from delta_prop_wire.delta import KnownIds, Source

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch

BLOBS_DDL = "bucket int, first long, changes binary"
"""Columns of blobs. `first`: the offset of the first change, or one of the values below."""
BUCKET_BYTES = 32 << 20
"""Bytes of the log per bucket."""
BUCKETS_MAX = 10_000
_BLOB_BYTES = 16 << 20
_BUFFER_BYTES = 64 << 20
_BLOBS = pa.schema([("bucket", pa.int32()), ("first", pa.int64()), ("changes", pa.binary())])
STATES, UNORDERED, SINK_STATES = -1, -2, -3
"""Values of `first` that are no offsets.

`STATES` marks the states of a snapshot, which sort before all changes; `UNORDERED`, a part of the log that is
not in canonical order; `SINK_STATES`, a sink's states.
"""


def bucket_count_for(size: int) -> int:
    """Return the number of buckets for a log of `size` bytes."""
    return min(max(-(-size // BUCKET_BYTES), 1), BUCKETS_MAX)


def spread(
    batches: Iterable[LoggedBatch], bucket_count: int, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the changes in batches of the log below offset `end`, or states of a snapshot, as blobs.

    The batches come in the order of the log.
    """
    pending: list[pa.RecordBatch] = []
    size, first, lamport, in_order = 0, STATES, 0, True
    flush_bytes = max(_BLOB_BYTES, bucket_count << 12)
    for logged in batches:
        batch = logged.batch
        if not batch.is_state:
            rises = logged.lamport > lamport and logged.source != Source.REPLICA
            in_order = in_order and rises and logged.known_ids is KnownIds.NONE
            lamport = logged.lamport + logged.count - 1
        if not pending:
            first = STATES if batch.is_state else logged.offset
        pending.append(changes_of(logged, end))
        size += batch.size
        if size >= flush_bytes:
            yield _pack_blobs(pending, bucket_count, first)
            pending, size = [], 0
    if pending:
        yield _pack_blobs(pending, bucket_count, first)
    if not in_order:
        empty_blob = EMPTY.serialize().to_pybytes()
        yield pa.record_batch(
            [
                np.arange(bucket_count, dtype=np.int32),
                np.full(bucket_count, UNORDERED),
                pa.array([empty_blob] * bucket_count),
            ],
            schema=_BLOBS,
        )


def spread_sink_states(states: pa.Table, bucket_count: int) -> pa.RecordBatch:
    """Return a sink's states as blobs, in the buckets of the same vectors' changes."""
    return _pack_blobs(states.to_batches(), bucket_count, SINK_STATES)


def unpack_blobs(blobs: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the changes in the blobs of a bucket, each with its `first`."""
    for batch in blobs:
        for first, blob in zip(batch.column(1).to_pylist(), batch.column(2), strict=True):
            yield first, pa.ipc.read_record_batch(blob.as_buffer(), CHANGES)


class ChangeBuffer:
    """Buffers changes in the order of the log.

    While this is the canonical order, it folds a full buffer to states, so that a vector with very many
    changes takes no more memory than others.
    """

    def __init__(self) -> None:
        self.in_order = True
        self._buffered: list[pa.RecordBatch] = []
        self._bytes, self._bound = 0, _BUFFER_BYTES

    def add(self, changes: pa.RecordBatch) -> None:
        """Add the next changes."""
        self._buffered.append(changes)
        self._bytes += changes.nbytes
        if self.in_order and self._bytes >= self._bound:
            states = fold(self.table())
            self._buffered, self._bytes = states.to_batches(), states.nbytes
            self._bound = max(_BUFFER_BYTES, 2 * self._bytes)

    def table(self) -> pa.Table:
        """Return the buffered changes, some of them folded to states."""
        return pa.Table.from_batches(self._buffered, CHANGES)


def fold_blobs(blobs: Iterable[pa.RecordBatch]) -> pa.Table:
    """Fold the blobs of a bucket, sorted by `first`, to states."""
    buffer = ChangeBuffer()
    for first, changes in unpack_blobs(blobs):
        buffer.in_order = buffer.in_order and first != UNORDERED
        buffer.add(changes)
    return fold(buffer.table())


def _pack_blobs(pending: list[pa.RecordBatch], bucket_count: int, first: int) -> pa.RecordBatch:
    table = pa.Table.from_batches(pending, CHANGES).combine_chunks()
    if not table.num_rows:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in _BLOBS], schema=_BLOBS)
    batch = table.to_batches()[0]
    if bucket_count == 1:
        bucket_numbers, pieces = np.zeros(1, np.int32), [batch]
    else:
        bucket_by_row = buckets_of(batch.column("key"), bucket_count)
        sorted_rows = batch.take(pa.array(np.argsort(bucket_by_row, kind="stable")))
        counts = np.bincount(bucket_by_row, minlength=bucket_count)
        bucket_numbers = counts.nonzero()[0].astype(np.int32)
        starts = (np.cumsum(counts) - counts)[bucket_numbers]
        pieces = [
            sorted_rows.slice(start, count)
            for start, count in zip(starts.tolist(), counts[bucket_numbers].tolist(), strict=True)
        ]
    blobs = [piece.serialize().to_pybytes() for piece in pieces]
    return pa.record_batch(
        [bucket_numbers, np.full(len(bucket_numbers), first), pa.array(blobs, pa.binary())], schema=_BLOBS
    )
