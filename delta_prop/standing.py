"""Which drafts wait with a place but no dot yet, by the vectors they change: what comes later stands behind.

A draft that waits for a parent has no dot before it is appended, so a stand-in dot (of a negative origin)
orders behind it what touches the same vectors. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot

if TYPE_CHECKING:
    from delta_prop.ingest.work import Draft, MatrixDraft
    from delta_prop.order.orderer import Entry


class Standing:
    """The stand-ins of each vector, in order; the last is waited for."""

    def __init__(self) -> None:
        self._drawn = 0
        self._by_vector: dict[tuple[str, str], list[Dot]] = {}

    def draw(self) -> int:
        """An origin for the next stand-in."""
        self._drawn += 1
        return -self._drawn

    def before(self, draft: Draft | MatrixDraft) -> set[Dot]:
        """What a draft has to wait for."""
        held = self._by_vector
        return {held[key][-1] for key in draft.vectors() if key in held} if held else set()

    def add(self, draft: Draft | MatrixDraft, entry: Entry) -> None:
        """It waits from now on."""
        for key in draft.vectors():
            self._by_vector.setdefault(key, []).append(Dot(entry.origin, 1))

    def remove(self, draft: Draft | MatrixDraft, entry: Entry) -> None:
        """It waits no longer."""
        stand_in = Dot(entry.origin, 1)
        for key in draft.vectors():
            standing = self._by_vector.get(key, [])
            if stand_in in standing:
                standing.remove(stand_in)
            if not standing:
                self._by_vector.pop(key, None)

    def clear(self) -> None:
        """Nothing waits."""
        self._by_vector.clear()
