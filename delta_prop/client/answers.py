"""From what an acknowledgement says of sequences to what an offer is told of its rows.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.published import Published, RowPlace
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.lane import OpenFrame
    from delta_prop.client.offer import Offer
    from delta_prop_wire.delta import Dot
    from delta_prop_wire.frames import AckRange


def note(frame: OpenFrame, told: AckRange) -> bool:
    """Note what a range says of this batch; whether all its rows have been told of now."""
    first = max(told.first - frame.sequence, 0)
    last = min(told.last - frame.sequence, frame.batch.count - 1)
    at = None if told.offset == UNKNOWN_OFFSET else told.offset + frame.sequence + first - told.first
    frame.told.append((first, last, at, told.duplicate))
    return sum(last - first + 1 for first, last, _, _ in frame.told) >= frame.batch.count


def whole_place(frame: OpenFrame) -> int | None:
    """The offset of the first row where all rows got their places now, in a row; else None."""
    if frame.question or len(frame.told) != 1:
        return None
    first, last, at, _ = frame.told[0]
    return at if (first, last) == (0, frame.batch.count - 1) else None


def outcome_of(frame: OpenFrame, row: int, offer: Offer) -> Published | Refused:
    """What an offer, whose first row that is, is told of an acknowledged batch.

    Dots are this producer's own, so a repeat was sent twice by itself and is new to its caller; what came
    under an id, or asks about a former life, may have been there before. A row of which nobody says where it
    is counts as no acknowledgement: the log may have lost it.
    """
    batch, count = frame.batch, offer.count
    repeats = offer.has_ids or frame.question
    level = batch.ack_level
    if not repeats and (at := whole_place(frame)) is not None:
        return Published(at + row, batch.dot(row), count, level)
    places = dict[int, RowPlace]()
    for first, last, at, duplicate in frame.told:
        if at is None:
            continue
        for one in range(max(first, row), min(last, row + count - 1) + 1):
            known = duplicate and repeats
            places[one - row] = RowPlace(at + one - first, None if known else batch.dot(one), known)
    if len(places) < count:
        return unknown(batch.dot(row))
    rows = [places[one] for one in range(count)]
    if any(not one.duplicate for one in rows):
        return Published.of_rows(rows, level)
    duplicates = {one: place.offset for one, place in enumerate(rows)}
    return Published(rows[0].offset, batch.dot(row), count, level, duplicates)


def unknown(dot: Dot) -> Refused:
    """The service has dealt with a delta, and does not say what became of it."""
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        "the service has dealt with it and does not say where it is, so it may have happened: find out in "
        "another way, such as by reading the fact, before you send it again",
        details={"dot": dot},
    )
