"""Slots of very many vectors that were never looked up: found by sorted hashes instead of a dictionary.

A dictionary of ten million entries takes several seconds and 700 MB. After a start from an image most vectors
are not looked up by id for a long time, if ever; an id enters the dictionary when it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

COLLISIONS_MAX = 32
"""Maximum ids with one hash. More occur only by an attack, and then a dictionary is better."""


def hash_of(key: str) -> int:
    """Return the hash that the column stores of a vector id."""
    return crc32c(key.encode())


class ColdSlots(dict[str, int]):
    """Vector id → slot. The dictionary holds the ids looked up so far; a sorted column of hashes finds the
    rest.

    `ids` is the table's own column, in which a released slot holds None or another id.
    """

    def __init__(self, ids: list[str | None], order: NDArray[np.int32], hashes: NDArray[np.uint32]) -> None:
        super().__init__()
        self._ids, self._order, self._hashes = ids, order, hashes
        self._cold = len(order)

    @classmethod
    def from_hashes(cls, ids: list[str | None], hashes: NDArray[np.uint32]) -> ColdSlots | None:
        """Return the slots of a table whose ids have these hashes, slot by slot; None if too many hashes
        collide.

        Raises ValueError if an id occurs twice.
        """
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        hashes = hashes[order]
        equal = (hashes[1:] == hashes[:-1]).nonzero()[0]
        if len(hashes) > COLLISIONS_MAX and (hashes[COLLISIONS_MAX:] == hashes[:-COLLISIONS_MAX]).any():
            return None
        pairs = zip(order[equal].tolist(), order[equal + 1].tolist(), strict=True)
        twice = [ids[one] for one, other in pairs if ids[one] == ids[other]]
        begins = equal[:-1][
            equal[1:] == equal[:-1] + 1
        ].tolist()  # of three or more ids with one hash, any two may be the same
        for begin in begins:
            group = [ids[slot] for slot in order[begin : begin + COLLISIONS_MAX].tolist()]
            same = hashes[begin : begin + COLLISIONS_MAX] == hashes[begin]
            group = group[: int(np.count_nonzero(same))]
            twice += [group[0]] * (len(set(group)) < len(group))
        if twice:
            raise ValueError(f"{twice[0]!r:.80}, or an id with its hash, occurs twice")
        return cls(ids, order, hashes)

    def warm(self, keys: Iterable[str]) -> None:
        """Add those of these ids that have a slot to the dictionary, in bulk."""
        hot = super().__contains__
        missing = [key for key in keys if not hot(key)]
        if not missing or not self._cold:
            return
        wanted = np.array([hash_of(key) for key in missing], np.uint32)
        for key, at, hashed in zip(
            missing, np.searchsorted(self._hashes, wanted).tolist(), wanted.tolist(), strict=True
        ):
            self._find_from(key, at, hashed)

    def _find_from(self, key: str, at: int, hashed: int) -> int | None:
        hashes, ids = self._hashes, self._ids
        while at < len(hashes) and hashes[at] == hashed:
            slot = int(self._order[at])
            if ids[slot] == key:
                if not super().__contains__(key):
                    super().__setitem__(key, slot)
                    self._cold -= 1
                return slot
            at += 1
        return None

    def _find(self, key: str) -> int | None:
        hashed = hash_of(key)
        return self._find_from(key, int(np.searchsorted(self._hashes, np.uint32(hashed))), hashed)

    # --- as a dictionary

    def __missing__(self, key: str) -> int:
        slot = self._find(key)
        if slot is None:
            raise KeyError(key)
        return slot

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and self._find(key) is not None)

    def get(self, key: str, default: Any = None) -> Any:
        slot = super().get(key)
        slot = self._find(key) if slot is None else slot
        return default if slot is None else slot

    def __delitem__(self, key: str) -> None:
        self[key]  # moves the key into the dictionary, or raises KeyError
        super().__delitem__(key)

    def __len__(self) -> int:
        return super().__len__() + self._cold

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.items())

    def items(self) -> Any:
        """Return all pairs, slot by slot."""
        return ((key, slot) for slot, key in enumerate(self._ids) if key is not None)

    def keys(self) -> Any:
        """Return all ids, slot by slot."""
        return iter(self)

    def values(self) -> Any:
        """Return all slots in use."""
        return (slot for _, slot in self.items())


def hashes_of(keys: Sequence[str]) -> NDArray[np.uint32]:
    """Return the hashes of many ids."""
    return np.array([hash_of(key) for key in keys], np.uint32)
