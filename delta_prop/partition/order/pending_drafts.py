"""Drafts that wait for dependencies and have no dot yet, by the vectors that they change.

A draft gets its dot when it is appended. While it waits, later drafts that change the same vectors depend on
its placeholder dot, which has a negative origin. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot

if TYPE_CHECKING:
    from delta_prop.partition.ingest.work import Draft, MatrixDraft
    from delta_prop.partition.order.orderer import Entry


class PendingDrafts:
    """Placeholder dots of each vector, in order; a new draft waits for the last one."""

    def __init__(self) -> None:
        self._placeholder_count = 0
        self._by_vector: dict[tuple[str, str], list[Dot]] = {}

    def next_placeholder_origin(self) -> int:
        """Return the origin of the next placeholder."""
        self._placeholder_count += 1
        return -self._placeholder_count

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
        placeholder = Dot(entry.origin, 1)
        for key in draft.vectors():
            placeholders = self._by_vector.get(key, [])
            if placeholder in placeholders:
                placeholders.remove(placeholder)
            if not placeholders:
                self._by_vector.pop(key, None)

    def clear(self) -> None:
        """Remove all drafts."""
        self._by_vector.clear()
