"""Sealed segments are rewritten with compressed frames: one at a time, in small steps, beside all else.

The new file is whole and on stable storage before it takes the name of the old one, so that name leads to
one of two files that say the same, whatever ends the process or the machine. Readers that have the old file
open read on in it. A rewriting that fails, or would save little, leaves the segment as it is.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import BadFrame
from delta_prop_broker.log.files.compressed import compress_frame
from delta_prop_broker.log.files.frames import Walk
from delta_prop_broker.log.files.names import TEMPORARY
from delta_prop_broker.log.files.segment import damaged, index_frame, load_index, write_index
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.files.writing import write_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.frames import Place
    from delta_prop_broker.log.files.segment import Segment, Segments
    from delta_prop_broker.log.retention.room import Room
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_wire.compression import Compression

STEP_BYTES = 256 * 1024
"""Plain bytes that one step takes."""
SYNC_BYTES = 4 * 1024 * 1024
"""Synced so often, as one large sync holds up the commits beside it."""
TRIAL_BYTES = 4 * 1024 * 1024
SAVED_MIN = 1 / 8
"""After so many bytes, and at the end, at least this share must have been saved: else it is given up."""


class Rewriting:
    """One segment under way. `step` and `end` are for a thread; `take` and `finish` of `Rewriter` are not."""

    def __init__(
        self, disk: Disk, directory: str, segment: Segment, codec: Compression, *, free_bytes_min: int
    ) -> None:
        self.segment = segment
        self.index: SparseIndex | None = None  # of the new file, once it has the segment's name
        self.useless = False  # it would save too little
        self._disk = disk
        self._directory = directory
        self._codec = codec
        self._free_bytes_min = free_bytes_min
        self._path = segment.path + TEMPORARY
        self._new = SparseIndex(segment.base)
        self._old_file: File | None = None
        self._file: File | None = None
        self._places: Iterator[Place] = iter(())
        self._read = self._written = self._synced = 0

    def step(self) -> bool:
        """Do a part; whether it is done. Raises LogDamaged, OSError: then only `end` is left to do."""
        if self._file is None:
            self._begin()
        file, parts, until = self._file, [], self._read + STEP_BYTES
        assert file is not None
        try:
            while self._read < until and (place := next(self._places, None)) is not None:
                parts.append(self._stored(place))
        except BadFrame as bad:
            assert self._old_file is not None
            raise damaged(self.segment, self._old_file, bad) from None
        self._written = write_all(file, self._written, parts)
        whole = self._read >= self.segment.size
        if self._written - self._synced >= SYNC_BYTES or whole:
            file.sync()
            self._synced = self._written
        if whole or self._read >= TRIAL_BYTES:
            self.useless = self._written > (1 - SAVED_MIN) * self._read
        if self.useless:
            self._note_useless()
        elif whole:
            self._exchange()
        return whole or self.useless

    def end(self) -> None:
        """Let go of the files; what has not become the segment goes."""
        for file in (self._file, self._old_file):
            if file is not None:
                file.close()
        if self._file is not None and self.index is None:
            with suppress(OSError):
                self._disk.remove(self._path)

    def _begin(self) -> None:
        size = self.segment.size
        free = self._disk.free_bytes()
        if free < self._free_bytes_min + size:
            reason = f"{free} bytes are left on the disk, and a segment of {size} is to be written"
            raise OSError(errno.ENOSPC, reason, self._path)
        self._old_file = self._disk.open(self.segment.path, read_only=True)
        self._places = iter(
            Walk(self._old_file, position=0, offset=self.segment.base, end=size, previous_crc=None)
        )
        self._file = self._disk.open(self._path, create=True)
        self._file.truncate(0)

    def _stored(self, place: Place) -> bytes:
        logged = place.logged
        packed = compress_frame(logged.head, logged.batch.body, self._codec)
        raw = logged.head + bytes(logged.batch.body) if packed is None else packed
        codec = 0 if packed is None else int(self._codec)
        index_frame(self._new, place._replace(size=len(raw), codec=codec))
        self._read += place.size
        return raw

    def _exchange(self) -> None:
        segment, new = self.segment, self._new
        assert (new.end, new.last_crc) == (segment.end, segment.last_crc), "the very frames, and all of them"
        new.tried = True
        self._disk.rename(self._path, segment.path)
        self.index = new
        # Both files say the same and are on stable storage: the name may lead to either after a crash.
        with suppress(OSError):
            self._disk.sync_directory(self._directory)
        write_index(self._disk, segment, new)

    def _note_useless(self) -> None:
        """So that the next process does not try again; no more than a hint, as the index is."""
        index = load_index(self._disk, self.segment)
        if index is not None:
            index.tried = True
            write_index(self._disk, self.segment, index)


class Rewriter:
    """Picks the segments and takes what was rewritten over; for the thread that owns the log."""

    def __init__(
        self, disk: Disk, directory: str, segments: Segments, room: Room, settings: LogSettings
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._segments = segments
        self._room = room
        self._codec = settings.codec
        self._free_bytes_min = settings.free_bytes_min
        self._running: Rewriting | None = None
        self._let_go: Segment | None = None  # while it was rewritten

    def take(self, synced: int) -> Rewriting | None:
        """The oldest sealed segment that has not been tried; None where there is none. Raises OSError.

        Until `finish` it is read through a file that is opened now, whatever comes to bear its name.
        """
        if self._codec is None or self._running is not None:
            return None
        for segment in self._segments.all[:-1]:
            if not segment.tried and segment.size and segment.file is None and segment.end <= synced:
                segment.file = self._disk.open(segment.path, read_only=True)
                self._running = Rewriting(
                    self._disk, self._directory, segment, self._codec, free_bytes_min=self._free_bytes_min
                )
                return self._running
        return None

    @property
    def under_way(self) -> bool:
        """Whether a segment is being rewritten."""
        return self._running is not None

    def keep(self, removed: list[Segment]) -> list[Segment]:
        """Of these, the segments that may be removed now; one that is being rewritten follows at its end."""
        if self._running is None or self._running.segment not in removed:
            return removed
        self._let_go = self._running.segment
        return [segment for segment in removed if segment is not self._let_go]

    def finish(self, rewriting: Rewriting, *, again: bool) -> Segment | None:
        """Take it over; the segment, where it is to be removed now. `again`: it is to be tried once more."""
        segment = rewriting.segment
        file, segment.file = segment.file, None
        if file is not None:
            file.close()
        if rewriting is not self._running:  # of a log that was recovered since
            return None
        let_go, self._running, self._let_go = self._let_go, None, None
        segment.tried = not again
        if rewriting.index is not None and let_go is None:
            self._room.bytes -= segment.size - rewriting.index.size
            self._segments.exchange(segment, rewriting.index)
        return let_go
