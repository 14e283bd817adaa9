"""Publishes the parts of a committed job through the pipeline, as a producer does: in order, each delta once.

Dots reveal which deltas are in the log, so a publication that was interrupted, by a crash or a log failure,
resumes from any earlier position without publishing a delta twice. When a batch is finally refused, its rows
are sent again under dots of a retry origin, in halves, then in halves of a refused half, until each refused
row is alone. Their order depends only on earlier outcomes, so an interrupted retry resumes, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop.server.job_files import CommittedPart, JobDecision, JobFiles, Progress, stem_of
from delta_prop.server.part_file import (
    READ_BYTES,
    PartHead,
    PartPosition,
    StagedFrame,
    path_of,
    read_frames,
    read_head,
)
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Source,
    make_origin,
    origin_lane,
    origin_partition,
    producer_id_of,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import OriginClaim, RefusedRow
from delta_prop_wire.reheader import with_header
from delta_prop_wire.requests import REFUSED_ROWS_MAX
from delta_prop_wire.slicing import deltas_of
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Threads
    from delta_prop.server.job_table import Job
    from delta_prop.server.server_context import JobCounts
    from delta_prop_broker.disk import File

logger = logging.getLogger("delta_prop.server")

UNACKED_BYTES_MAX = 4 * 1024 * 1024
"""Maximum bytes in flight to stable storage; a larger batch is in flight alone."""
PROGRESS_INTERVAL_S = 1.0
"""Minimum interval between two stores of a publication's progress."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.005, 60.0
_RECLAIM_CODES = frozenset({ErrorCode.FENCED, ErrorCode.UNKNOWN_ORIGIN})


class _BatchReceipt(Receipt):
    """The receipt of an offered batch. `is_noop`: True if the batch was finally refused."""

    __slots__ = ("_wakeup", "is_noop")

    def __init__(self, wakeup: Wakeup) -> None:
        super().__init__()
        self.is_noop = False
        self._wakeup = wakeup

    def mark_appended(self, place: PublishAck | None = None) -> None:
        """See `Receipt`. Without a place, the batch was appended as a no-op."""
        self.is_noop = place is None
        super().mark_appended(place)
        self._wakeup.notify()

    def _finish(self) -> None:
        super()._finish()
        self._wakeup.notify()


class _UnackedBatch(NamedTuple):
    """A batch in flight. `progress`: the publication's progress once this batch is acknowledged."""

    receipt: _BatchReceipt
    size: int
    progress: Progress


class RunningJob:
    """A job that is being published. `progress`: the progress that is acknowledged."""

    def __init__(self, job: Job, decision: JobDecision, counts: JobCounts) -> None:
        self.decision = decision
        self.progress = decision.progress
        self._job = job
        self._counts = counts
        self._counted = decision.progress

    def set_progress(self, progress: Progress) -> None:
        """Set and count the progress; after a log failure, it may have gone back."""
        self.progress = progress
        self._job.decision = replace(self.decision, progress=progress)
        self._counted = self._counts.add_progress(self._counted, progress)


class JobPublication:
    """The publication of one job."""

    def __init__(self, partition: Partition, files: JobFiles, threads: Threads, running: RunningJob) -> None:
        self._partition = partition
        self._pipeline = partition.pipeline
        self._files = files
        self._threads = threads
        self._running = running
        self._wakeup = Wakeup()
        self._stored = running.progress
        self._stored_at = self._now()
        self._unacked: deque[_UnackedBatch] = deque()
        self._unacked_bytes = 0
        self._epochs: dict[int, int] = {}
        self._refusals: dict[Dot, Refused] = {}  # of rows of the current frame

    async def publish(self) -> None:
        """Publish the rest of the job; return once all is on stable storage.

        Raises OSError if the disk fails: start again, with the latest progress.
        """
        last_code = None
        while True:
            try:
                await self._publish_parts()
                return
            except Refused as refused:  # solved by a retry or a new claim; `_publish_part` handles final ones
                self._rewind(refused)
                if refused.code is not last_code:
                    last_code = refused.code
                    logger.warning("publishing job %r waits: %s", self._decision.job, refused.message)
                wait_s = (refused.retry_after_ms or 0) / 1000
                await anyio.sleep(min(max(wait_s, _RETRY_MIN_S), _RETRY_MAX_S))

    async def write(self, write_file: Callable[[], None]) -> None:
        """Write a small file on the thread, even if the disk is full. Raises OSError."""
        await self._threads.run(partial(self._partition.log.write_small, write_file))

    # --- parts

    async def _publish_parts(self) -> None:
        parts = self._decision.parts
        while self._progress.index < len(parts):
            part = parts[self._progress.index]
            file = await self._threads.run(partial(_open_part, self._files, self._decision.job, part))
            try:
                await self._publish_part(part, file)
            finally:
                if file is not None:
                    file.close()
        await self._store_progress()

    async def _publish_part(self, part: CommittedPart, file: File | None) -> None:
        """Publish the rest of a part. Raises Refused (retryable), OSError."""
        head_and_start = None if file is None else await self._threads.run(partial(read_head, file))
        end, refusal = PartPosition(), None
        if file is not None and head_and_start is not None:
            head, start = head_and_start
            if not self._progress.position.byte_offset:
                self._running.set_progress(replace(self._progress, position=start))
            try:
                end = await self._publish_frames(part, file, head)
            except Refused as refused:
                if refused.retryable or refused.code in _RECLAIM_CODES:
                    raise
                self._rewind(refused)
                logger.error("part %d of job %r: %s", part.part, self._decision.job, refused.message)
                refusal = refused
        if (end.byte_offset, end.checksum) != (part.size, part.checksum):
            await self._skip_missing(part, refusal)
        else:
            self._running.set_progress(
                replace(self._progress, index=self._progress.index + 1, position=PartPosition())
            )

    async def _publish_frames(self, part: CommittedPart, file: File, head: PartHead) -> PartPosition:
        """Publish the remaining frames; return the end of the last intact one. Raises Refused."""
        sender, position = Sender(self._decision.owner, Source(head.source)), self._progress.position
        while position.byte_offset < part.size:
            staged = await self._threads.run(partial(_read_next_frames, file, position))
            if not staged:
                break
            for frame in staged:
                await self._publish_frame(part, frame, self._claim_epoch(head.origin), sender)
                position = frame.end
                await self._wait_unacked(UNACKED_BYTES_MAX)
        await self._wait_unacked(0)
        return position

    # --- frames

    async def _publish_frame(
        self, part: CommittedPart, frame: StagedFrame, epoch: int, sender: Sender
    ) -> None:
        """Publish one frame of a part, unless it is in the log already. Raises Refused."""
        batch = frame.batch
        watermark = self._watermark(batch.origin)
        if batch.last <= watermark:
            await self._wait_unacked(0)
            await self._finish_frame(
                part, frame, sender, refused_from=self._refused_from(batch, part.watermark)
            )
            return
        rest = batch
        if batch.base <= watermark:
            remaining = list(deltas_of(batch))[watermark + 1 - batch.base :]
            rest = _encode_rows(remaining, batch, batch.origin, watermark + 1, epoch)
        receipt = await self._offer(with_header(rest, epoch=epoch, ack_level=AckLevel.DURABLE), sender)
        if not self._is_refused(receipt, rest):
            progress = self._count_frame(self._last_progress, part, frame)
            self._unacked.append(_UnackedBatch(receipt, batch.size, progress))
            self._unacked_bytes += batch.size
            return
        await self._wait_unacked(0)
        await self._remember_refusal(receipt, rest)
        await self._finish_frame(part, frame, sender, refused_from=rest.base - batch.base)

    async def _finish_frame(
        self, part: CommittedPart, frame: StagedFrame, sender: Sender, *, refused_from: int
    ) -> None:
        """Retry the rows of a frame that were refused, those from `refused_from` on, and advance past it."""
        count = frame.batch.count
        if refused_from < count:
            await self._retry_rows(frame.batch, range(refused_from, count), sender)
        self._refusals.clear()
        self._running.set_progress(
            replace(self._count_frame(self._progress, part, frame, rows=refused_from), retry_base=0)
        )
        if refused_from < count:
            await self._store_progress()
        await anyio.lowlevel.checkpoint()

    def _is_refused(self, receipt: _BatchReceipt, batch: Batch) -> bool:
        """Return True if a batch was finally refused.

        Raises the refusal if it left the dots open: they are to be sent again.
        """
        refusal = receipt.refusal()
        if refusal is not None and (not refusal.is_final or self._watermark(batch.origin) < batch.last):
            raise refusal
        return receipt.is_noop or refusal is not None

    def _refused_from(self, batch: Batch, watermark_at_decision: int) -> int:
        """Return the first row that this publication sent and that was refused, or the number of rows.

        All rows after it were refused, too. Rows that were in the log at the decision do not count.
        """
        first = max(watermark_at_decision + 1 - batch.base, 0)
        if first >= batch.count or not self._was_refused(batch.origin, batch.last):
            return batch.count
        return next(
            row for row in range(first, batch.count) if self._was_refused(batch.origin, batch.base + row)
        )

    async def _retry_rows(self, batch: Batch, rows: range, sender: Sender) -> None:
        """Send rows of a refused batch again, in halves, until each refused row is alone."""
        origin = self._retry_origin(batch.origin)
        if not self._progress.retry_base:
            self._claim_epoch(origin)
            self._running.set_progress(replace(self._progress, retry_base=self._watermark(origin) + 1))
        await self._store_progress()
        base, progress, deltas = self._progress.retry_base, self._progress, list(deltas_of(batch))
        stack = _split_halves(rows)
        if not stack:  # a single row, which was refused under its own dot
            progress = self._with_refused(
                progress, batch, rows.start, Dot(batch.origin, batch.base + rows.start)
            )
        while stack:
            half = stack.pop()
            half_deltas = deltas[half.start : half.stop]
            if await self._try_rows(batch, half_deltas, origin, base, sender):
                stack += _split_halves(half)
                if len(half) == 1:
                    progress = self._with_refused(progress, batch, half.start, Dot(origin, base))
            else:
                progress = replace(progress, published=progress.published + len(half))
            base += len(half)
        self._running.set_progress(progress)

    async def _try_rows(
        self, batch: Batch, deltas: Sequence[Delta], origin: int, base: int, sender: Sender
    ) -> bool:
        """Send rows, unless they were sent before; return True if they were refused. Raises Refused."""
        if base + len(deltas) - 1 <= self._watermark(origin):
            return self._was_refused(origin, base)
        retry = _encode_rows(deltas, batch, origin, base, self._claim_epoch(origin))
        receipt = await self._offer(retry, sender)
        await anyio.lowlevel.checkpoint()
        is_refused = self._is_refused(receipt, retry)
        if is_refused:
            await self._remember_refusal(receipt, retry)
        return is_refused

    async def _remember_refusal(self, receipt: _BatchReceipt, batch: Batch) -> None:
        """Remember the refusal of a single row, if it is to be listed."""
        if batch.count > 1 or len(self._progress.refused_rows) + len(self._refusals) >= REFUSED_ROWS_MAX:
            return
        await self._wait_outcome(receipt)
        refusal = receipt.refusal()
        if refusal is not None and refusal.is_final:
            self._refusals[batch.dot(0)] = refusal

    def _with_refused(self, progress: Progress, batch: Batch, row: int, dot: Dot) -> Progress:
        """Return the progress with one more refused row, which was sent by itself under `dot`."""
        refusal = self._refusals.get(dot)
        if refusal is None:  # the refusal came before a restart, or is beyond those that are remembered
            code, text = self._pipeline.outcome(*dot), ""
        else:
            code, text = refusal.code, refusal.message.removeprefix("row 0: ")
        error_code = code if isinstance(code, ErrorCode) else ErrorCode.INVALID_DELTA
        part = self._decision.parts[progress.index].part
        return progress.with_refused(
            RefusedRow(part, batch.base - 1 + row, batch.keys[row], error_code, text)
        )

    async def _skip_missing(self, part: CommittedPart, refusal: Refused | None) -> None:
        """Log that a committed part cannot be read to its end, count the rest as refused, and skip it."""
        missing = part.deltas - self._progress.position.counter
        logger.error(
            "job %r: %d of %d deltas of part %d cannot be published: its file is corrupted or missing, or "
            "its origin belongs to another token; they count as refused: rerun the job under another name",
            self._decision.job,
            missing,
            part.deltas,
            part.part,
        )
        code = ErrorCode.PROCESSING_FAILED if refusal is None else refusal.code
        cause = "the part's file is corrupted or missing" if refusal is None else refusal.message
        text = f"{cause}: none of its last {missing} rows, from this one on, is published"
        progress = replace(
            self._progress, index=self._progress.index + 1, position=PartPosition(), retry_base=0
        )
        if missing:
            counter = self._progress.position.counter
            progress = progress.with_refused(RefusedRow(part.part, counter, "", code, text), missing)
        self._running.set_progress(progress)
        await self._store_progress()

    async def _offer(self, batch: Batch, sender: Sender) -> _BatchReceipt:
        """Offer a batch to the pipeline, and wait until it is appended, or will not be."""
        receipt = _BatchReceipt(self._wakeup)
        with self._partition.tick_callbacks:
            self._pipeline.offer(SequencedBatch(batch, sender, receipt), self._now())
        while not (receipt.done or receipt.state is OfferState.APPENDED):
            await self._wakeup.wait()
        return receipt

    async def _wait_outcome(self, receipt: _BatchReceipt) -> None:
        while not receipt.done:
            await self._wakeup.wait()

    # --- progress

    @property
    def _decision(self) -> JobDecision:
        return self._running.decision

    @property
    def _progress(self) -> Progress:
        """The progress that is acknowledged."""
        return self._running.progress

    @property
    def _last_progress(self) -> Progress:
        """The progress once everything in flight is acknowledged."""
        return self._unacked[-1].progress if self._unacked else self._progress

    def _count_frame(
        self, progress: Progress, part: CommittedPart, frame: StagedFrame, rows: int | None = None
    ) -> Progress:
        """Return the progress after a frame whose first `rows` are in the log under their own dots.

        `rows`: None if all are.
        """
        batch = frame.batch
        count = batch.count if rows is None else rows
        duplicates = min(max(part.watermark + 1 - batch.base, 0), count)
        return replace(
            progress,
            position=frame.end,
            published=progress.published + count - duplicates,
            duplicates=progress.duplicates + duplicates,
        )

    async def _wait_unacked(self, bytes_max: int) -> None:
        """Wait until no more than `bytes_max` wait for stable storage. Raises Refused."""
        while self._unacked and (self._unacked_bytes > bytes_max or self._unacked[0].receipt.done):
            receipt, size, progress = self._unacked[0]
            await self._wait_outcome(receipt)
            refusal = receipt.refusal()
            if refusal is not None:
                raise refusal
            self._unacked.popleft()
            self._unacked_bytes -= size
            self._running.set_progress(progress)
        if self._now() - self._stored_at >= PROGRESS_INTERVAL_S:
            await self._store_progress()

    def _rewind(self, refused: Refused) -> None:
        """Go back to the acknowledged progress; after a log failure, to the stored one.

        A failed log may have lost rows that the acknowledged progress counts as duplicates or published.
        """
        self._unacked.clear()
        self._unacked_bytes = 0
        if refused.code in _RECLAIM_CODES:
            self._epochs.clear()
        if refused.code in (ErrorCode.LOG_FAILED, ErrorCode.SHUTTING_DOWN):
            self._running.set_progress(self._stored)

    async def _store_progress(self) -> None:
        """Store the progress, once all rows that it counts are on stable storage. Raises Refused, OSError."""
        progress, failures = self._progress, list[Refused]()
        if progress == self._stored:
            return
        self._pipeline.check_running()  # `when_reached` does not report a failure from before the call
        reached = anyio.Event()

        def on_reached(failure: Refused | None) -> None:
            if failure is not None:
                failures.append(failure)
            reached.set()

        self._pipeline.when_reached(on_reached)
        await reached.wait()
        if failures:
            raise failures[0]
        await self.write(partial(self._files.write_progress, self._decision.job, progress))
        self._stored, self._stored_at = progress, self._now()

    # --- origins

    def _claim_epoch(self, origin: int) -> int:
        """Return the producer epoch of an origin, which is claimed first if necessary. Raises Refused."""
        epoch = self._epochs.get(origin)
        if epoch is None:
            now = self._now()
            (grant,) = self._pipeline.claim(
                [OriginClaim(origin, 0)], self._decision.owner, now, bounded=False
            )
            epoch = self._epochs[origin] = grant.epoch
        return epoch

    def _now(self) -> float:
        return self._partition.world.clock.now()

    def _watermark(self, origin: int) -> int:
        return self._pipeline.watermark(origin)

    def _was_refused(self, origin: int, counter: int) -> bool:
        """True if a processed dot was refused, as far as outcomes are remembered."""
        outcome = self._pipeline.outcome(origin, counter)
        return isinstance(outcome, ErrorCode) and outcome is not ErrorCode.DOT_REUSED

    def _retry_origin(self, origin: int) -> int:
        """Return the origin under which the rows of refused batches are sent again."""
        part = self._decision.parts[self._progress.index].part
        return make_origin(
            producer_id_of(f"{self._decision.job}/{part}/again"),
            origin_lane(origin),
            origin_partition(origin),
        )


def _split_halves(rows: range) -> list[range]:
    """Return the two halves of these rows, the last one first; nothing for a single row."""
    half = len(rows) // 2
    return [rows[half:], rows[:half]] if half else []


def _encode_rows(deltas: Sequence[Delta], batch: Batch, origin: int, base: int, epoch: int) -> Batch:
    """Encode rows as a batch of their own, with the priority and the time of `batch`."""
    return encode_batch(
        deltas,
        origin=origin,
        base=base,
        epoch=epoch,
        ack_level=AckLevel.DURABLE,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )


def _open_part(files: JobFiles, job: str, part: CommittedPart) -> File | None:
    try:
        return files.disk.open(path_of(stem_of(job), part.part, part.attempt), read_only=True)
    except FileNotFoundError:
        return None


def _read_next_frames(file: File, position: PartPosition) -> list[StagedFrame]:
    frames: list[StagedFrame] = []
    size = 0
    for frame in read_frames(file, position):
        frames.append(frame)
        size += frame.batch.size
        if size >= READ_BYTES:
            break
    return frames
