"""Turns the sequence ranges of an acknowledgement into the outcome of each offer.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.calls.outcomes import PublishAck, RowAck
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.offer import Offer
    from delta_prop.client.sequence_sender import UnackedBatch
    from delta_prop_wire.frames import AckRange


def record_ack_range(unacked: UnackedBatch, acked: AckRange) -> bool:
    """Record an acknowledged range of a batch; return True once all rows of the batch are acknowledged."""
    first = max(acked.first - unacked.sequence, 0)
    last = min(acked.last - unacked.sequence, unacked.batch.count - 1)
    offset = None if acked.offset == UNKNOWN_OFFSET else acked.offset + unacked.sequence + first - acked.first
    unacked.acked_ranges.append((first, last, offset, acked.duplicate))
    return sum(last - first + 1 for first, last, _, _ in unacked.acked_ranges) >= unacked.batch.count


def contiguous_offset(unacked: UnackedBatch) -> int | None:
    """Return the offset of the first row if one range acknowledges all rows of the batch; else None.

    Also None for an outcome query, since the rows of its answer may be duplicates.
    """
    if unacked.is_outcome_query or len(unacked.acked_ranges) != 1:
        return None
    first, last, offset, _ = unacked.acked_ranges[0]
    return offset if (first, last) == (0, unacked.batch.count - 1) else None


def outcome_of(unacked: UnackedBatch, row: int, offer: Offer) -> PublishAck | Refused:
    """Return the outcome of an offer whose first row is `row` of an acknowledged batch.

    No other producer uses these dots: a duplicate of a dot is a resend, so the delta is new to the caller. A
    delta with an id, or one of an outcome query, may have been in the log before. If the service does not
    report the offset of a row, the outcome is unknown, since the log may have lost the row.
    """
    batch, count = unacked.batch, offer.count
    may_be_duplicate = offer.has_ids or unacked.is_outcome_query
    level = batch.ack_level
    if not may_be_duplicate and (offset := contiguous_offset(unacked)) is not None:
        return PublishAck(offset + row, batch.dot(row), count, level)
    acks = dict[int, RowAck]()
    for first, last, offset, duplicate in unacked.acked_ranges:
        if offset is None:
            continue
        for index in range(max(first, row), min(last, row + count - 1) + 1):
            is_duplicate = duplicate and may_be_duplicate
            dot = None if is_duplicate else batch.dot(index)
            acks[index - row] = RowAck(offset + index - first, dot, is_duplicate)
    if len(acks) < count:
        return unknown_outcome(batch.dot(row))
    rows = [acks[index] for index in range(count)]
    if any(not ack.duplicate for ack in rows):
        return PublishAck.of_rows(rows, level)
    duplicates = {index: ack.offset for index, ack in enumerate(rows)}
    return PublishAck(rows[0].offset, batch.dot(row), count, level, duplicates)


def unknown_outcome(dot: Dot) -> Refused:
    """Return the refusal of a delta that the service has processed without reporting its outcome."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        "the service has processed this delta and does not report its offset, so it may have happened: find "
        "out in another way, such as by reading the fact, before you send it again",
        details={"dot": dot},
    )
