"""Copies a log to another disk while it is written to: what is synced, from the oldest segment that is left.

Takes no lock and changes nothing in the source. The order makes the copy whole:
1. the small files beside the log, which lag behind it;
2. checkpoints and snapshots, so that they speak of nothing behind the mark;
3. the mark, up to which the log is copied;
4. the segments, each read back and checked; where one went meanwhile it begins again with what is left;
5. identity and mark of the copy, and at the very end the format, without which it is no log.

A copy is a history of its own from its end on: it begins an epoch there that the source will not reach by
counting, so that a cursor of the one that lies beyond is never taken for one of the other.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.frames import CHUNK_BYTES, Walk
from delta_prop_broker.log.files.identity import (
    check_format,
    read_identity,
    read_small,
    replace_file,
    write_identity,
)
from delta_prop_broker.log.files.marks import Mark, MarkFile, open_mark, read_mark
from delta_prop_broker.log.files.names import ASIDE, FORMAT_PATH, IDENTITY, MARK, TEMPORARY
from delta_prop_broker.log.files.segment import (
    INDEX_SUFFIX,
    SUFFIX,
    Segment,
    damaged,
    index_frame,
    segment_bases,
    write_index,
)
from delta_prop_broker.log.files.snapshot import SUFFIX as SNAPSHOT_SUFFIX
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.identity import Identity

TRIES = 100
PAUSE_S = 0.05
LEAP_BYTES = 2
"""An epoch of a copy leaps by 1 to 65,536, drawn: two copies of one log differ too."""
_SYNC_BYTES = 16 * 1024 * 1024


class CopyFailed(DeltaPropError):
    """The source changed under the copy again and again."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy holds; `begun_again` counts how often something went while it was copied."""

    first_offset: int
    next_offset: int
    epoch: int
    segments: int
    bytes: int
    files: int
    begun_again: int


class _Gone(Exception):
    """The source is not what it was at the start: look again."""


def copy_log(
    source: Disk,
    target: Disk,
    directory: str,
    *,
    files: Sequence[str],
    directories: Sequence[str],
    draw: Callable[[int], bytes],
    pause: Callable[[float], object],
) -> Copied:
    """Copy a log into an empty directory; durable when this returns.

    `files` go along where they are there, and all in `directories` but locks. Raises UsageError (no log
    there), LogDamaged, FormatUnknown, CopyFailed, OSError; what was written by then is no log.
    """
    if not check_format(source):
        raise UsageError(f"{source.name!r} holds no log to copy: name a data directory, or a copy of one")
    copying = _Copying(source, target, directory, draw)
    for tried in range(TRIES):
        try:
            return copying.run(files, directories, tried)
        except (_Gone, FileNotFoundError) as error:
            reason = error
            pause(PAUSE_S)
    raise CopyFailed(
        f"the log changed under its copy {TRIES} times, the last time: {reason}; let it keep more, or "
        "copy it when less is written"
    )


class _Copying:
    """One copy on its way; sealed segments that are there are not copied again."""

    def __init__(self, source: Disk, target: Disk, directory: str, draw: Callable[[int], bytes]) -> None:
        self._source = source
        self._target = target
        self._directory = directory
        self._draw = draw
        self._ready: dict[int, Segment] = {}
        self._files = 0

    def run(self, files: Sequence[str], directories: Sequence[str], tried: int) -> Copied:
        self._make_directories(directories)
        self._files = 0
        self._copy_beside("", files)
        for path in directories:
            self._copy_beside(path, [name for name in self._source.list(path) if not name.endswith(".lock")])
        identity = self._identity()
        self._clear()
        snapshots = self._copy_states()
        mark = self._mark()
        segments = self._copy_segments(mark)
        start = segments[0].base if segments else mark.synced
        if self._identity() != identity:
            raise _Gone("another process has opened it")
        if start and self._newest(SNAPSHOT_SUFFIX) is not None and (snapshots is None or snapshots < start):
            raise _Gone("a newer snapshot stands for segments that went")
        identity = identity.next_epoch(mark.synced, leap=1 + int.from_bytes(self._draw(LEAP_BYTES), "little"))
        self._seal(identity, Mark(synced=mark.synced, start=start))
        return Copied(
            first_offset=start,
            next_offset=mark.synced,
            epoch=identity.epoch,
            segments=len(segments),
            bytes=sum(segment.size for segment in segments),
            files=self._files,
            begun_again=tried,
        )

    def _make_directories(self, directories: Sequence[str]) -> None:
        for path in (self._directory, *directories):
            self._target.make_directory(path)
            parts = path.split("/")
            for depth in range(len(parts)):
                self._target.sync_directory("/".join(parts[:depth]))

    def _clear(self) -> None:
        """Of an earlier try, only sealed segments are good."""
        for name in self._target.list(self._directory):
            if not name.endswith((SUFFIX, INDEX_SUFFIX)):
                self._target.remove(f"{self._directory}/{name}")

    # --- whole files

    def _copy_beside(self, directory: str, names: Sequence[str]) -> None:
        """Copy small files, each of which is replaced as a whole or only grows."""
        for name in names:
            if not name.endswith(TEMPORARY):
                with suppress(FileNotFoundError):  # there is none, or it was forgotten just now
                    self._copy_file(f"{directory}/{name}" if directory else name)
        self._target.sync_directory(directory)

    def _copy_states(self) -> int | None:
        """Copy what says something of the log at an offset; the newest snapshot's offset."""
        for name in self._source.list(self._directory):
            if name not in (IDENTITY, MARK) and not name.endswith((SUFFIX, INDEX_SUFFIX, TEMPORARY, ASIDE)):
                self._copy_file(f"{self._directory}/{name}")
        return self._newest(SNAPSHOT_SUFFIX, self._target)

    def _newest(self, suffix: str, disk: Disk | None = None) -> int | None:
        bases = segment_bases((disk or self._source).list(self._directory), suffix)
        return bases[-1] if bases else None

    def _copy_file(self, path: str) -> None:
        file = self._source.open(path, read_only=True)
        try:
            target = self._target.open(path, create=True)
            try:
                target.truncate(0)
                _write(target, file, file.size())
                target.sync()
            finally:
                target.close()
        finally:
            file.close()
        self._files += 1

    # --- the log

    def _identity(self) -> Identity:
        path = f"{self._directory}/{IDENTITY}"
        identity = read_identity(self._source, path)
        if identity is None:
            raise LogDamaged(path, "the file is missing")
        return identity

    def _mark(self) -> Mark:
        path = f"{self._directory}/{MARK}"
        file = open_mark(self._source, path, read_only=True)
        if file is None:
            raise LogDamaged(path, "the file is missing: open the log for writing once")
        try:
            mark, broken = read_mark(file)
        finally:
            file.close()
        if broken and mark is not None:  # one is being written, and it is that one that counts
            raise _Gone("its mark was just moved")
        if mark is None:
            raise LogDamaged(path, "none of its slots can be read: open the log for writing once")
        return mark

    def _copy_segments(self, mark: Mark) -> list[Segment]:
        """All segments up to the mark, the last one as far as it is synced."""
        bases = [base for base in segment_bases(self._source.list(self._directory)) if base < mark.synced]
        ends = [*bases[1:], mark.synced][: len(bases)]
        parts = {base: end for base, end in zip(bases, ends, strict=True) if end > mark.start}
        first = min(parts, default=mark.synced)
        if first > mark.start:
            self._check_went(mark, first)
            raise _Gone(f"offsets {mark.start} to {first} went")
        for base in segment_bases(self._target.list(self._directory)):
            if base not in parts or base not in self._ready:
                self._drop(base)
        segments: list[Segment] = []
        crc: int | None = None
        for base, end in parts.items():
            segment = self._ready.get(base)
            if segment is None or segment.end != end:
                segment = self._ready[base] = self._copy_segment(base, end, crc)
            crc = segment.last_crc
            segments.append(segment)
        self._target.sync_directory(self._directory)
        return segments

    def _check_went(self, mark: Mark, first: int) -> None:
        """Segments go after the mark has said so, and come again with a name that a recovery gave them aside:
        what is missing otherwise is damage.
        """
        names = self._source.list(self._directory)  # before the mark: what has gone by then it says
        oldest = next(iter(segment_bases(names)), None)
        back = oldest is not None and oldest <= mark.start
        if back or any(name.endswith(ASIDE) for name in names) or self._mark().start != mark.start:
            return
        missing = Segment(self._directory, mark.start).path
        raise LogDamaged(missing, "the file is missing", offset=mark.start, end=first)

    def _copy_segment(self, base: int, end: int, crc: int | None) -> Segment:
        """Copy what lies below `end`, and check it as it lies in the copy."""
        segment, index = Segment(self._directory, base), SparseIndex(base)
        source = self._source.open(segment.path, read_only=True)
        try:
            target = self._target.open(segment.path, create=True)
            try:
                target.truncate(0)
                size = source.size()
                _write(target, source, size)
                walk = Walk(target, position=0, offset=base, end=size, previous_crc=crc)
                try:
                    for found in walk:
                        index_frame(index, found)
                        if walk.offset >= end:
                            break
                except BadFrame as bad:
                    segment.size, segment.end = size, end
                    raise damaged(segment, source, bad) from None
                target.truncate(walk.position)
                target.sync()
            finally:
                target.close()
        finally:
            source.close()
        if index.end != end:
            reason = f"it ends at offset {index.end}, and should at {end}"
            raise LogDamaged(segment.path, reason, position=index.size, offset=index.end, end=end)
        segment.describe(index)
        write_index(self._target, segment, index)
        return segment

    def _drop(self, base: int) -> None:
        self._ready.pop(base, None)
        segment = Segment(self._directory, base)
        self._target.remove(segment.path)
        if segment.index_path.rpartition("/")[2] in self._target.list(self._directory):
            self._target.remove(segment.index_path)

    def _seal(self, identity: Identity, mark: Mark) -> None:
        target, directory = self._target, self._directory
        write_identity(target, directory, f"{directory}/{IDENTITY}", identity)
        file = open_mark(target, f"{directory}/{MARK}", create=True)
        assert file is not None
        try:
            MarkFile(file, Mark()).settle(replace(mark, clean=True))
        finally:
            file.close()
        target.sync_directory(directory)
        told = read_small(self._source, FORMAT_PATH)
        assert told is not None
        replace_file(target, "", FORMAT_PATH, [told])


def _write(target: File, source: File, size: int) -> None:
    """Copy so many bytes; what is written is synced now and then, so that no sync is long."""
    at = synced = 0
    while at < size:
        chunk = source.read(at, min(CHUNK_BYTES, size - at))
        if not chunk:
            raise _Gone("a file became shorter")
        at = write_all(target, at, [chunk])
        if at - synced >= _SYNC_BYTES:
            target.sync()
            synced = at
