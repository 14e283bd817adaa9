"""Opening what a process left behind: the frames are the truth, all else is checked against them.

A torn tail is cut only above the synced mark, and told. Damage below it is refused, with the range named,
and nothing is changed then.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.ahead import content_end
from delta_prop_broker.log.files.checkpoints import Checkpoint, CheckpointDamaged, Checkpoints
from delta_prop_broker.log.files.compressed import PEEK_BYTES, require
from delta_prop_broker.log.files.frames import CHUNK_BYTES, Walk, heads_behind, read_head
from delta_prop_broker.log.files.identity import (
    FORMAT,
    check_format,
    new_identity,
    read_identity,
    replace_file,
    write_format,
    write_identity,
)
from delta_prop_broker.log.files.marks import Mark, MarkFile, open_mark, read_mark
from delta_prop_broker.log.files.names import ASIDE, FORMAT_PATH, IDENTITY, MARK, TEMPORARY
from delta_prop_broker.log.files.reserve import is_no_room
from delta_prop_broker.log.files.segment import (
    INDEX_SUFFIX,
    Segment,
    Segments,
    damaged,
    index_frame,
    load_index,
    segment_bases,
    write_index,
)
from delta_prop_broker.log.files.snapshot import newest_snapshot
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.files.writing import write_all
from delta_prop_broker.log.parts.recovered import Cut, Recovered, RecoveryReport
from delta_prop_wire.errors import PeerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.identity import Identity

"""Behind the name of a segment that is about to get it back."""


def recover(
    disk: Disk,
    directory: str,
    *,
    draw: Callable[[int], bytes],
    made_by: str,
    read_only: bool = False,
    synced: int = 0,
    oldest_format: int = FORMAT,
) -> Recovered:
    """Open a log's directory, or make it. Raises LogDamaged, UsageError (read-only, none there), OSError.

    `synced`: up to where the caller knows it to be on stable storage, whatever the files say.
    `oldest_format`: which formats of the directory may be opened, up to the present one.
    """
    formatted = check_format(disk, oldest=oldest_format)
    recovery = _Recovery(
        disk, directory, read_only=read_only, formatted=formatted, made_by=made_by, synced=synced
    )
    return recovery.run(draw)


class _Recovery:
    def __init__(
        self, disk: Disk, directory: str, *, read_only: bool, formatted: bool, made_by: str, synced: int
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._read_only = read_only
        self._formatted = formatted
        self._made_by = made_by
        self._report = RecoveryReport(read_only=read_only)
        self._segments = Segments(disk, directory)
        self._mark = Mark()
        self._mark_known = False
        self._chain: int | None = None
        self._evidence = synced
        self._last: Segment | None = None
        self._checkpoints = Checkpoints(disk, directory, b"")

    def run(self, draw: Callable[[int], bytes]) -> Recovered:
        try:
            return self._run(draw)
        except BaseException:
            if self._last is not None and self._last.file is not None:
                self._last.file.close()
            raise

    def _run(self, draw: Callable[[int], bytes]) -> Recovered:
        self._read_mark()
        names = self._disk.list(self._directory)
        if not self._read_only:
            names = self._put_back(names)
        bases = segment_bases(names)
        identity = self._identify(bases, draw)
        obsolete = [base for base, after in pairwise(bases) if after <= self._mark.start]
        bases = bases[len(obsolete) :]
        self._checkpoints = Checkpoints.read(
            self._disk, self._directory, identity.log_id, names, self._report.notes
        )
        self._check_start(bases)
        for base, after in pairwise(bases):
            self._take_sealed(Segment(self._directory, base), after)
        torn = self._take_last(bases[-1]) if bases else False
        last = self._segments.last
        end = self._mark.start if last is None else last.end
        if self._chain is None:
            self._chain = self._chain_before(end, identity.log_id)
        for checkpoint in self._checkpoints.kept[:]:
            self._check_belongs(checkpoint, end)
        self._tell(end)
        mark_file = None
        if not self._read_only:
            identity, mark_file = self._write(identity, torn, end)
            self._remove(obsolete, names)
            self._checkpoints.sweep(names)
        self._report.epoch = identity.epoch
        visible = self._evidence if self._read_only else end
        return Recovered(
            identity, self._segments, self._chain, self._report.first_offset, end, visible, mark_file,
            self._checkpoints, self._report,
        )  # fmt: skip

    # --- what is there

    def _read_mark(self) -> None:
        path = f"{self._directory}/{MARK}"
        file = open_mark(self._disk, path, read_only=True)
        mark, broken = (None, 0) if file is None else read_mark(file)
        if file is not None:
            file.close()
        if broken:
            self._report.notes.append(f"{path}: {broken} of 2 slots damaged, not used")
        if mark is not None:
            self._mark, self._mark_known = mark, True
        self._report.clean = self._mark.clean
        self._evidence = max(self._evidence, self._mark.synced)

    def _identify(self, bases: list[int], draw: Callable[[int], bytes]) -> Identity:
        path = f"{self._directory}/{IDENTITY}"
        identity = read_identity(self._disk, path)
        if identity is not None:
            if not self._formatted:
                raise LogDamaged(FORMAT_PATH, "the file is missing, and there is a log beside it")
            return identity
        if self._read_only:
            raise UsageError(f"there is no log in {self._directory} of the data directory: name another one")
        if self._mark.synced or any(self._size(Segment(self._directory, base)) for base in bases):
            raise LogDamaged(path, "the file is missing, and there are deltas beside it")
        # Written again where it is there: the sync that makes it last may have failed before.
        write_format(self._disk, self._made_by)
        self._disk.make_directory(self._directory)
        parts = self._directory.split("/")
        for depth in range(len(parts)):
            self._disk.sync_directory("/".join(parts[:depth]))
        identity = new_identity(draw)
        write_identity(self._disk, self._directory, path, identity)
        self._report.created = True
        return identity

    def _check_start(self, bases: list[int]) -> None:
        start = self._mark.start
        # Written after the sync of all that it speaks of, so it proves that as the mark does.
        self._evidence = max((self._evidence, *(one.end for one in self._checkpoints.kept)))
        if not bases:
            if self._evidence > start:
                path = Segment(self._directory, start).path
                raise LogDamaged(path, "no segment is left", offset=start, end=self._evidence)
            return
        if self._mark_known and bases[0] > start:
            path = Segment(self._directory, start).path
            raise LogDamaged(path, "the file is missing", offset=start, end=bases[0])
        if not self._mark_known and not self._report.created:
            path = f"{self._directory}/{MARK}"
            self._report.notes.append(f"{path} is missing or damaged: the frames alone say what was synced")
        self._evidence = max(self._evidence, bases[-1])

    def _take_sealed(self, segment: Segment, after: int) -> None:
        file = self._disk.open(segment.path, read_only=True)
        try:
            size = file.size()
            index = load_index(self._disk, segment)
            if index is None or not _describes(index, file, size):
                index = SparseIndex(segment.base)
                bad = self._walk(segment, file, size, index)
                if bad is not None:
                    segment.size, segment.end = size, after
                    raise damaged(segment, file, bad)
                self._report.indexes_rebuilt += 1
                if not self._read_only:
                    write_index(self._disk, segment, index)
            require(index.codecs)
            self._join(segment, index)
        finally:
            file.close()
        if segment.end != after:
            low, high = sorted((segment.end, after))
            reason = (
                f"it ends at offset {segment.end}, the next segment starts at {after}: frames are missing"
                if segment.end < after
                else f"it ends at offset {segment.end}, beyond the start of the next segment, {after}"
            )
            raise LogDamaged(segment.path, reason, position=segment.size, offset=low, end=high)

    def _take_last(self, base: int) -> bool:
        """Read it, from the newest checkpoint in it on; return whether its file is longer than its frames."""
        segment = self._last = Segment(self._directory, base)
        file = segment.file = self._disk.open(segment.path, read_only=self._read_only)
        size = file.size()
        # Behind the frames there may be zeros, written ahead of the next ones. Where they begin is looked up
        # first: the process that writes the log may fill them meanwhile, and what came since is not judged.
        content = content_end(file, 0, size)
        index = self._index_so_far(segment, file, size)
        bad = self._walk(segment, file, size, index)
        if bad is not None and bad.position < content:
            for _, head in heads_behind(file, bad.position + bad.skip, content):
                if bad.offset < head.offset and head.stamp.synced_offset <= head.offset:
                    self._evidence = max(self._evidence, head.stamp.synced_offset)
            if self._evidence > bad.offset or bad.misplaced:
                segment.size, segment.end = size, max(self._evidence, bad.offset)
                raise damaged(segment, file, bad)
            self._report.cut = Cut(
                segment.path, bad.position, content - bad.position, bad.offset, bad.reason
            )  # fmt: skip
        self._join(segment, index)
        segment.index = index
        if self._evidence > segment.end:
            reason = "it ends early: frames that were on stable storage are missing"
            raise LogDamaged(
                segment.path, reason, position=segment.size, offset=segment.end, end=self._evidence
            )
        return bad is not None

    def _index_so_far(self, segment: Segment, file: File, size: int) -> SparseIndex:
        """What a checkpoint kept of the last segment's index, where the frames at its ends fit; else none.

        The frames that it speaks of are on stable storage, and are checked whenever they are read.
        """
        for checkpoint in self._checkpoints.kept:
            if checkpoint.index_base != segment.base:
                continue
            try:
                index = checkpoint.index()
            except (CheckpointDamaged, OSError) as error:
                self._report.notes.append(str(error))
                continue
            if index is not None and index.size <= size and _describes(index, file, index.size):
                return index
        return SparseIndex(segment.base)

    def _check_belongs(self, checkpoint: Checkpoint, end: int) -> None:
        """Drop a checkpoint that is not of these frames' history, or has frames missing behind it."""
        first = self._segments.all[0].base if self._segments.all else end
        if first <= checkpoint.offset <= end and self._crc_before(checkpoint.offset, end) == checkpoint.crc:
            if self._report.checkpoint is None:
                self._report.checkpoint = checkpoint.offset
            return
        self._checkpoints.drop(checkpoint)
        self._report.notes.append(
            f"{checkpoint.path} does not fit the frames from offset {first} to {end} and is not used"
        )

    def _chain_before(self, end: int, log_id: bytes) -> int | None:
        """The checksum of the last stamp, where it went with its segment: what was made of it knows."""
        for checkpoint in self._checkpoints.kept:
            if checkpoint.offset == end:
                return checkpoint.crc
        with suppress(LogDamaged, OSError):  # of a snapshot; that is told by who needs it
            snapshot = newest_snapshot(self._disk, self._directory, log_id)
            if snapshot is not None:
                snapshot.close()
                return snapshot.facts.chain if snapshot.offset == end else None
        return None

    def _crc_before(self, offset: int, end: int) -> int | None:
        """The checksum of the stamp that the frame at an offset follows; None where no frame begins there."""
        if offset == end:
            return self._chain or 0
        try:
            found = next(self._segments.walk(offset, offset + 1, 64 * 1024), None)
        except (LogDamaged, OSError):  # told when it is read
            return None
        if found is None or found.logged.offset != offset:
            return None
        return found.stamp.previous_crc

    def _walk(self, segment: Segment, file: File, size: int, index: SparseIndex) -> BadFrame | None:
        """Read a segment's frames behind those that its index knows, and note them there."""
        begin = index.size
        previous = self._chain if index.last_crc is None else index.last_crc
        walk = Walk(file, position=begin, offset=index.end, end=size, previous_crc=previous)
        try:
            for found in walk:
                index_frame(index, found)
                self._evidence = max(self._evidence, found.stamp.synced_offset)
        except BadFrame as bad:
            return bad
        finally:
            self._report.walked_bytes += walk.position - begin
        return None

    def _join(self, segment: Segment, index: SparseIndex) -> None:
        first = index.first_previous_crc
        if self._chain is not None and first is not None and first != self._chain:
            reason = f"its first frame follows stamp {first:#010x}, before it lies {self._chain:#010x}"
            raise LogDamaged(segment.path, reason, position=0, offset=segment.base)
        segment.describe(index)
        if index.last_crc is not None:
            self._chain = index.last_crc
        self._segments.add(segment)

    def _tell(self, end: int) -> None:
        report = self._report
        held = self._segments.all
        report.first_offset = held[0].base if held else end
        report.next_offset, report.synced = end, self._evidence
        report.segments, report.bytes = len(held), sum(segment.size for segment in held)
        if report.cut is not None or end != self._mark.synced:
            report.clean = False

    # --- what is changed

    def _write(self, identity: Identity, torn: bool, end: int) -> tuple[Identity, MarkFile]:
        last = self._segments.last
        if last is not None and not self._report.clean:
            self._make_sure(last, torn)
        if not self._report.created:
            identity = identity.opened()
            if not self._report.clean:
                identity = identity.next_epoch(end)
            write_identity(self._disk, self._directory, f"{self._directory}/{IDENTITY}", identity)
        file = open_mark(self._disk, f"{self._directory}/{MARK}", create=True)
        assert file is not None
        mark_file = MarkFile(file, self._mark)
        try:
            mark_file.settle(replace(self._mark, synced=end, start=self._report.first_offset, clean=False))
            self._disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            raise
        return identity, mark_file

    def _make_sure(self, last: Segment, torn: bool) -> None:
        """Bring to stable storage what of the last segment may never have come there.

        A sync that failed leaves bytes and names that look written and that no later sync writes out. So what
        is not known to be synced is written once more, and a file of which nothing is known is copied.
        """
        assert last.file is not None
        assert last.index is not None
        if self._evidence <= last.base and self._copied(last):
            return
        if torn:
            last.file.truncate(last.size)
        at = last.index.before(self._evidence).position if self._evidence < last.end else last.size
        for chunk in _chunks(last.file, at, last.size):
            at = write_all(last.file, at, [chunk])
        last.file.sync()

    def _copied(self, last: Segment) -> bool:
        """Put a copy in its place; where there is no room for one, give it its name anew, and say so."""
        assert last.file is not None
        try:
            replace_file(self._disk, self._directory, last.path, _chunks(last.file, 0, last.size))
        except OSError as error:
            if not is_no_room(error):
                raise
            with suppress(OSError):
                self._disk.remove(last.path + TEMPORARY)
            for old, new in ((last.path, last.path + ASIDE), (last.path + ASIDE, last.path)):
                self._disk.rename(old, new)
                self._disk.sync_directory(self._directory)
            return False
        last.file.close()
        last.file = self._disk.open(last.path)
        return True

    def _put_back(self, names: list[str]) -> list[str]:
        """Segments that a process was about to give their names anew when it ended."""
        aside = [name for name in names if name.endswith(ASIDE)]
        for name in aside:
            path = f"{self._directory}/{name}"
            self._disk.rename(path, path.removesuffix(ASIDE))
        return self._disk.list(self._directory) if aside else names

    def _remove(self, obsolete: list[int], names: list[str]) -> None:
        for base in obsolete:
            self._disk.remove(Segment(self._directory, base).path)
        for name in names:
            if name.endswith(TEMPORARY):
                with suppress(FileNotFoundError):  # it may have been used just now
                    self._disk.remove(f"{self._directory}/{name}")
        held = {segment.base for segment in self._segments.all[:-1]}
        for base in segment_bases(names, INDEX_SUFFIX):
            if base not in held:
                self._disk.remove(Segment(self._directory, base).index_path)

    def _size(self, segment: Segment) -> int:
        file = self._disk.open(segment.path, read_only=True)
        try:
            return file.size()
        finally:
            file.close()


def _chunks(file: File, at: int, end: int) -> Iterator[bytes]:
    while at < end:
        chunk = file.read(at, min(CHUNK_BYTES, end - at))
        if not chunk:
            raise OSError(errno.EIO, f"the file ended at byte {at}, and had {end} just now")
        yield chunk
        at += len(chunk)


def _describes(index: SparseIndex, file: File, size: int) -> bool:
    """Whether a stored index was made from this very file: its first and last frames say so."""
    if index.size != size:
        return False
    try:
        first = read_head(memoryview(file.read(0, PEEK_BYTES)))
        if (first.offset, first.stamp.previous_crc) != (index.base, index.first_previous_crc):
            return False
        entry = index.last_entry()
        walk = Walk(
            file,
            position=entry.position,
            offset=entry.offset,
            end=size,
            previous_crc=entry.previous_crc,
            chunk_bytes=64 * 1024,
        )
        for _ in walk:
            pass
    except (BadFrame, PeerError):
        return False
    return (walk.offset, walk.crc) == (index.end, index.last_crc)
