"""A connection's way in where it stages a part of a job: its frames are kept aside, on disk, for a decision.

What an intake is, with one attempt of one part in place of the chain. It never waits: frames gather until the
jobs' own task has written and synced them, and are acknowledged then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from delta_prop.checks import check_batch
from delta_prop.published import Published
from delta_prop.refusals import overlap
from delta_prop.server.intake import Intake
from delta_prop.server.partitions import check_origin
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import BatchFrame, OriginGrant
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.receipt import Receipt
    from delta_prop.server.grants import Grant
    from delta_prop.server.hub import Hub
    from delta_prop.server.part_file import Mark, PartHead
    from delta_prop_broker.disk import File
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Source
    from delta_prop_wire.frames import Ack, DeltaFrame, Hello, JobPart, Nack, OriginClaim
    from delta_prop_wire.runs import Run

_GAP_AGAIN_MS = 10
_NOT_ASIDE = {
    Column.CLOCK: "clock",
    Column.IDS: "id",
    Column.COUNTERS: "counters",
    Column.PARENTS: "parents",
    Column.EXPECTS: "expect",
    Column.ROW_OFFSETS: "row offsets",
}


class Attempt:
    """One attempt of one part: what of it is on disk, and what waits to be.

    `have`: counter of the last delta taken; `mark`: what is synced, None before its file is there; `gone`:
    why it takes no more; `holder`: the connection that stages it, the last one that said so.
    """

    def __init__(self, part: int, attempt: int, path: str, head: PartHead, mark: Mark | None = None) -> None:
        self.part = part
        self.attempt = attempt
        self.path = path
        self.head = head
        self.mark = mark
        self.have = self.kept
        self.pending: list[tuple[Batch, Receipt]] = []
        self.pending_bytes = 0
        self.repeats: list[tuple[Batch, Receipt]] = []  # of what is pending
        self.file: File | None = None
        self.gone: Refused | None = None
        self.holder: object = None
        self.charged = 0  # of what all jobs may take

    @property
    def kept(self) -> int:
        """Deltas on disk."""
        return 0 if self.mark is None else self.mark.counter

    @property
    def bytes(self) -> int:
        """What its file takes, about, once all is written."""
        return self.pending_bytes + (0 if self.mark is None else self.mark.position)

    def taken(self) -> list[tuple[Batch, Receipt]]:
        """What is to be written now."""
        pending, self.pending = self.pending, []
        return pending

    def take(self, batch: Batch, receipt: Receipt) -> None:
        """Have a frame written."""
        self.pending.append((batch, receipt))
        self.pending_bytes += batch.size
        self.have = batch.last

    def written(self, frames: Sequence[tuple[Batch, Receipt]], mark: Mark) -> None:
        """These are synced."""
        self.mark, self.have = mark, max(self.have, mark.counter)
        self.pending_bytes = sum(batch.size for batch, _ in self.pending)
        for batch, receipt in frames:
            receipt.acknowledge(_place(batch))
        repeats, self.repeats = self.repeats, []
        for batch, receipt in repeats:
            self.repeat(batch, receipt)

    def repeat(self, batch: Batch, receipt: Receipt) -> None:
        """Tell a frame that was taken before, once that is on disk."""
        if batch.last > self.kept:
            self.repeats.append((batch, receipt))
        else:
            receipt.acknowledge(_place(batch, repeated=True))

    def failed(self, frames: Sequence[tuple[Batch, Receipt]], refusal: Refused) -> None:
        """These could not be written, and so nothing behind them counts."""
        lost = [*frames, *self.pending, *self.repeats]
        self.pending, self.repeats, self.pending_bytes, self.have = [], [], 0, self.kept
        for _, receipt in lost:
            receipt.refuse(refusal)

    def end(self, refusal: Refused) -> None:
        """It takes no more."""
        self.gone = self.gone or refusal
        self.failed((), self.gone)


class Staging(Protocol):
    """Where parts are kept: the server's jobs."""

    def enter(self, part: JobPart, source: Source, owner: str) -> Attempt:
        """The attempt that a connection stages. Raises Refused."""

    def take(self, attempt: Attempt, batch: Batch, receipt: Receipt) -> None:
        """Have a batch kept. Raises Refused."""

    def leave(self, attempt: Attempt) -> None:
        """The connection that staged it is gone."""


class StagingIntake(Intake):
    """What comes is one attempt's. Call `stage` first."""

    def stage(self, part: JobPart, jobs: Staging) -> None:
        """Begin. What another connection sends for this attempt is refused from now on. Raises Refused."""
        self._jobs = jobs
        self._attempt = jobs.enter(part, self._session.source, self._session.owner)
        self._attempt.holder = self

    def claim(self, claims: Sequence[OriginClaim]) -> list[OriginGrant]:
        """Say how far the part is. Raises Refused."""
        attempt, origins = self._attempt, self._chain.origins
        if attempt.gone is not None:
            raise attempt.gone
        for claim in claims:
            origins.check_owner(claim.origin, self._session.owner)
            if attempt.have and claim.origin != attempt.head.origin:
                raise Refused(
                    ErrorCode.BAD_REQUEST,
                    f"attempt {attempt.attempt} of part {attempt.part} holds deltas of origin "
                    f"{attempt.head.origin:016x}, and not of {claim.origin:016x}: one priority, and one "
                    "producer, for each part",
                )
        for claim in claims[-1:]:
            attempt.head = attempt.head._replace(origin=claim.origin)
        return [OriginGrant(claim.origin, 0, attempt.kept) for claim in claims]

    def run(self, run: Run) -> None:
        """See `Intake`."""
        rows = 0
        for batch in run.batches:
            frame = BatchFrame(run.sequence + rows, batch, ack_wanted=run.ack_wanted)
            self.batch(frame, batch.size)
            rows += batch.count

    def batch(self, frame: BatchFrame, size: int) -> None:
        """Stage a batch."""
        batch, attempt = frame.batch, self._attempt
        entry = self._opened(frame.sequence, batch.count, size, wanted=frame.ack_wanted)
        self._counters.deltas_in += batch.count
        try:
            if attempt.gone is not None:
                raise attempt.gone
            if attempt.holder is not self:
                raise _taken(attempt)
            if frame.stamp is not None:
                check_origin(batch.origin, frame.stamp.stream, frame.stamp.partition)
            if self._repeats(batch):
                attempt.repeat(batch, entry)
            else:
                self._jobs.take(attempt, batch, entry)
        except Refused as refused:
            if refused.voids and attempt.holder is self:  # its dots stay open, so the part ends here
                attempt.end(_spoilt(refused))
            entry.refuse(refused)

    def delta(self, frame: DeltaFrame, size: int) -> None:
        """Refuse a single delta: what is staged comes in batches."""
        entry = self._opened(frame.sequence, 1, size, wanted=frame.ack_wanted)
        told = "a Delta frame where a part of a job is staged: send Batch frames, of one row if need be"
        entry.refuse(Refused(ErrorCode.BAD_REQUEST, told))

    def answers(self, *, pressed: bool) -> Sequence[Ack | Nack]:
        """See `Intake`. What is kept aside does not wait for the queue."""
        del pressed
        return super().answers(pressed=False)

    def close(self) -> None:
        """See `Intake`."""
        super().close()
        if self._attempt.holder is self:
            self._attempt.holder = None
            self._jobs.leave(self._attempt)

    # --- what may come

    def _repeats(self, batch: Batch) -> bool:
        """Whether a frame repeats what was taken; one that does not is looked over. Raises Refused."""
        attempt, have = self._attempt, self._attempt.have
        if batch.origin != attempt.head.origin or batch.epoch:
            raise Refused(
                ErrorCode.UNKNOWN_ORIGIN,
                f"origin {batch.origin:016x} epoch {batch.epoch}: this part is of origin "
                f"{attempt.head.origin:016x} epoch 0: say hello for it",
                details={"origin": batch.origin},
            )
        _check_alone(batch)
        if batch.last <= have:
            return True
        if batch.base <= have:
            raise overlap(batch, have)
        if batch.base > have + 1:
            raise _too_early(batch, have)
        self._check(batch)
        lanes = self._chain.lanes
        if batch.count > lanes.capacity_deltas or batch.size > lanes.capacity_bytes:
            raise Refused(
                ErrorCode.TOO_LARGE,
                f"{batch.count} deltas of {batch.size} bytes at once, and the queue takes "
                f"{lanes.capacity_deltas} of {lanes.capacity_bytes} bytes: send smaller batches",
            )
        check_batch(batch)
        return False


def _place(batch: Batch, *, repeated: bool = False) -> Published:
    """What its sender is told: offsets count within the part."""
    first = batch.base - 1
    firsts: dict[int, int | None] = {row: first + row for row in range(batch.count)} if repeated else {}
    return Published(first, batch.dot(0), batch.count, AckLevel.DURABLE, firsts)


def _check_alone(batch: Batch) -> None:
    """What depends on other deltas cannot wait aside. Raises InvalidDelta."""
    if batch.plain:
        return
    if batch.is_control or batch.is_state:
        raise InvalidDelta("op", "rows that a log writes for itself are staged nowhere: send deltas")
    for column, name in _NOT_ASIDE.items():
        if batch.columns_mask >> column & 1:
            raise InvalidDelta(
                name,
                "what is staged for a job names no other delta, and its counters go up by 1: leave it out, "
                "or publish it without a job",
            )


def _too_early(batch: Batch, have: int) -> Refused:
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"counters {batch.base} to {batch.last} where {have + 1} is next: send what comes before, then this",
        retry_after_ms=_GAP_AGAIN_MS,
    )


def _taken(attempt: Attempt) -> Refused:
    return Refused(
        ErrorCode.FENCED,
        f"another connection stages attempt {attempt.attempt} of part {attempt.part} now: stop this one, or "
        "give each attempt a number of its own",
    )


def _spoilt(refused: Refused) -> Refused:
    return Refused(
        refused.code,
        f"an earlier delta of this part was refused ({refused.message}): stage the part again, as another "
        "attempt",
    )


def intake_for(hub: Hub, grant: Grant, hello: Hello, ring: Callable[[], None], address: str) -> Intake:
    """Make what takes a connection's deltas after this hello: for the chain, or aside for a job. Raises
    Refused.
    """
    parts = hub.inside, hub.settings, grant, hello.source
    lent: dict[str, Any] = {
        "rates": hub.rates,
        "counters": hub.counters,
        "ring": ring,
        "audit": lambda refused: hub.audit.refused(address, grant, "DATA", refused),
    }
    if hello.job is None:
        return Intake(*parts, **lent, splits=hello.splits)
    staging = StagingIntake(*parts, **lent)
    staging.stage(hello.job, hub.jobs)
    return staging
