"""Why a log on disk takes nothing, in words for whoever sent it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.files.reserve import is_no_room
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

RETRY_AFTER_MS = 50
FULL = "full"
"""The detail of a refusal for want of room: what is full, `disk` or `log`."""


def level_refusal(batch: Batch) -> Refused:
    """Of a level that one disk cannot grant."""
    return Refused(
        ErrorCode.LEVEL_UNAVAILABLE,
        f"ack level {batch.ack_level.name.lower()} asked for, but a log on one disk grants durable: "
        "ask for durable",
    )


def stopped(failure: Exception | None) -> Refused:
    """Of a log whose disk has failed."""
    if isinstance(failure, DeltaPropError):  # nothing that another try could mend
        return Refused(ErrorCode.LOG_FAILED, f"the log has stopped: {failure}")
    details = full_disk(failure)
    cure = (
        "when there is room: make room, and send it again"
        if details
        else "when that is well again: send it again"
    )
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log stopped at a failure of its disk ({failure}) and is recovered {cure} then",
        retry_after_ms=1000,
        details=details,
    )


def full_disk(failure: Exception | None) -> dict[str, object]:
    """The details of a failure of the disk: that it is full, where it says so."""
    return {FULL: "disk"} if isinstance(failure, OSError) and is_no_room(failure) else {}


def too_large(size: int, bytes_max: int) -> Refused:
    """Of a batch that never finds room."""
    return Refused(
        ErrorCode.TOO_LARGE,
        f"a batch of {size} bytes is larger than what the log holds beside one segment "
        f"({bytes_max}): send smaller batches",
    )


def too_slow(unwritten_bytes: int, bytes_max: int) -> Refused:
    """Of a disk that has not caught up."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"{unwritten_bytes} of {bytes_max} bytes wait to be written: try again when the disk has caught up",
        retry_after_ms=RETRY_AFTER_MS,
        details={
            "depth_bytes": unwritten_bytes,
            "capacity_bytes": bytes_max,
            "blocked_by": None,
            FULL: "log",
        },
    )


def disk_full(free_bytes: int, kept_bytes: int, needed_bytes: int) -> Refused:
    """Of a disk on which `kept_bytes` stay free, and which is to have `needed_bytes` with them."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"the disk has {free_bytes} bytes left, of which {kept_bytes} stay free: "
        f"make room for {needed_bytes - free_bytes} bytes more, or let the log keep less",
        retry_after_ms=RETRY_AFTER_MS * 20,
        details={"free_bytes": free_bytes, "blocked_by": None, FULL: "disk"},
    )


def disk_unasked(error: OSError) -> Refused:
    """Of a disk that does not say how much room it has."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"the disk does not tell how many bytes it has left ({error}): mend it, and try again",
        retry_after_ms=RETRY_AFTER_MS * 20,
        details={"blocked_by": None, FULL: "disk"},
    )


def log_full(
    held_bytes: int, bytes_max: int, *, offsets: tuple[int, int], holder: str | None, waits_for: str
) -> Refused:
    """Of a log whose oldest is needed, by a sink or by what `waits_for` says. `offsets`: first, next."""
    why = f"sink {holder!r} still needs the oldest" if holder else waits_for
    return Refused(
        ErrorCode.LOG_FULL,
        f"the log holds {held_bytes} of {bytes_max} bytes, and {why} (offset {offsets[0]}): "
        "try again later, detach the sink, or raise bytes_max",
        retry_after_ms=RETRY_AFTER_MS,
        details={
            "depth": offsets[1] - offsets[0],
            "depth_bytes": held_bytes,
            "capacity_bytes": bytes_max,
            "blocked_by": holder,
            FULL: "log",
        },
    )


def too_old(offset: int, first_offset: int) -> Refused:
    """Of a reader whose next rows are gone."""
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"offset {offset} is no longer in the log, which starts at {first_offset}: "
        "start there, or rebuild from another sink",
        details={"offset": offset, "start_offset": first_offset},
    )
