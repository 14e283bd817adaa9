"""Inspects a log without opening it: yields every frame and all corruption, and continues after corruption.

For `log verify` and `log export`: it trusts only the frames, changes nothing and needs no lock. While another
process writes, the last frames may be torn or missing. Snapshots and checkpoints are read in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.recovery.checkpoints import (
    Checkpoint,
    CheckpointCorrupted,
    checkpoint_names,
    read_checkpoint,
)
from delta_prop_broker.recovery.recovery_point import RecoveryPoint, open_recovery_point, read_recovery_point
from delta_prop_broker.retention.snapshot import SnapshotFacts, open_snapshot, snapshot_offsets
from delta_prop_broker.segments.frames import FrameLocation, FrameScanner, heads_after
from delta_prop_broker.segments.identity import Identity, check_format, read_identity
from delta_prop_broker.segments.paths import DIRECTORY, FORMAT_PATH, IDENTITY, RECOVERY_POINT
from delta_prop_broker.segments.preallocation import content_end
from delta_prop_broker.segments.segment import Segment, segment_bases

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk


def inspect(disk: Disk, directory: str = DIRECTORY) -> Iterator[FrameLocation | LogCorrupted]:
    """Yield every valid frame in the order of the log, and all corruption between them.

    A torn tail after the last synced row, which an opening truncates, counts as corruption, too; its reason
    says so. Raises FormatUnknown, OSError.
    """
    yield from _inspect_small_files(disk, directory)
    point, fault = _read_recovery_point(disk, directory)
    if fault is not None:
        yield LogCorrupted(f"{directory}/{RECOVERY_POINT}", fault)
    bases = segment_bases(disk.list(directory))
    expected = _start(point, bases)
    previous_crc: int | None = None
    for index, base in enumerate(bases):
        if index + 1 < len(bases) and bases[index + 1] <= (0 if point is None else point.start):
            continue  # the segment was removed on purpose, and only its file is left
        if base > expected:
            yield LogCorrupted(
                Segment(directory, expected).path, "frames are missing", offset=expected, end=base
            )
            previous_crc = None
        is_last = index + 1 == len(bases)
        synced = (0 if point is None else point.synced) if is_last else bases[index + 1]
        inspector = _SegmentInspector(disk, Segment(directory, base), previous_crc, synced, is_last=is_last)
        yield from inspector.run()
        expected, previous_crc = inspector.offset, inspector.crc
    if point is not None and point.synced > expected:
        path = Segment(directory, bases[-1] if bases else expected).path
        yield LogCorrupted(path, "frames that were synced are missing", offset=expected, end=point.synced)


def start_offset(disk: Disk, directory: str = DIRECTORY) -> int:
    """Return the oldest offset that the log still holds, or its end if it holds none. Raises OSError."""
    return _start(_read_recovery_point(disk, directory)[0], segment_bases(disk.list(directory)))


def inspect_snapshots(disk: Disk, directory: str = DIRECTORY) -> Iterator[SnapshotFacts | LogCorrupted]:
    """Yield every valid snapshot, read and checked in full, and corruption. Raises OSError."""
    for offset in snapshot_offsets(disk.list(directory)):
        try:
            snapshot = open_snapshot(disk, directory, offset)
        except FileNotFoundError:
            continue  # a newer one has replaced it since
        except LogCorrupted as corruption:
            yield corruption
            continue
        try:
            snapshot.verify()
            yield snapshot.facts
        except LogCorrupted as corruption:
            yield corruption
        finally:
            snapshot.close()


def inspect_checkpoints(disk: Disk, directory: str = DIRECTORY) -> Iterator[Checkpoint | LogCorrupted]:
    """Yield every valid checkpoint, read and checked in full, and corruption. Raises OSError."""
    identity = _read_identity(disk, directory)
    if identity is None:
        return
    for name in sorted(checkpoint_names(disk.list(directory))):
        try:
            checkpoint = read_checkpoint(disk, directory, name, identity.log_id)
            checkpoint.verify()
        except FileNotFoundError:
            continue  # a newer one has replaced it since
        except CheckpointCorrupted as corruption:
            if name in disk.list(directory):  # else the checkpoint was removed, with its part files
                yield LogCorrupted(corruption.path, corruption.reason)
        else:
            yield checkpoint


class _SegmentInspector:
    """Inspects one segment; `offset` and `crc` are those after its last frame.

    `synced`: the offset up to which its rows are known to be synced.
    """

    def __init__(
        self, disk: Disk, segment: Segment, previous_crc: int | None, synced: int, *, is_last: bool
    ) -> None:
        self.offset = segment.base
        self.crc = previous_crc
        self._disk = disk
        self._segment = segment
        self._synced = synced
        self._is_last = is_last

    def run(self) -> Iterator[FrameLocation | LogCorrupted]:
        """Yield the frames of the segment, and corruption between them."""
        with closing(self._disk.open(self._segment.path, read_only=True)) as file:
            size, position = file.size(), 0
            content = content_end(file, 0, size)  # frames that a writer adds meanwhile are not inspected
            while position < size:
                scanner = FrameScanner(
                    file, position=position, offset=self.offset, end=size, previous_crc=self.crc
                )
                try:
                    yield from scanner
                    bad = None
                except BadFrame as found:
                    bad = found
                self.offset, self.crc, position = scanner.offset, scanner.crc, scanner.position
                if bad is None:
                    return
                if bad.position >= content and self._synced <= bad.offset and self._is_last:
                    return  # only preallocated zeros follow
                heads = heads_after(file, bad.position + bad.skip, content)
                position, head = next(((p, h) for p, h in heads if h.offset > bad.offset), (size, None))
                end = self._synced if head is None else head.offset
                is_torn = head is None and end <= bad.offset and not bad.is_misplaced
                reason = bad.reason + ("; a torn tail, never synced: opening truncates it" if is_torn else "")
                yield LogCorrupted(
                    self._segment.path,
                    reason,
                    position=bad.position,
                    offset=bad.offset,
                    end=None if is_torn else end,
                )
                self.crc = None
                if head is not None:
                    self.offset = head.offset
                elif not is_torn:
                    self.offset = end


def _read_recovery_point(disk: Disk, directory: str) -> tuple[RecoveryPoint | None, str | None]:
    """Return the newest readable recovery point, and the fault of its file, if it has one."""
    file = open_recovery_point(disk, f"{directory}/{RECOVERY_POINT}", read_only=True)
    if file is None:
        return None, "the file is missing"
    try:
        point, bad_slots = read_recovery_point(file)
    finally:
        file.close()
    if bad_slots:
        return point, f"{bad_slots} of its 2 slots are corrupted"
    return point, "it is empty" if point is None else None


def _start(recovery_point: RecoveryPoint | None, bases: list[int]) -> int:
    return recovery_point.start if recovery_point is not None else (bases[0] if bases else 0)


def _read_identity(disk: Disk, directory: str) -> Identity | None:
    """Return the log's identity; None if it is missing or corrupted, which `inspect` reports."""
    try:
        return read_identity(disk, f"{directory}/{IDENTITY}")
    except LogCorrupted:
        return None


def _inspect_small_files(disk: Disk, directory: str) -> Iterator[LogCorrupted]:
    try:
        if not check_format(disk):
            yield LogCorrupted(FORMAT_PATH, "the file is missing")
    except LogCorrupted as corruption:
        yield corruption
    path = f"{directory}/{IDENTITY}"
    try:
        if read_identity(disk, path) is None:
            yield LogCorrupted(path, "the file is missing")
    except LogCorrupted as corruption:
        yield corruption
