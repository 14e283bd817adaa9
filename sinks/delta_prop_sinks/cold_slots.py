"""Finds the slots of vectors by sorted hashes of their ids, for tables of very many vectors.

A dictionary of ten million entries takes several seconds to build and 700 MB. After a start from an image,
most ids are not looked up for a long time, if ever; an id enters the dictionary when it is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_prop_wire.crc import crc32c

COLLISIONS_MAX = 32
"""Maximum number of ids with one hash. More occur only in an attack, and then a dictionary is better."""


def hash_of(key: str) -> int:
    """Return the hash of a vector id, as the sorted column stores it."""
    return crc32c(key.encode())


class ColdSlots(dict[str, int]):
    """Maps vector ids to slots. The dictionary holds the ids looked up so far; a sorted column of hashes
    finds the others.

    `ids` is the table's own column, in which a released slot holds None or another id. `order`: the slots in
    the order of their ids' hashes; `hashes`: these hashes, ascending.
    """

    def __init__(self, ids: list[str | None], order: NDArray[np.int32], hashes: NDArray[np.uint32]) -> None:
        super().__init__()
        self._ids, self._order, self._hashes = ids, order, hashes
        self._cold_count = len(order)  # ids that are not in the dictionary

    @classmethod
    def from_hashes(cls, ids: list[str | None], hashes: NDArray[np.uint32]) -> ColdSlots | None:
        """Return the slots of a table; None if more than `COLLISIONS_MAX` ids have one hash.

        `hashes`: those of the ids, slot by slot. Raises ValueError if an id occurs twice.
        """
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        hashes = hashes[order]
        equal = (hashes[1:] == hashes[:-1]).nonzero()[0]
        if len(hashes) > COLLISIONS_MAX and (hashes[COLLISIONS_MAX:] == hashes[:-COLLISIONS_MAX]).any():
            return None
        pairs = zip(order[equal].tolist(), order[equal + 1].tolist(), strict=True)
        duplicates = [ids[first] for first, second in pairs if ids[first] == ids[second]]
        # Of three or more ids with one hash, any two may be the same.
        group_starts = equal[:-1][equal[1:] == equal[:-1] + 1].tolist()
        for start in group_starts:
            group = [ids[slot] for slot in order[start : start + COLLISIONS_MAX].tolist()]
            has_same_hash = hashes[start : start + COLLISIONS_MAX] == hashes[start]
            group = group[: int(np.count_nonzero(has_same_hash))]
            duplicates += [group[0]] * (len(set(group)) < len(group))
        if duplicates:
            raise ValueError(f"{duplicates[0]!r:.80}, or another id with the same hash, occurs twice")
        return cls(ids, order, hashes)

    def warm(self, keys: Iterable[str]) -> None:
        """Look up many ids at once; those that have a slot enter the dictionary."""
        is_in_dictionary = super().__contains__
        missing = [key for key in keys if not is_in_dictionary(key)]
        if not missing or not self._cold_count:
            return
        hashes = hashes_of(missing)
        for key, index, key_hash in zip(
            missing, np.searchsorted(self._hashes, hashes).tolist(), hashes.tolist(), strict=True
        ):
            self._find_from(key, index, key_hash)

    def _find_from(self, key: str, index: int, key_hash: int) -> int | None:
        """Search the sorted hashes from `index`, their first `key_hash`, on; add the id to the dictionary."""
        hashes, ids = self._hashes, self._ids
        while index < len(hashes) and hashes[index] == key_hash:
            slot = int(self._order[index])
            if ids[slot] == key:
                if not super().__contains__(key):
                    super().__setitem__(key, slot)
                    self._cold_count -= 1
                return slot
            index += 1
        return None

    def _find(self, key: str) -> int | None:
        key_hash = hash_of(key)
        return self._find_from(key, int(np.searchsorted(self._hashes, np.uint32(key_hash))), key_hash)

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
        self[key]  # adds the key to the dictionary, or raises KeyError
        super().__delitem__(key)

    def __len__(self) -> int:
        return super().__len__() + self._cold_count

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
