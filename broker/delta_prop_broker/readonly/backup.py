"""Online backup: copies the synced parts of all logs of a directory while they are written to.

Each log is copied as of a moment of its own. A stream that is created or deleted meanwhile is not copied.

Takes no lock and changes nothing in the source. The order makes the copy of a log consistent:
1. the small files beside the log, which lag behind it;
2. checkpoints and snapshots, so that they cover no row after the recovery point;
3. the recovery point, up to which the log is copied;
4. the segments, each read back and checked; if one is removed meanwhile, the copy starts again, but keeps the
   segments that it has;
5. identity and recovery point of the copy; after all logs the catalogue, and last the format file, without
   which the copy is not a data directory.

From its end on, the history of a copy differs from that of the source. So the copy begins a new epoch there,
higher by a random step, which the source will not have: a cursor beyond that end is never valid in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop_broker.catalogue.store import PLACE_OF_DEFAULT, place_of, read_catalogue, write_catalogue
from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.recovery.recovery_point import (
    RecoveryPoint,
    RecoveryPointFile,
    open_recovery_point,
    read_recovery_point,
)
from delta_prop_broker.retention.snapshot import SUFFIX as SNAPSHOT_SUFFIX
from delta_prop_broker.segments.frames import CHUNK_BYTES, FrameScanner
from delta_prop_broker.segments.identity import (
    Identity,
    Randomness,
    check_format,
    read_identity,
    write_identity,
)
from delta_prop_broker.segments.paths import (
    CATALOGUE_PATH,
    FORMAT_PATH,
    IDENTITY,
    RECOVERY_POINT,
    STAGED,
    TEMPORARY,
)
from delta_prop_broker.segments.segment import (
    INDEX_SUFFIX,
    SUFFIX,
    Segment,
    corruption_error,
    index_frame,
    segment_bases,
    write_index,
)
from delta_prop_broker.segments.small_file import read_file, replace_file, write_all
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from delta_prop_broker.catalogue.store import PartitionPlace
    from delta_prop_broker.catalogue.stream import Stream
    from delta_prop_broker.disk import Disk, File

TRIES = 100
"""Maximum number of attempts."""
PAUSE_S = 0.05
"""Pause between two attempts."""
EPOCH_STEP_BYTES = 2
"""Bytes of the random step (1 to 65,536) of a copy's epoch, so that the epochs of two copies differ, too."""
_SYNC_BYTES = 16 * 1024 * 1024


class BackupFailed(DeltaPropError):
    """The source kept changing under the copy."""


@dataclass(frozen=True, slots=True)
class BackupReport:
    """Contents of the copy of a log: `segments` and `files` are numbers, `bytes` is the size of the segments.

    `retries`: number of times that it started again because the source changed.
    """

    start_offset: int
    next_offset: int
    epoch: int
    segments: int
    bytes: int
    files: int
    retries: int


class _SourceChanged(Exception):
    """The source has changed since the start of this attempt, so another attempt is needed."""


def copy_directory(
    source: Disk,
    target: Disk,
    *,
    files: Sequence[str],
    directories: Sequence[str],
    randomness: Randomness,
    pause: Callable[[float], object],
) -> dict[PartitionPlace, BackupReport]:
    """Copy all logs of a data directory into an empty directory, durably.

    Copies, of the readers of each log, `files` if they exist, and all files in `directories` except locks.
    Raises UsageError (no log there), LogCorrupted, FormatUnknown, BackupFailed, OSError; then the target is
    not a data directory.
    """
    if not check_format(source):
        raise UsageError(f"{source.name!r} holds no log to copy: name a data directory, or a copy of one")
    catalogue = read_catalogue(source)
    reports: dict[PartitionPlace, BackupReport] = {}
    for stream in catalogue.streams.values():
        for number in range(stream.partitions):
            place = place_of(stream, number)
            if place != PLACE_OF_DEFAULT and not _is_used(source, place.log_path):
                continue
            backup = _Backup(source, target, place, randomness)
            report = _copy_log(backup, files, directories, pause, stream)
            if report is None:
                break
            reports[place] = report
    for stream in catalogue.streams.values():
        if not _exists(source, stream):
            catalogue = catalogue.delete(stream.name)  # the next start removes what was copied of it
    if read_file(source, CATALOGUE_PATH) is not None:
        write_catalogue(target, catalogue)
    format_file = read_file(source, FORMAT_PATH)
    assert format_file is not None
    replace_file(target, FORMAT_PATH, [format_file])
    return reports


def _is_used(source: Disk, directory: str) -> bool:
    """Return False for a partition that was never used, or is just being created."""
    names = source.list(directory)
    return RECOVERY_POINT in names or bool(segment_bases(names))


def _exists(source: Disk, stream: Stream) -> bool:
    """Return True while the stream is in the catalogue."""
    found = read_catalogue(source).streams.get(stream.name)
    return found is not None and found.stream_id == stream.stream_id


def _copy_log(
    backup: _Backup,
    files: Sequence[str],
    directories: Sequence[str],
    pause: Callable[[float], object],
    stream: Stream,
) -> BackupReport | None:
    """Copy a log, in several attempts if it changes; return None if its stream was deleted meanwhile."""
    for attempt in range(TRIES):
        try:
            return backup.run(files, directories, attempt)
        except (_SourceChanged, FileNotFoundError, LogCorrupted) as error:
            if not _exists(backup.source, stream):
                return None
            if isinstance(error, LogCorrupted):
                raise
            reason = error
            pause(PAUSE_S)
    raise BackupFailed(
        f"the log changed under its copy {TRIES} times, the last time: {reason}: raise its retention, or "
        "copy it when less is written"
    )


class _Backup:
    """One running copy; sealed segments that an earlier attempt copied are not copied again."""

    def __init__(self, source: Disk, target: Disk, place: PartitionPlace, randomness: Randomness) -> None:
        self.source = source
        self._target = target
        self._directory = place.log_path
        self._state_path = place.state_path
        self._randomness = randomness
        self._copied: dict[int, Segment] = {}
        self._file_count = 0

    def run(self, files: Sequence[str], directories: Sequence[str], attempt: int) -> BackupReport:
        state = self._state_path
        paths = [f"{state}/{path}" if state else path for path in directories]
        self._make_directories(paths)
        self._file_count = 0
        self._copy_small_files(state, files)
        for path in paths:
            self._copy_small_files(
                path, [name for name in self.source.list(path) if not name.endswith(".lock")]
            )
        identity = self._read_identity()
        self._clear()
        snapshot_offset = self._copy_states()
        point = self._read_recovery_point()
        segments = self._copy_segments(point)
        start = segments[0].base if segments else point.synced
        if self._read_identity() != identity:
            raise _SourceChanged("another process has opened it")
        if (
            start
            and self._newest_snapshot(self.source) is not None
            and (snapshot_offset is None or snapshot_offset < start)
        ):
            raise _SourceChanged("segments were removed that only a newer snapshot covers")
        identity = identity.next_epoch(
            point.synced, step=1 + int.from_bytes(self._randomness.bytes(EPOCH_STEP_BYTES), "little")
        )
        self._complete(identity, RecoveryPoint(synced=point.synced, start=start))
        return BackupReport(
            start_offset=start,
            next_offset=point.synced,
            epoch=identity.epoch,
            segments=len(segments),
            bytes=sum(segment.size for segment in segments),
            files=self._file_count,
            retries=attempt,
        )

    def _make_directories(self, directories: Sequence[str]) -> None:
        for path in (self._directory, *directories):
            self._target.make_directory(path)
            parts = path.split("/")
            for depth in range(len(parts)):
                self._target.sync_directory("/".join(parts[:depth]))

    def _clear(self) -> None:
        """Remove the files of an earlier attempt, except segments."""
        for name in self._target.list(self._directory):
            if not name.endswith((SUFFIX, INDEX_SUFFIX)):
                self._target.remove(f"{self._directory}/{name}")

    # --- whole files

    def _copy_small_files(self, directory: str, names: Sequence[str]) -> None:
        """Copy small files, each of which is replaced as a whole or only grows."""
        for name in names:
            if not name.endswith(TEMPORARY):
                with suppress(FileNotFoundError):  # it does not exist, or was removed just now
                    self._copy_file(f"{directory}/{name}" if directory else name)
        self._target.sync_directory(directory)

    def _copy_states(self) -> int | None:
        """Copy checkpoints, snapshots and times; return the newest snapshot's offset."""
        for name in self.source.list(self._directory):
            if name not in (IDENTITY, RECOVERY_POINT) and not name.endswith(
                (SUFFIX, INDEX_SUFFIX, TEMPORARY, STAGED)
            ):
                self._copy_file(f"{self._directory}/{name}")
        return self._newest_snapshot(self._target)

    def _newest_snapshot(self, disk: Disk) -> int | None:
        """Return the offset of the newest snapshot in the files of a disk; None if there is none."""
        offsets = segment_bases(disk.list(self._directory), SNAPSHOT_SUFFIX)
        return offsets[-1] if offsets else None

    def _copy_file(self, path: str) -> None:
        with (
            closing(self.source.open(path, read_only=True)) as file,
            closing(self._target.open(path, create=True)) as target,
        ):
            target.truncate(0)
            _copy_bytes(target, file, file.size())
            target.sync()
        self._file_count += 1

    # --- the log

    def _read_identity(self) -> Identity:
        path = f"{self._directory}/{IDENTITY}"
        identity = read_identity(self.source, path)
        if identity is None:
            raise LogCorrupted(path, "the file is missing")
        return identity

    def _read_recovery_point(self) -> RecoveryPoint:
        path = f"{self._directory}/{RECOVERY_POINT}"
        file = open_recovery_point(self.source, path, read_only=True)
        if file is None:
            raise LogCorrupted(path, "the file is missing: open the log for writing once")
        try:
            point, bad_slots = read_recovery_point(file)
        finally:
            file.close()
        if bad_slots and point is not None:
            # A slot that cannot be read is being written: it will be the newest, so the other is out of date.
            raise _SourceChanged("its recovery point has just changed")
        if point is None:
            raise LogCorrupted(path, "none of its slots can be read: open the log for writing once")
        return point

    def _copy_segments(self, recovery_point: RecoveryPoint) -> list[Segment]:
        """Copy all segments up to the recovery point; of the last one, the synced part."""
        bases = [
            base for base in segment_bases(self.source.list(self._directory)) if base < recovery_point.synced
        ]
        ends = [*bases[1:], recovery_point.synced][: len(bases)]
        end_by_base = {base: end for base, end in zip(bases, ends, strict=True) if end > recovery_point.start}
        first = min(end_by_base, default=recovery_point.synced)
        if first > recovery_point.start:
            self._check_removed(recovery_point, first)
            raise _SourceChanged(f"offsets {recovery_point.start} to {first} were removed")
        for base in segment_bases(self._target.list(self._directory)):
            if base not in end_by_base or base not in self._copied:
                self._drop(base)
        segments: list[Segment] = []
        crc: int | None = None
        for base, end in end_by_base.items():
            segment = self._copied.get(base)
            if segment is None or segment.end != end:
                segment = self._copied[base] = self._copy_segment(base, end, crc)
            crc = segment.last_crc
            segments.append(segment)
        self._target.sync_directory(self._directory)
        return segments

    def _check_removed(self, recovery_point: RecoveryPoint, first: int) -> None:
        """Raise LogCorrupted unless the missing segments were removed, or a recovery is renaming them.

        Before segments are removed, the recovery point's `start` moves past them, so a `start` that has moved
        proves a removal. A recovery renames segments only briefly.
        """
        names = self.source.list(
            self._directory
        )  # before the recovery point, whose `start` then covers every removal
        oldest = next(iter(segment_bases(names)), None)
        has_reappeared = oldest is not None and oldest <= recovery_point.start
        if (
            has_reappeared  # a recovery had renamed it
            or any(name.endswith(STAGED) for name in names)
            or self._read_recovery_point().start != recovery_point.start
        ):
            return
        missing = Segment(self._directory, recovery_point.start).path
        raise LogCorrupted(missing, "the file is missing", offset=recovery_point.start, end=first)

    def _copy_segment(self, base: int, end: int, previous_crc: int | None) -> Segment:
        """Copy the frames below `end`, and check them in the copy."""
        segment, index = Segment(self._directory, base), SparseIndex(base)
        with (
            closing(self.source.open(segment.path, read_only=True)) as source,
            closing(self._target.open(segment.path, create=True)) as target,
        ):
            target.truncate(0)
            size = source.size()
            _copy_bytes(target, source, size)
            scanner = FrameScanner(target, position=0, offset=base, end=size, previous_crc=previous_crc)
            try:
                for frame in scanner:
                    index_frame(index, frame)
                    if scanner.offset >= end:
                        break
            except BadFrame as bad:
                segment.size, segment.end = size, end
                raise corruption_error(segment, source, bad) from None
            target.truncate(scanner.position)
            target.sync()
        if index.end != end:
            reason = f"it ends at offset {index.end}, but should end at {end}"
            raise LogCorrupted(segment.path, reason, position=index.size, offset=index.end, end=end)
        segment.apply_index(index)
        write_index(self._target, segment, index)
        return segment

    def _drop(self, base: int) -> None:
        self._copied.pop(base, None)
        segment = Segment(self._directory, base)
        self._target.remove(segment.path)
        if segment.index_path.rpartition("/")[2] in self._target.list(self._directory):
            self._target.remove(segment.index_path)

    def _complete(self, identity: Identity, recovery_point: RecoveryPoint) -> None:
        """Write the identity and the recovery point, which make the copy a log."""
        target, directory = self._target, self._directory
        write_identity(target, f"{directory}/{IDENTITY}", identity)
        file = open_recovery_point(target, f"{directory}/{RECOVERY_POINT}", create=True)
        assert file is not None
        try:
            RecoveryPointFile(file, RecoveryPoint()).write_durably(replace(recovery_point, clean=True))
        finally:
            file.close()
        target.sync_directory(directory)


def _copy_bytes(target: File, source: File, size: int) -> None:
    """Copy the first `size` bytes, with a sync now and then, so that no sync takes long."""
    position = synced = 0
    while position < size:
        chunk = source.read(position, min(CHUNK_BYTES, size - position))
        if not chunk:
            raise _SourceChanged("a file became shorter")
        position = write_all(target, position, [chunk])
        if position - synced >= _SYNC_BYTES:
            target.sync()
            synced = position
