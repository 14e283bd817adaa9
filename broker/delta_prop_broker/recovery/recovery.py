"""Recovery of a data directory at its opening: the frames are authoritative, and all else must fit them.

A torn tail after all rows that are known to be synced is truncated and reported. Corruption before the end of
these rows raises an error that names the range, and then nothing is changed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.recovery.checkpoints import Checkpoint, CheckpointCorrupted, Checkpoints
from delta_prop_broker.recovery.recovery_point import (
    RecoveryPoint,
    RecoveryPointFile,
    open_recovery_point,
    read_recovery_point,
)
from delta_prop_broker.retention.snapshot import newest_snapshot
from delta_prop_broker.segments.compressed import PEEK_BYTES, require_codecs
from delta_prop_broker.segments.frames import CHUNK_BYTES, FrameScanner, heads_after, read_head
from delta_prop_broker.segments.identity import (
    FORMAT,
    Identity,
    Randomness,
    check_format,
    new_identity,
    read_identity,
    write_format,
    write_identity,
)
from delta_prop_broker.segments.paths import (
    DIRECTORY,
    FORMAT_PATH,
    IDENTITY,
    RECOVERY_POINT,
    STAGED,
    TEMPORARY,
)
from delta_prop_broker.segments.preallocation import content_end
from delta_prop_broker.segments.reserve import is_disk_full
from delta_prop_broker.segments.segment import (
    INDEX_SUFFIX,
    Segment,
    Segments,
    corruption_error,
    index_frame,
    load_index,
    segment_bases,
    write_index,
)
from delta_prop_broker.segments.small_file import replace_file, write_all
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_wire.errors import ProtocolError, UsageError

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File


@dataclass(frozen=True, slots=True)
class TruncatedTail:
    """A torn tail, after all rows known to be synced: truncated, or hidden if the log is read-only.

    `bytes`: its size; it starts at `position` of the file `path`. `offset`: of its first row.
    """

    path: str
    position: int
    bytes: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.bytes} bytes from byte {self.position} on (offset {self.offset} and above) "
            f"were never synced and are left out: {self.reason}"
        )


@dataclass(slots=True)
class RecoveryReport:
    """The findings and actions of an opening.

    `created`: the log is new. `clean`: it was closed cleanly. `segments`: their number; `bytes`: their size,
    of which `scanned_bytes` were read. `notes`: messages about files that are not used.
    """

    read_only: bool = False
    created: bool = False
    clean: bool = False
    epoch: int = 0
    start_offset: int = 0
    next_offset: int = 0
    synced: int = 0  # the offset up to which rows were known to be synced before the recovery
    segments: int = 0
    bytes: int = 0
    scanned_bytes: int = 0
    indexes_rebuilt: int = 0
    checkpoint: int | None = None  # the offset of the newest checkpoint that fits
    truncated_tail: TruncatedTail | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "new" if self.created else "closed cleanly" if self.clean else "not closed cleanly"
        lines = [
            f"log {state}: offsets {self.start_offset} to {self.next_offset}, epoch {self.epoch}, "
            f"{self.segments} segments of {self.bytes} bytes, {self.scanned_bytes} read; "
            f"synced up to {self.synced}",
            *([] if self.checkpoint is None else [f"checkpoint at offset {self.checkpoint}"]),
            *([] if self.truncated_tail is None else [str(self.truncated_tail)]),
            *self.notes,
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class RecoveryResult:
    """The state that a log continues from."""

    identity: Identity
    segments: Segments
    chain_crc: int | None  # the last stamp's checksum; None if there is no frame
    start: int  # offset of the first row
    next_offset: int
    synced: int  # offset up to which rows are synced
    recovery_point: RecoveryPointFile | None  # None if the log is read-only
    checkpoints: Checkpoints
    report: RecoveryReport

    def close(self) -> None:
        """Close the files; only for a result that no log continues from."""
        self.segments.close()
        if self.recovery_point is not None:
            self.recovery_point.close()


def recover(
    disk: Disk,
    directory: str,
    *,
    randomness: Randomness,
    made_by: str,
    read_only: bool = False,
    synced: int = 0,
    oldest_format: int = FORMAT,
) -> RecoveryResult:
    """Open a log's directory, or create it. Raises LogCorrupted, UsageError (read-only, no log), OSError.

    `randomness`: for the id of a new log. `synced`: the offset below which the caller knows rows to be on
    stable storage, whatever the files say. `oldest_format`: the oldest format of the directory that may be
    opened.
    """
    has_format = check_format(disk, oldest=oldest_format)
    recovery = _Recovery(
        disk, directory, read_only=read_only, has_format=has_format, made_by=made_by, synced=synced
    )
    return recovery.run(randomness)


class _Recovery:
    def __init__(
        self, disk: Disk, directory: str, *, read_only: bool, has_format: bool, made_by: str, synced: int
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._read_only = read_only
        self._has_format = has_format
        self._made_by = made_by
        self._report = RecoveryReport(read_only=read_only)
        self._segments = Segments(disk, directory)
        self._recovery_point = RecoveryPoint()
        self._chain_crc: int | None = None
        self._known_synced = synced  # the offset up to which something shows that rows were synced
        self._last: Segment | None = None
        self._checkpoints = Checkpoints(disk, directory, b"")

    def run(self, randomness: Randomness) -> RecoveryResult:
        try:
            return self._run(randomness)
        except BaseException:
            if self._last is not None and self._last.file is not None:
                self._last.file.close()
            raise

    def _run(self, randomness: Randomness) -> RecoveryResult:
        has_recovery_point = self._read_recovery_point()
        names = self._disk.list(self._directory)
        if not self._read_only:
            names = self._restore_names(names)
        bases = segment_bases(names)
        identity = self._read_or_create_identity(bases, randomness)
        obsolete = [base for base, next_base in pairwise(bases) if next_base <= self._recovery_point.start]
        bases = bases[len(obsolete) :]
        self._checkpoints = Checkpoints.read(
            self._disk, self._directory, identity.log_id, names, self._report.notes
        )
        self._check_start(bases, has_recovery_point=has_recovery_point)
        for base, next_base in pairwise(bases):
            self._load_sealed(Segment(self._directory, base), next_base)
        has_torn_tail = self._load_last(bases[-1]) if bases else False
        last = self._segments.last
        end = self._recovery_point.start if last is None else last.end
        if self._chain_crc is None:
            self._chain_crc = self._removed_stamp_crc(end, identity.log_id)
        for checkpoint in self._checkpoints.stored[:]:
            self._drop_if_unfit(checkpoint, end)
        self._fill_report(end)
        point_file = None
        if not self._read_only:
            identity, point_file = self._write(identity, has_torn_tail, end)
            self._remove_leftovers(obsolete, names)
            self._checkpoints.sweep(names)
        self._report.epoch = identity.epoch
        synced = self._known_synced if self._read_only else end
        return RecoveryResult(
            identity, self._segments, self._chain_crc, self._report.start_offset, end, synced, point_file,
            self._checkpoints, self._report,
        )  # fmt: skip

    # --- reading

    def _read_recovery_point(self) -> bool:
        """Read the recovery point; return False if there is none that can be read."""
        path = f"{self._directory}/{RECOVERY_POINT}"
        file = open_recovery_point(self._disk, path, read_only=True)
        point, bad_slots = (None, 0) if file is None else read_recovery_point(file)
        if file is not None:
            file.close()
        if bad_slots:
            self._report.notes.append(f"{path}: {bad_slots} of 2 slots corrupted, not used")
        if point is not None:
            self._recovery_point = point
        self._report.clean = self._recovery_point.clean
        self._known_synced = max(self._known_synced, self._recovery_point.synced)
        return point is not None

    def _read_or_create_identity(self, bases: list[int], randomness: Randomness) -> Identity:
        path = f"{self._directory}/{IDENTITY}"
        identity = read_identity(self._disk, path)
        if identity is not None:
            if not self._has_format:
                raise LogCorrupted(FORMAT_PATH, "the file is missing, and there is a log beside it")
            return identity
        if self._read_only:
            raise UsageError(f"there is no log in {self._directory} of the data directory: name another one")
        if self._recovery_point.synced or any(self._size(Segment(self._directory, base)) for base in bases):
            raise LogCorrupted(path, "the file is missing, and there are deltas beside it")
        # The first log writes the format file even if there is one, since the sync that makes it durable may
        # have failed before. Several other logs may be created at a time, after the first.
        if not self._has_format or self._directory == DIRECTORY:
            write_format(self._disk, self._made_by)
        self._disk.make_directory(self._directory)
        parts = self._directory.split("/")
        for depth in range(len(parts)):
            self._disk.sync_directory("/".join(parts[:depth]))
        identity = new_identity(randomness)
        write_identity(self._disk, path, identity)
        self._report.created = True
        return identity

    def _check_start(self, bases: list[int], *, has_recovery_point: bool) -> None:
        start = self._recovery_point.start
        # A checkpoint is written after all its rows are synced, so it proves that they are.
        ends = (checkpoint.end for checkpoint in self._checkpoints.stored)
        self._known_synced = max((self._known_synced, *ends))
        if not bases:
            if self._known_synced > start:
                path = Segment(self._directory, start).path
                raise LogCorrupted(path, "no segment is left", offset=start, end=self._known_synced)
            return
        if has_recovery_point and bases[0] > start:
            path = Segment(self._directory, start).path
            raise LogCorrupted(path, "the file is missing", offset=start, end=bases[0])
        if not has_recovery_point and not self._report.created:
            path = f"{self._directory}/{RECOVERY_POINT}"
            self._report.notes.append(f"{path} is missing or corrupted: only the frames show what was synced")
        self._known_synced = max(self._known_synced, bases[-1])

    def _load_sealed(self, segment: Segment, next_base: int) -> None:
        with closing(self._disk.open(segment.path, read_only=True)) as file:
            size = file.size()
            index = load_index(self._disk, segment)
            if index is None or not _describes(index, file, size):
                index = SparseIndex(segment.base)
                bad = self._scan(segment, file, size, index)
                if bad is not None:
                    segment.size, segment.end = size, next_base
                    raise corruption_error(segment, file, bad)
                self._report.indexes_rebuilt += 1
                if not self._read_only:
                    write_index(self._disk, segment, index)
            require_codecs(index.codecs)
            self._add_segment(segment, index)
        if segment.end != next_base:
            low, high = sorted((segment.end, next_base))
            reason = (
                f"it ends at offset {segment.end}, but the next segment starts at {next_base}: "
                "frames are missing"
                if segment.end < next_base
                else f"it ends at offset {segment.end}, beyond the start of the next segment, {next_base}"
            )
            raise LogCorrupted(segment.path, reason, position=segment.size, offset=low, end=high)

    def _load_last(self, base: int) -> bool:
        """Read the frames of the last segment; return True if a torn tail follows them."""
        segment = self._last = Segment(self._directory, base)
        file = segment.file = self._disk.open(segment.path, read_only=self._read_only)
        size = file.size()
        # After the frames there may be zeros, preallocated for later frames. Their start is located first: a
        # process that writes the log may fill them meanwhile, and such frames must not count as torn.
        content = content_end(file, 0, size)
        index = self._partial_index(segment, file, size)
        bad = self._scan(segment, file, size, index)
        if bad is not None and bad.position < content:
            for _, head in heads_after(file, bad.position + bad.skip, content):
                if bad.offset < head.offset and head.stamp.synced_offset <= head.offset:
                    self._known_synced = max(self._known_synced, head.stamp.synced_offset)
            if self._known_synced > bad.offset or bad.is_misplaced:
                segment.size, segment.end = size, max(self._known_synced, bad.offset)
                raise corruption_error(segment, file, bad)
            self._report.truncated_tail = TruncatedTail(
                segment.path, bad.position, content - bad.position, bad.offset, bad.reason
            )  # fmt: skip
        self._add_segment(segment, index)
        segment.index = index
        if self._known_synced > segment.end:
            reason = "it ends early: frames that were on stable storage are missing"
            raise LogCorrupted(
                segment.path, reason, position=segment.size, offset=segment.end, end=self._known_synced
            )
        return bad is not None

    def _partial_index(self, segment: Segment, file: File, size: int) -> SparseIndex:
        """Return the last segment's index from a checkpoint that fits its frames; else an empty one.

        The frames of a checkpoint's index are on stable storage, and are checked whenever they are read.
        """
        for checkpoint in self._checkpoints.stored:
            if checkpoint.index_base != segment.base:
                continue
            try:
                index = checkpoint.index()
            except (CheckpointCorrupted, OSError) as error:
                self._report.notes.append(str(error))
                continue
            if index is not None and index.size <= size and _describes(index, file, index.size):
                return index
        return SparseIndex(segment.base)

    def _drop_if_unfit(self, checkpoint: Checkpoint, end: int) -> None:
        """Drop a checkpoint that does not fit the frames before it, or after which frames are missing.

        The first one that fits, which is the newest, goes into the report.
        """
        first = self._segments.all[0].base if self._segments.all else end
        if (
            first <= checkpoint.offset <= end
            and self._stamp_crc_before(checkpoint.offset, end) == checkpoint.crc
        ):
            if self._report.checkpoint is None:
                self._report.checkpoint = checkpoint.offset
            return
        self._checkpoints.drop(checkpoint)
        self._report.notes.append(
            f"{checkpoint.path} does not fit the frames from offset {first} to {end} and is not used"
        )

    def _removed_stamp_crc(self, end: int, log_id: bytes) -> int | None:
        """Return the checksum of the last stamp, whose segment was removed; None if it is not known.

        A checkpoint or snapshot at `end`, the end of the log, names the checksum.
        """
        for checkpoint in self._checkpoints.stored:
            if checkpoint.offset == end:
                return checkpoint.crc
        with suppress(LogCorrupted, OSError):  # the reader of the snapshot reports its errors
            snapshot = newest_snapshot(self._disk, self._directory, log_id)
            if snapshot is not None:
                snapshot.close()
                return snapshot.facts.chain_crc if snapshot.offset == end else None
        return None

    def _stamp_crc_before(self, offset: int, end: int) -> int | None:
        """Return the checksum of the stamp before the frame at an offset; None if no frame begins there."""
        if offset == end:
            return self._chain_crc or 0
        try:
            frame = next(self._segments.scan(offset, offset + 1, 64 * 1024), None)
        except (LogCorrupted, OSError):  # reported when the frame is read
            return None
        if frame is None or frame.logged.offset != offset:
            return None
        return frame.stamp.previous_crc

    def _scan(self, segment: Segment, file: File, size: int, index: SparseIndex) -> BadFrame | None:
        """Read the frames of a segment that its index lacks, and add them to the index."""
        start = index.size
        previous = self._chain_crc if index.last_crc is None else index.last_crc
        scanner = FrameScanner(file, position=start, offset=index.end, end=size, previous_crc=previous)
        try:
            for frame in scanner:
                index_frame(index, frame)
                self._known_synced = max(self._known_synced, frame.stamp.synced_offset)
        except BadFrame as bad:
            return bad
        finally:
            self._report.scanned_bytes += scanner.position - start
        return None

    def _add_segment(self, segment: Segment, index: SparseIndex) -> None:
        first = index.crc_before
        if self._chain_crc is not None and first is not None and first != self._chain_crc:
            reason = f"its first frame follows stamp {first:#010x}, but the last is {self._chain_crc:#010x}"
            raise LogCorrupted(segment.path, reason, position=0, offset=segment.base)
        segment.apply_index(index)
        if index.last_crc is not None:
            self._chain_crc = index.last_crc
        self._segments.add(segment)

    def _fill_report(self, end: int) -> None:
        report = self._report
        segments = self._segments.all
        report.start_offset = segments[0].base if segments else end
        report.next_offset, report.synced = end, self._known_synced
        report.segments, report.bytes = len(segments), sum(segment.size for segment in segments)
        if report.truncated_tail is not None or end != self._recovery_point.synced:
            report.clean = False

    # --- writing

    def _write(self, identity: Identity, has_torn_tail: bool, end: int) -> tuple[Identity, RecoveryPointFile]:
        last = self._segments.last
        if last is not None and not self._report.clean:
            self._make_durable(last, has_torn_tail)
        if not self._report.created:
            identity = identity.with_opening()
            if not self._report.clean:
                identity = identity.next_epoch(end)
            write_identity(self._disk, f"{self._directory}/{IDENTITY}", identity)
        file = open_recovery_point(self._disk, f"{self._directory}/{RECOVERY_POINT}", create=True)
        assert file is not None
        point_file = RecoveryPointFile(file, self._recovery_point)
        try:
            point_file.write_durably(
                replace(self._recovery_point, synced=end, start=self._report.start_offset, clean=False)
            )
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            raise
        return identity, point_file

    def _make_durable(self, last: Segment, has_torn_tail: bool) -> None:
        """Make durable all parts of the last segment that may not be durable.

        A failed sync leaves bytes and names that look written, but that no later sync writes. So bytes not
        known to be synced are written again, and a file without any byte known to be synced is copied.
        """
        assert last.file is not None
        assert last.index is not None
        if self._known_synced <= last.base and self._replace_with_copy(last):
            return
        if has_torn_tail:
            last.file.truncate(last.size)
        is_all_synced = self._known_synced >= last.end
        position = last.size if is_all_synced else last.index.entry_before(self._known_synced).position
        for chunk in _chunks(last.file, position, last.size):
            position = write_all(last.file, position, [chunk])
        last.file.sync()

    def _replace_with_copy(self, last: Segment) -> bool:
        """Replace the segment by a copy and return True.

        If the disk is full, rename the segment to another name and back instead, and return False.
        """
        assert last.file is not None
        try:
            replace_file(self._disk, last.path, _chunks(last.file, 0, last.size))
        except OSError as error:
            if not is_disk_full(error):
                raise
            with suppress(OSError):
                self._disk.remove(last.path + TEMPORARY)
            for old, new in ((last.path, last.path + STAGED), (last.path + STAGED, last.path)):
                self._disk.rename(old, new)
                self._disk.sync_directory(self._directory)
            return False
        last.file.close()
        last.file = self._disk.open(last.path)
        return True

    def _restore_names(self, names: list[str]) -> list[str]:
        """Restore the names of segments that a process was renaming when it ended; return all names."""
        staged = [name for name in names if name.endswith(STAGED)]
        for name in staged:
            path = f"{self._directory}/{name}"
            self._disk.rename(path, path.removesuffix(STAGED))
        return self._disk.list(self._directory) if staged else names

    def _remove_leftovers(self, obsolete: list[int], names: list[str]) -> None:
        """Remove segments with bases in `obsolete`, temporary files, and indexes of no sealed segment."""
        for base in obsolete:
            self._disk.remove(Segment(self._directory, base).path)
        for name in names:
            if name.endswith(TEMPORARY):
                with suppress(FileNotFoundError):  # this recovery may have renamed it
                    self._disk.remove(f"{self._directory}/{name}")
        sealed_bases = {segment.base for segment in self._segments.all[:-1]}
        for base in segment_bases(names, INDEX_SUFFIX):
            if base not in sealed_bases:
                self._disk.remove(Segment(self._directory, base).index_path)

    def _size(self, segment: Segment) -> int:
        with closing(self._disk.open(segment.path, read_only=True)) as file:
            return file.size()


def _chunks(file: File, position: int, end: int) -> Iterator[bytes]:
    while position < end:
        chunk = file.read(position, min(CHUNK_BYTES, end - position))
        if not chunk:
            raise OSError(errno.EIO, f"the file ends at byte {position}, but had {end} bytes a moment ago")
        yield chunk
        position += len(chunk)


def _describes(index: SparseIndex, file: File, size: int) -> bool:
    """Return True if a stored index was made from this file, by its first and last frames."""
    if index.size != size:
        return False
    try:
        first = read_head(memoryview(file.read(0, PEEK_BYTES)))
        if (first.offset, first.stamp.previous_crc) != (index.base, index.crc_before):
            return False
        entry = index.last_entry()
        scanner = FrameScanner(
            file,
            position=entry.position,
            offset=entry.offset,
            end=size,
            previous_crc=entry.previous_crc,
            chunk_bytes=64 * 1024,
        )
        for _ in scanner:
            pass
    except (BadFrame, ProtocolError):
        return False
    return (scanner.offset, scanner.crc) == (index.end, index.last_crc)
