"""Heads of vectors as columns, for a checkpoint: the heads that a range of the log changed, or all heads.

Pure. Each namespace has these columns: vector ids, the dot of each head, and whether the vector is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from delta_prop_wire.delta import FULL_KINDS, Kind, Source

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

ALIVE, DEAD, UNCHANGED = 0, 1, 2
"""The state of a vector; UNCHANGED if the range of the log neither creates nor deletes it."""
ORIGIN_SHIFT = 64
"""Shift of the origin's index in the code of a head; the counter is in the bits below."""
_LITTLE: repeat[Literal["little"]] = repeat("little")
_SEPARATOR = "\0"
"""Separator of vector ids; no id contains it, since validation refuses control characters."""


class HeadChanges:
    """The heads that a range of the log changed, in log order."""

    def __init__(self) -> None:
        self.writers: list[int] = []  # origins; codes name an origin by its index in this list
        self._writer_indexes: dict[int, int] = {}
        self._namespaces: dict[str, _Changes] = {}
        self.count = 0

    def note(self, batch: Batch, source: Source) -> None:
        """Note the next batch of the range."""
        if batch.is_control or batch.is_state:
            return
        index = self._writer_indexes.setdefault(batch.origin, len(self.writers))
        if index == len(self.writers):
            self.writers.append(batch.origin)
        first = index << ORIGIN_SHIFT
        counters = batch.counters
        codes: Iterable[int] = (
            range(first | batch.base, (first | batch.base) + batch.count)
            if counters is None
            else [first | counter for counter in counters.tolist()]
        )
        if batch.namespace is not None and batch.kind is not None:
            self._changes_of(batch.namespace).note(batch.keys, codes, batch.kind, source)
            self.count += batch.count
            return
        for namespace, key, kind, code in zip(
            batch.namespaces, batch.keys, batch.kinds, codes, strict=True
        ):  # fmt: skip
            self._changes_of(namespace).note([key], [code], kind, source)
        self.count += batch.count

    def pack(self) -> list[dict[str, Any]]:
        """Return the columns of each namespace."""
        packed = []
        for name, changes in self._namespaces.items():
            dead, unchanged = changes.dead, changes.undecided
            states: Iterable[int] = bytes(len(changes.heads))  # all are ALIVE
            if dead or unchanged:
                states = [
                    DEAD if key in dead else UNCHANGED if key in unchanged else ALIVE for key in changes.heads
                ]
            packed.append(pack_heads(name, list(changes.heads), list(changes.heads.values()), states))
        return packed

    def _changes_of(self, namespace: str) -> _Changes:
        changes = self._namespaces.get(namespace)
        if changes is None:
            changes = self._namespaces[namespace] = _Changes()
        return changes


class _Changes:
    __slots__ = ("dead", "heads", "undecided")

    def __init__(self) -> None:
        self.heads: dict[str, int] = {}
        self.dead: set[str] = set()
        self.undecided: set[str] = set()  # vectors that no row of the range created or deleted

    def note(self, keys: list[str], codes: Iterable[int], kind: int, source: Source) -> None:
        deletes = kind == Kind.DELETE and source is not Source.REPLICA
        revives = kind in FULL_KINDS or source is Source.REPLICA
        if not (deletes or revives):
            self.undecided.update(key for key in keys if key not in self.heads)
        self.heads.update(zip(keys, codes, strict=True))
        if deletes:
            self.dead.update(keys)
        elif revives and self.dead:
            self.dead.difference_update(keys)
        if self.undecided and (deletes or revives):
            self.undecided.difference_update(keys)


def pack_heads(
    name: str, keys: Sequence[str], codes: Sequence[int], states: Iterable[int]
) -> dict[str, Any]:  # fmt: skip
    """Pack one namespace's columns; a code is an index of an origin << 64 | a counter."""
    count = len(keys)
    words = np.frombuffer(b"".join(map(int.to_bytes, codes, repeat(16), _LITTLE)), "<u8")
    return {
        "name": name,
        "count": count,
        "keys": _SEPARATOR.join(keys).encode(),
        "places": words[1::2].astype("<u4").tobytes(),
        "counters": words[::2].tobytes(),
        "states": bytes(states),
    }


class SavedHeads(NamedTuple):
    """Heads of one namespace in a checkpoint, oldest first; later ones replace those of the same vectors.

    `keys`: the vector ids in UTF-8, separated by NUL. For each: `writers`, the index of its head's origin
    (u32, little-endian), `counters`, the counter (u64, little-endian), and `states`: ALIVE, DEAD, UNCHANGED.
    """

    name: str
    keys: bytes
    writers: bytes
    counters: bytes
    states: bytes

    @classmethod
    def read(cls, packed: Mapping[str, Any], writers: Sequence[int]) -> SavedHeads:
        """Read packed columns. `writers`: the index of each of their origins. Raises ValueError, KeyError."""
        count, places = packed["count"], np.frombuffer(packed["places"], "<u4")
        counters, states = packed["counters"], packed["states"]
        if not len(places) == len(counters) // 8 == len(states) == count:
            raise ValueError(f"columns of {count} heads have other lengths")
        if count and int(places.max()) >= len(writers):
            raise ValueError(f"a head of origin {int(places.max())}, and there are {len(writers)}")
        indexes = np.array(writers, "<u4")[places] if count else places
        return cls(packed["name"], packed["keys"], indexes.tobytes(), counters, states)

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yield vector id, code of the head, and state of each vector. Raises ValueError."""
        if not self.states:
            return
        keys = str(self.keys, "utf-8").split(_SEPARATOR)
        writers, counters = np.frombuffer(self.writers, "<u4"), np.frombuffer(self.counters, "<u8")
        shifted = map(int.__lshift__, writers.tolist(), repeat(ORIGIN_SHIFT))
        yield from zip(keys, map(or_, shifted, counters.tolist()), self.states, strict=True)
