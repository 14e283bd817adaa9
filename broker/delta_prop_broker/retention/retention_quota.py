"""Capacity of a log on disk: removes the oldest segments, if they are sealed and no longer needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.retention.holders import Holders
    from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
    from delta_prop_broker.segments.segment import Segment, Segments


class RetentionQuota:
    """Counts the bytes of the stored segments, and removes the oldest. `bytes`: the size of the log.

    Parameters of its methods: `readable`, the offset from which the log itself needs its segments; `end`, the
    next offset of the log.
    """

    def __init__(
        self, settings: LogSettings, segments: Segments, holders: Holders, planner: SnapshotPlanner
    ) -> None:
        self.bytes = sum(segment.size for segment in segments.all)
        self._settings = settings
        self._segments = segments
        self._holders = holders
        self._planner = planner
        self._removed: list[Segment] = []

    def take_removed(self) -> list[Segment]:
        """Return the segments that were removed since the last call, oldest first."""
        removed, self._removed = self._removed, []
        return removed

    def held_bytes(self, offset: int) -> int:
        """Return the bytes of all segments from the one that holds `offset` on."""
        return sum(segment.size for segment in self._segments.segments_from(offset))

    def retention_share(self, offset: int, seen_us: int) -> float:
        """Return how close the segment of `offset` is to its removal; from 1 on it may be removed."""
        settings, last = self._settings, self._segments.last
        if last is None or offset >= last.base:
            return 0.0
        bytes_max = settings.compact_from_bytes if settings.compact else settings.retention_bytes
        age_s = (seen_us - self._segments.segment_at(offset).seen_last_us) / 1e6
        return max(self.held_bytes(offset) / bytes_max, age_s / settings.delta_retention_s)

    def ensure_capacity(self, size: int, *, readable: int, end: int) -> bool:
        """Free capacity for `size` bytes below the hard limit; return True if they fit."""
        if self._has_capacity(size):
            return True
        self._remove_oldest(size, readable, end)
        if not self._has_capacity(size) and self._can_fit(size, readable, end):
            while not self._has_capacity(size) and self._holders.evict_slowest():
                self._remove_oldest(size, readable, end)
        return self._has_capacity(size)

    def retain(self, seen_us: int, *, readable: int, end: int) -> None:
        """Remove segments beyond `retention_bytes` or older than `retention_s`, unless a holder needs them.

        With compaction, removes all segments that a snapshot covers, as they were due when it was made.
        """
        floor = self._floor(self._holders.floor(end), readable)
        while self._can_remove(floor):
            too_old = seen_us - self._segments.all[0].seen_last_us > self._settings.retention_s * 1e6
            in_bounds = not too_old and self.bytes <= self._settings.retention_bytes
            if in_bounds and not self._settings.compact:
                return
            self._remove()

    def _floor(self, holders_floor: int, readable: int) -> int:
        return min(holders_floor, self._planner.floor(readable))

    def _has_capacity(self, size: int) -> bool:
        return self.bytes + size <= self._settings.bytes_max

    def _remove_oldest(self, size: int, readable: int, end: int) -> None:
        floor = self._floor(self._holders.floor(end), readable)
        while not self._has_capacity(size) and self._can_remove(floor):
            self._remove()

    def _can_remove(self, floor: int) -> bool:
        """Return True if the oldest segment may be removed: no reader needs it, and it is not the last one.

        The file name of the last segment holds the log's offset, so a commit creates the next segment first.
        """
        segments = self._segments.all
        return len(segments) > 1 and segments[0].end <= floor

    def _remove(self) -> None:
        segment = self._segments.drop_first()
        self.bytes -= segment.size
        self._removed.append(segment)

    def _can_fit(self, size: int, readable: int, end: int) -> bool:
        """Return True if `size` bytes fit once all evictable holders are evicted."""
        floor = self._floor(self._holders.unevictable_floor(end), readable)
        remaining_bytes = self.bytes
        for segment in self._segments.all[:-1]:
            if segment.end > floor:
                break
            remaining_bytes -= segment.size
        return remaining_bytes + size <= self._settings.bytes_max
