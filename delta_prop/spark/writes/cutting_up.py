"""Rows of a part as blocks, each of which travels as one frame.

Their bounds depend on the rows alone, counted from the part's first one, not on the batches that they come
in: a part that is sent again is cut alike, so a block was taken or refused as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BLOCK_ROWS = 5_000
"""Half of what Spark hands over at once, so that nothing is copied. Streams that go on depend on it."""
BLOCK_BYTES = 4 * 1024 * 1024


def blocks_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, up to so many at once, and about so many bytes."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            count = min(BLOCK_ROWS - rows, batch.num_rows - at)
            waiting.append(batch.slice(at, count))
            at, rows = at + count, rows + count
            if rows == BLOCK_ROWS:
                yield from _small_enough(together(waiting))
                waiting, rows = [], 0
    if waiting:
        yield from _small_enough(together(waiting))


def together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches as one; copies where there are several."""
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _small_enough(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if rows.num_rows == 1 or sum(map(_size, rows.columns)) <= BLOCK_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _small_enough(rows.slice(0, half))
    yield from _small_enough(rows.slice(half))


def _size(column: pa.Array) -> int:
    """Bytes of what is in it; the same however it is kept, so that nothing else tells where blocks end."""
    kind, count = column.type, len(column)
    if not (pa.types.is_list(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return 8 * count
    ends = np.frombuffer(column.buffers()[1], np.int32)
    content = int(ends[column.offset + count]) - int(ends[column.offset])
    return content * (4 if pa.types.is_list(kind) else 1)
