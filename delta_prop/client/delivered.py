"""A batch as a subscriber gets it: rows with their places, decoded when they are looked at.

Pure.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from delta_prop.published import Delivered
from delta_prop_wire.cutting import rows_of
from delta_prop_wire.frames import BatchFrame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.cutting import Row
    from delta_prop_wire.frames import DeltaFrame
    from delta_prop_wire.stamp import Stamp


class DeliveredBatch:
    """Deltas that came together, in the order of the log; iterate for each of them.

    `batch` is as its producer made it, or as the service cut it, and `stamp` is what the log says of it; None
    where single deltas were asked for.
    Rows before `first` came before.
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
        """`received`: everything below this offset came before. `size`: bytes of the frame."""
        self._frame = frame
        self._rows: Iterator[Row] | None = None
        self._next = 0  # the row that it gives next
        self.batch: Batch | None = None
        self.stamp: Stamp | None = None
        if isinstance(frame, BatchFrame):
            self.batch, self.stamp = frame.batch, frame.stamp
        self.first = 0
        rows = 1 if self.batch is None else self.batch.count
        self.size = size
        self.next_offset = self._place(rows - 1) + 1
        while self.first < rows and self._place(self.first) < received:
            self.first += 1
        self.count = rows - self.first
        self.offset = self._place(self.first) if self.count else self.next_offset

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Delivered]:
        frame = self._frame
        if not isinstance(frame, BatchFrame):
            return iter((self.row(0),) if self.count else ())
        return map(Delivered._make, islice(rows_of(frame), self.first, None))

    def row(self, row: int) -> Delivered:
        """One of the rows that are new; quickest one after the other."""
        frame, at = self._frame, self.first + row
        if not isinstance(frame, BatchFrame):
            assert frame.lamport is not None
            return Delivered(frame.sequence, frame.lamport, frame.delta)
        if self._rows is None or at < self._next:
            self._rows, self._next = rows_of(frame), 0
        rows = self._rows if at == self._next else islice(self._rows, at - self._next, None)
        self._next = at + 1
        return Delivered._make(next(rows))

    def offset_of(self, row: int) -> int:
        """Where one of the rows that are new stands in the log."""
        return self._place(self.first + row)

    def skip(self, rows: int) -> None:
        """So many rows are not wanted any more."""
        self.first += rows
        self.count -= rows
        self.offset = self._place(self.first)

    def _place(self, row: int) -> int:
        offsets = None if self.batch is None else self.batch.row_offsets
        return self._frame.sequence + row if offsets is None else int(offsets[row])
