"""Duplicate ids: deltas of one vector with one id under different dots, because two services accepted both.

Only the first of them in canonical order has an effect; the others count as ignored. Pure: takes the deltas
of one vector in a log, and returns the keys of those without effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.delta import KnownIds

if TYPE_CHECKING:
    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import LoggedBatch


class IdentifiedDelta(NamedTuple):
    """A delta with an id: its key, its offset, and its frame's `known_ids`."""

    id: bytes
    key: Key
    offset: int
    known_ids: KnownIds

    @classmethod
    def of(cls, logged: LoggedBatch, row: int) -> IdentifiedDelta | None:
        """Return the identified delta of a row of the log; None if it has no id."""
        ids = logged.batch.ids
        if ids is None:
            return None
        return cls(ids[row], logged.key(row), logged.row_offset(row), logged.known_ids)


def find_duplicates(deltas: Iterable[IdentifiedDelta | None], *, complete: bool) -> set[Key]:
    """Return the keys of one vector's deltas that have no effect, since an earlier one has their id.

    Only frames whose `known_ids` is not NONE hold duplicates. Any other delta with an earlier id was accepted
    as new, since the id was no longer known. `complete`: True if no older deltas of the vector were removed.
    If some were, the first copy of an id may be among them. Then the frame of the oldest remaining copy has
    KnownIds.ALL, and no remaining copy has an effect.
    """
    groups: dict[bytes, list[IdentifiedDelta]] = {}
    for delta in deltas:
        if delta is not None:
            groups.setdefault(delta.id, []).append(delta)
    ignored_keys: set[Key] = set()
    for group in groups.values():
        oldest = min(group, key=lambda copy: copy.offset)
        copies = [copy for copy in group if copy is oldest or copy.known_ids is not KnownIds.NONE]
        first_was_removed = oldest.known_ids is KnownIds.ALL and not complete
        first_key = None if first_was_removed else min(copy.key for copy in copies)
        ignored_keys.update(copy.key for copy in copies if copy.key != first_key)
    return ignored_keys
