"""Reading from the log on disk, up to its high watermark: new rows from memory, older ones from segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log import refusals
from delta_prop_broker.log.state import LogState
from delta_prop_wire.stamp import unpack_logged_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop_broker.retention.snapshot import Snapshot
    from delta_prop_broker.segments.frames import FrameLocation
    from delta_prop_broker.segments.sendfile import SendfileReader
    from delta_prop_wire.batch import LoggedBatch


class Reading(LogState):
    """Finds batches, frames and snapshots."""

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds `offset` on, below `high_watermark` and within the bounds.

        Returns at least one batch below `high_watermark`, even if it exceeds the bounds. Raises Refused
        (CURSOR_TOO_OLD) below `start_offset`, LogCorrupted, OSError.
        """
        return self._read(offset, self.high_watermark, rows_max=rows_max, bytes_max=bytes_max)

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches like `read`, but up to `next_offset`: also those not yet visible or written.

        Raises Refused (CURSOR_TOO_OLD) below `start_offset`, LogCorrupted, OSError.
        """
        return self._read(offset, self.next_offset, rows_max=rows_max, bytes_max=bytes_max)

    def _read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        if offset < self._start:
            raise refusals.offset_too_old(offset, self._start)
        if offset >= end:
            return []
        if offset >= self._tail.start_offset:
            return self._tail.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)
        # After a failure `written` is lower: the rows from there on may be lost.
        end = min(end, self.written, self._tail.start_offset)
        return self._segments.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)

    def frames(self, offset: int = 0) -> Iterator[FrameLocation]:
        """Yield the frames from an offset (or the log's start) up to `high_watermark`, and check each again.

        Raises LogCorrupted at a frame that cannot be read; `inspect` continues after such a frame.
        """
        return self._segments.scan(max(offset, self._start), self.high_watermark)

    def snapshot(self) -> Snapshot | None:
        """Open the newest snapshot and return it, for the caller to close; None if there is none.

        It holds each vector's state at its offset, and the log has all rows from there on. Reads a few
        blocks from the disk, so not for the event loop. Raises LogCorrupted, OSError.
        """
        return self._planner.newest(start=self._start, end=self.next_offset)

    def may_have_snapshot(self) -> bool:
        """Return False if memory already shows that `snapshot` would find none; True otherwise."""
        return self._planner.may_have_snapshot(self._start)

    def find(self, origin: int, counter: int) -> int | None:
        """Return the offset of a dot, even one not yet written; None if the log does not hold it."""
        return self._segments.find(origin, counter, self._fetch)

    def sendfile_reader(self) -> SendfileReader:
        """Return a reader of full frames as the files hold them."""
        return self.sendfile_pool.reader()

    def write_small(self, write: Callable[[], None]) -> None:
        """Write a small file beside the log, also on a full disk. For a thread. Raises what `write` does."""
        self.reserve.use(write)

    def offset_at(self, time_us: int) -> int:
        """Return the first offset appended at that time (us since 1970) or later, else `high_watermark`."""
        return self._segments.offset_at(time_us, self.high_watermark)

    def age_s(self, offset: int) -> float | None:
        """Return the seconds since the row at an offset was appended, by log time.

        0 from `high_watermark` on; None where the time cannot be read at present.
        """
        if offset >= self.high_watermark:
            return 0.0
        time = self.append_time(offset)
        return None if time is None else max(self.clock.peek() - time, 0) / 1e6

    def append_time(self, offset: int) -> int | None:
        """Return the append time (us since 1970) of a row below `high_watermark`; None if it cannot be read.

        For a removed row, returns the time of the oldest stored one. Reads a few frame heads, and no bodies.
        """
        if offset >= self._tail.start_offset:
            (logged,) = self._tail.read(offset, self.next_offset, rows_max=1, bytes_max=1)
            head_fields = unpack_logged_head(logged.head)
            return None if head_fields is None else head_fields[2].append_time
        try:
            return self._segments.append_time(max(offset, self._start))
        except (LogCorrupted, OSError):
            return None

    def mark_time(self) -> None:
        """Do nothing: here a stamp holds the time of each batch."""

    def _fetch(self, offset: int) -> LoggedBatch | None:
        batches = self.read_appended(offset, rows_max=1, bytes_max=1)
        return batches[0] if batches else None
