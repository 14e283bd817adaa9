"""What becomes of what was published, as values: the acknowledgement, the states on the way, the delivery.

Nothing here waits: `receipt.py` does, and clients that have no event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.delta import AckLevel, Dot

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    order; `in_place`: with a place left out for each duplicate between them. For a row in `duplicates` the
    first copy stands at that offset (None: no longer known). `offset` and `dot` are None where every row was
    a duplicate and its dot is not known. `places` tells of each row.
    """

    offset: int | None
    dot: Dot | None
    count: int
    level: AckLevel
    duplicates: Mapping[int, int | None] = field(default_factory=dict)
    in_place: bool = False

    @property
    def duplicate(self) -> bool:
        """Whether all rows had been accepted before."""
        return len(self.duplicates) == self.count

    @property
    def last_dot(self) -> Dot | None:
        """The dot of the last row that is new: as what depends on the whole publish names it."""
        return None if self.dot is None else self.dot._replace(counter=self.dot.counter + self._span - 1)

    @property
    def next_offset(self) -> int:
        """The offset after the last row: what a sink's cursor must reach for all rows to be visible."""
        known = [at + 1 for at in self.duplicates.values() if at is not None]
        if self.offset is not None:
            known.append(self.offset + self._span)
        return max(known, default=0)

    def places(self) -> list[RowPlace]:
        """The place of each row."""
        found: list[RowPlace] = []
        ahead = 0  # of the first new row
        for row in range(self.count):
            if row in self.duplicates:
                found.append(RowPlace(self.duplicates[row], None, duplicate=True))
                ahead += self.in_place and ahead > 0
                continue
            offset = None if self.offset is None else self.offset + ahead
            dot = None if self.dot is None else self.dot._replace(counter=self.dot.counter + ahead)
            found.append(RowPlace(offset, dot, duplicate=False))
            ahead += 1
        return found

    @property
    def _span(self) -> int:
        """How many places lie from the first to the last new row; at least one."""
        if not self.duplicates or not self.in_place:
            return max(self.count - len(self.duplicates), 1)
        new = [row for row in range(self.count) if row not in self.duplicates]
        return new[-1] - new[0] + 1 if new else 1


class State(Enum):
    """Where an offered delta is. Placed: it is in the log, and not yet as safe there as was asked."""

    QUEUED = "queued"
    PENDING = "pending"
    PLACED = "placed"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class Delivered(NamedTuple):
    """One delta as a subscriber gets it: its place, its Lamport number, what it says."""

    offset: int
    lamport: int
    delta: Delta
