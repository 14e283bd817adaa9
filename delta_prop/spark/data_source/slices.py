"""Slices the rows of a part, so that each slice is sent as one block.

Needs pyarrow, not Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from delta_prop.spark.arrays import concat_batches

BLOCK_ROWS = 5_000
"""Half the rows of a batch of Spark, so that slices need no copy. Another value breaks running streams."""
BLOCK_BYTES = 4 * 1024 * 1024


def slice_blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in slices of up to `BLOCK_ROWS` and about `BLOCK_BYTES`, each of which is a frame.

    The bounds of slices depend only on the part's rows, not on the batches in which Spark passes them. So a
    retried part is sliced into the same blocks, each of which was accepted or refused as a whole.
    """
    pending: list[pa.RecordBatch] = []
    row_count = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            count = min(BLOCK_ROWS - row_count, batch.num_rows - start)
            pending.append(batch.slice(start, count))
            start, row_count = start + count, row_count + count
            if row_count == BLOCK_ROWS:
                yield from _split_large(concat_batches(pending))
                pending, row_count = [], 0
    if pending:
        yield from _split_large(concat_batches(pending))


def _split_large(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if rows.num_rows == 1 or content_size(rows) <= BLOCK_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _split_large(rows.slice(0, half))
    yield from _split_large(rows.slice(half))


def content_size(rows: pa.RecordBatch) -> int:
    """Return the bytes of the rows' content, independent of its encoding, as block bounds depend on it."""
    return sum(map(_column_size, rows.columns))


def _column_size(column: pa.Array) -> int:
    kind, count = column.type, len(column)
    if not (pa.types.is_list(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return 8 * count
    ends = np.frombuffer(column.buffers()[1], np.int32)
    content = int(ends[column.offset + count]) - int(ends[column.offset])
    return content * (4 if pa.types.is_list(kind) else 1)
