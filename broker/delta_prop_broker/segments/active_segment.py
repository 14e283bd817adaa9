"""The active segment, which appends go to, and its pending writes.

A segment that is full or old is sealed with the next commit, and another one begins after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.segments.commit import SegmentWrite
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_broker.segments.segment import Segment
from delta_prop_broker.segments.sparse_index import SparseIndex

if TYPE_CHECKING:
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.segments.segment import Segments


class ActiveSegment:
    """The last segment of the log. `pending_writes`: the writes of the next commit, one per segment."""

    def __init__(self, segments: Segments, settings: LogSettings) -> None:
        self.pending_writes: list[SegmentWrite] = []
        self._segments = segments
        self._settings = settings

    def write_for(self, size: int, *, offset: int, seen_us: int) -> SegmentWrite:
        """Return the write that takes a frame of this size, with this offset, at this seen time."""
        last, bytes_max = self._segments.last, self._settings.segment_bytes_max
        if last is not None and not last.size:
            last.seen_first_us = seen_us
        elif last is None or last.size + size > bytes_max or self.is_old(last, seen_us):
            last = self.begin(offset=offset, seen_us=seen_us)
        return self.write_of(last)

    def is_old(self, segment: Segment, seen_us: int) -> bool:
        """Return True if the segment has been active for `segment_s_max`."""
        return seen_us - segment.seen_first_us >= self._settings.segment_s_max * 1e6

    def begin(self, *, offset: int, seen_us: int) -> Segment:
        """Seal the last segment with the next commit, and begin another one after it."""
        last = self._segments.last
        if last is not None:
            self.write_of(last).seals_segment = True
        last = Segment(DIRECTORY, offset)
        last.index = SparseIndex(offset)
        last.seen_first_us = last.seen_last_us = seen_us
        self._segments.add(last)
        self.write_of(last)
        return last

    def write_of(self, segment: Segment) -> SegmentWrite:
        """Return the pending write of the last segment, `segment`; begin one if there is none."""
        if not self.pending_writes or self.pending_writes[-1].segment is not segment:
            self.pending_writes.append(SegmentWrite(segment, segment.size, end=segment.size))
        return self.pending_writes[-1]
