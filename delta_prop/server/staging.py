"""The write path of a connection that stages a part of a job: its batches wait on disk for a decision.

A `ProduceHandler` that sends its batches to one attempt of one part, not to the pipeline. It never waits: the
task of `Jobs` writes and syncs the collected batches, and then acknowledges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delta_prop.calls.argument_checks import check_batch
from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.calls.refusals import overlap
from delta_prop.partition.ingest.work import Sender
from delta_prop.server.outcome_collector import OutcomeCollector
from delta_prop.server.partition_checks import check_frame
from delta_prop.server.produce_handler import ProduceHandler, PublishChecks
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frame_runs import FrameRun
from delta_prop_wire.frames import BatchFrame, DeltaFrame, Hello, JobPart, OriginClaim, OriginGrant
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.answers import Answers, ConnectedClient
    from delta_prop.server.jobs import Jobs
    from delta_prop.server.part_file import PartHead, PartPosition
    from delta_prop.server.server_context import ServerContext
    from delta_prop_broker.disk import File

_GAP_RETRY_MS = 10
_UNSTAGEABLE = {
    Column.CLOCK: "clock",
    Column.IDS: "id",
    Column.COUNTERS: "counters",
    Column.PARENTS: "parents",
    Column.EXPECTS: "expect",
    Column.ROW_OFFSETS: "row offsets",
}


class Attempt:
    """One attempt of one part: the batches on disk, and those waiting to be written.

    `taken_counter`: counter of the last delta accepted. `synced_position`: end of the synced batches; None
    before the file exists. `refusal`: why it accepts no more. `holder`: the handler that stages
    it; None once its connection has closed.
    """

    def __init__(self, path: str, head: PartHead, synced_position: PartPosition | None = None) -> None:
        self.path = path
        self.head = head
        self.synced_position = synced_position
        self.taken_counter = self.stored_deltas
        self.pending: list[tuple[Batch, Receipt]] = []
        self.pending_bytes = 0
        self.duplicates: list[tuple[Batch, Receipt]] = []  # of pending batches
        self.file: File | None = None
        self.refusal: Refused | None = None
        self.holder: object = None
        self.counted_bytes = 0  # counted against the limit of all jobs

    @property
    def key(self) -> tuple[int, int]:
        """The numbers of its part and of itself."""
        return self.head.part, self.head.attempt

    @property
    def stored_deltas(self) -> int:
        """Deltas on disk."""
        return 0 if self.synced_position is None else self.synced_position.counter

    @property
    def bytes(self) -> int:
        """Approximate size of its file, once all is written."""
        return self.pending_bytes + (0 if self.synced_position is None else self.synced_position.byte_offset)

    def take_pending(self) -> list[tuple[Batch, Receipt]]:
        """Remove and return the batches to write now."""
        pending, self.pending = self.pending, []
        return pending

    def add(self, batch: Batch, receipt: Receipt) -> None:
        """Queue a batch for writing."""
        self.pending.append((batch, receipt))
        self.pending_bytes += batch.size
        self.taken_counter = batch.last

    def on_written(self, batches: Sequence[tuple[Batch, Receipt]], position: PartPosition) -> None:
        """Acknowledge batches that are synced now."""
        self.synced_position, self.taken_counter = position, max(self.taken_counter, position.counter)
        self.pending_bytes = sum(batch.size for batch, _ in self.pending)
        for batch, receipt in batches:
            receipt.acknowledge(_make_ack(batch))
        duplicates, self.duplicates = self.duplicates, []
        for batch, receipt in duplicates:
            self.add_duplicate(batch, receipt)

    def add_duplicate(self, batch: Batch, receipt: Receipt) -> None:
        """Acknowledge a batch that was accepted before, once its first copy is on disk."""
        if batch.last > self.stored_deltas:
            self.duplicates.append((batch, receipt))
        else:
            receipt.acknowledge(_make_ack(batch, duplicate=True))

    def on_failed(self, batches: Sequence[tuple[Batch, Receipt]], refusal: Refused) -> None:
        """Refuse batches that could not be written, and all that were queued after them."""
        failed = [*batches, *self.pending, *self.duplicates]
        self.pending, self.duplicates, self.pending_bytes, self.taken_counter = [], [], 0, self.stored_deltas
        for _, receipt in failed:
            receipt.refuse(refusal)

    def close(self, refusal: Refused) -> None:
        """Accept no more batches, and refuse those that wait."""
        self.refusal = self.refusal or refusal
        self.on_failed((), self.refusal)


class StagingHandler(ProduceHandler):
    """The deltas of one attempt. Call `stage` before the other methods."""

    is_throttled = False  # staging does not depend on the pipeline's queue

    def stage(self, part: JobPart, jobs: Jobs) -> None:
        """Begin to stage an attempt, and fence other connections that stage it. Raises Refused."""
        self._jobs = jobs
        self._attempt = jobs.open_attempt(part, self._sender.source, self._sender.owner)
        self._attempt.holder = self

    def claim(self, claims: Sequence[OriginClaim]) -> list[OriginGrant]:
        """Return the part's watermark. Raises Refused."""
        attempt, origins = self._attempt, self._pipeline.origins
        if attempt.refusal is not None:
            raise attempt.refusal
        for claim in claims:
            origins.check_owner(claim.origin, self._sender.owner)
            if attempt.taken_counter and claim.origin != attempt.head.origin:
                raise Refused(
                    ErrorCode.BAD_REQUEST,
                    f"attempt {attempt.head.attempt} of part {attempt.head.part}: it has deltas of origin "
                    f"{attempt.head.origin:016x}, not of {claim.origin:016x}: use one producer and one "
                    "priority for each part",
                )
        for claim in claims[-1:]:
            attempt.head = attempt.head._replace(origin=claim.origin)
        return [OriginGrant(claim.origin, 0, attempt.stored_deltas) for claim in claims]

    def handle_run(self, run: FrameRun) -> None:
        """See `ProduceHandler`."""
        rows = 0
        for batch in run.batches:
            frame = BatchFrame(run.sequence + rows, batch, ack_wanted=run.ack_wanted)
            self.handle_batch(frame, batch.size)
            rows += batch.count

    def handle_batch(self, frame: BatchFrame, size: int) -> None:
        """Stage a batch."""
        batch, attempt = frame.batch, self._attempt
        entry = self.outcomes.open(frame.sequence, batch.count, size, is_ack_wanted=frame.ack_wanted)
        self._counters.deltas_in += batch.count
        try:
            if attempt.refusal is not None:
                raise attempt.refusal
            if attempt.holder is not self:
                raise _fenced_error(attempt)
            check_frame(frame, self._name)
            if self._is_duplicate(batch):
                attempt.add_duplicate(batch, entry)
            else:
                self._jobs.stage_batch(attempt, batch, entry)
        except Refused as refused:
            if refused.is_final and attempt.holder is self:
                # Its dots stay unused, so no later delta of the part can be staged.
                attempt.close(_failed_part_error(refused))
            entry.refuse(refused)

    def handle_delta(self, frame: DeltaFrame, size: int) -> None:
        """Refuse a single delta: only batches are staged."""
        entry = self.outcomes.open(frame.sequence, 1, size, is_ack_wanted=frame.ack_wanted)
        text = "a Delta frame cannot be staged for a job: send Batch frames, of one row if need be"
        entry.refuse(Refused(ErrorCode.BAD_REQUEST, text))

    def close(self) -> None:
        """See `ProduceHandler`."""
        super().close()
        if self._attempt.holder is self:
            self._attempt.holder = None
            self._jobs.close_attempt(self._attempt)

    # --- checks

    def _is_duplicate(self, batch: Batch) -> bool:
        """Return True if a batch was accepted before; else check it. Raises Refused."""
        attempt, taken = self._attempt, self._attempt.taken_counter
        if batch.origin != attempt.head.origin or batch.epoch:
            raise Refused(
                ErrorCode.UNKNOWN_ORIGIN,
                f"origin {batch.origin:016x} epoch {batch.epoch}: this part has origin "
                f"{attempt.head.origin:016x} epoch 0: send a hello that claims it",
                details={"origin": batch.origin},
            )
        _check_independent(batch)
        if batch.last <= taken:
            return True
        if batch.base <= taken:
            raise overlap(batch, taken)
        if batch.base > taken + 1:
            raise _gap_error(batch, taken)
        self._checks.check_batch(batch, is_forwarded=False)
        queue = self._pipeline.queue
        if batch.count > queue.capacity_deltas or batch.size > queue.capacity_bytes:
            raise Refused(
                ErrorCode.TOO_LARGE,
                f"{batch.count} deltas of {batch.size} bytes in one batch: send smaller batches, up to "
                f"{queue.capacity_deltas} deltas and {queue.capacity_bytes} bytes",
            )
        check_batch(batch)
        return False


def _make_ack(batch: Batch, *, duplicate: bool = False) -> PublishAck:
    """Return the acknowledgement for a batch: offsets count within the part."""
    first = batch.base - 1
    first_offsets: dict[int, int | None] = (
        {row: first + row for row in range(batch.count)} if duplicate else {}
    )
    return PublishAck(first, batch.dot(0), batch.count, AckLevel.DURABLE, first_offsets)


def _check_independent(batch: Batch) -> None:
    """Check that a batch does not depend on other deltas: a staged batch cannot wait. Raises InvalidDelta."""
    if batch.homogeneous:
        return
    if batch.is_control or batch.is_state:
        raise InvalidDelta("op", "control rows of a log cannot be staged: send deltas")
    for column, field in _UNSTAGEABLE.items():
        if batch.columns_mask >> column & 1:
            raise InvalidDelta(
                field,
                "deltas staged for a job name no other delta, and their counters rise by 1: leave it out, or "
                "publish without a job",
            )


def _gap_error(batch: Batch, taken: int) -> Refused:
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"counters {batch.base} to {batch.last}: counter {taken + 1} is next: send the "
        "deltas before these first",
        retry_after_ms=_GAP_RETRY_MS,
    )


def _fenced_error(attempt: Attempt) -> Refused:
    return Refused(
        ErrorCode.FENCED,
        f"attempt {attempt.head.attempt} of part {attempt.head.part} is now staged by another connection: "
        "stop this one, or give each attempt a number of its own",
        details={"origin": attempt.head.origin, "epoch": 0},
    )


def _failed_part_error(refused: Refused) -> Refused:
    return Refused(
        refused.code,
        f"an earlier delta of this part was refused ({refused.message}): restage the part, as another "
        "attempt",
    )


def make_produce_handler(
    context: ServerContext, client: ConnectedClient, hello: Hello, answers: Answers
) -> ProduceHandler:
    """Make the handler of a connection's deltas after this hello: one for the pipeline, or one for a job.

    Raises Refused.
    """
    permissions, settings = client.rights, context.settings
    checks = PublishChecks(
        permissions, context.rate_limiter, context.clock, clock_entries_max=settings.clock_entries_max
    )
    outcomes = OutcomeCollector(answers.writer, context.counters, answers.refusals)
    can_split = hello.splits and hello.job is None
    sender = Sender(owner=permissions.name, source=hello.source, can_split=can_split)
    parts: dict[str, Any] = {"checks": checks, "outcomes": outcomes, "counters": context.counters}
    if hello.job is None:
        return ProduceHandler(context.partition, settings, sender, **parts)
    staging = StagingHandler(context.partition, settings, sender, **parts)
    staging.stage(hello.job, context.served.jobs)
    return staging
