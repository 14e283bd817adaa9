"""Changes on their way to where all those of one vector meet: in buckets by name, as few large blobs.

Spark moves the blobs, a column of bytes each, and never looks inside: rows of numbers would cost it many
times as much. Needs pyarrow, not Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from delta_prop.spark.changes import CHANGES, EMPTY, buckets_of, changes_of
from delta_prop.spark.folding import fold
from delta_prop_wire.delta import KnownIds, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_wire.batch import LoggedBatch

BLOBS_DDL = "bucket int, first long, changes binary"
BUCKET_BYTES = 32 << 20
"""About as much of the log belongs into a bucket."""
BUCKETS_MAX = 10_000
_GATHERED_BYTES = 16 << 20
_HELD_BYTES = 64 << 20
_BLOBS = pa.schema([("bucket", pa.int32()), ("first", pa.int64()), ("changes", pa.binary())])
_STATES, _UNORDERED = -1, -2
"""In place of the first offset: states, which stand before everything; and word that the log's order is not
the canonical one, which stands before them.
"""


def buckets_for(size: int) -> int:
    """How many buckets so many bytes of a log are spread over."""
    return min(max(-(-size // BUCKET_BYTES), 1), BUCKETS_MAX)


def spread(batches: Iterable[LoggedBatch], buckets: int, end: int | None = None) -> Iterator[pa.RecordBatch]:
    """The changes in batches of the log below offset `end`, or states of a snapshot, as blobs.

    The batches come in the order of the log.
    """
    gathered: list[pa.RecordBatch] = []
    size, first, lamport, in_order = 0, _STATES, 0, True
    least = max(_GATHERED_BYTES, buckets << 12)
    for logged in batches:
        batch = logged.batch
        if not batch.is_state:
            rises = logged.lamport > lamport and logged.source != Source.REPLICA
            in_order = in_order and rises and logged.known_ids is KnownIds.NONE
            lamport = logged.lamport + logged.count - 1
        if not gathered:
            first = _STATES if batch.is_state else logged.offset
        gathered.append(changes_of(logged, end))
        size += batch.size
        if size >= least:
            yield _blobs(gathered, buckets, first)
            gathered, size = [], 0
    if gathered:
        yield _blobs(gathered, buckets, first)
    if not in_order:
        word = EMPTY.serialize().to_pybytes()
        yield pa.record_batch(
            [np.arange(buckets, dtype=np.int32), np.full(buckets, _UNORDERED), pa.array([word] * buckets)],
            schema=_BLOBS,
        )


def spread_changes(changes: pa.Table, buckets: int) -> pa.RecordBatch:
    """Changes that are no log's, such as what a sink holds, as blobs for the same buckets."""
    return _blobs(changes.to_batches(), buckets, _STATES)


def folded(blobs: Iterable[pa.RecordBatch]) -> pa.Table:
    """The states that the blobs of a bucket give, which come sorted by `first`.

    Where the log's order is the canonical one, what has come is folded before the next comes: a vector with
    very many changes takes no more memory than others.
    """
    held: list[pa.RecordBatch] = []
    size, bound, in_order = 0, _HELD_BYTES, True
    for some in blobs:
        for first, blob in zip(some.column(1).to_pylist(), some.column(2), strict=True):
            in_order = in_order and first != _UNORDERED
            buffer = blob.as_buffer()
            held.append(pa.ipc.read_record_batch(buffer, CHANGES))
            size += buffer.size
            if in_order and size >= bound:
                states = fold(pa.Table.from_batches(held, CHANGES))
                held, size = states.to_batches(), states.nbytes
                bound = max(_HELD_BYTES, 2 * size)
    return fold(pa.Table.from_batches(held, CHANGES))


def _blobs(gathered: list[pa.RecordBatch], buckets: int, first: int) -> pa.RecordBatch:
    table = pa.Table.from_batches(gathered, CHANGES).combine_chunks()
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
