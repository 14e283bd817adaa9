"""Splits a batch whose rows must keep their dots: around the refused row, or into single rows.

Pure. The parts replace the batch in its sender; the caller has them sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.client.sequence_sender import UnackedBatch


SINGLES_MAX = 256


def split_around(frame: UnackedBatch, row: int | None) -> Sequence[UnackedBatch]:
    """Split a batch into the rows before the refused row, that row, and the rest. None: halve it.

    Each time a part is refused again, twice as many rows after the refused one are sent singly, so that a
    batch of bad rows costs few rounds. A single refused row is settled at once and blocks no other.
    """
    count = frame.batch.count
    if row is None:
        parts = _split_at(frame, [count // 2])
    else:
        singles = min(1 << frame.split_count, SINGLES_MAX, count - row)
        parts = _split_at(frame, [cut for cut in range(row, row + singles + 1) if 0 < cut < count])
    for part in parts:
        part.split_count = frame.split_count + 1
    return parts


def split_rows(frame: UnackedBatch) -> Sequence[UnackedBatch]:
    """Split a batch into single rows."""
    return _split_at(frame, range(1, frame.batch.count))


def _split_at(frame: UnackedBatch, cuts: Sequence[int]) -> Sequence[UnackedBatch]:
    parts = [frame]
    for cut in reversed(cuts):
        parts[:1] = parts[0].split_at(cut)
    frame.sender.replace_batch(frame, parts)
    return parts
