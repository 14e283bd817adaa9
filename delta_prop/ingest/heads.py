"""Heads of vectors as columns: what a stretch of the log changed, or all there are, for a checkpoint.

Pure. Columns of one namespace: the vector ids, the dot of each head, and whether the vector is dead.
"""

from __future__ import annotations

from itertools import repeat
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from delta_prop_wire.delta import WHOLE_KINDS, Kind, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop_wire.batch import Batch

ALIVE, DEAD, AS_IT_WAS = 0, 1, 2
ORIGIN_SHIFT = 64
_LITTLE: repeat[Literal["little"]] = repeat("little")
_SEPARATOR = "\0"
"""No vector id holds one: control characters are refused at the edge."""


class HeadChanges:
    """The heads that a stretch of the log moved, in its order."""

    def __init__(self) -> None:
        self.by_place: list[int] = []
        self._places: dict[int, int] = {}
        self._namespaces: dict[str, _Changes] = {}
        self.count = 0

    def note(self, batch: Batch, source: Source) -> None:
        """The next batch."""
        if batch.is_control or batch.is_state:
            return
        place = self._places.setdefault(batch.origin, len(self.by_place))
        if place == len(self.by_place):
            self.by_place.append(batch.origin)
        first = place << ORIGIN_SHIFT
        counters = batch.counters
        codes: Iterable[int] = (
            range(first | batch.base, (first | batch.base) + batch.count)
            if counters is None
            else [first | counter for counter in counters.tolist()]
        )
        if batch.namespace is not None and batch.kind is not None:
            self._changes(batch.namespace).note(batch.keys, codes, batch.kind, source)
            self.count += batch.count
            return
        for namespace, key, kind, code in zip(
            batch.namespaces, batch.keys, batch.kinds, codes, strict=True
        ):  # fmt: skip
            self._changes(namespace).note([key], [code], kind, source)
        self.count += batch.count

    def pack(self) -> list[dict[str, Any]]:
        """Columns of each namespace."""
        packed = []
        for name, changes in self._namespaces.items():
            dead, kept = changes.dead, changes.kept
            states: Iterable[int] = bytes(len(changes.heads))  # all are alive
            if dead or kept:
                states = [
                    DEAD if key in dead else AS_IT_WAS if key in kept else ALIVE for key in changes.heads
                ]
            packed.append(pack_heads(name, list(changes.heads), list(changes.heads.values()), states))
        return packed

    def _changes(self, namespace: str) -> _Changes:
        known = self._namespaces.get(namespace)
        if known is None:
            known = self._namespaces[namespace] = _Changes()
        return known


class _Changes:
    __slots__ = ("dead", "heads", "kept")

    def __init__(self) -> None:
        self.heads: dict[str, int] = {}
        self.dead: set[str] = set()
        self.kept: set[str] = set()  # whose life nothing in the stretch decided

    def note(self, keys: list[str], codes: Iterable[int], kind: int, source: Source) -> None:
        deletes = kind == Kind.DELETE and source is not Source.REPLICA
        revives = kind in WHOLE_KINDS or source is Source.REPLICA
        if not (deletes or revives):
            self.kept.update(key for key in keys if key not in self.heads)
        self.heads.update(zip(keys, codes, strict=True))
        if deletes:
            self.dead.update(keys)
        elif revives and self.dead:
            self.dead.difference_update(keys)
        if self.kept and (deletes or revives):
            self.kept.difference_update(keys)


def pack_heads(
    name: str, keys: Sequence[str], codes: Sequence[int], states: Iterable[int]
) -> dict[str, Any]:  # fmt: skip
    """One namespace's columns; codes hold a place in a list of origins, then a counter."""
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


def unpack_heads(
    packed: Mapping[str, Any], places: Sequence[int]
) -> tuple[list[str], list[int], list[str], list[str]]:  # fmt: skip
    """Vector ids and codes of one namespace, and which are dead, and which alive for sure.

    `places`: where the origins of these columns stand in the list that the codes shall refer to.
    """
    if not packed["count"]:
        return [], [], [], []
    keys = str(packed["keys"], "utf-8").split(_SEPARATOR)
    place = np.frombuffer(packed["places"], "<u4")
    counters = np.frombuffer(packed["counters"], "<u8").tolist()
    shifted = [one << ORIGIN_SHIFT for one in places]
    if (place == place[0]).all():
        codes = list(map(shifted[int(place[0])].__or__, counters))
    else:
        codes = list(map(or_, map(shifted.__getitem__, place.tolist()), counters))
    states = np.frombuffer(packed["states"], np.uint8)
    dead = [keys[row] for row in np.flatnonzero(states == DEAD).tolist()]
    alive = keys if not states.any() else [keys[row] for row in np.flatnonzero(states == ALIVE).tolist()]
    return keys, codes, dead, alive
