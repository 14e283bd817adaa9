"""Drafts that wait in order without a dot yet, by the vectors that they change.

A draft that waits for a parent has no dot before it is appended, so a placeholder dot (of a negative origin)
orders after it the drafts that change the same vectors. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot

if TYPE_CHECKING:
    from delta_prop.ingest.work import Draft, MatrixDraft
    from delta_prop.order.orderer import Entry


class PendingDrafts:
    """Placeholder dots of each vector, in order; a new draft waits for the last one."""

    def __init__(self) -> None:
        self._stand_in_count = 0
        self._by_vector: dict[tuple[str, str], list[Dot]] = {}

    def next_stand_in(self) -> int:
        """Return the origin of the next placeholder."""
        self._stand_in_count += 1
        return -self._stand_in_count

    def find_blockers(self, draft: Draft | MatrixDraft) -> set[Dot]:
        """Return the placeholder dots that a draft has to wait for."""
        by_vector = self._by_vector
        return {by_vector[key][-1] for key in draft.vectors() if key in by_vector} if by_vector else set()

    def add(self, draft: Draft | MatrixDraft, entry: Entry) -> None:
        """Add a draft that starts to wait."""
        for key in draft.vectors():
            self._by_vector.setdefault(key, []).append(Dot(entry.origin, 1))

    def remove(self, draft: Draft | MatrixDraft, entry: Entry) -> None:
        """Remove a draft that no longer waits."""
        stand_in = Dot(entry.origin, 1)
        for key in draft.vectors():
            placeholders = self._by_vector.get(key, [])
            if stand_in in placeholders:
                placeholders.remove(stand_in)
            if not placeholders:
                self._by_vector.pop(key, None)

    def clear(self) -> None:
        """Remove all drafts."""
        self._by_vector.clear()
