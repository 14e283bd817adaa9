"""Epochs of origins, as numbers: which a log may have granted, and which it may grant.

An epoch that was granted must never come again for another holder, though nothing was written under it before
a crash. So each opening of a log has a block of epochs of its own, above those of all openings before. A log
that needs epochs beyond its block counts openings up first, on disk, as far as they reach.
"""

from __future__ import annotations

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

EPOCH_MAX = (1 << 32) - 1
EPOCHS_AN_OPENING = 4096
CLAIMED_MAX = 1 << 31
"""The highest epoch that is believed of a producer whom nobody knows: as many are left for those to come."""
SPARE = 1024
"""So many epochs are left in a block when the next one is asked for."""
_OPENINGS_MAX = EPOCH_MAX // EPOCHS_AN_OPENING
_RETRY_MS = 1_000


def epochs_above(openings: int | None) -> int:
    """Return the epoch up to which former openings of a log may have granted all; None: it is in memory."""
    return min(openings or 0, _OPENINGS_MAX) * EPOCHS_AN_OPENING


def epochs_until(openings: int | None) -> int:
    """Return the epoch up to which this opening may grant: the next opening begins above it."""
    return EPOCH_MAX if openings is None else min(epochs_above(openings) + EPOCHS_AN_OPENING, EPOCH_MAX)


def openings_for(epoch: int) -> int:
    """Return how many openings there must have been for an epoch to be granted."""
    return (epoch - 1) // EPOCHS_AN_OPENING


def not_believed(origin: int, epoch: int) -> Refused:
    """Refuse a claim of an epoch that this service cannot have granted, and that would leave too few."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        f"epoch {epoch} of origin {origin:016x}: this service has not granted it, and believes none above "
        f"{CLAIMED_MAX}: claim with epoch 0",
        details={"origin": origin, "epoch": epoch},
    )


def not_reserved(origin: int, epoch: int) -> Refused:
    """Refuse an epoch until it is written down that it may have been granted."""
    return Refused(
        ErrorCode.RATE_LIMITED,
        f"epoch {epoch} of origin {origin:016x}: it is beyond those that were set aside, which is being "
        "mended: send the same hello again",
        retry_after_ms=_RETRY_MS,
        details={"origin": origin, "epoch": epoch},
    )


def used_up(origin: int) -> Refused:
    """Refuse a new epoch where there is none left."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        f"origin {origin:016x}: all of its epochs are used up: choose another producer name",
        details={"origin": origin},
    )


def of_another(origin: int) -> Refused:
    """Refuse to write as an origin that is somebody else's."""
    return Refused(
        ErrorCode.UNAUTHORIZED,
        f"origin {origin:016x} belongs to another producer: write under your own",
        details={"origin": origin},
    )


def fenced_by(origin: int, epoch: int, present: int) -> Refused:
    """Refuse who writes under an epoch while another one holds a later one."""
    return Refused(
        ErrorCode.FENCED,
        f"origin {origin:016x} writes under epoch {epoch}, but another producer of that "
        f"name has said hello since and holds {present}: stop this one, or give it its own name",
        details={"origin": origin, "epoch": present},
    )
