"""From what an acknowledgement says of sequences to what an offer is told of its rows.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.published import Published
from delta_prop_wire.spec import COUNTER_MAX

if TYPE_CHECKING:
    from delta_prop.client.lane import OpenFrame
    from delta_prop.client.offer import Offer
    from delta_prop_wire.frames import AckRange


UNKNOWN_OFFSET = COUNTER_MAX
"""The offset of a repeat whose first place is not known any more."""


def note(frame: OpenFrame, told: AckRange) -> bool:
    """Note what a range says of this batch; whether all its rows have been told of now."""
    first = max(told.first - frame.sequence, 0)
    last = min(told.last - frame.sequence, frame.batch.count - 1)
    at = None if told.offset == UNKNOWN_OFFSET else told.offset + frame.sequence + first - told.first
    frame.told.append((frame.skipped + first, frame.skipped + last, at, told.duplicate))
    return sum(last - first + 1 for first, last, _, _ in frame.told) >= frame.batch.count


def whole_place(frame: OpenFrame) -> int | None:
    """The offset of the first row where all rows got their places now, in a row; else None."""
    if frame.skipped or frame.question or len(frame.told) != 1:
        return None
    return frame.told[0][2]


def published(frame: OpenFrame, row: int, offer: Offer) -> Published:
    """What an offer, whose first row that is, is told of an acknowledged batch.

    Dots are this producer's own, so a repeat was sent twice by itself and is new to its caller; what came
    under an id, or asks about a former life, may have been there before.
    """
    batch, count = frame.batch, offer.count
    repeats = offer.has_ids or frame.question
    level = batch.ack_level
    if not repeats and (at := whole_place(frame)) is not None:
        return Published(at + row, batch.dot(row), count, level)
    duplicates: dict[int, int | None] = dict.fromkeys(range(count))
    offset = new = None
    for first, last, at, duplicate in sorted(frame.told, key=_first):
        rows = range(max(first, row), min(last, row + count - 1) + 1)
        if not rows or at is None:
            continue
        start = at + rows[0] - first
        if duplicate and repeats:
            duplicates.update((one - row, start + place) for place, one in enumerate(rows))
            continue
        if new is None:
            offset, new = start, rows[0]
        for one in rows:
            duplicates.pop(one - row, None)
    if new is None:
        offset, new = duplicates.get(0), row
    dot = batch.dot(max(new - frame.skipped, 0))
    return Published(offset, dot, count, level, duplicates, in_place=True)


def _first(told: tuple[int, int, int | None, bool]) -> int:
    return told[0]
