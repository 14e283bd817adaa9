"""Reading from the log on disk: from memory what is new, from its segments what is older, up to `visible`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.damage import LogDamaged
from delta_prop_broker.log.parts.state import LogState
from delta_prop_wire.stamp import unpack_logged_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.log.files.frames import Place
    from delta_prop_broker.log.files.snapshot import Snapshot
    from delta_prop_wire.batch import LoggedBatch


class Reading(LogState):
    """What finds batches, frames and snapshots."""

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Batches from the one that holds `offset` on, at least one unless `offset` is at `visible`.

        Raises Refused (CURSOR_TOO_OLD) below `first_offset`, LogDamaged, OSError.
        """
        return self._read(offset, self.visible, rows_max=rows_max, bytes_max=bytes_max)

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """`read` up to `next_offset`: also what is not visible yet, or not even written.

        Raises Refused (CURSOR_TOO_OLD) below `first_offset`, LogDamaged, OSError.
        """
        return self._read(offset, self.next_offset, rows_max=rows_max, bytes_max=bytes_max)

    def _read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        if offset < self._start:
            raise refusals.too_old(offset, self._start)
        if offset >= end:
            return []
        if offset >= self._tail.first:
            return self._tail.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)
        # A log that failed counts less as written than it did: what lies between may have gone.
        end = min(end, self.written, self._tail.first)
        return self._segments.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)

    def frames(self, offset: int = 0) -> Iterator[Place]:
        """Every frame on disk from an offset (or the log's start) up to `visible`, read and checked anew.

        Raises LogDamaged where one cannot be read; `inspect` goes on behind it.
        """
        return self._segments.walk(max(offset, self._start), self.visible)

    def snapshot(self) -> Snapshot | None:
        """The newest snapshot, open; None where there is none. The caller closes it.

        It holds each vector's state at its offset, and the log has all that follows from there on. Reads a
        few blocks, so not on the event loop. Raises LogDamaged, OSError.
        """
        return self._cover.newest(start=self._start, end=self.next_offset)

    def may_have_snapshot(self) -> bool:
        """Whether `snapshot` may find one, by what is known in memory. False: it finds none."""
        return self._cover.may_have(self._start)

    def find(self, origin: int, counter: int) -> int | None:
        """The offset of a dot, of one not yet written too; None where it is not, or no longer, here."""
        return self._segments.find(origin, counter, self._fetch)

    def offset_at(self, time_us: int) -> int:
        """The first visible offset appended at that time (us since 1970) or later, else `visible`."""
        return self._segments.offset_at(time_us, self.visible)

    def age_s(self, offset: int) -> float | None:
        """Return how long ago the row at an offset came, by log time; 0 from `visible` on; None where that
        cannot be read at present.
        """
        if offset >= self.visible:
            return 0.0
        time = self.append_time(offset)
        return None if time is None else max(self.clock.peek() - time, 0) / 1e6

    def append_time(self, offset: int) -> int | None:
        """When the row at an offset below `visible` was appended (us since 1970), or the oldest row where it
        is gone; None where that cannot be read. Heads of frames are looked at, a few, and no bodies.
        """
        if offset >= self._tail.first:
            (logged,) = self._tail.read(offset, self.next_offset, rows_max=1, bytes_max=1)
            known = unpack_logged_head(logged.head)
            return None if known is None else known[2].append_time
        try:
            return self._segments.append_time(max(offset, self._start))
        except (LogDamaged, OSError):
            return None

    def mark_time(self) -> None:
        """Batches are stamped one by one here."""

    def _fetch(self, offset: int) -> LoggedBatch | None:
        found = self.read_appended(offset, rows_max=1, bytes_max=1)
        return found[0] if found else None
