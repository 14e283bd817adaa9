"""Outcomes of published deltas as values: the acknowledgement, the states before it, the delivery.

Nothing here waits. `receipt.py` waits for outcomes, and so do clients without an event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from delta_prop_wire.delta import AckLevel, Delta, Dot


class RowAck(NamedTuple):
    """One row of a publish: its offset (None: no longer known), its dot, and True if it is a duplicate.

    Of a duplicate the offset is its first copy's, and the dot is None.
    """

    offset: int | None
    dot: Dot | None
    duplicate: bool


_NO_DUPLICATES: Mapping[int, int | None] = {}
_new_dot = tuple.__new__  # as `Dot(…)`, in half the time


@dataclass(slots=True)
class PublishAck:
    """Acknowledgement of the rows of one publish. Never changed once it is created.

    The rows not in `duplicates` have consecutive offsets from `offset` on, and consecutive dots from `dot`
    on, unless `rows` lists each row. `duplicates` maps a row to the offset of its first copy (None: no longer
    known). `offset` is None if every row was a duplicate; `dot` is then the dot of the first copy with the
    highest offset, None if that is not known.
    """

    offset: int | None
    dot: Dot | None
    count: int
    level: AckLevel
    duplicates: Mapping[int, int | None] = field(default_factory=dict)
    rows: Sequence[RowAck] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[RowAck], level: AckLevel) -> PublishAck:
        """Return the acknowledgement of rows of which some are new, at any offsets."""
        duplicates = {row: offset for row, (offset, _, duplicate) in enumerate(rows) if duplicate}
        first = next(row for row in rows if not row.duplicate)
        ack = cls(first.offset, first.dot, len(rows), level, duplicates)
        if ack.row_acks() != rows:
            ack.rows = rows
        return ack

    def of_row(self, row: int) -> PublishAck:
        """Return the acknowledgement of one row alone, of rows without duplicates."""
        offset, dot = self.offset, self.dot
        if self.count == 1 or offset is None or dot is None:
            return self
        return PublishAck(offset + row, Dot(dot.origin, dot.counter + row), 1, self.level, self.duplicates)

    def split(self, counts: Sequence[int]) -> list[PublishAck]:
        """Return the acknowledgement of each call of a publish without duplicates; `counts`: their rows."""
        offset, dot, level, acks = self.offset, self.dot, self.level, list[PublishAck]()
        assert offset is not None
        assert dot is not None
        origin, counter = dot
        for count in counts:
            acks.append(PublishAck(offset, _new_dot(Dot, (origin, counter)), count, level, _NO_DUPLICATES))
            offset += count
            counter += count
        return acks

    @property
    def duplicate(self) -> bool:
        """True if all rows had been accepted before."""
        return len(self.duplicates) == self.count

    @property
    def last_dot(self) -> Dot | None:
        """Dot of the last new row, by which a later delta names the whole publish as its parent."""
        if self.dot is None or self.rows:
            return next((row.dot for row in reversed(self.rows) if row.dot is not None), None)
        return Dot(self.dot.origin, self.dot.counter + max(self.count - len(self.duplicates), 1) - 1)

    @property
    def next_offset(self) -> int:
        """Offset after the last row: all rows are visible once a sink's cursor reaches it."""
        if not self.duplicates and self.offset is not None and not self.rows:
            return self.offset + max(self.count, 1)
        next_offsets = [offset + 1 for offset in self.duplicates.values() if offset is not None]
        next_offsets += [row.offset + 1 for row in self.rows if row.offset is not None]
        if self.offset is not None and not self.rows:
            next_offsets.append(self.offset + max(self.count - len(self.duplicates), 1))
        return max(next_offsets, default=0)

    def row_acks(self) -> Sequence[RowAck]:
        """Return the acknowledgement of each row."""
        if self.rows:
            return self.rows
        row_acks: list[RowAck] = []
        new_count = 0
        for row in range(self.count):
            if row in self.duplicates:
                row_acks.append(RowAck(self.duplicates[row], None, duplicate=True))
                continue
            offset = None if self.offset is None else self.offset + new_count
            dot = None if self.dot is None else Dot(self.dot.origin, self.dot.counter + new_count)
            row_acks.append(RowAck(offset, dot, duplicate=False))
            new_count += 1
        return row_acks


class OfferState(Enum):
    """State of an offered delta. Appended: it is in the log, but not yet at the requested ack level. In
    doubt: the log failed before that, and a recovery has yet to decide if the delta is stored.
    """

    QUEUED = "queued"
    PENDING = "pending"
    APPENDED = "appended"
    IN_DOUBT = "in doubt"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class Delivered(NamedTuple):
    """One delta as a subscriber receives it: its offset, its Lamport number, its content."""

    offset: int
    lamport: int
    delta: Delta
