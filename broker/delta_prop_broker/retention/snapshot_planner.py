"""The snapshot of a log, and the planning of the next one.

With compaction, rows leave the log only once a snapshot on stable storage covers them. A snapshot is due when
the old part of the log is at least half as large as the previous snapshot, or when capacity becomes short.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.retention.compaction import Compaction, SegmentRange, remove_older
from delta_prop_broker.retention.snapshot import (
    PresentSnapshot,
    Snapshot,
    newest_snapshot,
    present_snapshot,
    snapshot_offsets,
)
from delta_prop_broker.retention.tombstones import TombstoneLimit
from delta_prop_broker.segments.segment import Segment, Segments

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.retention.holders import Holders


@dataclass(slots=True)
class RequestedRemoval:
    """Requests to remove segments that end up to `before`, and tombstones of the sort keys `erased`."""

    before: int = 0
    erased: set[str] = field(default_factory=set)


class SnapshotPlanner:
    """Finds the snapshot of one log, `present`, and plans the next one.

    `corruption`: the error of a snapshot that
    cannot be used; then no row is removed, and no snapshot made.
    """

    def __init__(self, disk: Disk, directory: str, *, settings: LogSettings, holders: Holders) -> None:
        self.present = PresentSnapshot()
        self.snapshots_made = 0
        self.corruption: LogCorrupted | None = None
        self.is_running = False
        self.requested = RequestedRemoval()
        self._disk = disk
        self._directory = directory
        self._settings = settings
        self._holders = holders
        self._log_id = b""
        self._newest_offset = 0  # the highest offset in a snapshot's file name at the opening
        self._read_only = False

    def alter(self, settings: LogSettings) -> None:
        """Plan by these settings from now on; `compact` is as before."""
        self._settings = settings

    def open(self, log_id: bytes, *, start: int, end: int, read_only: bool) -> int:
        """Find the snapshot of a log with offsets `start` to `end`, if the log is compacted.

        Return the log time of the last append that it covers; 0 without a snapshot. Raises OSError.
        """
        self._log_id, self._read_only = log_id, read_only
        self._newest_offset = max(snapshot_offsets(self._disk.list(self._directory)), default=0)
        if not self._settings.compact:
            return 0
        try:
            snapshot = self.newest(start=start, end=end)
        except LogCorrupted as corruption:
            self.corruption = corruption
            return 0
        if snapshot is None:
            return 0
        self.present = present_snapshot(snapshot)
        snapshot.close()
        if not read_only:
            with suppress(OSError):
                remove_older(self._disk, self._directory, snapshot.offset)
        return snapshot.time_us

    def newest(self, *, start: int, end: int) -> Snapshot | None:
        """Open the newest snapshot, if a log with offsets `start` to `end` continues from it.

        None if there is no snapshot, or if the log lacks the rows after it. Raises LogCorrupted, OSError.
        """
        snapshot = newest_snapshot(self._disk, self._directory, self._log_id)
        if snapshot is not None and not start <= snapshot.offset <= end:
            snapshot.close()
            if snapshot.offset > end and not self._read_only:  # a writer may have appended rows since
                raise LogCorrupted(snapshot.path, f"the log ends at offset {end}, before this snapshot")
            return None
        return snapshot

    def may_have_snapshot(self, start: int) -> bool:
        """Return True if there may be a snapshot for a log that begins at `start`; reads no file."""
        return max(self.present.offset or 0, self._newest_offset) >= start

    def floor(self, readable: int) -> int:
        """Return the offset below which snapshots allow segments to be removed."""
        return min(readable, self.present.offset or 0) if self._settings.compact else readable

    def wait_reason(self, readable: int) -> str:
        """Return the reason why a full log removes no row, although no sink needs the oldest row."""
        if self.corruption is not None:
            return f"its snapshot cannot be used ({self.corruption.path}: {self.corruption.reason})"
        if self.floor(readable) < readable:
            return "a snapshot is being made of the oldest rows"
        return "the newest rows are not written yet"

    def is_due(self, segment: Segment, seen_us: int, held_bytes: int) -> bool:
        """Return True if a segment is to be truncated, too old for time travel, or the log too large."""
        settings = self._settings
        return (
            segment.end <= self.requested.before
            or seen_us - segment.seen_last_us > settings.delta_retention_s * 1e6
            or held_bytes > settings.compact_from_bytes
        )

    def take_compaction(
        self, segments: Segments, *, seen_us: int, readable: int, held_bytes: int
    ) -> Compaction | None:
        """Return the compaction to run now, then call `finish`; None if none is due, or one is running.

        `held_bytes`: of all segments. A compaction does not wait for holders that can be evicted, since the
        snapshot can replace their rows.
        """
        if not self._settings.compact or self.is_running or self.corruption is not None:
            return None
        present, floor = self.present, min(self._holders.unevictable_floor(readable), readable)
        ranges: list[SegmentRange] = []
        size, remaining_bytes = 0, held_bytes
        for segment in segments.all[:-1]:
            if segment.end > floor or not self.is_due(segment, seen_us, remaining_bytes):
                break
            remaining_bytes -= segment.size
            if present.offset is None or segment.base >= present.offset:
                ranges.append(SegmentRange(segment.path, segment.base, segment.end))
                size += segment.size
        is_short = held_bytes > (self._settings.compact_from_bytes + self._settings.bytes_max) // 2
        is_truncation = bool(ranges) and ranges[0].end <= self.requested.before
        if not ranges or (size * 2 < present.bytes and not is_short and not is_truncation):
            return None
        self.is_running = True
        return Compaction(
            self._disk,
            self._directory,
            log_id=self._log_id,
            segments=ranges,
            previous=present.offset,
            run_bytes_max=self._settings.compact_memory_bytes_max,
            free_bytes_min=self._settings.free_bytes_min // 2,
            tombstones=TombstoneLimit(
                seen_us,
                seen_us - self._settings.tombstone_retention_s * 1e6,
                frozenset(self.requested.erased),
            ),
        )

    def finish(self, compaction: Compaction, *, made: bool) -> None:
        """End a compaction; `made`: its snapshot is on stable storage."""
        self.is_running = False
        if made:
            self.present = compaction.made
            self.snapshots_made += 1
