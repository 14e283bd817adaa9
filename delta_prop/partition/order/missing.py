"""The missing dependencies of a delta, and the refusals that name them.

This module only builds values; `orderer.py` decides when to refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.order.pending import Entry, Shortage

RETRY_AFTER_MS = 1_000
"""Delay before a retry: a guess, since no one knows when another producer sends the missing delta."""

NAMED_MAX = 16
"""Maximum number of missing dots and ids that a refusal names; it only counts the others."""


class DotRange(NamedTuple):
    """Counters `first` to `last` of one origin."""

    origin: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.origin < 0:
            return "a delta that has no dot yet"  # callers do not know placeholder origins
        first_dot = f"{self.origin:016x}:{self.first}"
        return first_dot if self.first == self.last else f"{first_dot}-{self.last}"


class MissingDependencies(NamedTuple):
    """The dots and ids that an entry waits for."""

    dot_ranges: tuple[DotRange, ...]
    ids: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.dot_ranges or self.ids)

    @property
    def names(self) -> list[str]:
        """Each missing dot, range or id as text, up to `NAMED_MAX`."""
        return [str(dot_range) for dot_range in self.dot_ranges[:NAMED_MAX]] + [
            delta_id.hex() for delta_id in self.ids[: max(0, NAMED_MAX - len(self.dot_ranges))]
        ]

    def __str__(self) -> str:
        more = len(self.dot_ranges) + len(self.ids) - NAMED_MAX
        return ", ".join(self.names) + (f" and {more} more" if more > 0 else "")

    @property
    def blocked_by(self) -> str | None:
        """The first missing dot or id; None if nothing is missing."""
        if self.dot_ranges:
            origin, first, _ = self.dot_ranges[0]
            return str(DotRange(origin, first, first))
        return self.ids[0].hex() if self.ids else None


def pending_full(missing: MissingDependencies, shortage: Shortage) -> Refused:
    """Return the refusal of an entry that would exceed a bound of the pending entries."""
    return Refused(
        ErrorCode.PENDING_FULL,
        f"delta waits for {missing}, but there are {shortage.depth} {shortage.unit}, and the maximum is "
        f"{shortage.capacity}: send its dependencies first, then resend it, under its dot if it has one",
        retry_after_ms=RETRY_AFTER_MS,
        details={
            "depth": shortage.depth,
            "capacity": shortage.capacity,
            "missing": missing.names,
            "blocked_by": missing.blocked_by,
        },
    )


def timed_out(missing: MissingDependencies, waited_s: float, ids_kept_since: int) -> Refused:
    """Return the refusal of an entry whose dependencies did not arrive in time."""
    message = (
        f"delta waited {waited_s:g} s for {missing}: send its dependencies, then resend it, "
        "under its dot if it has one"
    )
    details: dict[str, object] = {"missing": missing.names, "blocked_by": missing.blocked_by}
    if missing.ids:
        since = f"offset {ids_kept_since}"
        message += f"; ids are known since {since}: name an older parent by its dot"
        details["ids_kept_since"] = since
    return Refused(ErrorCode.DEP_TIMEOUT, message, retry_after_ms=RETRY_AFTER_MS, details=details)


def blocked_by_refused(root: Entry, cause: Refused, missing: MissingDependencies) -> Refused:
    """Return the refusal of an entry that depends on the refused entry `root`; `cause`: its refusal."""
    code = cause.code if cause.retryable else ErrorCode.DEP_TIMEOUT
    root_dot = str(DotRange(root.origin, root.first, root.first))
    more = f", and waits for {missing}" if missing.names else ""
    return Refused(
        code,
        f"delta depends on {root_dot}, which was refused ({cause.code.name}){more}: "
        "resend it after that delta, under its dot if it has one",
        retry_after_ms=cause.retry_after_ms if cause.retry_after_ms is not None else RETRY_AFTER_MS,
        details={"blocked_by": root_dot, "missing": missing.names},
    )


def overlap(entry: Entry, watermark: int, pending: Entry | None) -> Refused:
    """Return the refusal of an entry of which a part was delivered, or is pending, in another batch.

    `pending`: the pending entry with the same `previous`; None if there is none.
    """
    counters = f"counters {entry.first} to {entry.last} of origin {entry.origin:016x}"
    if pending is None or watermark > entry.previous:
        message = (
            f"{counters} begin below its watermark {watermark}: split after {watermark}, resend the rest"
        )
        return Refused(ErrorCode.OVERLAP, message, retry_after_ms=0, details={"watermark": watermark})
    return Refused(
        ErrorCode.OVERLAP,
        f"{counters} are pending as {pending.first} to {pending.last}: resend them in the same batch",
        retry_after_ms=RETRY_AFTER_MS,
        details={"watermark": watermark, "current": f"{pending.first}-{pending.last}"},
    )
