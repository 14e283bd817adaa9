"""The log on disk: one partition's frames, numbered, chained and written together.

Synchronous and deterministic. An append only buffers; `take_commit` returns the disk's work, for a thread
that may wait for the disk, and `finish_commit` then advances `written` and `synced`. Everything else happens
on the one thread that owns the log. The first failure stops the log: from then on it only reads, until it is
recovered in place (`recover_in_place`, `resume`) or opened again.

The log consists of parts: the marks, the commit queue, the appender, the group commits, capacity and
retention. A recovery in place replaces those that hold files or positions in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.disk import Disk
from delta_prop_broker.log import refusals
from delta_prop_broker.log.capacity import Capacity
from delta_prop_broker.log.data_directory import DataDirectory
from delta_prop_broker.log.directory import LogDirectory, Times
from delta_prop_broker.log.retention import Retention
from delta_prop_broker.log.statistics import DurableLogStatistics
from delta_prop_broker.log.stored_batches import Tail
from delta_prop_broker.log.writing import Commit, CommitQueue, GroupCommits, LogAppender, LogMarks
from delta_prop_broker.log_clock import Clock, LogClock
from delta_prop_broker.recovery.checkpoints import Checkpoints, Position
from delta_prop_broker.recovery.recovery import RecoveryReport, RecoveryResult
from delta_prop_broker.retention.compaction import Compaction
from delta_prop_broker.retention.holders import Holders
from delta_prop_broker.retention.segment_compression import SegmentCompression
from delta_prop_broker.retention.snapshot import Snapshot, sort_key
from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.frames import FrameLocation
from delta_prop_broker.segments.identity import Randomness
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_broker.segments.reserve import Reserve
from delta_prop_broker.segments.sendfile import SendfilePool, SendfileReader
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.spec import ACK_LEVEL_SHIFT, HEADER_BYTES
from delta_prop_wire.stamp import DEFAULT_LOG, LogName, unpack_stamp

if TYPE_CHECKING:
    from delta_prop_broker.log.settings import LogSettings


_DURABLE = int(AckLevel.DURABLE)


class DurableLog:
    """A `Log` in a directory, with group commits.

    `failure`: the error that stopped the log; None while it works. `segments`: its files; a recovery in place
    replaces them. `commit_queue`: what waits for the next commit. `sendfile_pool`: creates
    readers of full frames, as the files hold them. `Log` describes the methods without a docstring.
    """

    ack_level = AckLevel.DURABLE

    def __init__(
        self, directory: LogDirectory, recovered: RecoveryResult, *, settings: LogSettings, clock: Clock
    ) -> None:
        """Use `open`."""
        disk, segments = directory.disk, recovered.segments
        start, end, read_only = recovered.start, recovered.next_offset, not directory.is_writable
        times = directory.read_times(recovered.report.notes)
        times.set_ages(segments.all, times.seen_us)
        holders = Holders()
        planner = SnapshotPlanner(disk, directory.path, settings=settings, holders=holders)
        snapshot_us = planner.open(recovered.identity.log_id, start=start, end=end, read_only=read_only)
        latest = max((segment.latest_time for segment in segments.all), default=0)
        latest = max(latest, times.time_us, snapshot_us)
        self.settings = settings
        self.clock = LogClock(clock, seen_us=times.seen_us, time_us=latest, jump=times.jump)
        self.failure: Exception | None = None
        self.segments = segments
        self.commit_queue = CommitQueue(directory.data.space)
        self._directory = directory
        self._marks = marks = LogMarks(settings.read_level)
        marks.restart(start, end, recovered.synced)
        self._retention = Retention(
            disk, segments, planner, holders,
            settings=settings, clock=self.clock, marks=marks, queue=self.commit_queue,
        )  # fmt: skip
        self._capacity = Capacity(settings, directory.data.space, self.commit_queue, self._retention)
        tail = Tail(end, bytes_max=settings.tail_bytes_max, open_logs=directory.data.open_logs)
        self.sendfile_pool = SendfilePool(disk, segments, marks)
        self._appender, self._commits = self._create_writers(recovered, tail)

    def _create_writers(self, recovered: RecoveryResult, tail: Tail) -> tuple[LogAppender, GroupCommits]:
        segments, marks, queue = recovered.segments, self._marks, self.commit_queue
        appender = LogAppender(
            segments, tail, self._retention,
            settings=self.settings, clock=self.clock, marks=marks, queue=queue, name=self._directory.name,
            chain_crc=recovered.chain_crc or 0,
        )  # fmt: skip
        commits = GroupCommits(
            self._directory.disk, segments, tail, recovered.recovery_point,
            settings=self.settings, marks=marks, queue=queue,
        )  # fmt: skip
        return appender, commits

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        settings: LogSettings,
        randomness: Randomness,
        clock: Clock,
        read_only: bool = False,
    ) -> tuple[DurableLog, RecoveryReport]:
        """Open the default log in a data directory, or create it there, and lock the directory meanwhile.

        Recovers it if it was not closed. A read-only log takes no lock, changes nothing, reads no clock,
        draws nothing, and shows only rows known to be synced. Raises LogBusy, LogCorrupted, FormatUnknown,
        FormatOutdated, UsageError, OSError
        (DiskFull if there is no space even after the reserve was released).
        """
        data = DataDirectory.open(
            disk, reserve_bytes=settings.reserve_bytes, clock=clock, read_only=read_only
        )
        try:
            log, report = cls.open_in(
                data, DIRECTORY, DEFAULT_LOG, settings=settings, randomness=randomness, clock=clock
            )
        except BaseException:
            data.close()
            raise
        log._directory.owns_data = True
        return log, report

    @classmethod
    def open_in(
        cls,
        data: DataDirectory,
        path: str,
        name: LogName,
        *,
        settings: LogSettings,
        randomness: Randomness,
        clock: Clock,
    ) -> tuple[DurableLog, RecoveryReport]:
        """Open one of several logs in an open data directory, which the caller closes after them.

        Raises as `open` does, but for LogBusy.
        """
        directory, recovered = LogDirectory.open(data, path, name, settings, randomness)
        try:
            return cls(directory, recovered, settings=settings, clock=clock), recovered.report
        except BaseException:
            directory.close()
            raise

    def recover_in_place(self) -> RecoveryResult:
        """Recover the directory after a failure; `resume` then adopts the result.

        For a thread: does not change this log, which holds its lock throughout. Raises OSError, after which
        the caller may retry; LogCorrupted, e.g. if rows that were synced are missing; FormatUnknown.
        """
        assert self.failure is not None, "the log has not failed: recover only a failed log"
        return self._directory.recover(self._marks.synced)

    def resume(self, recovered: RecoveryResult) -> None:
        """Adopt the result of `recover_in_place`: offsets, segments and epoch, as when a log is opened.

        Holders stay. Readers continue at their offsets, unless these are beyond `next_offset`.
        """
        self.times().set_ages(recovered.segments.all, self.clock.seen_us)
        self.segments.close()
        self._directory.resume(recovered)
        self._marks.restart(recovered.start, recovered.next_offset, recovered.synced)
        self._capacity.space.forget()
        self._retention.resume(recovered.segments)
        tail = Tail(
            recovered.next_offset,
            bytes_max=self.settings.tail_bytes_max,
            open_logs=self._directory.data.open_logs,
        )
        self.sendfile_pool.resume(recovered.segments)
        self._appender, self._commits = self._create_writers(recovered, tail)
        self.segments, self.failure = recovered.segments, None

    def raise_openings(self, openings: int) -> None:
        """Raise the number of openings to at least `openings`; it is on stable storage when this returns.

        For a thread, while the log has not failed. Raises OSError.
        """
        self._directory.raise_openings(openings)

    def close(self) -> None:
        """Commit the remaining batches, mark the log as closed, and release the directory.

        No commit may be under way. Raises OSError; the log is closed then, too.
        """
        assert not self._commits.is_running, "a commit is under way: wait for it"
        try:
            if self._can_write:
                commit = self.take_commit(sync=True)
                if commit is not None:
                    commit.run()
                    self.finish_commit(commit)
                preallocation.truncate_last(self.segments.last)
                self._directory.write_clean(self.times(), synced=self.synced, start=self.start_offset)
        except OSError as error:
            self.fail(error)
            raise
        finally:
            self.commit_queue.clear()
            self.segments.close()
            self._directory.close()

    @property
    def _can_write(self) -> bool:
        """True if the log is open for writing and works."""
        return self.failure is None and self._directory.is_writable

    # --- identity and marks

    @property
    def log_id(self) -> bytes:
        return self._directory.identity.log_id

    @property
    def epoch(self) -> int:
        return self._directory.identity.epoch

    @property
    def openings(self) -> int:
        """Number of openings for writing since the log was created, recoveries in place included."""
        return self._directory.identity.openings

    @property
    def recoveries(self) -> int:
        """Number of recoveries in place."""
        return self._directory.recoveries

    def epoch_end(self, epoch: int) -> int | None:
        return self._directory.identity.epoch_end(epoch)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints that fit this log, newest first. Only one thread at a time writes a checkpoint."""
        return self._directory.checkpoints

    @property
    def reserve(self) -> Reserve:
        """Disk space for writes that must succeed on a full disk."""
        return self._directory.reserve

    @property
    def default_level(self) -> AckLevel:
        return self.settings.ack_level

    @property
    def is_accepting(self) -> bool:
        """False while `unwritten_bytes_max` is half used; True after a failure, when appends are refused."""
        queue, bytes_max = self.commit_queue, self.settings.unwritten_bytes_max
        return not queue.unwritten_bytes or queue.space.unwritten_bytes * 2 < bytes_max

    @property
    def name(self) -> LogName:
        """The stream and partition that the stamps name."""
        return self._directory.name

    @property
    def start_offset(self) -> int:
        return self._marks.start_offset

    @property
    def next_offset(self) -> int:
        return self._marks.next_offset

    @property
    def written(self) -> int:
        """The offset (exclusive) up to which rows are written."""
        return self._marks.written

    @property
    def synced(self) -> int:
        """The offset (exclusive) up to which rows are on stable storage."""
        return self._marks.synced

    @property
    def high_watermark(self) -> int:
        return self._marks.high_watermark

    def offset_at_level(self, level: AckLevel) -> int:
        marks = self._marks
        if level is AckLevel.MEMORY:
            return marks.next_offset
        return marks.written if level is AckLevel.LOGGED else marks.synced

    @property
    def needed_from(self) -> int | None:
        """The offset from which a start would now replay the log; segments from there on stay."""
        return self._marks.needed_from

    @needed_from.setter
    def needed_from(self, offset: int | None) -> None:
        self._marks.needed_from = offset

    # --- appends

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        if not self._directory.is_writable:
            raise UsageError("the log is open read-only, or closed: open it for writing")
        size, level = batch.size, batch.attributes >> ACK_LEVEL_SHIFT & 3
        # The level of a forwarded batch counts only at the service where it entered.
        refusal = refusals.level_refusal(batch) if level > _DURABLE and source is not Source.REPLICA else None
        if refusal is None and (self.failure is not None or not self._capacity.has(size)):
            refusal = self._refusal(size)
        if refusal is not None:
            self._capacity.refused_count += 1
            raise refusal
        return self._appender.append(batch, lamport, source, known_ids)

    def make_capacity_for(self, batches: Sequence[Batch]) -> bool:
        size, level = batches[0].size, batches[0].attributes >> ACK_LEVEL_SHIFT & 3
        if len(batches) > 1:
            size = sum([batch.size for batch in batches])
            level = max([batch.attributes >> ACK_LEVEL_SHIFT & 3 for batch in batches])
        if not self._directory.is_writable or level > _DURABLE or self.failure is not None:
            return False
        capacity = self._capacity
        return capacity.has(size) or (size <= capacity.batch_bytes_max and capacity.refusal(size) is None)

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        return self._appender.append_run(batches, lamport, source)

    def refusal(self, *batches: Batch) -> Refused | None:
        too_high = next((batch for batch in batches if batch.ack_level > self.ack_level), None)
        if too_high is not None:
            return refusals.level_refusal(too_high)
        return self._refusal(sum(batch.size for batch in batches))

    def capacity_refusal(self, count: int, size: int) -> Refused | None:
        return None if size > self._capacity.batch_bytes_max else self._refusal(size)

    def _refusal(self, size: int) -> Refused | None:
        if self.failure is not None:
            return refusals.log_stopped(self.failure)
        return self._capacity.refusal(size)

    def shortage(self) -> Refused | None:
        failure = self.failure
        return self._capacity.shortage(None if failure is None else refusals.log_stopped(failure))

    def poll_capacity(self) -> None:
        if self._can_write:
            self._capacity.poll()

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that were appended and are not on disk yet."""
        return self.commit_queue.unwritten_bytes

    @property
    def free_bytes(self) -> int:
        """Free space of the disk, as far as known."""
        return self._capacity.space.bytes

    @property
    def active_segment_start(self) -> int:
        """The first offset of the active segment; `next_offset` while that segment is empty."""
        return self._appender.active_segment_start

    def position(self) -> Position:
        """Return the end of the log now, for a checkpoint; usable once `synced` has reached it."""
        return self._appender.position()

    def roll(self) -> bool:
        """Seal the last segment with the next commit if it is older than `segment_s_max`; return True if so.

        So rows can be compacted and removed even if no more are appended.
        """
        return self._can_write and self._appender.roll()

    # --- commits

    def request_sync(self) -> None:
        self.commit_queue.wants_sync = True

    @property
    def cacheable_bytes(self) -> int | None:
        """Bytes that a commit would copy into the page cache; None if it would do more, or nothing."""
        return self._commits.cacheable_bytes

    def take_commit(self, *, sync: bool = False) -> Commit | None:
        """Return the next commit. `sync`: it syncs all rows.

        Returns None if there is no work, if a commit is running, or if the log cannot be written to.
        """
        if self.failure is not None or not self._directory.is_writable:
            return None
        return self._commits.take(sync=sync)

    def finish_commit(self, commit: Commit) -> None:
        """Advance `written` and `synced`, once `run` of the commit has returned."""
        self._commits.finish(commit)

    def write_to_cache(self, bytes_max: int) -> bool:
        """Copy the pending bytes, if up to `bytes_max`, into the page cache now, instead of a commit.

        Returns False if they are more, if only a commit can write them, or if nothing is pending. Raises
        OSError: then call `fail`.
        """
        return self.failure is None and self._commits.write_to_cache(bytes_max)

    def fail(self, error: Exception) -> None:
        """Stop the log after `run` of a commit raised; from then on it only reads, until it is recovered.

        If the recovery finds corruption, the log stops for good. A failed sync may have dropped rows from the
        page cache that were written and not synced, so they are hidden until they have been read back.
        """
        self._marks.fall_back()
        self.commit_queue.clear()
        self.failure = error if isinstance(error, DeltaPropError) else self.failure or error
        self._commits.drop_running()

    @property
    def committed_frames(self) -> int:
        """Number of frames that were written since this object was created."""
        return self.commit_queue.committed_frames

    @property
    def committed_bytes(self) -> int:
        """Number of bytes that were written since this object was created."""
        return self.commit_queue.committed_bytes

    # --- reads

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        return self._read(offset, self._marks.high_watermark, rows_max, bytes_max)

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        return self._read(offset, self._marks.next_offset, rows_max, bytes_max)

    def _read(self, offset: int, end: int, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        tail, marks = self._appender.tail, self._marks
        if offset < marks.start_offset:
            raise refusals.offset_too_old(offset, marks.start_offset)
        if offset >= end:
            return []
        if offset >= tail.start_offset:
            return tail.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)
        # After a failure `written` is lower: the rows from there on may be lost.
        end = min(end, marks.written, tail.start_offset)
        return self.segments.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)

    def frames(self, offset: int = 0) -> Iterator[FrameLocation]:
        """Yield the frames from an offset (or the log's start) up to `high_watermark`, and check each again.

        Raises LogCorrupted at a frame that cannot be read; `inspect` continues after such a frame.
        """
        return self.segments.scan(max(offset, self.start_offset), self.high_watermark)

    def find(self, origin: int, counter: int) -> int | None:
        def fetch(offset: int) -> LoggedBatch | None:
            batches = self.read_appended(offset, rows_max=1, bytes_max=1)
            return batches[0] if batches else None

        return self.segments.find(origin, counter, fetch)

    def offset_at(self, time_us: int) -> int:
        """Return the first offset appended at that time (us since 1970) or later, else `high_watermark`."""
        return self.segments.offset_at(time_us, self.high_watermark)

    def age_s(self, offset: int) -> float | None:
        """Return the seconds since the row at an offset was appended, by log time.

        0 from `high_watermark` on; None where the time cannot be read at present.
        """
        if offset >= self.high_watermark:
            return 0.0
        time = self.append_time(offset)
        return None if time is None else max(self.clock.peek() - time, 0) / 1e6

    def append_time(self, offset: int) -> int | None:
        """Return the append time (us since 1970) of a row below `high_watermark`; None if it cannot be read.

        For a removed row, returns the time of the oldest stored one. Reads a few frame heads, and no bodies.
        """
        tail = self._appender.tail
        if offset >= tail.start_offset:
            (logged,) = tail.read(offset, self.next_offset, rows_max=1, bytes_max=1)
            header, stamp = logged.head[:HEADER_BYTES], logged.head[HEADER_BYTES:]
            return unpack_stamp(stamp, header).append_time
        try:
            return self.segments.append_time(max(offset, self.start_offset))
        except (LogCorrupted, OSError):
            return None

    def sendfile_reader(self) -> SendfileReader:
        return self.sendfile_pool.reader()

    # --- retention

    def used_share(self, offset: int) -> float:
        return self._retention.used_share(offset)

    def retention_share(self, offset: int) -> float:
        return self._retention.retention_share(offset)

    def hold(self, holder: str, needed: Callable[[], int], evict: Callable[[], None] | None = None) -> None:
        self._retention.holders.hold(holder, needed, evict)

    def release(self, holder: str) -> None:
        self._retention.holders.release(holder)

    def alter_retention(self, settings: LogSettings) -> None:
        """Retain rows and tombstones as long, and as many, as in these settings from now on."""
        self.settings = replace(
            self.settings,
            retention_s=settings.retention_s,
            retention_bytes=settings.retention_bytes,
            tombstone_retention_s=settings.tombstone_retention_s,
        )
        self._retention.alter(self.settings)

    def truncate(self, before: int) -> None:
        """Remove the rows below `before`, as far as whole segments go and no holder needs them.

        They are removed in the background: first a snapshot of them is made, if the log is compacted. A crash
        may interrupt it; then call it again. Raises UsageError for an offset that is not durable yet.
        """
        if not 0 <= before <= self.synced:
            raise UsageError(f"offset {before}: give 0 to {self.synced}, the end of the durable rows")
        if before == self.next_offset and self._can_write:
            self._appender.seal()
        self._retention.truncate(before)

    def begin_erase(self, namespace: str, vector_id: str) -> None:
        """Let no snapshot from now on have a tombstone of this vector, until `end_erase`."""
        self._retention.planner.requested.erased.add(sort_key(namespace, vector_id))

    def end_erase(self, namespace: str, vector_id: str) -> None:
        """Let snapshots have tombstones of this vector again."""
        self._retention.planner.requested.erased.discard(sort_key(namespace, vector_id))

    def replace_rows(self) -> int:
        """Seal the last segment, and have a snapshot replace all rows that there are now.

        That happens in the background, once they are synced and no holder needs them. Return their end.
        """
        if self._can_write and self.active_segment_start < self.next_offset:
            self._appender.seal()
        self._retention.truncate(self.next_offset)
        return self.next_offset

    def has_files_of(self, end: int) -> bool:
        """Return True if a segment or snapshot may have rows below `end`. For a thread. Raises OSError."""
        return self._directory.has_files_of(end)

    @property
    def tombstones_below(self) -> int:
        """The newest snapshot has no vectors that were deleted for good below this offset."""
        return self._retention.planner.present.tombstones_below

    def retain(self) -> int:
        """Remove old segments, by size and age, unless a holder needs them; return their number.

        Readers lose them at once; the next commit removes the files.
        """
        return self._retention.retain() if self._can_write else 0

    def take_compaction(self) -> Compaction | None:
        """Return the next compaction into a snapshot; None if there is none, or one is running.

        A background thread runs its steps, then `finish_compaction` takes it, even if it failed.
        """
        return self._retention.take_compaction() if self._can_write else None

    def finish_compaction(self, compaction: Compaction, *, made: bool) -> None:
        """Finish a compaction; `made`: its snapshot is on stable storage, so its rows may be removed."""
        self._retention.planner.finish(compaction, made=made)

    def take_compression(self) -> SegmentCompression | None:
        """Return the compression of the next sealed segment, by the settings; None if there is none.

        A thread runs its steps, then `finish_compression` takes it, even if it failed. Raises OSError.
        """
        return self._retention.take_compression() if self._can_write else None

    def finish_compression(self, compression: SegmentCompression, *, retry: bool = False) -> None:
        """Finish a compression whose steps and `close` have run. `retry`: it failed, and may be retried."""
        self._retention.finish_compression(compression, retry=retry)

    @property
    def is_rearranging(self) -> bool:
        """True while a compression or a compaction runs: no recovery may start before it has ended."""
        return self._retention.is_rearranging

    def snapshot(self) -> Snapshot | None:
        """Open the newest snapshot and return it, for the caller to close; None if there is none.

        It holds each vector's state at its offset, and the log has all rows from there on. Reads a few
        blocks from the disk, so not for the event loop. Raises LogCorrupted, OSError.
        """
        return self._retention.planner.newest(start=self.start_offset, end=self.next_offset)

    def may_have_snapshot(self) -> bool:
        return self._retention.planner.may_have_snapshot(self.start_offset)

    # --- small files and statistics

    def write_small(self, write: Callable[[], None]) -> None:
        self.reserve.use(write)

    def mark_time(self) -> None:
        """Do nothing: here a stamp holds the time of each batch."""

    def times(self) -> Times:
        """Return the times for `write_times`, as of the last read of the clock."""
        return Times.of(self.clock, self.segments)

    def write_times(self, times: Times) -> None:
        """Write the file of times. For a thread, while the log has not failed. Raises OSError."""
        self._directory.write_times(times)

    def statistics(self) -> DurableLogStatistics:
        """Return a snapshot of the statistics."""
        retention, planner, queue = self._retention, self._retention.planner, self.commit_queue
        snapshot = planner.present
        return DurableLogStatistics(
            start_offset=self.start_offset, next_offset=self.next_offset, written=self.written,
            synced=self.synced, high_watermark=self.high_watermark, segments=len(self.segments.all),
            compressed_segments=sum(segment.compressed for segment in self.segments.all),
            bytes=retention.bytes, bytes_max=self.settings.bytes_max,
            unwritten_bytes=queue.unwritten_bytes, tail_bytes=self._appender.tail.bytes,
            commits=queue.commits, syncs_skipped=queue.syncs_skipped, removed_segments=queue.removed_count,
            indexes_rebuilt=self.segments.indexes_rebuilt, refused=self._capacity.refused_count,
            held_by=retention.holders.slowest(), reopened=self.recoveries,
            reserve_bytes=self.reserve.bytes, snapshot_offset=snapshot.offset, snapshot_rows=snapshot.rows,
            snapshot_bytes=snapshot.bytes, snapshots_made=planner.snapshots_made,
            compacting=planner.is_running, time_us=self.clock.time_us,
            clock_ahead_s=self.clock.ahead_us / 1e6, clock_jumps=self.clock.jumps,
        )  # fmt: skip
