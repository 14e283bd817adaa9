"""What of a log a snapshot covers, and when the next snapshot is due.

With compaction nothing leaves the log before a snapshot on stable storage holds what it said. One is due
when so much of the log is old that writing a snapshot costs no more than a few times what it lets go, or
when room becomes short.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import LogDamaged
from delta_prop_broker.log.files.snapshot import newest_snapshot, snapshot_offsets
from delta_prop_broker.log.retention.compaction import Compaction, Part, remove_older

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.segment import Segment, Segments
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_broker.log.retention.holders import Holders
    from delta_prop_broker.log.settings import LogSettings


class Cover:
    """The snapshot of one log. `offset` and what follows are None and 0 where there is none.

    `damage`: why the snapshot there is cannot be used; then nothing is let go, and no other is made.
    """

    def __init__(self, disk: Disk, directory: str, *, settings: LogSettings, holders: Holders) -> None:
        self.offset: int | None = None
        self.bytes = self.rows = self.made = 0
        self.time_us = 0
        """Log time of the last append that the snapshot found at the opening holds."""
        self.damage: LogDamaged | None = None
        self.under_way = False
        self._disk = disk
        self._directory = directory
        self._settings = settings
        self._holders = holders
        self._log_id = b""
        self._named = 0  # the highest offset that a snapshot's name had at the opening
        self._read_only = False

    def open(self, log_id: bytes, *, start: int, end: int, read_only: bool) -> None:
        """Look what snapshot there is beside a log that reaches from `start` to `end`, where that counts.

        Raises OSError.
        """
        self._log_id, self._read_only = log_id, read_only
        self._named = max(snapshot_offsets(self._disk.list(self._directory)), default=0)
        if not self._settings.compact:
            return
        try:
            found = self.newest(start=start, end=end)
        except LogDamaged as damage:
            self.damage = damage
            return
        if found is not None:
            self.offset, self.bytes, self.rows = found.offset, found.bytes, found.rows
            self.time_us = found.time_us
            found.close()
            if not read_only:
                with suppress(OSError):
                    remove_older(self._disk, self._directory, found.offset)

    def newest(self, *, start: int, end: int) -> Snapshot | None:
        """The newest snapshot, open, from which a log from `start` to `end` goes on.

        None where there is none, or where the log does not hold what follows it. Raises LogDamaged, OSError.
        """
        found = newest_snapshot(self._disk, self._directory, self._log_id)
        if found is not None and not start <= found.offset <= end:
            found.close()
            if found.offset > end and not self._read_only:  # a writer may have gone on since
                raise LogDamaged(found.path, f"the log ends at offset {end}, before this snapshot")
            return None
        return found

    def may_have(self, start: int) -> bool:
        """Whether there may be a snapshot for a log that begins at `start`; without a look at the disk."""
        return max(self.offset or 0, self._named) >= start

    def floor(self, readable: int) -> int:
        """Below which offset segments may go, as far as snapshots are concerned."""
        return min(readable, self.offset or 0) if self._settings.compact else readable

    def waited_for(self, readable: int) -> str:
        """Why a full log lets nothing go that no sink needs."""
        if self.damage is not None:
            return f"its snapshot cannot be used ({self.damage.path}: {self.damage.reason})"
        if self.floor(readable) < readable:
            return "the oldest are being made into a snapshot"
        return "the newest are not written yet"

    def is_due(self, segment: Segment, seen_us: int, held_bytes: int) -> bool:
        """Whether a segment is older than the time-travel window, or the oldest of more than is kept."""
        settings = self._settings
        return (
            seen_us - segment.seen_last_us > settings.kept_s * 1e6 or held_bytes > settings.compact_from_bytes
        )

    def due(self, segments: Segments, *, seen_us: int, readable: int, held_bytes: int) -> Compaction | None:
        """The compaction to be run now, None where there is none; one at a time. Its end is told to `done`.

        `held_bytes`: of all segments. Who gives way is not waited for: when it does, a snapshot is there.
        """
        if not self._settings.compact or self.under_way or self.damage is not None:
            return None
        floor = min(self._holders.staying_floor(readable), readable)
        parts: list[Part] = []
        size, left = 0, held_bytes
        for segment in segments.all[:-1]:
            if segment.end > floor or not self.is_due(segment, seen_us, left):
                break
            left -= segment.size
            if self.offset is None or segment.base >= self.offset:
                parts.append(Part(segment.path, segment.base, segment.end))
                size += segment.size
        short = held_bytes > (self._settings.compact_from_bytes + self._settings.bytes_max) // 2
        if not parts or (size * 2 < self.bytes and not short):
            return None
        self.under_way = True
        return Compaction(
            self._disk,
            self._directory,
            log_id=self._log_id,
            parts=parts,
            previous=self.offset,
            run_bytes_max=self._settings.compact_memory_bytes_max,
            free_bytes_min=self._settings.free_bytes_min // 2,
        )

    def done(self, compaction: Compaction, *, made: bool) -> None:
        """It has ended; `made`: the snapshot is on stable storage."""
        self.under_way = False
        if made:
            self.offset, self.made = compaction.offset, self.made + 1
            self.bytes, self.rows = compaction.snapshot_bytes, compaction.snapshot_rows
