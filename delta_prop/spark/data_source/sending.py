"""Sends the rows of one part from within a task, as columns, and stages them for a job.

It is independent of Spark: its caller passes Arrow batches, and gets the rows' outcomes. It checks a full
block before it sends any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from delta_prop.client.sync_producer import SyncProducer, SyncReceipt
from delta_prop.spark.arrays import concat_batches
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.data_source.results import PartResult
from delta_prop.spark.options import WriteOptions
from delta_prop.spark.service_checks import check_on_worker
from delta_prop_wire.block import Block
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobPart
from delta_prop_wire.spec import ErrorCode

BLOCK_ROWS = 5_000
"""Half the rows of a batch of Spark, so that slices need no copy. Another value breaks running streams."""
BLOCK_BYTES = 4 * 1024 * 1024
_COMMITTED_STATES = ("committed", "published")


class RowBlocks:
    """Slices of a part. Iterating updates the attributes.

    `taken`: the number of rows so far. `starts`: the first row of each slice. `last`: the last slice.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._slices = slice_blocks(batches)
        self.taken = 0
        self.starts: list[int] = []
        self.last: pa.RecordBatch | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for rows in self._slices:
            self.starts.append(self.taken)
            self.taken += rows.num_rows
            self.last = rows
            yield rows

    def count(self) -> int:
        """Return the number of all rows, also those not taken yet."""
        for _ in self:
            pass
        return self.taken


class Blocks:
    """Blocks of a part. Iterating updates the number of `deltas` and `checksum`; raises InvalidDelta."""

    def __init__(self, batches: Iterable[pa.RecordBatch], namespace: str | None) -> None:
        self._slices = slice_blocks(batches)
        self._namespace = namespace
        self.deltas = self.checksum = 0

    def __iter__(self) -> Iterator[Block]:
        for rows in self._slices:
            block = to_block(rows, namespace=self._namespace, before=self.deltas)
            self.deltas += block.count
            self.checksum = block.content_crc(self.checksum)
            yield block


def stage_part(
    batches: Iterable[pa.RecordBatch], options: WriteOptions, job: str, part: int, attempt: int
) -> PartResult:
    """Stage a part, as one attempt of it. Raises Refused, Unreachable, UsageError."""
    blocks = Blocks(batches, options.namespace)
    remaining = iter(blocks)
    first = next(remaining, None)
    if first is None:
        return PartResult()
    try:
        with producer_of(options, f"{job}/{part}", JobPart(job, part, attempt)) as producer:
            receipts = [_offer_block(producer, block, options) for block in chain([first], remaining)]
            for receipt in receipts:
                receipt.result()
            return PartResult(blocks.deltas, waited_s=producer.waited_s, checksum=blocks.checksum)
    except Refused as refused:
        if refused.code is not ErrorCode.JOB_DECIDED or refused.details.get("state") not in _COMMITTED_STATES:
            raise
        deque(remaining, 0)  # encodes the rest, whose checksum is compared with the committed one
        return PartResult(blocks.deltas, was_decided=True, checksum=blocks.checksum)


def producer_of(options: WriteOptions, name: str, job: JobPart | None = None) -> SyncProducer:
    """Return the producer of a part. Raises UsageError."""
    remote = options.remote
    check_on_worker(remote)
    return SyncProducer(
        remote.addresses,
        name=name,
        token=remote.token,
        tls=remote.tls,
        settings=remote.settings,
        job=job,
        priority=options.priority,
    )


def offer_rows(
    producer: SyncProducer, rows: pa.RecordBatch, options: WriteOptions, counter: int, before: int = 0
) -> SyncReceipt:
    """Check a block and send it. `before`: the number of rows of the part that come before it.

    Raises InvalidDelta, which names the row; Refused.
    """
    block = to_block(rows, namespace=options.namespace, before=before)
    return _offer_block(producer, block, options, counter)


def _offer_block(
    producer: SyncProducer, block: Block, options: WriteOptions, counter: int | None = None
) -> SyncReceipt:
    limit_s = options.remote.settings.delivery_timeout_s
    return producer.offer_block(block, counter, priority=options.priority, timeout_s=limit_s)


# --- slices


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
    if rows.num_rows == 1 or sum(map(_content_size, rows.columns)) <= BLOCK_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _split_large(rows.slice(0, half))
    yield from _split_large(rows.slice(half))


def _content_size(column: pa.Array) -> int:
    """Return the bytes of a column's content, independent of its encoding, as block bounds depend on it."""
    kind, count = column.type, len(column)
    if not (pa.types.is_list(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return 8 * count
    ends = np.frombuffer(column.buffers()[1], np.int32)
    content = int(ends[column.offset + count]) - int(ends[column.offset])
    return content * (4 if pa.types.is_list(kind) else 1)
