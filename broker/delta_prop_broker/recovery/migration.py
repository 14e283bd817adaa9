"""Migrates a data directory to the present format, 2, in which each control row begins with its type.

The stamp of a frame holds the checksums of its body and of the stamp before it. So every frame from the
first one with control rows on gets a new stamp; the segments before it are not touched. Checkpoints,
snapshots and indexes name stamps, so they change too. All else stays: offsets, Lamport numbers, ids and
the checksums of bodies that producers sent.

1. The log is recovered as at any opening, and closed. Then it has no torn tail, and all of it is synced.
2. Each changed file is written beside the old one, under a temporary name, and synced.
3. The format file is replaced: it names the present format, and marks the migration as unfinished.
4. The new files are renamed to the old ones, and the format file is replaced by one without that mark.

A crash before step 3 leaves the old directory, with files that the next opening removes. A later crash
leaves an unfinished directory, which no version opens until the migration is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.corruption import BadFrame, InsufficientDiskSpace, LogBusy, LogCorrupted
from delta_prop_broker.recovery.checkpoints import Checkpoint, CheckpointCorrupted
from delta_prop_broker.recovery.recovery import RecoveryResult, recover
from delta_prop_broker.retention.snapshot import (
    Snapshot,
    SnapshotWriter,
    open_snapshot,
    snapshot_offsets,
    snapshot_path,
)
from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.compressed import compress_frame
from delta_prop_broker.segments.frames import FrameLocation, FrameScanner
from delta_prop_broker.segments.identity import FORMAT, OLDEST_FORMAT, Randomness, read_format, write_format
from delta_prop_broker.segments.paths import DIRECTORY, LOCK_PATH, TEMPORARY
from delta_prop_broker.segments.segment import Segment, corruption_error, index_frame
from delta_prop_broker.segments.small_file import write_all, write_temporary
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_wire.compression import Compression
from delta_prop_wire.encode import with_control_types
from delta_prop_wire.errors import UsageError
from delta_prop_wire.header import pack_header, unpack_header
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES
from delta_prop_wire.stamp import pack_stamp, stamp_crc

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File

STEP_BYTES = 1024 * 1024
SYNC_BYTES = 16 * 1024 * 1024
"""Maximum bytes written between two syncs."""
SPARE_BYTES = 1024 * 1024
"""Space for small files, and for the overhead of each file on the disk."""


class MigrationPlan(NamedTuple):
    """The extent of a migration; sizes in bytes.

    `start_offset`: of the first frame with control rows; None if there is none: then no segment is rewritten.
    """

    start_offset: int | None
    segments: int
    segments_rewritten: int
    bytes_needed: int
    bytes_free: int


@dataclass(slots=True)
class MigrationReport:
    """The outcome of a migration.

    `control_batches`: number of batches with control rows. `completed`: it completed an earlier migration
    that was interrupted.
    """

    from_format: int
    to_format: int = FORMAT
    segments_rewritten: int = 0
    bytes_written: int = 0
    control_batches: int = 0
    completed: bool = False


class MigrationCallbacks(NamedTuple):
    """Callbacks of a migration.

    `plan` is called before any file is written; `progress` with the bytes of frames that are done, and of all
    frames; `note` with the report of the recovery if the log was not closed cleanly.
    """

    plan: Callable[[MigrationPlan], object]
    progress: Callable[[int, int], object]
    note: Callable[[str], object]


def migrate(disk: Disk, *, randomness: Randomness, callbacks: MigrationCallbacks) -> MigrationReport:
    """Migrate a data directory to the present format; a directory that has it stays unchanged.

    Holds the lock of the directory throughout. Raises UsageError (no log there), LogBusy, LogCorrupted,
    CodecMissing, FormatUnknown, InsufficientDiskSpace, OSError. It can be run again after any of them.
    """
    current_format = read_format(disk)
    if current_format is None:
        raise UsageError(f"{disk.name!r} is not a data directory: name the one that `serve --data DIR` made")
    try:
        lock = disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(error.strerror or str(error)) from None
    try:
        current_format = read_format(disk) or current_format
        report = MigrationReport(current_format.number)
        if current_format.number < FORMAT:
            _prepare(disk, report, randomness, callbacks)
        elif not current_format.unfinished:
            return report
        else:
            report.completed = True
        _mark_unfinished(disk, current_format.made_by)
        _rename_new_files(disk)
        write_format(disk, current_format.made_by)
    finally:
        lock.release()
    return report


def _prepare(
    disk: Disk, report: MigrationReport, randomness: Randomness, callbacks: MigrationCallbacks
) -> None:
    """Write all changed files beside the old ones, durably."""
    recovered = recover(disk, DIRECTORY, randomness=randomness, made_by="", oldest_format=OLDEST_FORMAT)
    try:
        if not recovered.report.clean:
            callbacks.note(str(recovered.report))
        _mark_closed(recovered)
        _Rewriter(disk, recovered, report, callbacks).run()
    finally:
        recovered.close()


def _mark_closed(recovered: RecoveryResult) -> None:
    """Mark the log as closed; the recovery has synced all of it."""
    assert recovered.recovery_point is not None
    preallocation.truncate_last(recovered.segments.last)
    recovered.recovery_point.write_clean(recovered.next_offset, recovered.start)


def _mark_unfinished(disk: Disk, made_by: str) -> None:
    """Replace the format file by one with the present format and the mark "unfinished".

    Writes the file even if an earlier run wrote it: the sync that makes it durable may have failed.
    """
    try:
        write_format(disk, made_by, unfinished=True)
    except OSError:
        current_format = read_format(disk)
        if current_format is not None and current_format.number < FORMAT:  # there was no rename
            _remove_temporary_files(disk)
        raise


def _remove_temporary_files(disk: Disk) -> None:
    """Remove the temporary files of a directory that stays the old one."""
    for name in disk.list(DIRECTORY):
        if name.endswith(TEMPORARY):
            with suppress(OSError):
                disk.remove(f"{DIRECTORY}/{name}")


def _rename_new_files(disk: Disk) -> None:
    """Rename each temporary file to the file that it replaces."""
    for name in disk.list(DIRECTORY):
        if name.endswith(TEMPORARY):
            path = f"{DIRECTORY}/{name}"
            disk.rename(path, path.removesuffix(TEMPORARY))
    disk.sync_directory(DIRECTORY)


class _Progress:
    """Reports the bytes of frames that are done."""

    def __init__(self, callbacks: MigrationCallbacks, total_bytes: int) -> None:
        self.done_bytes = 0
        self._callbacks = callbacks
        self._total_bytes = total_bytes

    def add(self, size: int) -> None:
        """Count a frame."""
        self.done_bytes += size
        self._callbacks.progress(self.done_bytes, self._total_bytes)

    def finish(self) -> None:
        """Report that all is done."""
        self._callbacks.progress(self._total_bytes, self._total_bytes)


class _Rewriter:
    """Writes the new files (step 2) of a log that was just recovered."""

    def __init__(
        self, disk: Disk, recovered: RecoveryResult, report: MigrationReport, callbacks: MigrationCallbacks
    ) -> None:
        self._disk = disk
        self._log_id = recovered.identity.log_id
        self._segments: Sequence[Segment] = tuple(recovered.segments.all)
        self._checkpoints: Sequence[Checkpoint] = tuple(recovered.checkpoints.stored)
        self._report = report
        self._callbacks = callbacks
        self._chain_crc: int | None = None  # checksum of the last new stamp
        self._old_chain_crc: int | None = None  # checksum of the last old stamp
        self._first_control_offset: int | None = None  # offset of the first frame with control rows
        # New checksum of the stamp before each offset at which there is a snapshot or checkpoint.
        self._chain_crcs: dict[int, int] = {}
        # Packed index of the segment that was active at each checkpoint, by the checkpoint's offset.
        self._indexes: dict[int, bytes] = {}
        self._progress = _Progress(callbacks, sum(segment.size for segment in self._segments))

    def run(self) -> None:
        """Write the new files; remove them if that fails."""
        changed = self._segments[self._count_unchanged() :]
        try:
            snapshots = self._select_changed(snapshot_offsets(self._disk.list(DIRECTORY)))
            self._check_disk_space(changed, snapshots)
            noted_offsets = {*snapshots, *(checkpoint.offset for checkpoint in self._checkpoints)}
            for segment in changed:
                self._rewrite(segment, noted_offsets)
            for offset in snapshots:
                self._rewrite_snapshot(offset)
            for checkpoint in self._checkpoints:
                self._rewrite_checkpoint(checkpoint)
            self._disk.sync_directory(DIRECTORY)
        except BaseException:
            _remove_temporary_files(self._disk)
            raise
        self._progress.finish()

    # --- planning

    def _count_unchanged(self) -> int:
        """Find the first frame with control rows; return the number of segments before its segment.

        Reads the frames, not the indexes, which are only hints.
        """
        for index, segment in enumerate(self._segments):
            crc_before, bytes_before = self._old_chain_crc, self._progress.done_bytes
            for frame in self._frames(segment):
                if frame.logged.batch.is_control:
                    self._first_control_offset = frame.logged.offset
                    self._old_chain_crc, self._progress.done_bytes = crc_before, bytes_before
                    return index
        return len(self._segments)

    def _select_changed(self, offsets: list[int]) -> list[int]:
        """Select the offsets after the first stamp that changes."""
        return [
            offset
            for offset in offsets
            if self._first_control_offset is not None and offset > self._first_control_offset
        ]

    def _check_disk_space(self, changed: Sequence[Segment], snapshots: Sequence[int]) -> None:
        paths = [snapshot_path(DIRECTORY, offset) for offset in snapshots]
        paths += [checkpoint.path for checkpoint in self._checkpoints]
        size = sum(segment.size for segment in changed) + sum(map(self._size, paths))
        needed = size + size // 8 + SPARE_BYTES  # a control row of 12 or more bytes grows by one
        free = self._disk.free_bytes()
        self._callbacks.plan(
            MigrationPlan(self._first_control_offset, len(self._segments), len(changed), needed, free)
        )
        if free < needed:
            raise InsufficientDiskSpace(needed, free)

    def _size(self, path: str) -> int:
        with closing(self._disk.open(path, read_only=True)) as file:
            return file.size()

    # --- segments

    def _frames(self, segment: Segment) -> Iterator[FrameLocation]:
        """Yield the old frames of a segment. Raises LogCorrupted."""
        file = self._disk.open(segment.path, read_only=True)
        try:
            scanner = FrameScanner(
                file, position=0, offset=segment.base, end=segment.size, previous_crc=self._old_chain_crc
            )
            for frame in scanner:
                yield frame
                self._old_chain_crc = scanner.crc
                self._progress.add(frame.size)
        except BadFrame as bad:
            raise corruption_error(segment, file, bad) from None
        finally:
            file.close()
        if scanner.offset != segment.end:
            raise LogCorrupted(segment.path, "the file ends early", offset=scanner.offset, end=segment.end)

    def _rewrite(self, segment: Segment, noted_offsets: set[int]) -> None:
        """Write a segment with types of control rows and new stamps, and its index if it is sealed."""
        index = SparseIndex(segment.base)
        with closing(self._disk.open(segment.path + TEMPORARY, create=True)) as file:
            file.truncate(0)
            self._write(file, self._rewrite_frames(segment, index, noted_offsets))
        self._note(segment.end, index, noted_offsets)
        index.compression_tried = segment.compression_tried
        if segment is not self._segments[-1]:
            write_temporary(self._disk, segment.index_path, [index.pack()])
        self._report.segments_rewritten += 1

    def _rewrite_frames(
        self, segment: Segment, index: SparseIndex, noted_offsets: set[int]
    ) -> Iterator[bytes]:
        for frame in self._frames(segment):
            self._note(frame.logged.offset, index, noted_offsets)
            raw, stored = self._convert(frame)
            index_frame(index, stored)
            yield raw

    def _write(self, file: File, parts: Iterator[bytes]) -> None:
        position = synced = buffered_bytes = 0
        buffered: list[bytes] = []
        for part in parts:
            buffered.append(part)
            buffered_bytes += len(part)
            if buffered_bytes >= STEP_BYTES:
                position, buffered_bytes, buffered = write_all(file, position, buffered), 0, []
                if position - synced >= SYNC_BYTES:
                    file.sync()
                    synced = position
        position = write_all(file, position, buffered) if buffered else position
        file.sync()
        self._report.bytes_written += position

    def _convert(self, frame: FrameLocation) -> tuple[bytes, FrameLocation]:
        """Add types to a frame's control rows, and stamp it anew; return its bytes and its location."""
        batch, header = frame.logged.batch, frame.logged.head[:HEADER_BYTES]
        if batch.is_control:
            batch = with_control_types(batch)
            fields = unpack_header(header)
            header = pack_header(fields.type, fields.flags, fields.sequence, STAMP_BYTES + len(batch.raw))
            self._report.control_batches += 1
        previous = frame.stamp.previous_crc if self._chain_crc is None else self._chain_crc
        stamp = replace(frame.stamp, previous_crc=previous, body_crc=batch.crc)
        packed = pack_stamp(stamp, header)
        stamp.crc = self._chain_crc = stamp_crc(packed)
        raw, codec = None, 0
        if frame.codec:
            raw = compress_frame(header + packed, batch.body, Compression(frame.codec))
            codec = 0 if raw is None else frame.codec
        raw = raw or header + packed + bytes(batch.body)
        return raw, frame._replace(size=len(raw), stamp=stamp, codec=codec)

    def _note(self, offset: int, index: SparseIndex, noted_offsets: set[int]) -> None:
        """Store the new checksum, and the index, for a snapshot or checkpoint at this offset."""
        if offset not in noted_offsets or self._chain_crc is None:
            return
        self._chain_crcs[offset] = self._chain_crc
        bases = {checkpoint.index_base for checkpoint in self._checkpoints if checkpoint.offset == offset}
        if index.base in bases and index.size:
            partial_index = index.copy_until(offset, index.size, self._chain_crc, index.latest_time)
            self._indexes[offset] = partial_index.pack()

    # --- snapshots and checkpoints

    def _rewrite_snapshot(self, offset: int) -> None:
        if offset not in self._chain_crcs:
            path = snapshot_path(DIRECTORY, offset)
            raise LogCorrupted(path, "no frame of the log begins at its offset", offset=offset)
        with closing(open_snapshot(self._disk, DIRECTORY, offset)) as old:
            self._write_snapshot(old, self._chain_crcs[offset])

    def _write_snapshot(self, old: Snapshot, chain_crc: int) -> None:
        facts = old.facts
        writer = SnapshotWriter(self._disk, DIRECTORY, replace(facts, chain_crc=chain_crc))
        try:
            for logged in old.frames():
                writer.append(logged.batch)
        except BaseException:
            writer.discard()
            raise
        self._report.bytes_written += writer.bytes
        writer.seal(
            old.watermarks, alive=facts.alive, out_of_order=facts.out_of_order, unfolded=facts.unfolded
        )

    def _rewrite_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint with the new stamps; skip one that cannot be read."""
        chain_crc = self._chain_crcs.get(checkpoint.offset)
        if chain_crc is None:  # all frames of the checkpoint lie before the first control row
            return
        try:
            parts = checkpoint.repack(self._log_id, chain_crc, self._indexes.get(checkpoint.offset))
        except CheckpointCorrupted as error:
            self._callbacks.note(str(error))
            return
        self._report.bytes_written += write_temporary(self._disk, checkpoint.path, parts)
