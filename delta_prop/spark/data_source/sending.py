"""Sends the rows of one part from within a task, as columns, and stages them for a job.

It is independent of Spark: its caller passes Arrow batches, and gets the rows' outcomes. It checks a full
block before it sends any of it.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from delta_prop.client.sync_producer import SyncProducer
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.data_source.results import PartResult
from delta_prop.spark.data_source.slicing import slice_blocks
from delta_prop.spark.service_checks import check_on_worker
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobPart
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from delta_prop.client.sync_producer import SyncReceipt
    from delta_prop.spark.options import WriteOptions
    from delta_prop_wire.block import Block

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
