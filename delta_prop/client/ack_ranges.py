"""Turns the sequence ranges of an acknowledgement into the outcome of each offer.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.outcomes import PublishAck, RowAck
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.offer import Offer
    from delta_prop.client.sequence_sender import UnackedBatch
    from delta_prop_wire.delta import Dot
    from delta_prop_wire.frames import AckRange


def record_ack_range(frame: UnackedBatch, acked: AckRange) -> bool:
    """Record an acknowledged range of this batch; return True once all its rows are acknowledged."""
    first = max(acked.first - frame.sequence, 0)
    last = min(acked.last - frame.sequence, frame.batch.count - 1)
    at = None if acked.offset == UNKNOWN_OFFSET else acked.offset + frame.sequence + first - acked.first
    frame.acked_ranges.append((first, last, at, acked.duplicate))
    return sum(last - first + 1 for first, last, _, _ in frame.acked_ranges) >= frame.batch.count


def contiguous_offset(frame: UnackedBatch) -> int | None:
    """Return the offset of the first row if all rows were appended now, one after another; else None."""
    if frame.is_outcome_query or len(frame.acked_ranges) != 1:
        return None
    first, last, at, _ = frame.acked_ranges[0]
    return at if (first, last) == (0, frame.batch.count - 1) else None


def outcome_of(frame: UnackedBatch, row: int, offer: Offer) -> PublishAck | Refused:
    """Return the outcome of an offer whose first row is `row` of an acknowledged batch.

    Dots are this producer's own: a duplicate of a dot is this producer's own resend, so it is new to the
    caller. A delta with an id, or an outcome query, may have been in the log before. A row whose offset the
    service does not report is not acknowledged: the log may have lost it.
    """
    batch, count = frame.batch, offer.count
    may_duplicate = offer.has_ids or frame.is_outcome_query
    level = batch.ack_level
    if not may_duplicate and (at := contiguous_offset(frame)) is not None:
        return PublishAck(at + row, batch.dot(row), count, level)
    places = dict[int, RowAck]()
    for first, last, at, duplicate in frame.acked_ranges:
        if at is None:
            continue
        for one in range(max(first, row), min(last, row + count - 1) + 1):
            known = duplicate and may_duplicate
            places[one - row] = RowAck(at + one - first, None if known else batch.dot(one), known)
    if len(places) < count:
        return unknown_outcome(batch.dot(row))
    rows = [places[one] for one in range(count)]
    if any(not one.duplicate for one in rows):
        return PublishAck.of_rows(rows, level)
    duplicates = {one: place.offset for one, place in enumerate(rows)}
    return PublishAck(rows[0].offset, batch.dot(row), count, level, duplicates)


def unknown_outcome(dot: Dot) -> Refused:
    """Return the refusal of a delta that the service has processed without reporting its outcome."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        "the service has processed this delta and does not report its offset, so it may have happened: find "
        "out in another way, such as by reading the fact, before you send it again",
        details={"dot": dot},
    )
