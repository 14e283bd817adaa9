"""Slots: the numbers that the vectors of a table have, by vector id."""

from __future__ import annotations

from typing import Any

from delta_prop_wire.core import core_mode


class Slots(dict[str, int]):
    """Maps vector ids to slots, and slots to ids. A removed vector's slot is given to the next new vector.

    The native core has a class with the same methods, into whose columns it also folds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids: list[str | None] = []
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """The number of slots ever given, those of removed vectors included."""
        return len(self._ids)

    def bind(self, heads: Any, forms: Any, flags: Any, numbers: Any, extras: dict[int, int]) -> None:
        """Set the table's columns, and the slots that have bytes or metadata, for `fold_rows`."""

    def add(self, vector_id: str) -> int:
        """Return the slot of a vector; a new vector gets one."""
        slot = self.get(vector_id)
        if slot is None:
            if self._free:
                slot = self._free.pop()
                self._ids[slot] = vector_id
            else:
                slot = len(self._ids)
                self._ids.append(vector_id)
            self[vector_id] = slot
        return slot

    def add_all(self, vector_ids: list[str]) -> list[int]:
        """Return the slots of vectors; new vectors get some."""
        return list(map(self.add, vector_ids))

    def remove(self, slot: int) -> None:
        """Remove the vector of a slot."""
        vector_id = self._ids[slot]
        if vector_id is None:
            raise KeyError(slot)
        del self[vector_id]
        self._ids[slot] = None
        self._free.append(slot)

    def id(self, slot: int) -> str | None:
        """Return the vector id of a slot; None if its vector was removed."""
        return self._ids[slot]

    def ids(self, start: int, end: int) -> list[str | None]:
        """Return the vector ids of slots from `start` to below `end`."""
        return self._ids[start:end]


def make_slots() -> Slots:
    """Return an empty object, of the core that runs."""
    slots: Slots | None = core_mode.core.make_slots()
    return Slots() if slots is None else slots
