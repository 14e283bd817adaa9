"""One group commit: everything appended since the last one, written and synced together.

The log creates the commit, the thread that owns the disk runs it, and the log finishes it. The first error
ends the commit and stops the log: only a recovery finds out which bytes of a failed write or sync are on
the disk.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.segment import write_index
from delta_prop_broker.segments.writing import write_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.recovery.recovery_point import RecoveryPointFile
    from delta_prop_broker.segments.segment import Segment, Segments

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


def copy_to_cache(write: SegmentWrite) -> tuple[int, int]:
    """Copy a pending write into the page cache: a `Commit` without a sync, a recovery point or a new file.

    Return the numbers of frames and bytes. Raises OSError.
    """
    segment = write.segment
    assert segment.file is not None, "the segment has no file: run a commit, which creates it"
    _write_parts(segment.file, write)
    segment.readable = write.end
    return len(write.parts) // 2, write.end - write.start


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
