"""Refusals of the pipeline, with messages that name the problem and the fix. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.calls.receipt import Receipt
    from delta_prop.partition.ingest.work import SequencedBatch
    from delta_prop.partition.order.orderer import Entry
    from delta_prop_wire.batch import Batch


DUPLICATES_MAX = 100
"""Maximum duplicates of one pending batch that wait for its outcome; more are refused for now."""


class KnownOutcome(Refused):
    """Refusal of a delta that reports the outcome of an earlier one with its dot. A producer that has lost
    an answer sends the delta again to learn the outcome, so this need not be an error.
    """


class ForeignSinkData(Refused):
    """A sink that holds data which its log does not have. `what` describes it; the message adds the fix, for
    programs. `can_rebuild`: the sink can be rebuilt.
    """

    def __init__(self, what: str, *, can_rebuild: bool, details: dict[str, int]) -> None:
        fix = (
            "attach it to the log it belongs to, or with rebuild=True, which replaces its data"
            if can_rebuild
            else "it cannot be rebuilt: give it new storage of its own"
        )
        super().__init__(ErrorCode.CURSOR_TOO_OLD, f"{what}: {fix}", details=details)
        self.what = what
        self.can_rebuild = can_rebuild


def withdrawn() -> Refused:
    """Return the refusal that a no-op records for a delta withdrawn before it was appended."""
    return Refused(ErrorCode.INVALID_DELTA, "withdrawn by its producer")


def claimed_since(work: SequencedBatch, epoch: int) -> Refused:
    """Return the refusal of a batch pending when its origin was claimed; no forwarder is fenced."""
    is_same_epoch = work.is_forwarded or work.batch.epoch == epoch
    return superseded_by_hello() if is_same_epoch else fenced(work.batch.origin, epoch)


def fenced(origin: int, epoch: int) -> Refused:
    """Return the refusal of a batch whose origin was since claimed by another producer."""
    return Refused(
        ErrorCode.FENCED,
        f"another producer of that name has sent hello since and holds epoch {epoch}: "
        "stop this one, or give it its own name",
        details={"origin": origin, "epoch": epoch},
    )


def overlap(batch: Batch, watermark: int) -> Refused:
    """Return the refusal of a batch of which only some dots are up to the watermark."""
    return Refused(
        ErrorCode.OVERLAP,
        f"counters {batch.base} to {batch.last} lie partly up to the watermark {watermark}: "
        f"slice the batch and send it from {watermark + 1} on",
        retry_after_ms=0,
        details={"watermark": watermark},
    )


def sliced_differently(batch: Batch, pending: Entry, watermark: int) -> Refused:
    """Return the refusal of a batch whose dots are pending in another slice."""
    return Refused(
        ErrorCode.OVERLAP,
        f"counters {batch.base} to {batch.last} are pending as {pending.first} to {pending.last}: "
        "send those again as they were, or wait for their outcome",
        retry_after_ms=100,
        details={"watermark": watermark},
    )


def parent_refused(parent: Receipt) -> Refused:
    """Return the refusal of a delta whose parent was refused."""
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"a delta that must come first was {parent.state.value}: send that one again, then this one",
        retry_after_ms=0,
        details={"blocked_by": parent.refusal()},
    )


def too_many_duplicates(batch: Batch) -> Refused:
    """Return the refusal of a duplicate, if too many wait for one pending batch."""
    return Refused(
        ErrorCode.PENDING_FULL,
        f"counters {batch.base} to {batch.last} are pending, and {DUPLICATES_MAX} duplicates wait for them: "
        "wait for the outcome of those",
        retry_after_ms=1000,
    )


def outcome_unknown(batch: Batch) -> Refused:
    """Return the refusal of a duplicate whose outcome is no longer known."""
    return KnownOutcome(
        ErrorCode.OUTCOME_UNKNOWN,
        f"counters {batch.base} to {batch.last} of origin {batch.origin:016x} were processed, but the log no "
        "longer knows if with these contents: check the data itself, and continue above the watermark",
        details={"dot": batch.dot(0)},
    )


def log_unreadable(error: Exception) -> Refused:
    """Return the refusal of a query whose answer is in the log, which cannot be read at present."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"the log cannot be read ({error}), so the outcome is unknown: ask again",
        retry_after_ms=1000,
    )


def refused_before(batch: Batch, counter: int, code: ErrorCode) -> Refused:
    """Return the refusal of a duplicate of deltas that were refused permanently; `counter`: of the first."""
    return KnownOutcome(
        code,
        f"of counters {batch.base} to {batch.last} some were refused permanently before, from {counter} on, "
        "and are no-ops: send a corrected delta under a new dot",
        details={"dot": Dot(batch.origin, counter)},
    )


def dot_reused(batch: Batch, outcome: int | ErrorCode | None = None) -> Refused:
    """Return the refusal of other deltas under known dots. `outcome`: of a single delta, if known."""
    details: dict[str, object] = {"dot": batch.dot(0)}
    if outcome is not None:
        details["code" if isinstance(outcome, ErrorCode) else "offset"] = int(outcome)
    kind = Refused if outcome is None else KnownOutcome
    return kind(
        ErrorCode.DOT_REUSED,
        f"counters {batch.base} to {batch.last} of origin {batch.origin:016x} were used before for other "
        "deltas: give each producer a name of its own, and send hello after a restart",
        details=details,
    )


def id_reused(row: int, id_: bytes, copy: int) -> Refused:
    """Return the refusal of an id known for other content. `copy`: as in `DuplicateIdFinder`."""
    where = f"offset {copy}" if copy >= 0 else f"row {-1 - copy} of the same call"
    return Refused(
        ErrorCode.ID_REUSED,
        f"row {row}: id {id_.hex()} was accepted before for other content ({where}): give each change an id "
        "of its own",
        row=row,
        field="id",
        details={"offset": copy} if copy >= 0 else {},
    )


def first_copy_removed(ack: PublishAck) -> Refused:
    """Return the refusal of rows whose ids are known, but whose first copies the log no longer holds."""
    row = next(row for row, offset in ack.duplicates.items() if offset is None)
    others = "" if ack.duplicate else "; the rows with new ids were accepted"
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"row {row}: its id was accepted before, but the log no longer holds that delta, so it cannot be "
        f"compared with this one{others}: read the fact, and if it differs, give the change a new id",
        row=row,
    )


def duplicates_scattered(lookups_max: int, frames_max: int) -> Refused:
    """Return the refusal of duplicate ids that would take too long to compare with their first copies."""
    return Refused(
        ErrorCode.TOO_LARGE,
        f"the first copies of its ids lie in more than about {lookups_max} parts of the log, or {frames_max} "
        "ranges: send fewer deltas at once",
        field="id",
    )


def too_many_pieces(piece_count: int, pieces_max: int) -> Refused:
    """Return the refusal of alternating known and new ids, which would need too many frames in the log."""
    return Refused(
        ErrorCode.TOO_LARGE,
        f"known and new ids alternate {piece_count - 1} times from row to row; at most {pieces_max - 1} are "
        "allowed: send fewer deltas at once",
        field="id",
    )


def ids_unreadable(error: Exception) -> Refused:
    """Return the refusal of ids that cannot be looked up until they have been read from the log again."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the ids accepted before cannot be read ({error}), so duplicates cannot be detected until they are "
        "read from the log again: retry later",
        retry_after_ms=1000,
    )


def ids_backlogged() -> Refused:
    """Return the refusal of ids while too many wait in memory to be written."""
    return Refused(
        ErrorCode.LOG_FULL,
        "too many ids wait to be written: retry when the disk has caught up",
        retry_after_ms=100,
    )


def first_copy_unreadable(offset: int, error: object) -> Refused:
    """Return the refusal of a duplicate id whose first copy cannot be read."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log cannot be read at offset {offset}, where an id was accepted before ({error}), so this "
        "cannot be compared: retry later, and have the operator run `log verify`",
        retry_after_ms=1000,
    )


def superseded_by_hello() -> Refused:
    """Return the refusal of a batch pending at its producer's new hello: the producer resends it."""
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        "it waited for earlier deltas when its producer sent hello again: send it again, after all "
        "other deltas above the watermark that the answer to hello states",
        retry_after_ms=0,
    )


def lost_with_log() -> Refused:
    """Return the refusal of a delta that a failed log lost in its recovery."""
    return Refused(
        ErrorCode.LOG_FAILED,
        "the log failed before this was stored, and was recovered without it: send it again",
        retry_after_ms=0,
    )


def may_have_happened(why: str, dot: Dot | None = None, *, retry_after_ms: int | None = None) -> Refused:
    """Return the refusal of an appended delta that the log may still hold, or may have lost."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"{why}, so it may have happened: ask for the outcome of its dot before you send it again",
        retry_after_ms=retry_after_ms,
        details={} if dot is None else {"dot": dot},
    )


def timed_out(limit_s: float, ack: PublishAck | None) -> Refused:
    """Return the refusal after a publisher's timeout. `ack`: of the appended delta; None: withdrawn."""
    if ack is not None:
        return may_have_happened(
            f"it is in the log, but was not known to be stored within {limit_s} s", ack.dot
        )
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"not acknowledged within {limit_s} s and withdrawn: send it again, or allow more time",
        retry_after_ms=1000,
    )


def service_closing() -> Refused:
    """Return the refusal of a delta that is not appended when the service closes."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the service is closing: send it again to its successor",
        retry_after_ms=1000,
    )


def service_closed() -> Refused:
    """Return the refusal of deltas of which the closing service does not know if they are stored."""
    return may_have_happened("the service closed before this was known to be stored", retry_after_ms=1000)


def stopped_for_good(refusal: Refused) -> Refused:
    """Return the refusal after a failure of the log that does not recover by itself."""
    return may_have_happened(f"{refusal.message} (this delta was not known to be stored before)")


def add_dot(refusal: Refused, dot: Dot | None) -> Refused:
    """Return a copy of the refusal with the dot to query, for one delta."""
    details = refusal.details if dot is None else {**refusal.details, "dot": dot}
    return Refused(refusal.code, refusal.message, retry_after_ms=refusal.retry_after_ms, details=details)
