"""Compression of sealed segments: each is rewritten with compressed frames, in small steps.

The new file is complete and on stable storage before it takes the name of the old one, so after a crash the
name leads to one of two files with the same frames. Readers that have the old file open continue with it. A
compression that fails, or would save too little, leaves the segment unchanged.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import BadFrame
from delta_prop_broker.segments.compressed import compress_frame
from delta_prop_broker.segments.frames import FrameLocation, FrameScanner
from delta_prop_broker.segments.paths import TEMPORARY
from delta_prop_broker.segments.segment import (
    Segment,
    Segments,
    corruption_error,
    index_frame,
    load_index,
    write_index,
)
from delta_prop_broker.segments.small_file import write_all
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_wire.compression import Compression

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.settings import LogSettings

STEP_BYTES = 256 * 1024
"""Uncompressed bytes that one step reads."""
SYNC_BYTES = 4 * 1024 * 1024
"""Bytes written between two syncs, since one large sync delays commits that run at the same time."""
TRIAL_BYTES = 4 * 1024 * 1024
SAVED_MIN = 1 / 8
"""Minimum share that must be saved after TRIAL_BYTES, and at the end; else the compression is dropped."""


class _NewFile:
    """A file that is written from its beginning, with a sync now and then. `bytes`: written so far."""

    def __init__(self, disk: Disk, path: str) -> None:
        """Open the file; call `clear` before the first write. Raises OSError."""
        self.path = path
        self.bytes = 0
        self._synced_bytes = 0
        self._disk = disk
        self._file = disk.open(path, create=True)

    def clear(self) -> None:
        """Drop what an earlier process left in the file. Raises OSError."""
        self._file.truncate(0)

    def append(self, parts: list[bytes], *, is_last: bool) -> None:
        """Write these parts; after the last ones all are on stable storage. Raises OSError."""
        self.bytes = write_all(self._file, self.bytes, parts)
        if self.bytes - self._synced_bytes >= SYNC_BYTES or is_last:
            self._file.sync()
            self._synced_bytes = self.bytes

    def close(self, *, remove: bool) -> None:
        """Close the file; if `remove`, remove it, as far as the disk does."""
        self._file.close()
        if remove:
            with suppress(OSError):
                self._disk.remove(self.path)


class SegmentCompression:
    """The compression of one segment. `step` and `close` run in a thread, since they wait for the disk."""

    def __init__(
        self, disk: Disk, directory: str, segment: Segment, codec: Compression, *, free_bytes_min: int
    ) -> None:
        self.segment = segment
        self.index: SparseIndex | None = None  # of the new file, once it has replaced the segment's file
        self.is_useless = False  # it would save too little
        self._disk = disk
        self._directory = directory
        self._codec = codec
        self._free_bytes_min = free_bytes_min
        self._new_index = SparseIndex(segment.base)
        self._old_file: File | None = None
        self._new_file: _NewFile | None = None
        self._frames: Iterator[FrameLocation] = iter(())
        self._read_bytes = 0

    def step(self) -> bool:
        """Compress some frames; return True at the end. Raises LogCorrupted, OSError: then call `close`."""
        file = self._new_file or self._begin()
        parts, read_bytes_max = [], self._read_bytes + STEP_BYTES
        try:
            while self._read_bytes < read_bytes_max and (location := next(self._frames, None)) is not None:
                parts.append(self._pack_frame(location))
        except BadFrame as bad:
            assert self._old_file is not None
            raise corruption_error(self.segment, self._old_file, bad) from None
        is_complete = self._read_bytes >= self.segment.size
        file.append(parts, is_last=is_complete)
        if is_complete or self._read_bytes >= TRIAL_BYTES:
            self.is_useless = file.bytes > (1 - SAVED_MIN) * self._read_bytes
        if self.is_useless:
            self._note_useless()
        elif is_complete:
            self._exchange(file.path)
        return is_complete or self.is_useless

    def close(self) -> None:
        """Close the files; remove the new one unless it has replaced the segment."""
        if self._new_file is not None:
            self._new_file.close(remove=self.index is None)
        if self._old_file is not None:
            self._old_file.close()

    def _begin(self) -> _NewFile:
        size, path = self.segment.size, self.segment.path + TEMPORARY
        free = self._disk.free_bytes()
        if free < self._free_bytes_min + size:
            reason = f"{free} bytes are free on the disk, too few to write a segment of {size}"
            raise OSError(errno.ENOSPC, reason, path)
        self._old_file = self._disk.open(self.segment.path, read_only=True)
        self._frames = iter(
            FrameScanner(self._old_file, position=0, offset=self.segment.base, end=size, previous_crc=None)
        )
        self._new_file = _NewFile(self._disk, path)
        self._new_file.clear()
        return self._new_file

    def _pack_frame(self, frame: FrameLocation) -> bytes:
        logged = frame.logged
        packed = compress_frame(logged.head, logged.batch.body, self._codec)
        raw = logged.head + bytes(logged.batch.body) if packed is None else packed
        codec = 0 if packed is None else int(self._codec)
        index_frame(self._new_index, frame._replace(size=len(raw), codec=codec))
        self._read_bytes += frame.size
        return raw

    def _exchange(self, path: str) -> None:
        segment, new_index = self.segment, self._new_index
        assert (new_index.end, new_index.last_crc) == (segment.end, segment.last_crc), (
            "the new file has other frames"
        )
        new_index.compression_tried = True
        self._disk.rename(path, segment.path)
        self.index = new_index
        # After a crash the name may lead to either file: both hold the same frames, on stable storage.
        with suppress(OSError):
            self._disk.sync_directory(self._directory)
        write_index(self._disk, segment, new_index)

    def _note_useless(self) -> None:
        """Note in the stored index that compression saves too little, for the next process."""
        index = load_index(self._disk, self.segment)
        if index is not None:
            index.compression_tried = True
            write_index(self._disk, self.segment, index)


class SegmentCompressor:
    """Selects segments and adopts their compressed files; for the thread that owns the log."""

    def __init__(self, disk: Disk, directory: str, segments: Segments, settings: LogSettings) -> None:
        self._disk = disk
        self._directory = directory
        self._segments = segments
        self._codec = settings.codec
        self._free_bytes_min = settings.free_bytes_min
        self._running: SegmentCompression | None = None
        self._deferred: Segment | None = None  # the running segment, if the log has removed it meanwhile

    def take(self, synced: int) -> SegmentCompression | None:
        """Return the compression of the oldest sealed segment not tried yet; None if there is none.

        Until `finish`, readers use the old file, opened here, even if it is replaced. Raises OSError.
        """
        if self._codec is None or self._running is not None:
            return None
        for segment in self._segments.all[:-1]:
            if (
                not segment.compression_tried
                and segment.size
                and segment.file is None
                and segment.end <= synced
            ):
                segment.file = self._disk.open(segment.path, read_only=True)
                self._running = SegmentCompression(
                    self._disk, self._directory, segment, self._codec, free_bytes_min=self._free_bytes_min
                )
                return self._running
        return None

    @property
    def is_running(self) -> bool:
        """True while a segment is being rewritten."""
        return self._running is not None

    def defer_removal(self, removed: list[Segment]) -> list[Segment]:
        """Return those of these segments that may be removed now; `finish` returns the running one."""
        if self._running is None or self._running.segment not in removed:
            return removed
        self._deferred = self._running.segment
        return [segment for segment in removed if segment is not self._deferred]

    def finish(self, compression: SegmentCompression, *, retry: bool) -> tuple[Segment | None, int]:
        """Adopt a compression; return its segment if the log removed it meanwhile, and the saved bytes.

        `retry`: the segment may be tried again.
        """
        segment = compression.segment
        file, segment.file = segment.file, None
        if file is not None:
            file.close()
        if compression is not self._running:  # it belongs to a log that was recovered since
            return None, 0
        removed, self._running, self._deferred = self._deferred, None, None
        segment.compression_tried = not retry
        if compression.index is not None and removed is None:
            saved_bytes = segment.size - compression.index.size
            self._segments.exchange(segment, compression.index)
            return None, saved_bytes
        return removed, 0
