"""Reads a log that another process writes: frame after frame, as far as it is known to be synced.

It takes no lock and changes nothing. What was synced stands in the mark file, which the writer renews after
each commit; so a look at that file tells whether there is more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.frames import Walk
from delta_prop_broker.log.files.marks import Mark, open_mark, read_mark
from delta_prop_broker.log.files.names import DIRECTORY, MARK
from delta_prop_broker.log.files.segment import Segment, segment_bases
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk, File
    from delta_prop_broker.log.files.frames import Place


class Follower:
    """A reader's place in a log; `offset` is what comes next. Close it.

    `synced`: up to where the caller knows the log to be on stable storage, whatever the mark file says. It
    may lag, or be lost: then nobody must take the log for an empty one.
    """

    def __init__(self, disk: Disk, offset: int, directory: str = DIRECTORY, *, synced: int = 0) -> None:
        self.offset = offset
        self._known = synced
        self._disk = disk
        self._directory = directory
        self._segment: Segment | None = None
        self._file: File | None = None
        self._position = 0
        self._walked = 0  # the offset at `_position`, at or before `offset`
        self._crc: int | None = None
        self._seen = Mark()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> Iterator[Place]:
        """Frames from the one that holds `offset` on, up to what is synced now; none where that is all.

        `offset` moves behind each frame when the next one is asked for. Raises Refused (CURSOR_TOO_OLD),
        LogDamaged, OSError.
        """
        mark = self._mark()
        if self.offset < mark.start:
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"offset {self.offset} is no longer in the log, which starts at {mark.start}: start at "
                "earliest to take what is left",
                details={"offset": self.offset, "start_offset": mark.start},
            )
        while self.offset < mark.synced:
            if self._file is None:
                self._open()
            for place in self._walk(mark.synced):
                if place.logged.next_offset > self.offset:
                    yield place
                    self.offset = place.logged.next_offset
            if self.offset < mark.synced:
                self.close()  # this segment is at its end; the next one begins with what comes next

    def _mark(self) -> Mark:
        """The newest mark that can be read; a slot that is being written does not count."""
        file = open_mark(self._disk, f"{self._directory}/{MARK}", read_only=True)
        if file is not None:
            try:
                found, _ = read_mark(file)
            finally:
                file.close()
            if found is not None and found.sequence >= self._seen.sequence:
                self._seen = found
        return replace(self._seen, synced=max(self._seen.synced, self._known))

    def _open(self) -> None:
        bases = segment_bases(self._disk.list(self._directory))
        base = max((base for base in bases if base <= self.offset), default=None)
        if base is None or (self._segment is not None and base == self._segment.base):
            path = Segment(self._directory, self.offset).path
            raise LogDamaged(
                path, "frames are missing", offset=self.offset, end=max(self._seen.synced, self._known)
            )
        self._segment = Segment(self._directory, base)
        self._file = self._disk.open(self._segment.path, read_only=True)
        self._position, self._walked, self._crc = 0, base, None

    def _walk(self, synced: int) -> Iterator[Place]:
        """The rest of this file, up to `synced`."""
        assert self._file is not None
        assert self._segment is not None
        walk = Walk(
            self._file,
            position=self._position,
            offset=self._walked,
            end=self._file.size(),
            previous_crc=self._crc,
        )
        try:
            while self._walked < synced:
                place = next(iter(walk), None)
                if place is None:
                    return
                self._position, self._walked, self._crc = walk.position, walk.offset, walk.crc
                yield place
        except BadFrame as bad:
            raise LogDamaged(
                self._segment.path, bad.reason, position=bad.position, offset=bad.offset
            ) from None
