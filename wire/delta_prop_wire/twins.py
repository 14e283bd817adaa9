"""Twins: deltas of one vector that have one id under different dots, as two services accepted both.

Of twins the canonically first has an effect, the others are counted as ignored. Pure: what a log tells of
one vector comes in, the keys of those without effect go out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.delta import KnownIds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import LoggedBatch


class Identified(NamedTuple):
    """A delta that has an id, where it stands, and what its frame says of the ids in it."""

    id: bytes
    key: Key
    offset: int
    known: KnownIds

    @classmethod
    def of(cls, logged: LoggedBatch, row: int) -> Identified | None:
        """What a row of the log is known by; None where it has no id."""
        ids = logged.batch.ids
        if ids is None:
            return None
        return cls(ids[row], logged.key(row), logged.row_offset(row), logged.known_ids)


def without_effect(deltas: Iterable[Identified | None], *, whole: bool) -> set[Key]:
    """Of one vector's deltas, those that another one with their id comes before.

    Only a frame that says so repeats ids. What else has an id of before was taken for new, as that was no
    longer known. `whole`: nothing lies before these deltas. Else the first copy of an id may be among what is
    gone; the frame of the oldest that is left says whether it is, and then none of those left has an effect.
    """
    groups: dict[bytes, list[Identified]] = {}
    for delta in deltas:
        if delta is not None:
            groups.setdefault(delta.id, []).append(delta)
    found: set[Key] = set()
    for same in groups.values():
        oldest = min(same, key=lambda one: one.offset)
        twins = [one for one in same if one is oldest or one.known is not KnownIds.NONE]
        gone = oldest.known is KnownIds.ALL and not whole
        first = None if gone else min(one.key for one in twins)
        found.update(one.key for one in twins if one.key != first)
    return found
