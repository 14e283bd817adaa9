"""Rows of one part sent from within a task, as columns, and kept aside for a job.

Knows no Spark: whoever runs it brings batches of Arrow, and is told what became of the rows. All of a block
is looked at before anything of it is sent.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from delta_prop.client.blocking import SyncProducer
from delta_prop.spark.reach import check_on_worker
from delta_prop.spark.writes.blocks import to_block
from delta_prop.spark.writes.cutting_up import blocks_of
from delta_prop.spark.writes.told import Sent
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobPart
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from delta_prop.client.blocking import SyncReceipt
    from delta_prop.spark.options import WriteOptions
    from delta_prop_wire.block import Block

_HAPPENED = ("committed", "published")


class Rows:
    """What the blocks of a part hold, counted as they are taken. `firsts`: the first row of each."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._cut = blocks_of(batches)
        self.taken = 0
        self.firsts: list[int] = []
        self.last: pa.RecordBatch | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for rows in self._cut:
            self.firsts.append(self.taken)
            self.taken += rows.num_rows
            self.last = rows
            yield rows

    def count(self) -> int:
        """How many there are, with those that were not taken yet."""
        for _ in self:
            pass
        return self.taken


class Blocks:
    """The blocks of a part, counted and summed up as they are taken. Iterating raises InvalidDelta."""

    def __init__(self, batches: Iterable[pa.RecordBatch], namespace: str | None) -> None:
        self._cut = blocks_of(batches)
        self._namespace = namespace
        self.deltas = self.checksum = 0

    def __iter__(self) -> Iterator[Block]:
        for rows in self._cut:
            block = to_block(rows, namespace=self._namespace, before=self.deltas)
            self.deltas += block.count
            self.checksum = block.content_crc(self.checksum)
            yield block


def stage(
    batches: Iterable[pa.RecordBatch], options: WriteOptions, job: str, part: int, attempt: int
) -> Sent:
    """Have a part kept aside, as one attempt of it. Raises Refused, Unreachable, UsageError."""
    blocks = Blocks(batches, options.namespace)
    ahead = iter(blocks)
    first = next(ahead, None)
    if first is None:
        return Sent()
    try:
        with producer_of(options, f"{job}/{part}", JobPart(job, part, attempt)) as producer:
            receipts = [_offer_block(producer, block, options) for block in chain([first], ahead)]
            for receipt in receipts:
                receipt.result()
            return Sent(blocks.deltas, waited_s=producer.waited_s, checksum=blocks.checksum)
    except Refused as refused:
        if refused.code is not ErrorCode.JOB_DECIDED or refused.details.get("state") not in _HAPPENED:
            raise
        deque(ahead, 0)  # what they say is compared with what was committed
        return Sent(blocks.deltas, decided=True, checksum=blocks.checksum)


def producer_of(options: WriteOptions, name: str, job: JobPart | None = None) -> SyncProducer:
    """Who sends a part. Raises UsageError."""
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


def offer(
    producer: SyncProducer, rows: pa.RecordBatch, options: WriteOptions, counter: int, before: int = 0
) -> SyncReceipt:
    """Send a block, once all of it was looked at. `before`: rows of the part that come before it.

    Raises InvalidDelta, which names the row; Refused.
    """
    block = to_block(rows, namespace=options.namespace, before=before)
    return _offer_block(producer, block, options, counter)


def _offer_block(
    producer: SyncProducer, block: Block, options: WriteOptions, counter: int | None = None
) -> SyncReceipt:
    limit_s = options.remote.settings.delivery_s_max
    return producer.offer_block(block, counter, priority=options.priority, after_s=limit_s)
