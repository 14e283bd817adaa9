"""Refusals of a log on disk, with messages for the sender."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.segments.reserve import is_disk_full
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

RETRY_AFTER_MS = 50
FULL = "full"
"""Key of the detail by which a refusal for lack of capacity names what is full: `disk` or `log`."""


def level_refusal(batch: Batch) -> Refused:
    """Return the refusal of an ack level that one disk cannot grant."""
    return Refused(
        ErrorCode.LEVEL_UNAVAILABLE,
        f"ack level {batch.ack_level.name.lower()} requested, but a log on one disk grants up to durable: "
        "request durable",
    )


def log_stopped(failure: Exception | None) -> Refused:
    """Return the refusal of a stopped log: for good after a DeltaPropError, else until its recovery."""
    if isinstance(failure, DeltaPropError):  # a retry cannot repair it
        return Refused(ErrorCode.LOG_FAILED, f"the log has stopped: {failure}")
    details = disk_full_details(failure)
    fix = (
        "when the disk has space: free disk space, then send the batch again"
        if details
        else "when the disk works: then send the batch again"
    )
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log stopped at a failure of its disk ({failure}) and will be recovered {fix}",
        retry_after_ms=1000,
        details=details,
    )


def disk_full_details(failure: Exception | None) -> dict[str, object]:
    """Return the details of a disk failure: that the disk is full, if the error says so."""
    return {FULL: "disk"} if isinstance(failure, OSError) and is_disk_full(failure) else {}


def batch_too_large(size: int, bytes_max: int) -> Refused:
    """Return the refusal of a batch that can never fit."""
    return Refused(
        ErrorCode.TOO_LARGE,
        f"a batch of {size} bytes exceeds the maximum of {bytes_max} (the log's bytes_max less "
        "segment_bytes_max): send smaller batches",
    )


def disk_too_slow(unwritten_bytes: int, bytes_max: int) -> Refused:
    """Return the refusal of a log whose disk lags."""
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


def disk_full(free_bytes: int, reserved_bytes: int, needed_bytes: int) -> Refused:
    """Return the refusal for a disk with too little free space; `needed_bytes` includes `reserved_bytes`."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"the disk has {free_bytes} bytes left, of which {reserved_bytes} stay free: "
        f"free {needed_bytes - free_bytes} bytes more, or lower the log's retention",
        retry_after_ms=RETRY_AFTER_MS * 20,
        details={"free_bytes": free_bytes, "blocked_by": None, FULL: "disk"},
    )


def free_space_unknown(error: OSError) -> Refused:
    """Return the refusal for a disk whose free space cannot be read."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"the disk does not report its free space ({error}): repair it, and try again",
        retry_after_ms=RETRY_AFTER_MS * 20,
        details={"blocked_by": None, FULL: "disk"},
    )


def log_full(
    held_bytes: int, bytes_max: int, *, offsets: tuple[int, int], holder: str | None, reason: str
) -> Refused:
    """Return the refusal of a full log. `offsets`: its start and next offset.

    `holder`: the sink that needs the oldest row; None: `reason` says why the row cannot be removed.
    """
    why = f"sink {holder!r} still needs the oldest" if holder else reason
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


def offset_too_old(offset: int, start_offset: int) -> Refused:
    """Return the refusal of a reader whose next rows were removed."""
    return Refused(
        ErrorCode.CURSOR_TOO_OLD,
        f"offset {offset} is no longer in the log, which starts at {start_offset}: "
        "start there, or rebuild from another sink",
        details={"offset": offset, "start_offset": start_offset},
    )


def no_times() -> Refused:
    """Return the refusal of a time as a position in a log in memory."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        "a log in memory stores no times: start at earliest, latest, an offset or a cursor",
    )
