"""Splits a batch whose rows must keep their dots: around the refused row, or into single rows.

Pure. The parts replace the batch in its sender; the caller schedules them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.client.sequence_sender import UnackedBatch


SINGLES_MAX = 256
"""Maximum number of rows that one split sends singly."""


def split_around(unacked: UnackedBatch, row: int | None) -> Sequence[UnackedBatch]:
    """Split a batch into the rows before the refused `row`, that row, and the rest.

    If `row` is None, split it into halves. Each time a part is refused again, twice as many rows after the
    refused one are sent singly, so that a batch of bad rows costs few rounds. A refused row that was
    sent alone is settled at once, and holds up no other row.
    """
    count = unacked.batch.count
    if row is None:
        parts = _split_at(unacked, [count // 2])
    else:
        singles = min(1 << unacked.split_count, SINGLES_MAX, count - row)
        parts = _split_at(unacked, [cut for cut in range(row, row + singles + 1) if 0 < cut < count])
    for part in parts:
        part.split_count = unacked.split_count + 1
    return parts


def split_rows(unacked: UnackedBatch) -> Sequence[UnackedBatch]:
    """Split a batch into single rows."""
    return _split_at(unacked, range(1, unacked.batch.count))


def _split_at(unacked: UnackedBatch, cuts: Sequence[int]) -> Sequence[UnackedBatch]:
    parts = [unacked]
    for cut in reversed(cuts):
        parts[:1] = parts[0].split_at(cut)
    unacked.sender.replace_batch(unacked, parts)
    return parts
