"""Writing to the log on disk: appends, in memory, and the commits that write and sync them together.

Each batch gets its offsets and its stamp at once, and waits in the commit queue. The thread of the log takes
and finishes a commit; a thread that may wait for the disk runs it. The first error ends the commit and stops
the log: only a recovery finds out which bytes of a failed write or sync are on the disk.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delta_prop_broker.recovery.checkpoints import Position
from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.segment import Segment, Segments, write_index
from delta_prop_broker.segments.small_file import write_all
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.spec import ACK_LEVEL_SHIFT, Attribute
from delta_prop_wire.stamp import LogName, log_run, pack_logged_head

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.disk_space import DiskSpace
    from delta_prop_broker.log.retention import Retention
    from delta_prop_broker.log.settings import LogSettings, ReadLevel
    from delta_prop_broker.log.stored_batches import Tail
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.recovery.recovery_point import RecoveryPointFile


class LogMarks:
    """Offsets in ascending order: `start_offset`, `synced`, `written`, `next_offset`.

    `synced`, `written` and `high_watermark` are exclusive, and only the methods move them. The appender moves
    `next_offset`, and retention `start_offset`.
    """

    __slots__ = (
        "high_watermark",
        "needed_from",
        "next_offset",
        "reads_synced",
        "start_offset",
        "synced",
        "written",
    )

    def __init__(self, read_level: ReadLevel) -> None:
        self.reads_synced = read_level is AckLevel.DURABLE
        """True if readers see only synced rows; they see written ones otherwise."""
        self.start_offset = self.next_offset = self.written = self.synced = 0
        self.high_watermark = 0
        """The offset up to which readers may read."""
        self.needed_from: int | None = None
        """The offset from which a start would now replay the log; None if that is not known."""

    def restart(self, start: int, end: int, synced: int) -> None:
        """Continue from a recovery that found rows from `start` to `end`. `needed_from` stays."""
        self.start_offset, self.next_offset = start, end
        self.written = self.synced = self.high_watermark = synced

    def advance(self, written: int, synced: int) -> None:
        """Note that a commit has written and synced rows up to these offsets."""
        assert self.synced <= synced <= written <= self.next_offset
        assert self.written <= written
        self.written, self.synced = written, synced
        self.high_watermark = synced if self.reads_synced else written

    def fall_back(self) -> None:
        """Hide rows that are written and not synced: a failed sync may have dropped them."""
        self.written = self.high_watermark = self.synced

    @property
    def removable_end(self) -> int:
        """The offset below which the log itself no longer needs its rows."""
        needed_from = self.needed_from
        return self.high_watermark if needed_from is None else min(self.high_watermark, needed_from)


_SMALL_BYTES = 2048  # buffers are joined if their mean size is at most this
_JOINED_PARTS = 512  # maximum number of buffers that are joined into one
_UNJOINED_MAX = 4  # to join up to this many buffers costs more than it saves


@dataclass(slots=True)
class SegmentWrite:
    """Buffers to write to one segment, from position `start` on."""

    segment: Segment
    start: int
    parts: list[Buffer] = field(default_factory=list)
    end: int = 0  # where the last buffer ends in the file
    seals_segment: bool = False  # nothing follows in this segment


class Commit:
    """One group commit. Once `run` returns, rows are written up to `end` and synced up to `synced`."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        writes: list[SegmentWrite],
        removed: list[Segment],
        recovery_point: RecoveryPointFile,
        start: int,
        end: int,
        synced: int,
        sync: bool,
        polls_free_space: bool,
        preallocate_to: int,
    ) -> None:
        """`start`: the log's start offset without the segments in `removed`. `sync`: sync all written files.

        `preallocate_to`: maximum size of a file with the zeros after its frames; 0: write no zeros.
        """
        self.writes = writes
        self.removed = removed
        self.end = end
        self.synced = synced
        self.free_bytes: int | None = None
        """Free space of the disk after the commit; None if the commit did not poll it."""
        self._polls_free_space = polls_free_space
        self._preallocate_to = preallocate_to
        self._disk = disk
        self._directory = directory
        self._recovery_point = recovery_point
        self._start = start
        self._sync = sync

    def run(self) -> None:
        """Write and sync, write the recovery point, and remove old segments, in this order.

        Raises OSError; a commit is never run twice.
        """
        for write in self.writes:
            self._write(write)
            self._sync_written(write)
        self.conclude()

    @property
    def cacheable_bytes(self) -> int | None:
        """Bytes that `write_to_cache` copies; None if only `run` can do this commit."""
        if len(self.writes) != 1 or self.removed:
            return None
        (write,) = self.writes
        is_plain = write.segment.file is not None and not write.seals_segment
        return write.end - write.start if is_plain else None

    def write_to_cache(self) -> None:
        """Do the first third of `run`: what only copies into the page cache. Raises OSError.

        Then `sync` waits for the disk, and `conclude` does the rest, which again only copies. So a thread
        has to wait for the interpreter once.
        """
        self._write(self.writes[0])

    def sync(self) -> None:
        """Sync what was written, if the commit syncs. Raises OSError."""
        self._sync_written(self.writes[0])

    def conclude(self) -> None:
        """Write the recovery point, and remove old segments. Raises OSError."""
        if self.synced > self._recovery_point.newest.synced or self.removed:
            point = replace(self._recovery_point.newest, synced=self.synced, start=self._start, clean=False)
            if self.removed:
                # Both slots of the file must have the new start before segments are removed: if one is torn,
                # recovery uses the other.
                self._recovery_point.write_durably(point)
            else:
                self._recovery_point.write(point)
        for segment in self.removed:
            self._remove(segment.path)
            self._remove(segment.index_path)
        if self._polls_free_space:
            self.free_bytes = self._disk.free_bytes()

    def finish(self, segments: Segments) -> tuple[int, int]:
        """Make written frames readable and close sealed segments; return the numbers of frames and bytes.

        For the log's thread, once `run` has returned.
        """
        frames = size = 0
        for write in self.writes:
            segment = write.segment
            segment.readable = write.end
            size += write.end - write.start
            frames += len(write.parts) // 2  # each frame has a head and a body
            if write.seals_segment:
                if segment.file is not None:
                    segment.file.close()
                    segment.file = None
                if segment.index is not None:
                    segments.cache_index(segment, segment.index)
        return frames, size

    def _write(self, write: SegmentWrite) -> None:
        segment = write.segment
        file = segment.file
        if file is None:
            file = segment.file = self._create(segment)
        if write.parts:
            _write_parts(file, write)

    def _sync_written(self, write: SegmentWrite) -> None:
        segment, file = write.segment, write.segment.file
        assert file is not None, "the segment has no file: write it first"
        if write.seals_segment:
            preallocation.truncate(file, segment, write.end)
        elif self._sync and write.parts:
            preallocation.fill(file, segment, write.start, write.end, end_max=self._preallocate_to)
        if write.seals_segment or self._sync:
            file.sync()
        if write.seals_segment and segment.index is not None:
            write_index(self._disk, segment, segment.index)

    def _create(self, segment: Segment) -> File:
        file = self._disk.open(segment.path, create=True)
        if file.size():
            file.close()
            raise FileExistsError(errno.EEXIST, "the file of a new segment already exists", segment.path)
        self._disk.sync_directory(self._directory)
        return file

    def _remove(self, path: str) -> None:
        try:
            self._disk.remove(path)
        except FileNotFoundError:
            return


def _write_parts(file: File, write: SegmentWrite) -> None:
    size = write.end - write.start
    write_all(file, write.start, _join_small_parts(write.parts, size), size)


def all_have_files(writes: Iterable[SegmentWrite]) -> bool:
    """Return True if no write needs a new file, whose creation would wait for the disk.

    Then no write seals a segment either: the rows after a sealed segment go to a new one, which has no file
    yet.
    """
    return all(write.segment.file is not None for write in writes)


def _join_small_parts(parts: list[Buffer], size: int) -> list[Buffer]:
    """Join small buffers into fewer, larger ones: to write one more buffer costs more than to copy 2 KB."""
    if len(parts) <= _UNJOINED_MAX or len(parts) * _SMALL_BYTES < size:
        return parts
    return [b"".join(parts[first : first + _JOINED_PARTS]) for first in range(0, len(parts), _JOINED_PARTS)]


class CommitQueue:
    """The work of the next commit. Appends add to `writes`, retention to `removed_segments`.

    `unwritten_bytes`: bytes that were appended and are not on disk yet, those of a running commit included;
    they are part of those of `space`.
    `wants_sync`: the next commit syncs all rows. `commits`, `syncs_skipped`, `committed_frames`,
    `committed_bytes` and `removed_count` (of segments) count since the log was opened.
    """

    def __init__(self, space: DiskSpace) -> None:
        self.space = space
        self.writes: list[SegmentWrite] = []
        """The writes of the next commit, one per segment."""
        self.removed_segments: list[Segment] = []
        self.unwritten_bytes = 0
        self.wants_sync = False
        self.commits = self.syncs_skipped = self.removed_count = 0
        self.committed_frames = self.committed_bytes = 0

    def write_of(self, segment: Segment) -> SegmentWrite:
        """Return the write of the last segment, `segment`; begin one if there is none."""
        if not self.writes or self.writes[-1].segment is not segment:
            self.writes.append(SegmentWrite(segment, segment.size, end=segment.size))
        return self.writes[-1]

    def note_appended(self, size: int) -> None:
        """Count bytes that wait."""
        self.unwritten_bytes += size
        self.space.unwritten_bytes += size

    def note_written(self, frames: int, size: int, free_bytes: int | None) -> None:
        """Count a commit that wrote these frames. `free_bytes`: as polled after it; None if it was not."""
        self.commits += 1
        self.unwritten_bytes -= size
        self.space.note_written(size, free_bytes)
        self.committed_bytes += size
        self.committed_frames += frames

    def clear(self) -> None:
        """Drop what waits: the log has failed, or is closed. The counts stay."""
        self.writes, self.removed_segments = [], []
        self.space.unwritten_bytes -= self.unwritten_bytes
        self.unwritten_bytes, self.wants_sync = 0, False


class GroupCommits:
    """Runs one commit at a time; `DurableLog` describes the methods.

    `recovery_point`: None if the log is read-only, so that nothing commits.
    """

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        tail: Tail,
        recovery_point: RecoveryPointFile | None,
        *,
        settings: LogSettings,
        marks: LogMarks,
        queue: CommitQueue,
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._tail = tail
        self._recovery_point = recovery_point
        self._settings = settings
        self._marks = marks
        self._queue = queue
        self._running: Commit | None = None

    @property
    def is_running(self) -> bool:
        """True from `take` to `finish`."""
        return self._running is not None

    @property
    def cacheable_bytes(self) -> int | None:
        """Bytes that a commit would copy into the page cache; None if it would do more, or nothing."""
        queue = self._queue
        writes = queue.writes
        if self._running is not None or queue.wants_sync or queue.removed_segments or not writes:
            return None
        # A single write is checked without `all_have_files`, whose generator takes longer.
        if self._marks.reads_synced or writes[-1].segment.file is None:
            return None
        return queue.unwritten_bytes if len(writes) == 1 or all_have_files(writes) else None

    def take(self, *, sync: bool) -> Commit | None:
        """Return the next commit; None if there is no work, or one is running. `sync`: it syncs all rows."""
        queue, marks = self._queue, self._marks
        if self._running is not None or self._recovery_point is None:
            return None
        sync = sync or queue.wants_sync or marks.reads_synced
        if not (queue.writes or queue.removed_segments or (sync and marks.synced < marks.written)):
            return None
        if sync and not queue.writes and marks.synced < marks.written and self._segments.last is not None:
            queue.write_of(self._segments.last)
        sealed_end = max((write.segment.end for write in queue.writes if write.seals_segment), default=0)
        free_bytes = queue.space.bytes - queue.space.reserve.missing
        self._running = Commit(
            self._disk, self._segments.directory, writes=queue.writes, removed=queue.removed_segments,
            recovery_point=self._recovery_point, start=marks.start_offset, end=marks.next_offset,
            synced=marks.next_offset if sync else max(marks.synced, sealed_end),
            sync=sync and bool(queue.writes),
            polls_free_space=queue.space.claim_poll() or bool(queue.removed_segments),
            preallocate_to=preallocation.file_size_max(free_bytes, self._settings),
        )  # fmt: skip
        queue.syncs_skipped += not sync
        queue.writes, queue.removed_segments, queue.wants_sync = [], [], False
        return self._running

    def finish(self, commit: Commit) -> None:
        """Advance the marks, once `run` of the commit has returned."""
        assert commit is self._running, "another commit is running: finish that one"
        self._running = None
        self._queue.removed_count += len(commit.removed)
        frames, size = commit.finish(self._segments)
        self._note_written(commit.end, commit.synced, frames, size, commit.free_bytes)

    def write_to_cache(self, bytes_max: int) -> bool:
        """Copy the pending bytes, if up to `bytes_max`, into the page cache now, instead of a commit.

        Returns False if they are more, if only a commit can write them, or if nothing is pending. Raises
        OSError.
        """
        size, point, queue, marks = self.cacheable_bytes, self._recovery_point, self._queue, self._marks
        if size is None or size > bytes_max or len(queue.writes) > 1:
            return False
        if point is None or marks.synced > point.newest.synced:
            return False
        (write,), queue.writes = queue.writes, []
        queue.syncs_skipped += 1
        segment = write.segment
        assert segment.file is not None, "the segment has no file: run a commit, which creates it"
        _write_parts(segment.file, write)
        segment.readable = write.end
        free_bytes = self._disk.free_bytes() if queue.space.claim_poll() else None
        self._note_written(
            marks.next_offset, marks.synced, len(write.parts) // 2, write.end - write.start, free_bytes
        )
        return True

    def _note_written(self, end: int, synced: int, frames: int, size: int, free_bytes: int | None) -> None:
        self._marks.advance(end, synced)
        self._queue.note_written(frames, size, free_bytes)
        if self._tail.is_full:
            self._tail.trim(end)

    def drop_running(self) -> None:
        """Drop the running commit: it has failed, and the log has stopped."""
        self._running = None


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

    def takes(self, size: int, seen_us: int) -> bool:
        """Return True if `write_for` would return the write of the last segment, which has frames."""
        last = self._segments.last
        return last is not None and 0 < last.size <= self._bytes_max - size and not self.is_old(last, seen_us)

    def is_old(self, segment: Segment, seen_us: int) -> bool:
        """Return True if the segment has been active for `segment_s_max`."""
        return seen_us - segment.seen_first_us >= self._age_us_max

    def begin(self, *, offset: int, seen_us: int) -> Segment:
        """Seal the last segment with the next commit, and begin another one after it."""
        last = self._segments.last
        if last is not None:
            self._queue.write_of(last).seals_segment = True
        last = Segment(self._segments.directory, offset)
        last.index = SparseIndex(offset)
        last.seen_first_us = last.seen_last_us = seen_us
        self._segments.add(last)
        self._queue.write_of(last)
        return last


_DURABLE = int(AckLevel.DURABLE)
_RARE = Attribute.CONTROL | Attribute.COUNTER_GAPS


class LogAppender:
    """Appends to the active segment and to the tail; the caller has checked that there is capacity."""

    def __init__(
        self,
        segments: Segments,
        tail: Tail,
        retention: Retention,
        *,
        settings: LogSettings,
        clock: LogClock,
        marks: LogMarks,
        queue: CommitQueue,
        name: LogName,
        chain_crc: int,
    ) -> None:
        """`chain_crc`: the checksum of the last stamp, which the next one names; 0 if there is none."""
        self._segments = segments
        self.tail = tail
        self._retention = retention
        self._clock = clock
        self._marks = marks
        self._queue = queue
        self._active_segment = ActiveSegment(segments, queue, settings)
        self._name = name
        self._chain_crc = chain_crc

    def append(self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds) -> LoggedBatch:
        """Append a batch: assign its offsets."""
        logged = self._append_one(batch, lamport, source, known_ids, self._clock.read())
        self.tail.append(logged)
        return logged

    def append_run(self, batches: Sequence[Batch], lamport: int, source: Source) -> list[LoggedBatch]:
        """Append these batches with one append time."""
        now = self._clock.read()
        appended = self._append_together(batches, lamport, source, now)
        if appended is not None:
            self.tail.extend(appended)
            return appended
        appended = []
        for batch in batches:
            appended.append(self._append_one(batch, lamport, source, KnownIds.NONE, now))
            lamport += batch.count
        self.tail.extend(appended)
        return appended

    def _append_together(
        self, batches: Sequence[Batch], lamport: int, source: Source, now: int
    ) -> list[LoggedBatch] | None:
        """Append batches in one step; None if the active segment does not take them."""
        marks, segment, previous_crc = self._marks, self._segments.last, self._chain_crc
        size = attributes = 0
        for batch in batches:
            size += batch.size
            attributes |= batch.attributes
        if segment is None or attributes & _RARE or not self._active_segment.takes(size, self._clock.seen_us):
            return None
        index = segment.index
        assert index is not None
        run = log_run(
            [*batches], marks.next_offset, lamport=lamport, source=source, time=now,
            previous_crc=previous_crc, synced_offset=marks.synced, index=index.next_entry, log=self._name,
        )  # fmt: skip
        write = self._queue.write_of(segment)
        write.parts += run.parts
        write.end += size
        index.add_run(run, time=now, previous_crc=previous_crc)
        self._note_placed(segment, size, end=index.end, crc=run.crc)
        self._note_level(attributes, source)
        return run.batches

    def _append_one(
        self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds, now: int
    ) -> LoggedBatch:
        marks, size, previous = self._marks, batch.size, self._chain_crc
        offset, seen_us = marks.next_offset, self._clock.seen_us
        head, crc = pack_logged_head(
            batch, offset, lamport=lamport, source=source, known_ids=known_ids,
            time=now, previous_crc=previous, synced_offset=marks.synced, log=self._name,
        )  # fmt: skip
        logged = LoggedBatch(batch, offset, lamport, source, head, known_ids=known_ids)
        segment = (write := self._active_segment.write_for(size, offset=offset, seen_us=seen_us)).segment
        write.parts += (head, batch.raw)
        write.end += size
        assert segment.index is not None
        segment.index.add(batch, offset=offset, size=size, time=now, previous_crc=previous, crc=crc)
        self._note_placed(segment, size, end=offset + batch.count, crc=crc)
        self._note_level(batch.attributes, source)
        return logged

    def _note_placed(self, segment: Segment, size: int, *, end: int, crc: int) -> None:
        """Move all that moves with frames of `size` bytes, which are in the index of the active segment."""
        assert segment.index is not None
        segment.size += size
        segment.end = self._marks.next_offset = end
        segment.last_crc = self._chain_crc = crc
        segment.latest_time, segment.seen_last_us = segment.index.latest_time, self._clock.seen_us
        self._retention.bytes += size
        self._queue.note_appended(size)

    def _note_level(self, attributes: int, source: Source) -> None:
        # also for a replica, since a forwarder does not send a batch again
        if attributes >> ACK_LEVEL_SHIFT & 3 >= _DURABLE or source is Source.REPLICA:
            self._queue.wants_sync = True

    def seal(self) -> None:
        """Seal the last segment with the next commit, if it has rows."""
        last = self._segments.last
        if last is not None and last.size:
            self._active_segment.begin(offset=self._marks.next_offset, seen_us=self._clock.poll())

    def roll(self) -> bool:
        """Seal the last segment with the next commit if it is old; return True if so."""
        last = self._segments.last
        if last is None or not last.size:
            return False
        seen_us = self._clock.poll()
        if is_old := self._active_segment.is_old(last, seen_us):
            self._active_segment.begin(offset=self._marks.next_offset, seen_us=seen_us)
        return is_old

    @property
    def active_segment_start(self) -> int:
        """The first offset of the active segment; `next_offset` while that segment is empty."""
        last = self._segments.last
        if last is None or last.index is None or not last.size:
            return self._marks.next_offset
        return last.base

    def position(self) -> Position:
        """Return the end of the log now, for a checkpoint; usable once `synced` has reached it."""
        last, end = self._segments.last, self._marks.next_offset
        if last is None or last.index is None or not last.size:
            return Position(end, self._chain_crc)
        return Position(end, self._chain_crc, last.index, last.size, last.latest_time)
