"""What the chain refuses, in words: what was wrong, and what to do. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.ingest.work import Sequenced
    from delta_prop.order.orderer import Entry
    from delta_prop.published import Published
    from delta_prop.receipt import Receipt
    from delta_prop_wire.batch import Batch


REPEATS_MAX = 100
"""Repeats of one pending batch that are told its outcome; more are refused for now."""


class Remembered(Refused):
    """The refusal of a delta that tells what became of the one that had its dot: so producers ask that which
    have lost an answer, and nothing need be wrong.
    """


class HoldsOtherData(Refused):
    """A sink holds what the log it is attached to does not have. `what` says what; the message also the cure,
    for programs. `rebuilds`: it can be rebuilt.
    """

    def __init__(self, what: str, *, rebuilds: bool, details: dict[str, int]) -> None:
        cure = (
            "give it the log that it belongs to, or attach it with rebuild=True, which replaces what it holds"
            if rebuilds
            else "it cannot be rebuilt: give it data of its own, in a new place"
        )
        super().__init__(ErrorCode.CURSOR_TOO_OLD, f"{what}: {cure}", details=details)
        self.what = what
        self.rebuilds = rebuilds


def withdrawn() -> Refused:
    """Why a dot is void whose delta was taken back before it got its place."""
    return Refused(ErrorCode.INVALID_DELTA, "withdrawn by its producer")


def claimed_since(work: Sequenced, epoch: int) -> Refused:
    """Refuse what was pending when its origin was claimed under `epoch`. That fences no forwarder."""
    same = work.forwards or work.batch.epoch == epoch
    return said_hello_again() if same else fenced(work.batch.origin, epoch)


def fenced(origin: int, epoch: int) -> Refused:
    """The origin has another holder since."""
    return Refused(
        ErrorCode.FENCED,
        f"another producer of that name has said hello since and holds epoch {epoch}: "
        "stop this one, or give it its own name",
        details={"origin": origin, "epoch": epoch},
    )


def overlap(batch: Batch, have: int) -> Refused:
    """Some of these dots have their place."""
    return Refused(
        ErrorCode.OVERLAP,
        f"counters {batch.base} to {batch.last} lie partly up to the watermark {have}: "
        f"cut the batch and send it from {have + 1} on",
        retry_after_ms=0,
        details={"watermark": have},
    )


def cut_otherwise(batch: Batch, parked: Entry, have: int) -> Refused:
    """These dots are pending in another cut."""
    return Refused(
        ErrorCode.OVERLAP,
        f"counters {batch.base} to {batch.last} are pending as {parked.first} to {parked.last}: "
        "send those again as they were, or wait for their outcome",
        retry_after_ms=100,
        details={"watermark": have},
    )


def parent_refused(parent: Receipt) -> Refused:
    """What must come first was refused."""
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"a delta that must come first was {parent.state.value}: send that one again, then this one",
        retry_after_ms=0,
        details={"blocked_by": parent.refusal()},
    )


def too_many_repeats(batch: Batch) -> Refused:
    """More repeats of a pending batch than are told."""
    return Refused(
        ErrorCode.PENDING_FULL,
        f"counters {batch.base} to {batch.last} are pending, and {REPEATS_MAX} repeats wait with them: "
        "wait for the outcome of those",
        retry_after_ms=1000,
    )


def outcome_unknown(batch: Batch) -> Refused:
    """A repeat of what nobody can tell any more."""
    return Remembered(
        ErrorCode.OUTCOME_UNKNOWN,
        f"counters {batch.base} to {batch.last} of origin {batch.origin:016x} are dealt with, and the log no "
        "longer tells whether by these deltas: find out in another way, and go on above the watermark",
        details={"dot": batch.dot(0)},
    )


def unreadable(error: Exception) -> Refused:
    """What is asked for stands in the log, which cannot be read at present."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"the log cannot be read ({error}), so nobody can tell what became of it: ask again",
        retry_after_ms=1000,
    )


def void_before(batch: Batch, counter: int, code: ErrorCode) -> Refused:
    """A repeat of what was refused for good, from this counter on."""
    return Remembered(
        code,
        f"of counters {batch.base} to {batch.last} some were refused for good before, from {counter} on, and "
        "are void: send a corrected delta under a new dot",
        details={"dot": Dot(batch.origin, counter)},
    )


def dot_reused(batch: Batch, outcome: int | ErrorCode | None = None) -> Refused:
    """Known dots, other deltas. `outcome`: of the one that had a single delta's dot, where that is known."""
    details: dict[str, object] = {"dot": batch.dot(0)}
    if outcome is not None:
        details["code" if isinstance(outcome, ErrorCode) else "offset"] = int(outcome)
    kind = Refused if outcome is None else Remembered
    return kind(
        ErrorCode.DOT_REUSED,
        f"counters {batch.base} to {batch.last} of origin {batch.origin:016x} were used before for other "
        "deltas: two producers share a name, or a producer numbers anew after a restart; say hello first",
        details=details,
    )


def id_reused(row: int, id_: bytes, at: int) -> Refused:
    """Refuse an id that was accepted for other content. `at`: its first copy, as in `IdRepeats`."""
    where = f"offset {at}" if at >= 0 else f"row {-1 - at} of the same call"
    return Refused(
        ErrorCode.ID_REUSED,
        f"row {row}: id {id_.hex()} was accepted before for other content ({where}): give each change an id "
        "of its own",
        row=row,
        field="id",
        details={"offset": at} if at >= 0 else {},
    )


def first_copy_gone(published: Published) -> Refused:
    """Refuse to tell of rows whose ids are known, but whose first copies the log no longer holds."""
    row = next(row for row, at in published.duplicates.items() if at is None)
    others = "" if published.duplicate else "; the rows with new ids were accepted"
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"row {row}: its id was accepted before, and the log no longer holds that delta, so nobody can tell "
        f"if this one says the same{others}: read the fact, and if it differs, give the change a new id",
        row=row,
    )


def repeats_scattered(places_max: int, frames_max: int) -> Refused:
    """Refuse repeated ids that would take too long to compare with their first copies."""
    return Refused(
        ErrorCode.TOO_LARGE,
        f"the first copies of its ids lie in more than about {places_max} places of the log, or {frames_max} "
        "stretches: send fewer deltas at once",
        field="id",
    )


def too_many_pieces(pieces: int, pieces_max: int) -> Refused:
    """Refuse known and new ids by turns, which would be logged in too many frames."""
    return Refused(
        ErrorCode.TOO_LARGE,
        f"known and new ids change {pieces - 1} times from row to row, allowed are {pieces_max - 1} times: "
        "send fewer deltas at once",
        field="id",
    )


def ids_unreadable(error: Exception) -> Refused:
    """Refuse ids that cannot be looked up until they have been read from the log again."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the ids accepted before cannot be read ({error}), so this cannot be told from a repeat: they are "
        "read from the log again, send it again later",
        retry_after_ms=1000,
    )


def ids_wait() -> Refused:
    """Refuse ids while too many wait in memory to be written."""
    return Refused(
        ErrorCode.LOG_FULL,
        "too many ids wait to be written: try again when the disk has caught up",
        retry_after_ms=100,
    )


def first_copy_unreadable(offset: int, error: object) -> Refused:
    """Refuse a repeated id whose first copy cannot be read."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log cannot be read at offset {offset}, where an id was accepted before ({error}), so this "
        "cannot be compared: send it again later, and have the operator run `log verify`",
        retry_after_ms=1000,
    )


def said_hello_again() -> Refused:
    """What was pending when its producer said hello again, which sends everything open anew."""
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        "it waited for earlier deltas when its producer said hello again: send it again, behind all "
        "that is above the watermark which hello granted",
        retry_after_ms=0,
    )


def lost() -> Refused:
    """The log failed, and was recovered without it."""
    return Refused(
        ErrorCode.LOG_FAILED,
        "the log failed before this was kept, and was recovered without it: send it again",
        retry_after_ms=0,
    )


def may_have_happened(why: str, dot: Dot | None = None, *, retry_after_ms: int | None = None) -> Refused:
    """The delta has its place in the log, and nobody can tell at present whether it is kept there."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"{why}, so it may have happened: ask for the outcome of its dot before you send it again",
        retry_after_ms=retry_after_ms,
        details={} if dot is None else {"dot": dot},
    )


def late(limit_s: float, place: Published | None) -> Refused:
    """A publisher's time is over. `place`: of its delta in the log; None: it has none and was withdrawn."""
    if place is not None:
        return may_have_happened(
            f"it has a place in the log, which was not known to keep it within {limit_s} s", place.dot
        )
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"not acknowledged within {limit_s} s and withdrawn: send it again, or allow more time",
        retry_after_ms=1000,
    )


def closing() -> Refused:
    """The service ends, and it has no place in the log."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the service is closing: send it again to its successor",
        retry_after_ms=1000,
    )


def closed() -> Refused:
    """The service has ended before it was known which deltas are kept."""
    return may_have_happened("the service closed before this was known to be kept", retry_after_ms=1000)


def stopped_for_good(refusal: Refused) -> Refused:
    """The log has failed and will not be recovered by itself."""
    return may_have_happened(f"{refusal.message} (this delta was not known to be kept before)")


def with_dot(refusal: Refused, dot: Dot | None) -> Refused:
    """The same, of one delta: the dot to ask by."""
    details = refusal.details if dot is None else {**refusal.details, "dot": dot}
    return Refused(refusal.code, refusal.message, retry_after_ms=refusal.retry_after_ms, details=details)
