"""The newest batches, in memory: those not on disk yet, and those for readers that keep up."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from delta_prop_broker.log.stored_batches import weight

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch


class Tail:
    """Contiguous batches up to the log's end. `trim` drops the oldest that exceed the bound."""

    def __init__(self, offset: int, *, bytes_max: int) -> None:
        self.start_offset = offset  # the oldest stored offset
        self.bytes = 0
        self._bytes_max = bytes_max
        self._batches: list[LoggedBatch] = []
        self._starts: list[int] = []
        self._head = 0

    def append(self, logged: LoggedBatch) -> None:
        """Add the next batch."""
        self._batches.append(logged)
        self._starts.append(logged.offset)
        self.bytes += weight(logged.batch)

    def extend(self, appended: list[LoggedBatch]) -> None:
        """Add the next batches, one after the other."""
        if len(appended) == 1:
            self.append(appended[0])
            return
        self._batches += appended
        self._starts += [logged.offset for logged in appended]
        self.bytes += sum([weight(logged.batch) for logged in appended])

    def trim(self, written: int) -> None:
        """Drop the oldest batches that exceed the bound, as far as they are on disk (below `written`)."""
        has_dropped = False
        while self.bytes > self._bytes_max and self._head < len(self._batches):
            oldest = self._batches[self._head]
            if oldest.next_offset > written:
                break
            self.bytes -= weight(oldest.batch)
            self.start_offset = oldest.next_offset
            self._batches[self._head] = _REMOVED
            self._head += 1
            has_dropped = True
        if has_dropped and self._head * 2 > len(self._batches):
            del self._batches[: self._head]
            del self._starts[: self._head]
            self._head = 0

    def read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds `offset`, at least `start_offset`, up to offset `end`."""
        index = max(bisect_right(self._starts, offset, self._head) - 1, self._head)
        first = self._batches[index]
        if first.count >= rows_max or first.batch.size >= bytes_max:
            return [first]
        batches: list[LoggedBatch] = []
        row_count = size = 0
        for logged in self._batches[index : index + rows_max]:
            if logged.offset >= end:
                break
            if batches and (row_count + logged.count > rows_max or size + logged.batch.size > bytes_max):
                break
            batches.append(logged)
            row_count += logged.count
            size += logged.batch.size
        return batches


_REMOVED: LoggedBatch = None  # type: ignore[assignment]
