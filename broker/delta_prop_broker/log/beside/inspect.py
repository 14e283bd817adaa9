"""Looks a log over without opening it: every frame, and all damage, going on behind it.

For `log verify` and `log export`: it believes the frames alone, changes nothing and needs no lock. Beside a
process that writes, the last frames may be torn or missing. Snapshots and checkpoints are read whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.ahead import content_end
from delta_prop_broker.log.files.checkpoints import CheckpointDamaged, checkpoint_names, read_checkpoint
from delta_prop_broker.log.files.frames import Walk, heads_behind
from delta_prop_broker.log.files.identity import check_format, read_identity
from delta_prop_broker.log.files.marks import open_mark, read_mark
from delta_prop_broker.log.files.names import DIRECTORY, FORMAT_PATH, IDENTITY, MARK
from delta_prop_broker.log.files.segment import Segment, segment_bases
from delta_prop_broker.log.files.snapshot import open_snapshot, snapshot_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.checkpoints import Checkpoint
    from delta_prop_broker.log.files.frames import Place
    from delta_prop_broker.log.files.identity import Identity
    from delta_prop_broker.log.files.marks import Mark
    from delta_prop_broker.log.files.snapshot import SnapshotFacts


def inspect(disk: Disk, directory: str = DIRECTORY) -> Iterator[Place | LogDamaged]:
    """Every sound frame in the order of the log, and all damage between them. Raises FormatUnknown, OSError.

    A torn tail above the synced mark comes as damage too, with a reason that says so: opening cuts it.
    """
    yield from _small_files(disk, directory)
    mark, fault = _mark(disk, directory)
    if fault is not None:
        yield LogDamaged(f"{directory}/{MARK}", fault)
    bases = segment_bases(disk.list(directory))
    expected = _start(mark, bases)
    previous: int | None = None
    for place, base in enumerate(bases):
        if place + 1 < len(bases) and bases[place + 1] <= (0 if mark is None else mark.start):
            continue  # removed on purpose, but for the file itself
        if base > expected:
            yield LogDamaged(
                Segment(directory, expected).path, "frames are missing", offset=expected, end=base
            )
            previous = None
        last = place + 1 == len(bases)
        synced = (0 if mark is None else mark.synced) if last else bases[place + 1]
        walk = _Inspected(disk, Segment(directory, base), previous, synced, last=last)
        yield from walk.run()
        expected, previous = walk.offset, walk.crc
    if mark is not None and mark.synced > expected:
        path = Segment(directory, bases[-1] if bases else expected).path
        yield LogDamaged(path, "frames that were synced are missing", offset=expected, end=mark.synced)


def start_offset(disk: Disk, directory: str = DIRECTORY) -> int:
    """Return the oldest offset that the log still holds, which may be its end. Raises OSError."""
    return _start(_mark(disk, directory)[0], segment_bases(disk.list(directory)))


def inspect_snapshots(disk: Disk, directory: str = DIRECTORY) -> Iterator[SnapshotFacts | LogDamaged]:
    """Every sound snapshot, read and checked whole, and the damage of the others. Raises OSError."""
    for offset in snapshot_offsets(disk.list(directory)):
        try:
            snapshot = open_snapshot(disk, directory, offset)
        except FileNotFoundError:
            continue  # a newer one has taken its place since
        except LogDamaged as damage:
            yield damage
            continue
        try:
            snapshot.verify()
            yield snapshot.facts
        except LogDamaged as damage:
            yield damage
        finally:
            snapshot.close()


def inspect_checkpoints(disk: Disk, directory: str = DIRECTORY) -> Iterator[Checkpoint | LogDamaged]:
    """Read every checkpoint whole; yield the sound ones, and the damage of the others. Raises OSError."""
    identity = _identity(disk, directory)
    if identity is None:
        return
    for name in sorted(checkpoint_names(disk.list(directory))):
        try:
            checkpoint = read_checkpoint(disk, directory, name, identity.log_id)
            checkpoint.verify()
        except FileNotFoundError:
            continue  # A newer one has replaced it since.
        except CheckpointDamaged as damage:
            if name in disk.list(directory):  # else the parts went with it
                yield LogDamaged(damage.path, damage.reason)
        else:
            yield checkpoint


class _Inspected:
    """One segment; `offset` and `crc` say where it ends."""

    def __init__(
        self, disk: Disk, segment: Segment, previous_crc: int | None, synced: int, *, last: bool
    ) -> None:
        self.offset = segment.base
        self.crc = previous_crc
        self._disk = disk
        self._segment = segment
        self._synced = synced
        self._last = last

    def run(self) -> Iterator[Place | LogDamaged]:
        """Its frames, and what lies between them."""
        file = self._disk.open(self._segment.path, read_only=True)
        try:
            size, at = file.size(), 0
            content = content_end(file, 0, size)  # what comes in beside this is not judged
            while at < size:
                walk = Walk(file, position=at, offset=self.offset, end=size, previous_crc=self.crc)
                try:
                    yield from walk
                    bad = None
                except BadFrame as found:
                    bad = found
                self.offset, self.crc, at = walk.offset, walk.crc, walk.position
                if bad is None:
                    return
                if bad.position >= content and self._synced <= bad.offset and self._last:
                    return  # zeros that were written ahead of the next frames
                behind = heads_behind(file, bad.position + bad.skip, content)
                at, head = next(((p, h) for p, h in behind if h.offset > bad.offset), (size, None))
                end = self._synced if head is None else head.offset
                torn = head is None and end <= bad.offset and not bad.misplaced
                reason = bad.reason + ("; a torn tail, never synced: opening cuts it" if torn else "")
                yield LogDamaged(
                    self._segment.path,
                    reason,
                    position=bad.position,
                    offset=bad.offset,
                    end=None if torn else end,
                )
                self.crc = None
                if head is not None:
                    self.offset = head.offset
                elif not torn:
                    self.offset = end
        finally:
            file.close()


def _mark(disk: Disk, directory: str) -> tuple[Mark | None, str | None]:
    """Return the newest mark that can be read, and the fault of the mark file, if it has one."""
    file = open_mark(disk, f"{directory}/{MARK}", read_only=True)
    if file is None:
        return None, "the file is missing"
    try:
        mark, broken = read_mark(file)
    finally:
        file.close()
    if broken:
        return mark, f"{broken} of its 2 slots are damaged"
    return mark, "it is empty" if mark is None else None


def _start(mark: Mark | None, bases: list[int]) -> int:
    return mark.start if mark is not None else (bases[0] if bases else 0)


def _identity(disk: Disk, directory: str) -> Identity | None:
    """Return the log's identity; None where it is missing or damaged, which `inspect` reports."""
    try:
        return read_identity(disk, f"{directory}/{IDENTITY}")
    except LogDamaged:
        return None


def _small_files(disk: Disk, directory: str) -> Iterator[LogDamaged]:
    try:
        if not check_format(disk):
            yield LogDamaged(FORMAT_PATH, "the file is missing")
    except LogDamaged as damage:
        yield damage
    path = f"{directory}/{IDENTITY}"
    try:
        if read_identity(disk, path) is None:
            yield LogDamaged(path, "the file is missing")
    except LogDamaged as damage:
        yield damage
