"""The last dot of each vector that a producer changed, so that its deltas keep their order across origins.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from delta_prop.producing.sent_clocks import HeadDot

VECTORS_MAX = 100_000
D = TypeVar("D", bound=HeadDot)


class LastDots(Generic[D]):
    """The last dot of each of the `VECTORS_MAX` vectors, named by (namespace, id), that were changed last."""

    __slots__ = ("_by_vector",)

    def __init__(self, by_vector: dict[tuple[str, str], D] | None = None) -> None:
        self._by_vector = {} if by_vector is None else by_vector

    def of_others(self, vectors: Iterable[tuple[str, str]], origin: int) -> list[D]:
        """Return the last dots of these vectors, each once, that are of other origins than this one."""
        if not self._by_vector:
            return []
        found = map(self._by_vector.get, vectors)
        return list(dict.fromkeys(dot for dot in found if dot is not None and dot.origin != origin))

    def note(self, vectors: Sequence[tuple[str, str]], dot: D) -> None:
        """Note that `dot` is the last one of these vectors."""
        by_vector = self._by_vector
        for vector in vectors:
            by_vector.pop(vector, None)
            by_vector[vector] = dot
        while len(by_vector) > VECTORS_MAX:
            del by_vector[next(iter(by_vector))]
