"""Changes on their way to where all those of one vector meet: in buckets by name, as few large blobs.

Spark moves the blobs, a column of bytes each, and never looks inside: rows of numbers would cost it many
times as much. Needs pyarrow, not Spark.
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
"""About as much of the log belongs into a bucket."""
BUCKETS_MAX = 10_000
_GATHERED_BYTES = 16 << 20
_HELD_BYTES = 64 << 20
_BLOBS = pa.schema([("bucket", pa.int32()), ("first", pa.int64()), ("changes", pa.binary())])
STATES, UNORDERED, HELD = -1, -2, -3
"""In place of the first offset: states of a snapshot, which stand before everything; word that the log's
order is not the canonical one; what a sink holds.
"""


def buckets_for(size: int) -> int:
    """How many buckets so many bytes of a log are spread over."""
    return min(max(-(-size // BUCKET_BYTES), 1), BUCKETS_MAX)


def spread(batches: Iterable[LoggedBatch], buckets: int, end: int | None = None) -> Iterator[pa.RecordBatch]:
    """The changes in batches of the log below offset `end`, or states of a snapshot, as blobs.

    The batches come in the order of the log.
    """
    gathered: list[pa.RecordBatch] = []
    size, first, lamport, in_order = 0, STATES, 0, True
    least = max(_GATHERED_BYTES, buckets << 12)
    for logged in batches:
        batch = logged.batch
        if not batch.is_state:
            rises = logged.lamport > lamport and logged.source != Source.REPLICA
            in_order = in_order and rises and logged.known_ids is KnownIds.NONE
            lamport = logged.lamport + logged.count - 1
        if not gathered:
            first = STATES if batch.is_state else logged.offset
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
            [np.arange(buckets, dtype=np.int32), np.full(buckets, UNORDERED), pa.array([word] * buckets)],
            schema=_BLOBS,
        )


def spread_held(states: pa.Table, buckets: int) -> pa.RecordBatch:
    """States that a sink holds as blobs, for the same buckets."""
    return _blobs(states.to_batches(), buckets, HELD)


def pieces(blobs: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The changes in the blobs of a bucket, each with what it is sorted by."""
    for some in blobs:
        for first, blob in zip(some.column(1).to_pylist(), some.column(2), strict=True):
            yield first, pa.ipc.read_record_batch(blob.as_buffer(), CHANGES)


class Gathering:
    """Changes that come in the order of the log, and their fold.

    While that is the canonical order, what has come is folded before the next comes: a vector with very many
    changes takes no more memory than others.
    """

    def __init__(self) -> None:
        self.in_order = True
        self._held: list[pa.RecordBatch] = []
        self._bytes, self._bound = 0, _HELD_BYTES

    def add(self, changes: pa.RecordBatch) -> None:
        """The next ones."""
        self._held.append(changes)
        self._bytes += changes.nbytes
        if self.in_order and self._bytes >= self._bound:
            states = fold(self.table())
            self._held, self._bytes = states.to_batches(), states.nbytes
            self._bound = max(_HELD_BYTES, 2 * self._bytes)

    def table(self) -> pa.Table:
        """What is to be folded."""
        return pa.Table.from_batches(self._held, CHANGES)


def folded(blobs: Iterable[pa.RecordBatch]) -> pa.Table:
    """The states that the blobs of a bucket give, which come sorted by `first`."""
    gathering = Gathering()
    for first, changes in pieces(blobs):
        gathering.in_order = gathering.in_order and first != UNORDERED
        gathering.add(changes)
    return fold(gathering.table())


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
