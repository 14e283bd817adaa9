"""The active segment, which appends go to.

A segment that is full or old is sealed with the next commit, and another one begins after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_broker.segments.segment import Segment
from delta_prop_broker.segments.sparse_index import SparseIndex

if TYPE_CHECKING:
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.segments.commit import SegmentWrite
    from delta_prop_broker.segments.commit_queue import CommitQueue
    from delta_prop_broker.segments.segment import Segments


class ActiveSegment:
    """The last segment of the log; its writes wait in the commit queue."""

    def __init__(self, segments: Segments, queue: CommitQueue, settings: LogSettings) -> None:
        self._segments = segments
        self._queue = queue
        self._bytes_max = settings.segment_bytes_max
        self._age_us_max = settings.segment_s_max * 1e6

    def write_for(self, size: int, *, offset: int, seen_us: int) -> SegmentWrite:
        """Return the write that takes a frame of this size, with this offset, at this seen time."""
        last, writes = self._segments.last, self._queue.writes
        if last is not None and not last.size:
            last.seen_first_us = seen_us
        elif (
            last is None
            or last.size + size > self._bytes_max
            or seen_us - last.seen_first_us >= self._age_us_max
        ):
            last = self.begin(offset=offset, seen_us=seen_us)
        if writes and writes[-1].segment is last:
            return writes[-1]
        return self._queue.write_of(last)

    def is_old(self, segment: Segment, seen_us: int) -> bool:
        """Return True if the segment has been active for `segment_s_max`."""
        return seen_us - segment.seen_first_us >= self._age_us_max

    def begin(self, *, offset: int, seen_us: int) -> Segment:
        """Seal the last segment with the next commit, and begin another one after it."""
        last = self._segments.last
        if last is not None:
            self._queue.write_of(last).seals_segment = True
        last = Segment(DIRECTORY, offset)
        last.index = SparseIndex(offset)
        last.seen_first_us = last.seen_last_us = seen_us
        self._segments.add(last)
        self._queue.write_of(last)
        return last
