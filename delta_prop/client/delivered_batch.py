"""A batch as a subscriber gets it: rows with their offsets, decoded on access.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from delta_prop.calls.outcomes import Delivered
from delta_prop_wire.batch import Batch
from delta_prop_wire.frames import BatchFrame, DeltaFrame
from delta_prop_wire.slicing import Row, rows_of
from delta_prop_wire.stamp import Stamp


class DeliveredBatch:
    """Deltas that came together, in log order; iterate to get each of them.

    `batch` is as its producer made it, or as the service sliced it; `stamp` is the log's stamp of it. Both
    are None if single deltas were requested. Rows before `first` were delivered before; the others are the
    new rows, `count` of them.
    """

    __slots__ = (
        "_frame",
        "_next",
        "_rows",
        "batch",
        "count",
        "first",
        "next_offset",
        "offset",
        "size",
        "stamp",
    )

    def __init__(self, frame: BatchFrame | DeltaFrame, received: int, size: int) -> None:
        """`received`: everything below this offset was received before. `size`: bytes of the frame."""
        self._frame = frame
        self._rows: Iterator[Row] | None = None
        self._next = 0  # the row that `_rows` yields next
        self.batch: Batch | None = None
        self.stamp: Stamp | None = None
        if isinstance(frame, BatchFrame):
            self.batch, self.stamp = frame.batch, frame.stamp
        self.first = 0
        row_count = 1 if self.batch is None else self.batch.count
        self.size = size
        self.next_offset = self._offset_at(row_count - 1) + 1
        while self.first < row_count and self._offset_at(self.first) < received:
            self.first += 1
        self.count = row_count - self.first
        self.offset = self._offset_at(self.first) if self.count else self.next_offset

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Delivered]:
        frame = self._frame
        if not isinstance(frame, BatchFrame):
            return iter((self.row(0),) if self.count else ())
        return map(Delivered._make, islice(rows_of(frame), self.first, None))

    def row(self, row: int) -> Delivered:
        """Return one of the new rows; fastest when called for one row after another."""
        frame, index = self._frame, self.first + row
        if not isinstance(frame, BatchFrame):
            assert frame.lamport is not None
            return Delivered(frame.sequence, frame.lamport, frame.delta)
        if self._rows is None or index < self._next:
            self._rows, self._next = rows_of(frame), 0
        rows = self._rows if index == self._next else islice(self._rows, index - self._next, None)
        self._next = index + 1
        return Delivered._make(next(rows))

    def offset_of(self, row: int) -> int:
        """Return the offset of one of the new rows."""
        return self._offset_at(self.first + row)

    def skip(self, count: int) -> None:
        """Drop the first `count` of the new rows."""
        self.first += count
        self.count -= count
        self.offset = self._offset_at(self.first)

    def _offset_at(self, row: int) -> int:
        offsets = None if self.batch is None else self.batch.row_offsets
        return self._frame.sequence + row if offsets is None else int(offsets[row])
