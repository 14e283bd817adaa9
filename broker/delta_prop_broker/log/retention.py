"""Retention of a log on disk: holders, removal of old segments, compaction and compression.

Sealed segments are removed, the oldest first. Readers lose them at once; the next commit removes the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.retention.retention_quota import RetentionQuota
from delta_prop_broker.retention.segment_compression import SegmentCompressor
from delta_prop_broker.segments.paths import DIRECTORY

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.marks import LogMarks
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.retention.compaction import Compaction
    from delta_prop_broker.retention.holders import Holders
    from delta_prop_broker.retention.segment_compression import SegmentCompression
    from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
    from delta_prop_broker.segments.commit_queue import CommitQueue
    from delta_prop_broker.segments.segment import Segments
    from delta_prop_wire.errors import Refused


class Retention:
    """Removes and rewrites the oldest segments. `quota`: the size of the log.

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
        self._segments = segments
        self.quota = RetentionQuota(self._settings, segments, self.holders, self.planner)
        self._compressor = SegmentCompressor(self._disk, DIRECTORY, segments, self.quota, self._settings)

    # --- shares and removal

    def used_share(self, offset: int) -> float:
        """Return the share of `bytes_max` that the segments from that of `offset` on use."""
        if offset >= self._marks.next_offset:
            return 0.0
        return self.quota.held_bytes(offset) / self._settings.bytes_max

    def retention_share(self, offset: int) -> float:
        """Return how close the segment of `offset` is to its removal, by size and age, ignoring holders."""
        return self.quota.retention_share(offset, self._clock.seen_us)

    def retain(self) -> int:
        """Remove old segments, by size and age, unless a holder needs them; return their number."""
        marks = self._marks
        self.quota.retain(self._clock.poll(), readable=marks.removable_end, end=marks.next_offset)
        return self._note_removed()

    def refusal(self, size: int) -> Refused | None:
        """Return the error if `size` bytes do not fit below `bytes_max`, even without old segments."""
        marks, quota = self._marks, self.quota
        fits = quota.ensure_capacity(size, readable=marks.removable_end, end=marks.next_offset)
        self._note_removed()
        if fits:
            return None
        holder = self.holders.slowest()
        why = "" if holder else self.planner.wait_reason(marks.high_watermark)
        offsets = marks.start_offset, marks.next_offset
        return refusals.log_full(
            quota.bytes, self._settings.bytes_max, offsets=offsets, holder=holder, reason=why
        )

    def _note_removed(self) -> int:
        removed = self.quota.take_removed()
        if removed:
            self._queue.removed_segments += self._compressor.defer_removal(removed)
            self._marks.start_offset = removed[-1].end
        return len(removed)

    # --- compaction and compression

    @property
    def is_rearranging(self) -> bool:
        """True while a compression or a compaction runs."""
        return self._compressor.is_running or self.planner.is_running

    def take_compaction(self) -> Compaction | None:
        """Return the next compaction into a snapshot; None if there is none, or one is running."""
        held_bytes, seen_us = self.quota.bytes, self._clock.poll()
        return self.planner.take_compaction(
            self._segments, seen_us=seen_us, readable=self._marks.synced, held_bytes=held_bytes
        )

    def take_compression(self) -> SegmentCompression | None:
        """Return the compression of the next sealed segment; None if there is none. Raises OSError."""
        return self._compressor.take(self._marks.synced)

    def finish_compression(self, compression: SegmentCompression, *, retry: bool) -> None:
        """Finish a compression whose steps and `close` have run. `retry`: it failed, and may be retried."""
        removed = self._compressor.finish(compression, retry=retry)
        if removed is not None:
            self._queue.removed_segments.append(removed)
