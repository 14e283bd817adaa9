"""Shuffles changes into buckets by vector, as few large blobs.

Spark moves the blobs, a column of bytes, without decoding them: rows of numbers would cost many times as
much. Needs pyarrow, not Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from delta_prop.spark.states.changes import CHANGES, EMPTY, buckets_of, changes_of
from delta_prop.spark.states.folding import fold
from delta_prop_wire.delta import KnownIds, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_wire.batch import LoggedBatch

BLOBS_DDL = "bucket int, first long, changes binary"
BUCKET_BYTES = 32 << 20
"""Bytes of the log per bucket."""
BUCKETS_MAX = 10_000
_BLOB_BYTES = 16 << 20
_HELD_BYTES = 64 << 20
_BLOBS = pa.schema([("bucket", pa.int32()), ("first", pa.int64()), ("changes", pa.binary())])
STATES, UNORDERED, HELD = -1, -2, -3
"""Markers in place of a first offset: states of a snapshot, which sort before all changes; a sign that the
log is not in canonical order; a sink's contents.
"""


def buckets_for(size: int) -> int:
    """Return the number of buckets for this size of a log."""
    return min(max(-(-size // BUCKET_BYTES), 1), BUCKETS_MAX)


def spread(batches: Iterable[LoggedBatch], buckets: int, end: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the changes in batches of the log below offset `end`, or states of a snapshot, as blobs.

    The batches come in the order of the log.
    """
    pending: list[pa.RecordBatch] = []
    size, first, lamport, in_order = 0, STATES, 0, True
    least = max(_BLOB_BYTES, buckets << 12)
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
        if size >= least:
            yield _pack_blobs(pending, buckets, first)
            pending, size = [], 0
    if pending:
        yield _pack_blobs(pending, buckets, first)
    if not in_order:
        empty_blob = EMPTY.serialize().to_pybytes()
        yield pa.record_batch(
            [
                np.arange(buckets, dtype=np.int32),
                np.full(buckets, UNORDERED),
                pa.array([empty_blob] * buckets),
            ],
            schema=_BLOBS,
        )


def spread_sink_states(states: pa.Table, buckets: int) -> pa.RecordBatch:
    """Return a sink's states as blobs, for the same buckets."""
    return _pack_blobs(states.to_batches(), buckets, HELD)


def unpack_blobs(blobs: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the changes in the blobs of a bucket, each with its `first`."""
    for some in blobs:
        for first, blob in zip(some.column(1).to_pylist(), some.column(2), strict=True):
            yield first, pa.ipc.read_record_batch(blob.as_buffer(), CHANGES)


class ChangeBuffer:
    """Buffer of changes in the order of the log, which folds them.

    While that is the canonical order, it folds early, so that a vector with very many changes takes no more
    memory than others.
    """

    def __init__(self) -> None:
        self.in_order = True
        self._buffered: list[pa.RecordBatch] = []
        self._bytes, self._bound = 0, _HELD_BYTES

    def add(self, changes: pa.RecordBatch) -> None:
        """Add the next changes."""
        self._buffered.append(changes)
        self._bytes += changes.nbytes
        if self.in_order and self._bytes >= self._bound:
            states = fold(self.table())
            self._buffered, self._bytes = states.to_batches(), states.nbytes
            self._bound = max(_HELD_BYTES, 2 * self._bytes)

    def table(self) -> pa.Table:
        """Return the changes to fold."""
        return pa.Table.from_batches(self._buffered, CHANGES)


def fold_blobs(blobs: Iterable[pa.RecordBatch]) -> pa.Table:
    """Fold the blobs of a bucket, sorted by `first`, to states."""
    buffer = ChangeBuffer()
    for first, changes in unpack_blobs(blobs):
        buffer.in_order = buffer.in_order and first != UNORDERED
        buffer.add(changes)
    return fold(buffer.table())


def _pack_blobs(pending: list[pa.RecordBatch], buckets: int, first: int) -> pa.RecordBatch:
    table = pa.Table.from_batches(pending, CHANGES).combine_chunks()
    if not table.num_rows:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in _BLOBS], schema=_BLOBS)
    batch = table.to_batches()[0]
    if buckets == 1:
        found, pieces = np.zeros(1, np.int32), [batch]
    else:
        into = buckets_of(batch.column("key"), buckets)
        moved = batch.take(pa.array(np.argsort(into, kind="stable")))
        counts = np.bincount(into, minlength=buckets)
        found = counts.nonzero()[0].astype(np.int32)
        begins = (np.cumsum(counts) - counts)[found]
        pieces = [
            moved.slice(begin, count)
            for begin, count in zip(begins.tolist(), counts[found].tolist(), strict=True)
        ]
    blobs = [piece.serialize().to_pybytes() for piece in pieces]
    return pa.record_batch([found, np.full(len(found), first), pa.array(blobs, pa.binary())], schema=_BLOBS)
