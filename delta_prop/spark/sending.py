"""Rows of one part sent from within a task, as columns, and kept aside for a job.

Knows no Spark: whoever runs it brings batches of Arrow, and is told what became of the rows. All of a block
is looked at before anything of it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.blocking import SyncProducer
from delta_prop.spark.blocks import to_block
from delta_prop.spark.cutting_up import blocks_of
from delta_prop.spark.told import Sent
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobPart
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from delta_prop.client.blocking import SyncReceipt
    from delta_prop.spark.options import WriteOptions

_HAPPENED = ("committed", "published")


class Rows:
    """The blocks of a part, counted as they are taken."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._blocks = blocks_of(batches)
        self.taken = 0
        self.last: pa.RecordBatch | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for rows in self._blocks:
            self.taken += rows.num_rows
            self.last = rows
            yield rows

    def count(self) -> int:
        """How many there are, with those that were not taken yet."""
        for _ in self:
            pass
        return self.taken


def stage(
    batches: Iterable[pa.RecordBatch], options: WriteOptions, job: str, part: int, attempt: int
) -> Sent:
    """Have a part kept aside, as one attempt of it. Raises Refused, Unreachable, UsageError."""
    rows = Rows(batches)
    blocks = iter(rows)
    first = next(blocks, None)
    if first is None:
        return Sent()
    try:
        with producer_of(options, f"{job}/{part}", JobPart(job, part, attempt)) as producer:
            receipts = [offer(producer, first, options)]
            receipts += [offer(producer, block, options) for block in blocks]
            for receipt in receipts:
                receipt.result()
            return Sent(rows.taken, waited_s=producer.waited_s)
    except Refused as refused:
        if refused.code is not ErrorCode.JOB_DECIDED or refused.details.get("state") not in _HAPPENED:
            raise
        return Sent(rows.count(), decided=True)


def producer_of(options: WriteOptions, name: str, job: JobPart | None = None) -> SyncProducer:
    """Who sends a part."""
    remote = options.remote
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
    producer: SyncProducer, rows: pa.RecordBatch, options: WriteOptions, counter: int | None = None
) -> SyncReceipt:
    """Send a block, once all of it was looked at. Raises InvalidDelta, which names the row; Refused."""
    block = to_block(rows, namespace=options.namespace)
    limit_s = options.remote.settings.delivery_s_max
    return producer.offer_block(block, counter, priority=options.priority, after_s=limit_s)
