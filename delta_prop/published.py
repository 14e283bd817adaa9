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


@dataclass(slots=True)
class Published:
    """What an acknowledgement says about the rows of one publish. Never changed once it is made.

    The rows that `duplicates` leaves out have the offsets from `offset` on, and the dots from `dot` on, in
    order. For a row in `duplicates` the first copy stands at that offset (None: no longer known).
    `offset` and `dot` are None where every row was a duplicate and its dot is not known.
    """

    offset: int | None
    dot: Dot | None
    count: int
    level: AckLevel
    duplicates: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def duplicate(self) -> bool:
        """Whether all rows had been accepted before."""
        return len(self.duplicates) == self.count

    @property
    def last_dot(self) -> Dot | None:
        """The dot of the last row that is new: as what depends on the whole publish names it."""
        if self.dot is None:
            return None
        return Dot(self.dot.origin, self.dot.counter + max(self.count - len(self.duplicates), 1) - 1)

    @property
    def next_offset(self) -> int:
        """The offset after the last row: what a sink's cursor must reach for all rows to be visible."""
        if not self.duplicates and self.offset is not None:
            return self.offset + max(self.count, 1)
        known = [at + 1 for at in self.duplicates.values() if at is not None]
        fresh = self.count - len(self.duplicates)
        if self.offset is not None:
            known.append(self.offset + max(fresh, 1))
        return max(known, default=0)


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
