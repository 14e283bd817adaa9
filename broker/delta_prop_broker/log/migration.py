"""Migrates a data directory to the present format: the first byte of each control row is its type since 2.

A frame's stamp names the checksums of its body and of the stamp before it. So every frame from the first one
with control rows on gets a new stamp; the segments before are not touched. Checkpoints, snapshots and indexes
name stamps, and follow. Nothing else in the directory does: offsets, Lamport numbers, ids and the checksums
of bodies that producers sent stay as they are.

1. The log is recovered as at any opening, and closed: no torn tail, nothing that is not synced.
2. Each file that changes is written beside the one that there is, under a temporary name, and synced.
3. The format file is replaced: it names the present format, and says that files are to be exchanged.
4. The files are exchanged, and the format file says no more than the format.

A crash before step 3 leaves the old directory, with files that the next opening removes; a later one leaves
the new directory, to be finished by whoever runs this again. No version opens it in between.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.damage import BadFrame, LogBusy, LogDamaged, RoomMissing
from delta_prop_broker.log.files import ahead
from delta_prop_broker.log.files.checkpoints import CheckpointDamaged
from delta_prop_broker.log.files.compressed import compress_frame
from delta_prop_broker.log.files.frames import Walk
from delta_prop_broker.log.files.identity import (
    FORMAT,
    OLDEST_FORMAT,
    read_format,
    write_beside,
    write_format,
)
from delta_prop_broker.log.files.names import DIRECTORY, LOCK_PATH, TEMPORARY
from delta_prop_broker.log.files.segment import damaged, index_frame
from delta_prop_broker.log.files.snapshot import (
    SnapshotWriter,
    open_snapshot,
    snapshot_offsets,
    snapshot_path,
)
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.files.writing import write_all
from delta_prop_broker.log.parts.recovery import recover
from delta_prop_wire.compression import Compression
from delta_prop_wire.encode import with_control_types
from delta_prop_wire.errors import UsageError
from delta_prop_wire.header import pack_header, unpack_header
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES
from delta_prop_wire.stamp import pack_stamp, stamp_crc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.checkpoints import Checkpoint
    from delta_prop_broker.log.files.frames import Place
    from delta_prop_broker.log.files.segment import Segment
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_broker.log.parts.recovered import Recovered

STEP_BYTES = 1024 * 1024
SYNC_BYTES = 16 * 1024 * 1024
"""Written, and synced, at least so often."""
SPARE_BYTES = 1024 * 1024
"""Room for small files, and for what each file takes on the disk beyond its length."""


class Plan(NamedTuple):
    """A migration that is about to write; sizes in bytes. `first_offset`: of the first control rows."""

    first_offset: int | None
    segments: int
    segments_rewritten: int
    bytes_needed: int
    bytes_free: int


@dataclass(slots=True)
class Migrated:
    """The outcome of a migration. `completed`: it exchanged the files of an earlier one, broken off."""

    from_format: int
    to_format: int = FORMAT
    segments_rewritten: int = 0
    bytes_written: int = 0
    control_batches: int = 0
    completed: bool = False


class Watching(NamedTuple):
    """Callbacks of a migration. `plan` comes before a file is written, `progress` with the bytes of frames
    that are done, and of all; `note` with the report of a recovery where the log was not closed cleanly.
    """

    plan: Callable[[Plan], object]
    progress: Callable[[int, int], object]
    note: Callable[[str], object]


def migrate(disk: Disk, *, draw: Callable[[int], bytes], watching: Watching) -> Migrated:
    """Bring a data directory to the present format; one that has it stays as it is.

    Holds the lock of the directory throughout. Raises UsageError (no log there), LogBusy, LogDamaged,
    CodecMissing, FormatUnknown, RoomMissing, OSError. It can be run again after any of them.
    """
    found = read_format(disk)
    if found is None:
        raise UsageError(f"{disk.name!r} is not a data directory: name the one that `serve --data DIR` made")
    try:
        lock = disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(error.strerror or str(error)) from None
    try:
        found = read_format(disk) or found
        migrated = Migrated(found.number)
        if found.number < FORMAT:
            _prepare(disk, migrated, draw, watching)
        elif not found.unfinished:
            return migrated
        else:
            migrated.completed = True
        _switch(disk, found.made_by)
        _exchange(disk)
        write_format(disk, found.made_by)
    finally:
        lock.release()
    return migrated


def _prepare(disk: Disk, migrated: Migrated, draw: Callable[[int], bytes], watching: Watching) -> None:
    """Write all that changes beside what is there, durably."""
    recovered = recover(disk, DIRECTORY, draw=draw, made_by="", oldest_format=OLDEST_FORMAT)
    try:
        report = recovered.report
        if not report.clean:
            watching.note(str(report))
        _close(recovered)
        _Rewriting(disk, recovered, migrated, watching).run()
    finally:
        recovered.close()


def _close(recovered: Recovered) -> None:
    """Mark the log as closed, as its end is synced."""
    assert recovered.mark is not None
    ahead.cut_off(recovered.segments.last)
    recovered.mark.settle_clean(recovered.next_offset, recovered.start)


def _switch(disk: Disk, made_by: str) -> None:
    """Make it the new directory, unfinished, by the rename of the format file.

    Done again where it is that already: the sync that makes it last may have failed before.
    """
    try:
        write_format(disk, made_by, unfinished=True)
    except OSError:
        found = read_format(disk)
        if found is not None and found.number < FORMAT:  # there was no rename
            _discard(disk)
        raise


def _discard(disk: Disk) -> None:
    """Remove what was written beside the files of a directory that stays the old one."""
    for name in disk.list(DIRECTORY):
        if name.endswith(TEMPORARY):
            with suppress(OSError):
                disk.remove(f"{DIRECTORY}/{name}")


def _exchange(disk: Disk) -> None:
    """Give each file that was written beside another one the name of that."""
    for name in disk.list(DIRECTORY):
        if name.endswith(TEMPORARY):
            path = f"{DIRECTORY}/{name}"
            disk.rename(path, path.removesuffix(TEMPORARY))
    disk.sync_directory(DIRECTORY)


class _Rewriting:
    """Step 2, on a log that was recovered just now."""

    def __init__(self, disk: Disk, recovered: Recovered, migrated: Migrated, watching: Watching) -> None:
        self._disk = disk
        self._log_id = recovered.identity.log_id
        self._segments: Sequence[Segment] = tuple(recovered.segments.all)
        self._checkpoints: Sequence[Checkpoint] = tuple(recovered.checkpoints.kept)
        self._migrated = migrated
        self._watching = watching
        self._chain: int | None = None  # checksum of the last stamp, as it is now
        self._old_chain: int | None = None  # and as it was
        self._first: int | None = None  # offset of the first frame with control rows
        self._chains: dict[
            int, int
        ] = {}  # by the offset behind each stamp that a snapshot or checkpoint names
        self._indexes: dict[int, bytes] = {}  # of the segment that was growing at a checkpoint, by its offset
        self._done = self._total = 0

    def run(self) -> None:
        """Write the new files; what was written goes again where that fails."""
        self._total = sum(segment.size for segment in self._segments)
        untouched = self._find_first()
        later = self._segments[untouched:]
        try:
            snapshots = self._behind_first(snapshot_offsets(self._disk.list(DIRECTORY)))
            self._check_room(later, snapshots)
            wanted = {*snapshots, *(one.offset for one in self._checkpoints)}
            for segment in later:
                self._rewrite(segment, wanted)
            for offset in snapshots:
                self._rewrite_snapshot(offset)
            for checkpoint in self._checkpoints:
                self._rewrite_checkpoint(checkpoint)
            self._disk.sync_directory(DIRECTORY)
        except BaseException:
            _discard(self._disk)
            raise
        self._watching.progress(self._total, self._total)

    # --- what is to be done

    def _find_first(self) -> int:
        """Find the first frame with control rows; return how many segments lie before it.

        Reads the frames, not the indexes: those are no more than hints.
        """
        for place, segment in enumerate(self._segments):
            before, done = self._old_chain, self._done
            for found in self._frames(segment):
                if found.logged.batch.is_control:
                    self._first = found.logged.offset
                    self._old_chain, self._done = before, done
                    return place
        return len(self._segments)

    def _behind_first(self, offsets: list[int]) -> list[int]:
        """Select the offsets that follow a stamp which changes."""
        return [offset for offset in offsets if self._first is not None and offset > self._first]

    def _check_room(self, later: Sequence[Segment], snapshots: Sequence[int]) -> None:
        paths = [snapshot_path(DIRECTORY, offset) for offset in snapshots]
        paths += [one.path for one in self._checkpoints]
        size = sum(segment.size for segment in later) + sum(map(self._size, paths))
        needed = size + size // 8 + SPARE_BYTES  # a control row grows by a byte, and has twelve and more
        free = self._disk.free_bytes()
        self._watching.plan(Plan(self._first, len(self._segments), len(later), needed, free))
        if free < needed:
            raise RoomMissing(needed, free)

    def _size(self, path: str) -> int:
        file = self._disk.open(path, read_only=True)
        try:
            return file.size()
        finally:
            file.close()

    # --- segments

    def _frames(self, segment: Segment) -> Iterator[Place]:
        """Yield the frames of a segment as they are. Raises LogDamaged."""
        file = self._disk.open(segment.path, read_only=True)
        try:
            walk = Walk(file, position=0, offset=segment.base, end=segment.size, previous_crc=self._old_chain)
            for found in walk:
                yield found
                self._old_chain = walk.crc
                self._done += found.size
                self._watching.progress(self._done, self._total)
        except BadFrame as bad:
            raise damaged(segment, file, bad) from None
        finally:
            file.close()
        if walk.offset != segment.end:
            raise LogDamaged(segment.path, "the file ends early", offset=walk.offset, end=segment.end)

    def _rewrite(self, segment: Segment, wanted: set[int]) -> None:
        """Write a segment with types and new stamps, and its index where it is sealed."""
        index = SparseIndex(segment.base)
        file = self._disk.open(segment.path + TEMPORARY, create=True)
        try:
            file.truncate(0)
            self._write(file, self._rewritten(segment, index, wanted))
        finally:
            file.close()
        self._note(segment.end, index, wanted)
        index.tried = segment.tried
        if segment is not self._segments[-1]:
            write_beside(self._disk, segment.index_path, [index.pack()])
        self._migrated.segments_rewritten += 1

    def _rewritten(self, segment: Segment, index: SparseIndex, wanted: set[int]) -> Iterator[bytes]:
        for found in self._frames(segment):
            self._note(found.logged.offset, index, wanted)
            raw, stored = self._frame(found)
            index_frame(index, stored)
            yield raw

    def _write(self, file: File, parts: Iterator[bytes]) -> None:
        at = synced = size = 0
        waiting: list[bytes] = []
        for part in parts:
            waiting.append(part)
            size += len(part)
            if size >= STEP_BYTES:
                at, size, waiting = write_all(file, at, waiting), 0, []
                if at - synced >= SYNC_BYTES:
                    file.sync()
                    synced = at
        at = write_all(file, at, waiting) if waiting else at
        file.sync()
        self._migrated.bytes_written += at

    def _frame(self, found: Place) -> tuple[bytes, Place]:
        """Give a frame its type and its new stamp; return the bytes to store, and their place."""
        batch, header = found.logged.batch, found.logged.head[:HEADER_BYTES]
        if batch.is_control:
            batch = with_control_types(batch)
            plain = unpack_header(header)
            header = pack_header(plain.type, plain.flags, plain.sequence, STAMP_BYTES + len(batch.raw))
            self._migrated.control_batches += 1
        previous = found.stamp.previous_crc if self._chain is None else self._chain
        stamp = replace(found.stamp, previous_crc=previous, body_crc=batch.crc)
        packed = pack_stamp(stamp, header)
        stamp.crc = self._chain = stamp_crc(packed)
        raw, codec = None, 0
        if found.codec:
            raw = compress_frame(header + packed, batch.body, Compression(found.codec))
            codec = 0 if raw is None else found.codec
        raw = raw or header + packed + bytes(batch.body)
        return raw, found._replace(size=len(raw), stamp=stamp, codec=codec)

    def _note(self, offset: int, index: SparseIndex, wanted: set[int]) -> None:
        """Remember what a snapshot or checkpoint at this offset says of the frames before it."""
        if offset not in wanted or self._chain is None:
            return
        self._chains[offset] = self._chain
        bases = {one.index_base for one in self._checkpoints if one.offset == offset}
        if index.base in bases and index.size:
            until = index.until(offset, index.size, self._chain, index.latest_time)
            self._indexes[offset] = until.pack()

    # --- what stands beside them

    def _rewrite_snapshot(self, offset: int) -> None:
        if offset not in self._chains:
            path = snapshot_path(DIRECTORY, offset)
            raise LogDamaged(path, "no frame of the log begins at its offset", offset=offset)
        old = open_snapshot(self._disk, DIRECTORY, offset)
        try:
            self._write_snapshot(old, self._chains[offset])
        finally:
            old.close()

    def _write_snapshot(self, old: Snapshot, chain: int) -> None:
        facts = old.facts
        writer = SnapshotWriter(self._disk, DIRECTORY, replace(facts, chain=chain))
        try:
            for logged in old.frames():
                writer.add(logged.batch)
        except BaseException:
            writer.discard()
            raise
        self._migrated.bytes_written += writer.bytes
        writer.seal(old.watermarks, alive=facts.alive, late=facts.late, unfolded=facts.unfolded)

    def _rewrite_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write it with the new stamps; one that cannot be read is of no use, before and after."""
        chain = self._chains.get(checkpoint.offset)
        if chain is None:  # all it speaks of lies before the first control row
            return
        try:
            parts = checkpoint.moved(self._log_id, chain, self._indexes.get(checkpoint.offset))
        except CheckpointDamaged as error:
            self._watching.note(str(error))
            return
        self._migrated.bytes_written += write_beside(self._disk, checkpoint.path, parts)
