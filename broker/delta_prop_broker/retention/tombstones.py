"""Which tombstones a snapshot leaves out: those that are old enough, and those of erased vectors.

A tombstone is the state of a deleted vector. It is kept for a set time, so that a delta from before the
deletion that comes late does not bring the vector back.
"""

from __future__ import annotations

from typing import NamedTuple


class TombstoneAge(NamedTuple):
    """The age of tombstones, as a snapshot records it.

    `below`: tombstones whose last delta has a lower offset were left out, in this snapshot or before. `mark`:
    those with a lower offset will be next. `mark_us`: the log had reached `mark` at this time (open time, as
    in `LogClock`, in µs).
    """

    below: int = 0
    mark: int = 0
    mark_us: int = 0

    def next(self, offset: int, *, seen_us: int, old_us: float) -> TombstoneAge:
        """Return what the next snapshot records, made at `offset` and `seen_us`.

        Tombstones from before `old_us` are left out. The mark moves on once all tombstones below it are that
        old, so each is left out after its time, at most as long again plus the time between two snapshots.
        """
        if self.mark and self.mark_us > old_us:
            return self
        return TombstoneAge(self.mark, offset, seen_us)


NO_AGE = TombstoneAge()


class Forgotten(NamedTuple):
    """The tombstones to leave out: those whose last delta is `below` an offset, and those of the sort keys
    `erased`.
    """

    below: int = 0
    erased: frozenset[str] = frozenset()


KEEP_ALL = Forgotten()


class TombstoneLimit(NamedTuple):
    """Limit of the tombstones of a new snapshot: it has none from before `old_us`, and none of the sort keys
    `erased`.

    `seen_us`: the open time now.
    """

    seen_us: int = 0
    old_us: float = 0
    erased: frozenset[str] = frozenset()


NO_LIMIT = TombstoneLimit()
