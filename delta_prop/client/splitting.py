"""Splits a batch whose rows are to keep their dots: around the row that was refused, or into single rows.

Pure. The parts stand for the batch in its lane; whoever splits it has them sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.client.lane import OpenFrame


SINGLES_MAX = 256


def around(frame: OpenFrame, row: int | None) -> Sequence[OpenFrame]:
    """Cut a frame into what comes before the refused row, that row, and the rest. None: it is not known.

    Whenever a part is refused again, twice as many rows from the refused one on go by themselves, so that a
    batch of bad rows alone costs few rounds. A single row is void at once, and holds up nobody.
    """
    count = frame.batch.count
    if row is None:
        parts = _parts(frame, [count // 2])
    else:
        alone = min(1 << frame.splits, SINGLES_MAX, count - row)
        parts = _parts(frame, [cut for cut in range(row, row + alone + 1) if 0 < cut < count])
    for part in parts:
        part.splits = frame.splits + 1
    return parts


def singles(frame: OpenFrame) -> Sequence[OpenFrame]:
    """Each row by itself."""
    return _parts(frame, range(1, frame.batch.count))


def _parts(frame: OpenFrame, cuts: Sequence[int]) -> Sequence[OpenFrame]:
    parts = [frame]
    for cut in reversed(cuts):
        parts[:1] = parts[0].cut(cut)
    frame.lane.exchange(frame, parts)
    return parts
