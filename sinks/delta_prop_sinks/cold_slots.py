"""Slots of very many vectors that nobody has asked for yet: found by sorted hashes, not by a dictionary.

Ten million entries take a dictionary several seconds and 700 MB. After a start from an image most vectors are
not asked for by name for a long time, if ever; those that are go into the dictionary then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

ALIKE_MAX = 32
"""So many ids may have one hash; where more do, which only happens on purpose, a dictionary is better."""


def hash_of(key: str) -> int:
    """What the column holds of a vector id."""
    return crc32c(key.encode())


class ColdSlots(dict[str, int]):
    """Vector id → slot. As a dictionary it holds what was asked for since; the rest it looks up in a column.

    `ids` is the table's own column, in which a slot that was released holds None or another id.
    """

    def __init__(self, ids: list[str | None], order: NDArray[np.int32], hashes: NDArray[np.uint32]) -> None:
        super().__init__()
        self._ids, self._order, self._hashes = ids, order, hashes
        self._cold = len(order)

    @classmethod
    def of(cls, ids: list[str | None], hashes: NDArray[np.uint32]) -> ColdSlots | None:
        """The slots of a table whose ids have these hashes, slot by slot; None where too many are alike.

        Raises ValueError where an id is there twice.
        """
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        hashes = hashes[order]
        alike = (hashes[1:] == hashes[:-1]).nonzero()[0]
        if len(hashes) > ALIKE_MAX and (hashes[ALIKE_MAX:] == hashes[:-ALIKE_MAX]).any():
            return None
        pairs = zip(order[alike].tolist(), order[alike + 1].tolist(), strict=True)
        twice = [ids[one] for one, other in pairs if ids[one] == ids[other]]
        begins = alike[:-1][
            alike[1:] == alike[:-1] + 1
        ].tolist()  # of three and more, any two may be the same
        for begin in begins:
            group = [ids[slot] for slot in order[begin : begin + ALIKE_MAX].tolist()]
            same = hashes[begin : begin + ALIKE_MAX] == hashes[begin]
            group = group[: int(np.count_nonzero(same))]
            twice += [group[0]] * (len(set(group)) < len(group))
        if twice:
            raise ValueError(f"{twice[0]!r:.80} or one with its hash is there twice")
        return cls(ids, order, hashes)

    def warm(self, keys: Iterable[str]) -> None:
        """Take those of these that are there into the dictionary, many at once."""
        hot = super().__contains__
        missing = [key for key in keys if not hot(key)]
        if not missing or not self._cold:
            return
        wanted = np.array([hash_of(key) for key in missing], np.uint32)
        for key, at, hashed in zip(
            missing, np.searchsorted(self._hashes, wanted).tolist(), wanted.tolist(), strict=True
        ):
            self._found(key, at, hashed)

    def _found(self, key: str, at: int, hashed: int) -> int | None:
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
        return self._found(key, int(np.searchsorted(self._hashes, np.uint32(hashed))), hashed)

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
        self[key]  # is warm from here on, or a KeyError
        super().__delitem__(key)

    def __len__(self) -> int:
        return super().__len__() + self._cold

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.items())

    def items(self) -> Any:
        """All of them, slot by slot."""
        return ((key, slot) for slot, key in enumerate(self._ids) if key is not None)

    def keys(self) -> Any:
        """All ids, slot by slot."""
        return iter(self)

    def values(self) -> Any:
        """All slots in use."""
        return (slot for _, slot in self.items())


def hashes_of(keys: Sequence[str]) -> NDArray[np.uint32]:
    """The hashes of many ids."""
    return np.array([hash_of(key) for key in keys], np.uint32)
