"""Epochs of origins: which epochs a log may have granted, and which it may grant.

An epoch must never be granted to two holders, even if nothing was written under it before a crash. So each
opening of a log has its own block of epochs, above those of all earlier openings. A log that needs epochs
beyond its block first raises the number of openings on disk, until the blocks include those epochs.
"""

from __future__ import annotations

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

EPOCH_MAX = (1 << 32) - 1
EPOCHS_PER_OPENING = 4096
CLAIMED_EPOCH_MAX = 1 << 31
"""Highest epoch that is accepted from an unknown producer; the other half is left for later grants."""
SPARE_EPOCHS = 1024
"""When only this many epochs are left in a block, the next block is requested."""
_OPENINGS_MAX = EPOCH_MAX // EPOCHS_PER_OPENING
_RETRY_MS = 1_000


def epoch_floor(openings: int | None) -> int:
    """Return the highest epoch that earlier openings of a log may have granted.

    `openings`: their number; None for a log in memory.
    """
    return min(openings or 0, _OPENINGS_MAX) * EPOCHS_PER_OPENING


def epoch_limit(openings: int | None) -> int:
    """Return the highest epoch that this opening may grant; the next opening grants higher ones.

    `openings`: the number of earlier openings; None for a log in memory.
    """
    return EPOCH_MAX if openings is None else min(epoch_floor(openings) + EPOCHS_PER_OPENING, EPOCH_MAX)


def openings_for(epoch: int) -> int:
    """Return the number of openings that must be on disk before an epoch is granted."""
    return (epoch - 1) // EPOCHS_PER_OPENING


def claimed_epoch_too_high(origin: int, epoch: int) -> Refused:
    """Return the refusal of a claimed epoch that this service cannot have granted and that is too high."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        f"epoch {epoch} of origin {origin:016x}: not granted by this service, which accepts claims up to "
        f"{CLAIMED_EPOCH_MAX}: claim with epoch 0",
        details={"origin": origin, "epoch": epoch},
    )


def epoch_not_reserved(origin: int, epoch: int) -> Refused:
    """Return the refusal of an epoch until its block is reserved on disk."""
    return Refused(
        ErrorCode.RATE_LIMITED,
        f"epoch {epoch} of origin {origin:016x}: not reserved yet; more epochs are being reserved: "
        "send the same hello again",
        retry_after_ms=_RETRY_MS,
        details={"origin": origin, "epoch": epoch},
    )


def epochs_exhausted(origin: int) -> Refused:
    """Return the refusal of a new epoch of an origin that has none left."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        f"origin {origin:016x}: all its epochs are used up: choose another producer name",
        details={"origin": origin},
    )


def origin_not_owned(origin: int) -> Refused:
    """Return the refusal of a write to an origin of another producer."""
    return Refused(
        ErrorCode.UNAUTHORIZED,
        f"origin {origin:016x}: it belongs to another producer: write under your own origin",
        details={"origin": origin},
    )


def fenced_by(origin: int, epoch: int, current: int) -> Refused:
    """Return the refusal of a writer whose epoch is fenced by a later one."""
    return Refused(
        ErrorCode.FENCED,
        f"origin {origin:016x}: this producer writes under epoch {epoch}, but another one of that "
        f"name holds the later epoch {current}: stop this producer, or give it its own name",
        details={"origin": origin, "epoch": current},
    )
