"""Sends the rows of one part from within a task, as columns, and stages them for a job.

It is independent of Spark: its caller passes Arrow batches, and gets the rows' outcomes. It checks a full
block before it sends any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from delta_prop.client.service_identity import HIGHEST
from delta_prop.client.sync_producer import SyncProducer, SyncReceipt
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.data_source.results import PartResult, StagedRows
from delta_prop.spark.data_source.routing import PartitionRows, divide
from delta_prop.spark.options import WriteOptions
from delta_prop.spark.served_streams import DEFAULT_SERVED, ServedStream
from delta_prop.spark.service_checks import check_on_worker
from delta_prop_wire.block import Block
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobPart
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    import pyarrow as pa

_COMMITTED_STATES = ("committed", "published")


def stage_part(
    batches: Iterable[pa.RecordBatch],
    options: WriteOptions,
    job: str,
    part: int,
    attempt: int,
    *,
    stream: ServedStream = DEFAULT_SERVED,
) -> PartResult:
    """Stage a part, as one attempt of it, in the partitions of its vectors.

    Raises Refused, Unreachable, UsageError.
    """
    options = with_shared_close_timeout(options, stream)
    result, staged = PartResult(), dict[int, _StagedPart]()
    with ExitStack() as stack:
        for piece in divide(batches, stream.count, options.namespace):
            rows = staged.get(piece.partition)
            if rows is None:
                log, job_part = stream.log_name(piece.partition), JobPart(job, part, attempt)
                rows = staged[piece.partition] = stack.enter_context(_StagedPart(options, job_part, log))
            rows.add(piece)
        for rows in staged.values():
            rows.wait()
    for partition, rows in sorted(staged.items()):
        result.deltas += rows.deltas
        result.waited_s += rows.waited_s
        result.staged[partition] = StagedRows(rows.deltas, rows.checksum, rows.was_decided)
    return result


class _StagedPart:
    """Stages the rows of a part that belong to one partition; opens its producer for the first ones.

    `deltas`, `checksum`: of the rows so far. `was_decided`: the job was committed before, so that nothing
    more is sent, but the checksum of all rows is compared with the committed one.
    """

    def __init__(self, options: WriteOptions, job: JobPart, log: LogName) -> None:
        self._options = options
        self._producer = producer_of(options, f"{job.job}/{job.part}", log, job)
        self._is_open = False
        self._receipts: deque[SyncReceipt] = deque()
        self.deltas = self.checksum = 0
        self.was_decided = False

    @property
    def waited_s(self) -> float:
        """Seconds for which the task has waited for the service, 0 for a job that was decided."""
        return 0.0 if self.was_decided else self._producer.waited_s

    def __enter__(self) -> _StagedPart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_open:
            self._is_open = False
            self._producer.__exit__(kind, error, trace)

    def add(self, piece: PartitionRows) -> None:
        """Send rows. Raises InvalidDelta, Refused, Unreachable, UsageError."""
        block = to_block(piece.rows, namespace=self._options.namespace, before=int(piece.numbers[0]))
        self.deltas += block.count
        self.checksum = block.content_crc(self.checksum)
        if self.was_decided:
            return
        try:
            if not self._is_open:
                self._producer.__enter__()
                self._is_open = True
            self._receipts.append(_offer_block(self._producer, block, self._options))
        except Refused as refused:
            self._note_decided(refused)

    def wait(self) -> None:
        """Wait until all rows are staged. Raises Refused."""
        try:
            while self._receipts:
                self._receipts.popleft().result()
        except Refused as refused:
            self._note_decided(refused)

    def _note_decided(self, refused: Refused) -> None:
        if refused.code is not ErrorCode.JOB_DECIDED or refused.details.get("state") not in _COMMITTED_STATES:
            raise refused
        self.was_decided = True
        self._receipts.clear()
        self.__exit__(type(refused), refused, None)


def with_shared_close_timeout(options: WriteOptions, stream: ServedStream) -> WriteOptions:
    """Return options whose close timeout suits a producer for each partition: they close one by one."""
    remote = options.remote
    settings = replace(remote.settings, close_timeout_s=remote.settings.close_timeout_s / stream.count)
    return replace(options, remote=replace(remote, settings=settings))


def producer_of(
    options: WriteOptions, name: str, log: LogName = DEFAULT_LOG, job: JobPart | None = None
) -> SyncProducer:
    """Return the producer of a part's rows in one partition. Raises UsageError."""
    remote = options.remote
    check_on_worker(remote)
    return SyncProducer(
        remote.addresses,
        name=name,
        token=remote.token,
        tls=remote.tls,
        stream=log.stream,
        partition=log.partition,
        settings=remote.settings,
        ack_level=HIGHEST,  # Spark does not send a row again once its checkpoint has it
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
