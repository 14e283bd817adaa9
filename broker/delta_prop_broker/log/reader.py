"""Reads from the log on disk: new rows from memory, older ones from segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log import refusals
from delta_prop_broker.segments.sendfile import SendfilePool
from delta_prop_wire.stamp import unpack_logged_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.marks import LogMarks
    from delta_prop_broker.log.tail import Tail
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.segments.frames import FrameLocation
    from delta_prop_broker.segments.segment import Segments
    from delta_prop_wire.batch import LoggedBatch


class LogReader:
    """Finds batches and frames in the tail and in the segments.

    `sendfile_pool` creates readers of full frames, as the files hold them.
    """

    def __init__(
        self, disk: Disk, segments: Segments, tail: Tail, *, marks: LogMarks, clock: LogClock
    ) -> None:
        self.sendfile_pool = SendfilePool(disk, segments, marks)
        self._segments = segments
        self._tail = tail
        self._marks = marks
        self._clock = clock

    def resume(self, segments: Segments, tail: Tail) -> None:
        """Continue with the segments and the tail of the recovered log."""
        self._segments, self._tail = segments, tail
        self.sendfile_pool.resume(segments)

    @property
    def tail_bytes(self) -> int:
        """Size of the tail in memory, in bytes."""
        return self._tail.bytes

    def read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds `offset` on, below `end` and within the bounds.

        Returns at least one batch below `end`, even if it exceeds the bounds. Raises Refused (CURSOR_TOO_OLD)
        below the log's start, LogCorrupted, OSError.
        """
        tail, marks = self._tail, self._marks
        if offset < marks.start_offset:
            raise refusals.offset_too_old(offset, marks.start_offset)
        if offset >= end:
            return []
        if offset >= tail.start_offset:
            return tail.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)
        # After a failure `written` is lower: the rows from there on may be lost.
        end = min(end, marks.written, tail.start_offset)
        return self._segments.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)

    def frames(self, offset: int, end: int) -> Iterator[FrameLocation]:
        """Yield the frames from `offset` (or the log's start) up to `end`. Raises LogCorrupted, OSError."""
        return self._segments.scan(max(offset, self._marks.start_offset), end)

    def find(self, origin: int, counter: int) -> int | None:
        """Return the offset of a dot, even one not yet written; None if the log does not hold it."""
        return self._segments.find(origin, counter, self._fetch)

    def _fetch(self, offset: int) -> LoggedBatch | None:
        batches = self.read(offset, self._marks.next_offset, rows_max=1, bytes_max=1)
        return batches[0] if batches else None

    def offset_at(self, time_us: int, end: int) -> int:
        """Return the first offset appended at that time (us since 1970) or later, else `end`."""
        return self._segments.offset_at(time_us, end)

    def age_s(self, offset: int, end: int) -> float | None:
        """Return the seconds since the row at an offset was appended; 0 from `end` on; None: unreadable."""
        if offset >= end:
            return 0.0
        time = self.append_time(offset)
        return None if time is None else max(self._clock.peek() - time, 0) / 1e6

    def append_time(self, offset: int) -> int | None:
        """Return the append time (us since 1970) of a row; None if it cannot be read.

        For a removed row, returns the time of the oldest stored one. Reads a few frame heads, and no bodies.
        """
        if offset >= self._tail.start_offset:
            (logged,) = self._tail.read(offset, self._marks.next_offset, rows_max=1, bytes_max=1)
            head_fields = unpack_logged_head(logged.head)
            return None if head_fields is None else head_fields[2].append_time
        try:
            return self._segments.append_time(max(offset, self._marks.start_offset))
        except (LogCorrupted, OSError):
            return None
