"""Retention of a log on disk: its size, holders, removal of old segments, compaction and compression.

The oldest segments are removed, if they are sealed and no longer needed. Readers lose them at once; the next
commit removes the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.retention.segment_compression import SegmentCompression, SegmentCompressor
from delta_prop_broker.segments.segment import Segment, Segments
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log.writing import CommitQueue, LogMarks
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.retention.compaction import Compaction
    from delta_prop_broker.retention.holders import Holders
    from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner


class Retention:
    """Removes and rewrites the oldest segments. `bytes`: the size of the log.

    `planner`: plans the snapshots that replace removed segments. `holders`: consumers that still need rows.
    """

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        planner: SnapshotPlanner,
        holders: Holders,
        *,
        settings: LogSettings,
        clock: LogClock,
        marks: LogMarks,
        queue: CommitQueue,
    ) -> None:
        self.holders = holders
        self.planner = planner
        self._disk = disk
        self._settings = settings
        self._clock = clock
        self._marks = marks
        self._queue = queue
        self.resume(segments)

    def resume(self, segments: Segments) -> None:
        """Continue with the segments of a recovered log, with no compression under way."""
        self.bytes = sum(segment.size for segment in segments.all)
        self._segments = segments
        self._compressor = SegmentCompressor(self._disk, segments.directory, segments, self._settings)

    def alter(self, settings: LogSettings) -> None:
        """Retain rows by these settings from now on."""
        self._settings = settings
        self.planner.alter(settings)

    def truncate(self, before: int) -> None:
        """Let `retain` remove all segments that end up to this offset."""
        self.planner.requested.before = max(self.planner.requested.before, before)

    # --- shares and removal

    def used_share(self, offset: int) -> float:
        if offset >= self._marks.next_offset:
            return 0.0
        return self._held_bytes(offset) / self._settings.bytes_max

    def retention_share(self, offset: int) -> float:
        """Return how close the segment of `offset` is to its removal; from 1 on it may be removed."""
        settings, last = self._settings, self._segments.last
        if last is None or offset >= last.base:
            return 0.0
        bytes_max = settings.compact_from_bytes if settings.compact else settings.retention_bytes
        age_s = (self._clock.seen_us - self._segments.segment_at(offset).seen_last_us) / 1e6
        return max(self._held_bytes(offset) / bytes_max, age_s / settings.delta_retention_s)

    def retain(self) -> int:
        """Remove segments beyond `retention_bytes` or older than `retention_s`, unless a holder needs them.

        With compaction, removes all segments that a snapshot covers, as they were due when it was made.
        Returns their number.
        """
        settings, seen_us = self._settings, self._clock.poll()
        removed: list[Segment] = []
        floor = self._floor(self.holders.floor(self._marks.next_offset))
        while self._can_remove(floor):
            oldest = self._segments.all[0]
            too_old = seen_us - oldest.seen_last_us > settings.retention_s * 1e6
            is_truncated = oldest.end <= self.planner.requested.before
            if not (is_truncated or too_old or self.bytes > settings.retention_bytes or settings.compact):
                break
            removed.append(self._remove())
        self._note_removed(removed)
        return len(removed)

    def refusal(self, size: int) -> Refused | None:
        """Return the error if `size` bytes do not fit below `bytes_max`, even without old segments."""
        if self._has_capacity(size) or self._ensure_capacity(size):
            return None
        marks, holder = self._marks, self.holders.slowest()
        why = "" if holder else self.planner.wait_reason(marks.high_watermark)
        offsets = marks.start_offset, marks.next_offset
        return refusals.log_full(
            self.bytes, self._settings.bytes_max, offsets=offsets, holder=holder, reason=why
        )

    def _ensure_capacity(self, size: int) -> bool:
        """Free capacity for `size` bytes below the hard limit; return True if they fit."""
        removed = self._remove_oldest(size)
        if not self._has_capacity(size) and self._can_fit(size):
            while not self._has_capacity(size) and self.holders.evict_slowest():
                removed += self._remove_oldest(size)
        self._note_removed(removed)
        return self._has_capacity(size)

    def _has_capacity(self, size: int) -> bool:
        return self.bytes + size <= self._settings.bytes_max

    def _held_bytes(self, offset: int) -> int:
        """Return the bytes of all segments from the one that holds `offset` on."""
        return sum(segment.size for segment in self._segments.segments_from(offset))

    def _floor(self, holders_floor: int) -> int:
        return min(holders_floor, self.planner.floor(self._marks.removable_end))

    def _remove_oldest(self, size: int) -> list[Segment]:
        floor = self._floor(self.holders.floor(self._marks.next_offset))
        removed: list[Segment] = []
        while not self._has_capacity(size) and self._can_remove(floor):
            removed.append(self._remove())
        return removed

    def _can_remove(self, floor: int) -> bool:
        """Return True if the oldest segment may be removed: no reader needs it, and it is not the last one.

        The file name of the last segment holds the log's offset, so a commit creates the next segment first.
        """
        segments = self._segments.all
        return len(segments) > 1 and segments[0].end <= floor

    def _remove(self) -> Segment:
        segment = self._segments.drop_first()
        self.bytes -= segment.size
        return segment

    def _can_fit(self, size: int) -> bool:
        """Return True if `size` bytes fit once all evictable holders are evicted."""
        floor = self._floor(self.holders.unevictable_floor(self._marks.next_offset))
        remaining_bytes = self.bytes
        for segment in self._segments.all[:-1]:
            if segment.end > floor:
                break
            remaining_bytes -= segment.size
        return remaining_bytes + size <= self._settings.bytes_max

    def _note_removed(self, removed: list[Segment]) -> None:
        if removed:
            self._queue.removed_segments += self._compressor.defer_removal(removed)
            self._marks.start_offset = removed[-1].end

    # --- compaction and compression

    @property
    def is_rearranging(self) -> bool:
        """True while a compression or a compaction runs."""
        return self._compressor.is_running or self.planner.is_running

    def take_compaction(self) -> Compaction | None:
        """Return the next compaction into a snapshot; None if there is none, or one is running."""
        seen_us, synced = self._clock.poll(), self._marks.synced
        return self.planner.take_compaction(
            self._segments, seen_us=seen_us, readable=synced, held_bytes=self.bytes
        )

    def take_compression(self) -> SegmentCompression | None:
        """Return the compression of the next sealed segment; None if there is none. Raises OSError."""
        return self._compressor.take(self._marks.synced)

    def finish_compression(self, compression: SegmentCompression, *, retry: bool) -> None:
        """Finish a compression whose steps and `close` have run. `retry`: it failed, and may be retried."""
        removed, saved_bytes = self._compressor.finish(compression, retry=retry)
        self.bytes -= saved_bytes
        if removed is not None:
            self._queue.removed_segments.append(removed)
