"""One group commit: everything that was appended since the last one, written and synced in one go.

Made by the log, run on the thread that owns the disk, given back to the log. The first error ends it, and
the log with it: what a failed write or sync left behind is only known after a recovery.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delta_prop_broker.log.files import ahead
from delta_prop_broker.log.files.segment import write_index
from delta_prop_broker.log.files.writing import write_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.marks import MarkFile
    from delta_prop_broker.log.files.segment import Segment, Segments

_SMALL_BYTES = 2048
_GATHERED = 512
_FEW = 4  # which are not worth the call that makes one of them


@dataclass(slots=True)
class Piece:
    """What goes to one segment: buffers, from position `at` on."""

    segment: Segment
    at: int
    parts: list[Buffer] = field(default_factory=list)
    position: int = 0  # behind the last of them
    seals: bool = False  # nothing follows in this segment


class Commit:
    """The disk's side of a commit. `end` and `synced` are what holds if `run` returns."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        pieces: list[Piece],
        removed: list[Segment],
        mark: MarkFile,
        start: int,
        end: int,
        synced: int,
        sync: bool,
        asks_free: bool,
        ahead_to: int,
    ) -> None:
        """`ahead_to`: how long a file may become by zeros ahead of its frames; 0: no zeros."""
        self.pieces = pieces
        self.removed = removed
        self.end = end
        self.synced = synced
        self.free_bytes: int | None = None
        """What the disk has left, if that was to be asked."""
        self._asks_free = asks_free
        self._ahead_to = ahead_to
        self._disk = disk
        self._directory = directory
        self._mark = mark
        self._start = start
        self._sync = sync

    def run(self) -> None:
        """Write, sync, mark, remove, in this order. Raises OSError; it is not run a second time."""
        for piece in self.pieces:
            self._write(piece)
        if self.synced > self._mark.newest.synced or self.removed:
            mark = replace(self._mark.newest, synced=self.synced, start=self._start, clean=False)
            if self.removed:
                # Before a file goes, both slots say that it may: an older one never comes back.
                self._mark.settle(mark)
            else:
                self._mark.write(mark)
        for segment in self.removed:
            self._remove(segment.path)
            self._remove(segment.index_path)
        if self._asks_free:
            self.free_bytes = self._disk.free_bytes()

    def finish(self, segments: Segments) -> tuple[int, int]:
        """For the log's thread, once `run` has returned: what was written can be read, what is sealed is
        closed. How many frames and bytes that were.
        """
        frames = size = 0
        for piece in self.pieces:
            segment = piece.segment
            segment.readable = piece.position
            size += piece.position - piece.at
            frames += len(piece.parts) // 2  # a head and a body each
            if piece.seals:
                if segment.file is not None:
                    segment.file.close()
                    segment.file = None
                if segment.index is not None:
                    segments.keep_index(segment, segment.index)
        return frames, size

    def _write(self, piece: Piece) -> None:
        segment = piece.segment
        file = segment.file
        if file is None:
            file = segment.file = self._create(segment)
        if piece.parts:
            _write_parts(file, piece)
        if piece.seals:
            ahead.cut(file, segment, piece.position)
        elif self._sync and piece.parts:
            ahead.fill(file, segment, piece.at, piece.position, end_max=self._ahead_to)
        if piece.seals or self._sync:
            file.sync()
        if piece.seals and segment.index is not None:
            write_index(self._disk, segment, segment.index)

    def _create(self, segment: Segment) -> File:
        file = self._disk.open(segment.path, create=True)
        if file.size():
            file.close()
            raise FileExistsError(errno.EEXIST, "a new segment is there already", segment.path)
        self._disk.sync_directory(self._directory)
        return file

    def _remove(self, path: str) -> None:
        try:
            self._disk.remove(path)
        except FileNotFoundError:
            return


def write_piece(piece: Piece) -> tuple[int, int]:
    """Copy a piece into the page cache, where its file is made and nothing more is to be done: the short way
    of a `Commit`. How many frames and bytes it was. Raises OSError.
    """
    segment = piece.segment
    assert segment.file is not None, "a file is made by a commit"
    _write_parts(segment.file, piece)
    segment.readable = piece.position
    return len(piece.parts) // 2, piece.position - piece.at


def _write_parts(file: File, piece: Piece) -> None:
    size = piece.position - piece.at
    write_all(file, piece.at, _gathered(piece.parts, size), size)


def all_have_files(pieces: Iterable[Piece]) -> bool:
    """Whether no file is to be made for what is to be written, which waits for the disk.

    Nor is one to be sealed: a segment that is has one behind it in the same commit, whose file is to be made.
    """
    return all(piece.segment.file is not None for piece in pieces)


def _gathered(parts: list[Buffer], size: int) -> list[Buffer]:
    """Many small buffers as fewer large ones: a buffer costs the system more than copying 2 KB."""
    if len(parts) <= _FEW or len(parts) * _SMALL_BYTES < size:
        return parts
    return [b"".join(parts[first : first + _GATHERED]) for first in range(0, len(parts), _GATHERED)]
