"""The state that all parts of the log on disk share: identity, offsets, files.

Each part is one activity of the log: `appending`, `committing`, `reading`, and `retaining`, which also frees
capacity. `durable.py` opens and closes the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.free_space import FreeSpace
from delta_prop_broker.log.statistics import DurableLogStatistics
from delta_prop_broker.log.tail import Tail
from delta_prop_broker.log_clock import LogClock
from delta_prop_broker.recovery.checkpoints import Position
from delta_prop_broker.retention.holders import Holders
from delta_prop_broker.retention.retention_quota import RetentionQuota
from delta_prop_broker.retention.segment_compression import SegmentCompressor
from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
from delta_prop_broker.segments.active_segment import ActiveSegment
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_broker.segments.sendfile import SendfilePool
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, Lock
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log_clock import Clock
    from delta_prop_broker.recovery.recovery_result import RecoveryResult
    from delta_prop_broker.recovery.times import Times
    from delta_prop_broker.segments.commit import Commit
    from delta_prop_broker.segments.reserve import Reserve
    from delta_prop_broker.segments.segment import Segment


class LogState:
    """The state of a log on disk that all its parts share."""

    ack_level = AckLevel.DURABLE

    def __init__(
        self,
        disk: Disk,
        recovered: RecoveryResult,
        *,
        settings: LogSettings,
        random_bytes: Callable[[int], bytes],
        clock: Clock,
        times: Times,
        lock: Lock | None,
        reserve: Reserve,
    ) -> None:
        """Use `DurableLog.open`."""
        self.settings = settings
        self.reserve = reserve
        self._batch_bytes_max = settings.bytes_max - settings.segment_bytes_max
        self._disk = disk
        self._random_bytes = random_bytes
        self._lock = lock
        self._holders = Holders()
        self.committed_frames = self.committed_bytes = 0
        """Numbers of frames and bytes that were written since this object was created."""
        self.needed_from: int | None = None
        """The offset from which a start would now replay the log; segments from there on stay."""
        self._closed = False
        self._refused_size: int | None = None
        """The size that was last refused for lack of capacity; None once capacity was available."""
        self._commits = self._syncs_skipped = self._removed_count = self._refused_count = self._recoveries = 0
        self._planner = SnapshotPlanner(disk, DIRECTORY, settings=settings, holders=self._holders)
        start, end, read_only = recovered.start, recovered.next_offset, recovered.recovery_point is None
        self._planner.open(recovered.identity.log_id, start=start, end=end, read_only=read_only)
        latest = max((segment.latest_time for segment in recovered.segments.all), default=0)
        latest = max(latest, times.time_us, self._planner.time_us)
        self.clock = LogClock(clock, seen_us=times.seen_us, time_us=latest, jump=times.jump)
        self._free = FreeSpace(disk, lambda: self.clock.seen_us, read_only=read_only)
        self._adopt_state(recovered, times)
        self.sendfile_pool = SendfilePool(disk, lambda: (self._segments, self._start, self.high_watermark))
        """Creates readers of full frames, as the files hold them."""

    def _adopt_state(self, recovered: RecoveryResult, times: Times) -> None:
        """Continue from the files, with nothing pending. `times`: the ages of the segments."""
        for segment in recovered.segments.all:
            # The last append to a segment that the times lack may be as recent as this moment.
            segment.seen_last_us = times.ended_us.get(segment.base, self.clock.seen_us)
            segment.seen_first_us = segment.seen_last_us
            if times.growing is not None and times.growing[0] == segment.base:
                segment.seen_first_us = times.growing[1]
        self.next_offset = recovered.next_offset
        self.written = self.synced = recovered.synced
        self.failure: Exception | None = None
        self.checkpoints = recovered.checkpoints
        """The checkpoints that fit this log, newest first. Only one thread at a time writes a checkpoint."""
        self._identity = recovered.identity
        self._segments = recovered.segments
        self._chain_crc = recovered.chain_crc or 0
        self._start = recovered.start
        self._recovery_point = recovered.recovery_point
        self._tail = Tail(recovered.next_offset, bytes_max=self.settings.tail_bytes_max)
        self._quota = RetentionQuota(self.settings, self._segments, self._holders, self._planner)
        self._compressor = SegmentCompressor(
            self._disk, DIRECTORY, self._segments, self._quota, self.settings
        )
        self._active_segment = ActiveSegment(self._segments, self.settings)
        self._pending_sync = False
        self._unwritten_bytes = 0
        self._running_commit: Commit | None = None
        self._segments_to_remove: list[Segment] = []

    @property
    def log_id(self) -> bytes:
        """16 random bytes, drawn when the log was created."""
        return self._identity.log_id

    @property
    def epoch(self) -> int:
        """The log epoch; it grows at each opening after an unclean close, since a tail may be lost."""
        return self._identity.epoch

    @property
    def openings(self) -> int:
        """Number of openings for writing since the log was created, recoveries in place included."""
        return self._identity.openings

    def epoch_end(self, epoch: int) -> int | None:
        """Return the end offset (exclusive) of a past epoch; None for the present one or a later one."""
        return self._identity.epoch_end(epoch)

    @property
    def is_accepting(self) -> bool:
        """False while `unwritten_bytes_max` is half used; True after a failure, when appends are refused."""
        return self.failure is not None or self._unwritten_bytes * 2 < self.settings.unwritten_bytes_max

    @property
    def start_offset(self) -> int:
        """The oldest stored offset."""
        return self._start

    @property
    def high_watermark(self) -> int:
        """The offset up to which readers may read: `synced` or `written`, by `read_level`."""
        return self.synced if self.settings.read_level is AckLevel.DURABLE else self.written

    def offset_at_level(self, level: AckLevel) -> int:
        """Return the offset (exclusive) up to which rows are stored at this ack level."""
        if level is AckLevel.MEMORY:
            return self.next_offset
        return self.written if level is AckLevel.LOGGED else self.synced

    @property
    def active_segment_start(self) -> int:
        """The first offset of the active segment; `next_offset` while that segment is empty."""
        last = self._segments.last
        return self.next_offset if last is None or last.index is None or not last.size else last.index.base

    def position(self) -> Position:
        """Return the end of the log now, for a checkpoint; usable once `synced` has reached it."""
        last = self._segments.last
        if last is None or last.index is None or not last.size:
            return Position(self.next_offset, self._chain_crc)
        return Position(self.next_offset, self._chain_crc, last.index, last.size, last.latest_time)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that were appended and are not on disk yet."""
        return self._unwritten_bytes

    @property
    def free_bytes(self) -> int:
        """Free space of the disk, as far as known."""
        return self._free.bytes

    def statistics(self) -> DurableLogStatistics:
        """Return a snapshot of the statistics."""
        quota, planner, segments = self._quota, self._planner, self._segments
        return DurableLogStatistics(
            start_offset=self.start_offset, next_offset=self.next_offset, written=self.written,
            synced=self.synced, high_watermark=self.high_watermark, segments=len(segments.all),
            compressed_segments=sum(segment.compressed for segment in segments.all), bytes=quota.bytes,
            bytes_max=self.settings.bytes_max, unwritten_bytes=self._unwritten_bytes,
            tail_bytes=self._tail.bytes, commits=self._commits, syncs_skipped=self._syncs_skipped,
            removed_segments=self._removed_count, indexes_rebuilt=segments.indexes_rebuilt,
            refused=self._refused_count, held_by=self._holders.slowest(), reopened=self._recoveries,
            reserve_bytes=self.reserve.bytes, snapshot_offset=planner.offset, snapshot_rows=planner.rows,
            snapshot_bytes=planner.bytes, snapshots_made=planner.snapshots_made,
            compacting=planner.is_running, time_us=self.clock.time_us,
            clock_ahead_s=self.clock.ahead_us / 1e6, clock_jumps=self.clock.jumps,
        )  # fmt: skip
