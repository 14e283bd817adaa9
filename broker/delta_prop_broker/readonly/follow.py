"""Follows a log that another process writes, up to the last row that is known to be synced.

It takes no lock and changes nothing. The writer updates the recovery point file after each commit, so one
read of that file shows if there are more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.recovery.recovery_point import RecoveryPoint, open_recovery_point, read_recovery_point
from delta_prop_broker.segments.frames import FrameLocation, FrameScanner
from delta_prop_broker.segments.paths import DIRECTORY, RECOVERY_POINT
from delta_prop_broker.segments.segment import Segment, segment_bases
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File


class Follower:
    """A reader of a log, to be closed after use; `offset` is the next offset that it reads.

    `synced`: the offset up to which the caller knows rows to be synced. Without `synced`, a log whose
    recovery point is lost would look empty.
    """

    def __init__(self, disk: Disk, offset: int, directory: str = DIRECTORY, *, synced: int = 0) -> None:
        self.offset = offset
        self._known_synced = synced
        self._disk = disk
        self._directory = directory
        self._segment: Segment | None = None
        self._file: File | None = None
        self._position = 0
        self._scan_offset = 0  # offset of the frame at `_position`; at most `offset`
        self._crc: int | None = None
        self._recovery_point = RecoveryPoint()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> Iterator[FrameLocation]:
        """Yield the frames that are synced now, beginning with the one that holds `offset`.

        `offset` moves past a frame when the next frame is requested. Raises Refused (CURSOR_TOO_OLD),
        LogCorrupted, OSError.
        """
        point = self._read_recovery_point()
        if self.offset < point.start:
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"offset {self.offset} is no longer in the log, which starts at {point.start}: start at "
                "earliest to read the remaining rows",
                details={"offset": self.offset, "start_offset": point.start},
            )
        while self.offset < point.synced:
            if self._file is None:
                self._open()
            for location in self._scan(point.synced):
                if location.logged.next_offset > self.offset:
                    yield location
                    self.offset = location.logged.next_offset
            if self.offset < point.synced:
                self.close()  # the segment ends here; the next one begins with the next offset

    def _read_recovery_point(self) -> RecoveryPoint:
        """Return the newest readable recovery point; a slot that is being written cannot be read."""
        file = open_recovery_point(self._disk, f"{self._directory}/{RECOVERY_POINT}", read_only=True)
        if file is not None:
            try:
                point, _ = read_recovery_point(file)
            finally:
                file.close()
            if point is not None and point.sequence >= self._recovery_point.sequence:
                self._recovery_point = point
        return replace(self._recovery_point, synced=max(self._recovery_point.synced, self._known_synced))

    def _open(self) -> None:
        bases = segment_bases(self._disk.list(self._directory))
        base = max((base for base in bases if base <= self.offset), default=None)
        if base is None or (self._segment is not None and base == self._segment.base):
            path = Segment(self._directory, self.offset).path
            raise LogCorrupted(
                path,
                "frames are missing",
                offset=self.offset,
                end=max(self._recovery_point.synced, self._known_synced),
            )
        self._segment = Segment(self._directory, base)
        self._file = self._disk.open(self._segment.path, read_only=True)
        self._position, self._scan_offset, self._crc = 0, base, None

    def _scan(self, synced: int) -> Iterator[FrameLocation]:
        """Yield the remaining frames of this file, up to offset `synced`."""
        assert self._file is not None
        assert self._segment is not None
        scanner = FrameScanner(
            self._file,
            position=self._position,
            offset=self._scan_offset,
            end=self._file.size(),
            previous_crc=self._crc,
        )
        try:
            while self._scan_offset < synced:
                location = next(iter(scanner), None)
                if location is None:
                    return
                self._position, self._scan_offset, self._crc = scanner.position, scanner.offset, scanner.crc
                yield location
        except BadFrame as bad:
            raise LogCorrupted(
                self._segment.path, bad.reason, position=bad.position, offset=bad.offset
            ) from None
