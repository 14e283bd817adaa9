"""What a producer's callers are told where they are not told that it has happened.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.refusals import may_have_happened
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.offer import Offer


def late(offer: Offer | None, time_s_max: float, *, gone: bool) -> Refused:
    """Why an offer is given up whose time is over; None: it was not even taken."""
    what = f"no acknowledgement within {time_s_max:g} s"
    last = None if offer is None else offer.refusal
    behind = "" if last is None else f"; the last answer was {last}"
    if offer is not None and not gone:
        return may_have_happened(f"{what}{behind}", first_dot(offer), retry_after_ms=1000)
    return Refused(
        ErrorCode.DEP_TIMEOUT if last is None else last.code,
        f"{what}; it was taken back, and has not happened: send it again, or allow more time{behind}",
        retry_after_ms=1000 if last is None else last.retry_after_ms,
        details={} if last is None else last.details,
    )


def unanswered(offer: Offer, why: Refused) -> Refused:
    """The producer ends, or cannot go on, and the service may have the offer."""
    return may_have_happened(f"no acknowledgement before the producer ended ({why})", first_dot(offer))


def first_dot(offer: Offer) -> Dot:
    """The dot of an offer's first row; the place is that of its last one."""
    return Dot(offer.place.origin, offer.place.counter - offer.count + 1)


def left_over(name: str, count: int) -> Refused:
    """What to say at the end where not everything has an outcome: perhaps nobody looks at the receipts."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        f"{count} calls were not acknowledged when producer {name!r} was closed, and may have happened: "
        "flush before the end, or allow more close_s_max",
    )


def former(refusal: Refused) -> Refused:
    """A number of a former life of the producer stands for something else. `refusal`: of the service."""
    code = refusal.details.get("code")
    if code in set(ErrorCode) and code != ErrorCode.DOT_REUSED:
        known = ErrorCode(code)
        told = "this number was refused for good when the producer sent before: take another one"
        return Refused(known, told)
    what = "left out" if code == ErrorCode.DOT_REUSED else "used for another delta"
    return Refused(
        ErrorCode.DOT_REUSED,
        f"this number was {what} when the producer sent before: take another one",
        details=refusal.details,
    )


def of_row(refusal: Refused, row: int | None) -> Refused:
    """The refusal, with the row counted within the caller's own deltas."""
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
