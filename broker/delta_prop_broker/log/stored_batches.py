"""Batches in memory: all of a log in memory, and the newest of a log on disk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch, LoggedBatch

BATCH_OVERHEAD_BYTES = 3_072
ROW_OVERHEAD_BYTES = 96
"""Cost of a batch, and of a row, beside its bytes once sinks have read it: views, decoded names. Measured."""


def weight(batch: Batch) -> int:
    """Return the bytes that a batch counts for, with its overhead."""
    return batch.size + BATCH_OVERHEAD_BYTES + ROW_OVERHEAD_BYTES * batch.count


class _Batches:
    """Contiguous batches. `start_offset`: the oldest stored offset; `bytes`: their weights."""

    def __init__(self, offset: int) -> None:
        self.start_offset = offset
        self.bytes = 0
        self._batches: list[LoggedBatch] = []
        self._starts: list[int] = []
        self._head = 0  # index of the oldest stored batch; the entries before it are deleted now and then

    def __iter__(self) -> Iterator[LoggedBatch]:
        """Iterate over the batches, oldest first."""
        return islice(self._batches, self._head, None)

    def oldest(self) -> LoggedBatch | None:
        """Return the oldest batch; None if there is none."""
        return self._batches[self._head] if self._head < len(self._batches) else None

    def drop(self, oldest: LoggedBatch) -> None:
        """Drop the oldest batch; call `trim` after the last one."""
        self.bytes -= weight(oldest.batch)
        self.start_offset = oldest.next_offset
        self._batches[self._head] = _REMOVED
        self._head += 1


class StoredBatches(_Batches):
    """All batches of a log in memory."""

    def __init__(self) -> None:
        super().__init__(0)
        self._weights: list[int] = []  # cumulative: the sum up to and including each batch
        self._appended_bytes = 0

    def append(self, logged: LoggedBatch, size: int) -> None:
        """Add the next batch, which weighs `size`."""
        self._batches.append(logged)
        self._starts.append(logged.offset)
        self.bytes += size
        self._appended_bytes += size
        self._weights.append(self._appended_bytes)

    def read(self, offset: int, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds the stored `offset` on, within the bounds, at least one."""
        index = bisect_right(self._starts, offset, self._head) - 1
        first = self._batches[index]
        if first.count >= rows_max or first.batch.size >= bytes_max:
            return [first]
        batches: list[LoggedBatch] = []
        row_count = size = 0
        for logged in self._batches[index : index + rows_max]:
            if batches and (row_count + logged.count > rows_max or size + logged.batch.size > bytes_max):
                break
            batches.append(logged)
            row_count += logged.count
            size += logged.batch.size
        return batches

    def held_from(self, offset: int) -> tuple[int, int] | None:
        """Return the offset and bytes of the batches from that of `offset` on; None if it is not stored."""
        index = bisect_right(self._starts, offset, self._head) - 1
        if index < self._head:
            return None
        held_bytes = self._appended_bytes - self._weights[index] + weight(self._batches[index].batch)
        return self._starts[index], held_bytes

    def trim(self) -> None:
        """Delete the entries of dropped batches at half, so that each entry moves once on average."""
        if self._head * 2 > len(self._batches):
            del self._batches[: self._head], self._starts[: self._head], self._weights[: self._head]
            self._head = 0


TAIL_BYTES_MIN = 1024 * 1024
"""Share of the tails' memory that each of several logs has at least."""


class Tail(_Batches):
    """The newest batches of a log on disk: those not written yet, and those for readers that keep up."""

    def __init__(self, offset: int, *, bytes_max: int, open_logs: Collection[str]) -> None:
        """`bytes_max`: of the tails of all the open logs of a data directory, in equal shares."""
        super().__init__(offset)
        self._bytes_max = bytes_max
        self._open_logs = open_logs

    @property
    def is_full(self) -> bool:
        """True if it has more bytes than its share."""
        logs = len(self._open_logs)
        share = self._bytes_max if logs < 2 else max(self._bytes_max // logs, TAIL_BYTES_MIN)
        return self.bytes > share

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
        rows = appended[-1].next_offset - appended[0].offset
        self.bytes += sum([logged.batch.size for logged in appended])
        self.bytes += BATCH_OVERHEAD_BYTES * len(appended) + ROW_OVERHEAD_BYTES * rows

    def read(self, offset: int, end: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds the stored `offset` on, up to offset `end`, at least one."""
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

    def trim(self, written: int) -> None:
        """Drop the oldest batches that exceed the bound, as far as they are on disk (below `written`)."""
        while self.is_full and (oldest := self.oldest()) is not None:
            if oldest.next_offset > written:
                break
            self.drop(oldest)
        if self._head * 2 > len(self._batches):
            del self._batches[: self._head], self._starts[: self._head]
            self._head = 0


_REMOVED: LoggedBatch = None  # type: ignore[assignment]
