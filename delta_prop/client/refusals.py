"""Refusals that a producer itself reports to its callers, in place of an acknowledgement.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.calls.refusals import may_have_happened
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.offer import Offer


def timed_out(offer: Offer | None, timeout_s: float, *, withdrawn: bool) -> Refused:
    """Return the refusal of an offer that timed out; None: it was not even queued."""
    cause = f"no acknowledgement within {timeout_s:g} s"
    last = None if offer is None else offer.refusal
    suffix = "" if last is None else f"; the last answer was {last}"
    if offer is not None and not withdrawn:
        return may_have_happened(f"{cause}{suffix}", first_dot(offer), retry_after_ms=1000)
    return Refused(
        ErrorCode.DEP_TIMEOUT if last is None else last.code,
        f"{cause}; it was withdrawn, and has not happened: send it again, or allow more time{suffix}",
        retry_after_ms=1000 if last is None else last.retry_after_ms,
        details={} if last is None else last.details,
    )


def offer_unanswered(offer: Offer, cause: Refused) -> Refused:
    """Return the refusal of an offer that may be in the log, and has no outcome when the producer ends."""
    return may_have_happened(f"no acknowledgement before the producer ended ({cause})", first_dot(offer))


def first_dot(offer: Offer) -> Dot:
    """Return the dot of an offer's first row; `pending_dot` is that of its last one."""
    return Dot(offer.pending_dot.origin, offer.pending_dot.counter - offer.count + 1)


def offers_unacked(name: str, count: int) -> Refused:
    """Return the error for closing a producer with unacknowledged calls, whose receipts nobody may read."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        f"{count} calls were not acknowledged when producer {name!r} was closed, and may have happened: "
        "flush before the end, or increase close_timeout_s",
    )


def dot_used_before(refusal: Refused) -> Refused:
    """Return the refusal of a counter that an earlier run of the producer used for something else.

    `refusal`: the service's refusal of the outcome query.
    """
    code = refusal.details.get("code")
    if code in set(ErrorCode) and code != ErrorCode.DOT_REUSED:
        known = ErrorCode(code)
        text = "this counter was refused for good in an earlier run of this producer: take another one"
        return Refused(known, text)
    use = "skipped" if code == ErrorCode.DOT_REUSED else "used for another delta"
    return Refused(
        ErrorCode.DOT_REUSED,
        f"this counter was {use} in an earlier run of this producer: take another one",
        details=refusal.details,
    )


def with_row(refusal: Refused, row: int | None) -> Refused:
    """Return the refusal with `row` counted within the caller's own deltas."""
    if refusal.row == row:
        return refusal
    return Refused(
        refusal.code,
        refusal.message,
        retry_after_ms=refusal.retry_after_ms,
        row=row,
        field=refusal.field,
        details=refusal.details,
    )
