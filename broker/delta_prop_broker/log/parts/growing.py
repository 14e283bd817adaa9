"""Where the next frame goes: the segment that grows, and what of it waits to be written.

A segment that is full or old is sealed with the next commit, and another one begins behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_broker.log.files.segment import Segment
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.parts.commit import Piece

if TYPE_CHECKING:
    from delta_prop_broker.log.files.segment import Segments
    from delta_prop_broker.log.settings import LogSettings


class Growing:
    """`pieces`: what the next commit writes, a piece a segment."""

    def __init__(self, segments: Segments, settings: LogSettings) -> None:
        self.pieces: list[Piece] = []
        self._segments = segments
        self._settings = settings

    def piece_for(self, size: int, *, offset: int, seen_us: int) -> Piece:
        """Return where a frame of so many bytes goes that gets this offset at this seen time."""
        last, bytes_max = self._segments.last, self._settings.segment_bytes_max
        if last is not None and not last.size:
            last.seen_first_us = seen_us
        elif last is None or last.size + size > bytes_max or self.is_old(last, seen_us):
            last = self.begin(offset=offset, seen_us=seen_us)
        return self.piece_of(last)

    def is_old(self, segment: Segment, seen_us: int) -> bool:
        """Whether it has grown for as long as one may."""
        return seen_us - segment.seen_first_us >= self._settings.segment_s_max * 1e6

    def begin(self, *, offset: int, seen_us: int) -> Segment:
        """Seal the last segment with the next commit, and begin another one behind it."""
        last = self._segments.last
        if last is not None:
            self.piece_of(last).seals = True
        last = Segment(DIRECTORY, offset)
        last.index = SparseIndex(offset)
        last.seen_first_us = last.seen_last_us = seen_us
        self._segments.add(last)
        self.piece_of(last)
        return last

    def piece_of(self, segment: Segment) -> Piece:
        """The piece of the last segment: begun where there is none."""
        if not self.pieces or self.pieces[-1].segment is not segment:
            self.pieces.append(Piece(segment, segment.size, position=segment.size))
        return self.pieces[-1]
