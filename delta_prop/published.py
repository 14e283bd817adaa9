"""What becomes of what was published, as values: the acknowledgement, the states on the way, the delivery.

Nothing here waits: `receipt.py` does, and clients that have no event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.delta import AckLevel, Dot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delta_prop_wire.delta import Delta


class RowPlace(NamedTuple):
    """One row of a publish: its offset (None: no longer known), its dot, and if it was there before.

    Of a duplicate the offset is its first copy's, and the dot is None.
    """

    offset: int | None
    dot: Dot | None
    duplicate: bool


@dataclass(slots=True)
class Published:
    """What an acknowledgement says about the rows of one publish. Never changed once it is made.

    The rows that `duplicates` leaves out have the offsets from `offset` on, and the dots from `dot` on, in
    order, unless `rows` tells of each. For a row in `duplicates` the first copy stands at that offset (None:
    no longer known). `offset` is None where every row was a duplicate; `dot` is then of the first copy that
    stands last in the log, None where that is not known.
    """

    offset: int | None
    dot: Dot | None
    count: int
    level: AckLevel
    duplicates: Mapping[int, int | None] = field(default_factory=dict)
    rows: Sequence[RowPlace] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[RowPlace], level: AckLevel) -> Published:
        """Acknowledge rows of which some are new, at whatever offsets."""
        duplicates = {row: at for row, (at, _, duplicate) in enumerate(rows) if duplicate}
        first = next(row for row in rows if not row.duplicate)
        published = cls(first.offset, first.dot, len(rows), level, duplicates)
        if published.places() != rows:
            published.rows = rows
        return published

    @property
    def duplicate(self) -> bool:
        """Whether all rows had been accepted before."""
        return len(self.duplicates) == self.count

    @property
    def last_dot(self) -> Dot | None:
        """The dot of the last row that is new: as what depends on the whole publish names it."""
        if self.dot is None or self.rows:
            return next((row.dot for row in reversed(self.rows) if row.dot is not None), None)
        return Dot(self.dot.origin, self.dot.counter + max(self.count - len(self.duplicates), 1) - 1)

    @property
    def next_offset(self) -> int:
        """The offset after the last row: what a sink's cursor must reach for all rows to be visible."""
        if not self.duplicates and self.offset is not None and not self.rows:
            return self.offset + max(self.count, 1)
        known = [at + 1 for at in self.duplicates.values() if at is not None]
        known += [row.offset + 1 for row in self.rows if row.offset is not None]
        if self.offset is not None and not self.rows:
            known.append(self.offset + max(self.count - len(self.duplicates), 1))
        return max(known, default=0)

    def places(self) -> Sequence[RowPlace]:
        """Return the place of each row."""
        if self.rows:
            return self.rows
        found: list[RowPlace] = []
        new = 0
        for row in range(self.count):
            if row in self.duplicates:
                found.append(RowPlace(self.duplicates[row], None, duplicate=True))
                continue
            offset = None if self.offset is None else self.offset + new
            dot = None if self.dot is None else Dot(self.dot.origin, self.dot.counter + new)
            found.append(RowPlace(offset, dot, duplicate=False))
            new += 1
        return found


class State(Enum):
    """Where an offered delta is. Placed: it is in the log, and not yet as safe there as was asked. In doubt:
    the log failed before it was, and a recovery has yet to decide whether it is kept.
    """

    QUEUED = "queued"
    PENDING = "pending"
    PLACED = "placed"
    IN_DOUBT = "in doubt"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class Delivered(NamedTuple):
    """One delta as a subscriber gets it: its place, its Lamport number, what it says."""

    offset: int
    lamport: int
    delta: Delta
