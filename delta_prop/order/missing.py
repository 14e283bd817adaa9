"""What a delta waits for, as facts and in words; and the refusals that say so.

Builds values only; when something is refused is decided in `orderer.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.order.pending import Entry, Shortage

RETRY_AFTER_MS = 1_000
"""When to try again: the missing delta is on another's way here, its time of arrival is not known."""

NAMED_MAX = 16
"""Missing dots and ids that a refusal names; of the rest it gives the number."""


class DotRange(NamedTuple):
    """Counters `first` to `last` of one origin."""

    origin: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.origin < 0:
            return "a delta that has no dot yet"  # a stand-in means nothing outside
        head = f"{self.origin:016x}:{self.first}"
        return head if self.first == self.last else f"{head}-{self.last}"


class Missing(NamedTuple):
    """The dots and ids that an entry waits for."""

    dots: tuple[DotRange, ...]
    ids: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.dots or self.ids)

    @property
    def names(self) -> list[str]:
        """Each missing dot, range or id as text, up to `NAMED_MAX`."""
        return [str(dots) for dots in self.dots[:NAMED_MAX]] + [
            delta_id.hex() for delta_id in self.ids[: max(0, NAMED_MAX - len(self.dots))]
        ]

    def __str__(self) -> str:
        more = len(self.dots) + len(self.ids) - NAMED_MAX
        return ", ".join(self.names) + (f" and {more} more" if more > 0 else "")

    @property
    def holder(self) -> str | None:
        """The first thing missing."""
        if self.dots:
            origin, first, _ = self.dots[0]
            return str(DotRange(origin, first, first))
        return self.ids[0].hex() if self.ids else None


def pending_full(missing: Missing, shortage: Shortage) -> Refused:
    """There is no room to wait in."""
    return Refused(
        ErrorCode.PENDING_FULL,
        f"it waits for {missing}, and of {shortage.capacity} {shortage.what} {shortage.depth} are used: "
        "send what it waits for first, then this again, under its dot if it has one",
        retry_after_ms=RETRY_AFTER_MS,
        details={
            "depth": shortage.depth,
            "capacity": shortage.capacity,
            "missing": missing.names,
            "blocked_by": missing.holder,
        },
    )


def timed_out(missing: Missing, waited_s: float, ids_kept_since: str | None) -> Refused:
    """What it waits for has not come in time."""
    message = f"waited {waited_s:g} s for {missing}: send that, then this again, under its dot if it has one"
    details: dict[str, object] = {"missing": missing.names, "blocked_by": missing.holder}
    if missing.ids:
        since = ids_kept_since or "the log's beginning"
        message += f"; ids are known since {since}, an older parent must be named by its dot"
        details["ids_kept_since"] = since
    return Refused(ErrorCode.DEP_TIMEOUT, message, retry_after_ms=RETRY_AFTER_MS, details=details)


def held_behind(root: Entry, cause: Refused, missing: Missing) -> Refused:
    """It stands behind a delta that was refused; `cause` is that refusal."""
    code = cause.code if cause.retryable else ErrorCode.DEP_TIMEOUT
    holder = str(DotRange(root.origin, root.first, root.first))
    more = f", and waits for {missing}" if missing.names else ""
    return Refused(
        code,
        f"it stands behind {holder}, which was refused ({cause.code.name}){more}: "
        "send it again after that one, under its dot if it has one",
        retry_after_ms=cause.retry_after_ms if cause.retry_after_ms is not None else RETRY_AFTER_MS,
        details={"blocked_by": holder, "missing": missing.names},
    )


def overlap(entry: Entry, watermark: int, parked: Entry | None) -> Refused:
    """Some of its deltas have been delivered, or wait, under other cuts."""
    what = f"counters {entry.first} to {entry.last} of origin {entry.origin:016x}"
    if parked is None or watermark > entry.previous:
        message = (
            f"{what} begin below its watermark {watermark}: cut the batch behind {watermark}, send the rest"
        )
        return Refused(ErrorCode.OVERLAP, message, retry_after_ms=0, details={"watermark": watermark})
    return Refused(
        ErrorCode.OVERLAP,
        f"{what} are pending as {parked.first} to {parked.last}: send them again cut as they were",
        retry_after_ms=RETRY_AFTER_MS,
        details={"watermark": watermark, "current": f"{parked.first}-{parked.last}"},
    )
