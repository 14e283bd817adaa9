"""Numbers of many vectors, end to end, and what sparse, sparse_add, scale and offset do to all at once.

Exactly what `algebra.change` does to each: the same float32 operations on each element, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop_wire.algebra import saturate
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS_MAX = 32
"""A vector whose kinds of change alternate more often is folded by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Row i has `flat[bounds[i]:bounds[i + 1]]`."""

    bounds: NDArray[np.int64]
    flat: NDArray[Any]

    @classmethod
    def of(cls, column: pa.Array) -> Lists:
        """The lists of an Arrow array, which has no nulls."""
        return cls(_bounds(pc.list_value_length(column).to_numpy()), column.flatten().to_numpy())

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How long each list is."""
        return np.diff(self.bounds)

    def array(self) -> pa.Array:
        """As Arrow has it."""
        return pa.ListArray.from_arrays(pa.array(self.bounds.astype(np.int32)), pa.array(self.flat))

    def taken(self, rows: NDArray[np.intp]) -> Lists:
        """Some of the lists, copied; of row -1 an empty one."""
        sizes = np.where(rows < 0, 0, self.sizes[rows])
        width = int(sizes[0]) if len(sizes) else 0
        if width and (sizes == width).all() and len(self.flat) % width == 0 and self._even(width):
            return Lists(_bounds(sizes), self.flat.reshape(-1, width)[rows].reshape(-1))
        return Lists(_bounds(sizes), self.flat[spans(self.bounds[rows], sizes)])

    def highest(self) -> NDArray[np.int64]:
        """The highest number of each list, -1 of an empty one."""
        found = np.full(len(self.bounds) - 1, -1, np.int64)
        some = self.sizes > 0
        if some.any():
            found[some] = np.maximum.reduceat(self.flat, self.bounds[:-1][some])
        return found

    def _even(self, width: int) -> bool:
        return bool((self.sizes == width).all())


def spans(begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places begin, begin + 1, … of each span, one span behind the other."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(begins - before, sizes) + np.arange(int(sizes.sum()))


def change_numbers(
    vectors: Lists, which: NDArray[np.intp], kinds: NDArray[np.uint8], indices: Lists, values: Lists
) -> NDArray[np.bool_]:
    """Change vectors in their place: change i is of vector `which[i]`; these never fall, all have effect.

    Returns the vectors that must be folded by themselves; what stands there is void.
    """
    alone = np.zeros(len(vectors.bounds) - 1, bool)
    if not len(which):
        return alone
    rounds = _rounds(which, kinds)
    alone[which[rounds >= ROUNDS_MAX]] = True
    one_each = np.isin(kinds, (Kind.SCALE, Kind.OFFSET))
    for number in range(min(int(rounds.max()) + 1, ROUNDS_MAX)):
        now = rounds == number
        for kind in (Kind.SPARSE, Kind.SPARSE_ADD):
            rows = (now & (kinds == kind)).nonzero()[0]
            if len(rows):
                alone |= _change_elements(vectors, which[rows], kind, indices.taken(rows), values.taken(rows))
        for kind in (Kind.SCALE, Kind.OFFSET):
            rows = (now & one_each & (kinds == kind)).nonzero()[0]
            if len(rows):
                _change_all(vectors, which[rows], kind, values.flat[values.bounds[rows]])
    return alone


def _rounds(which: NDArray[np.intp], kinds: NDArray[np.uint8]) -> NDArray[np.intp]:
    """In which round each change is made: those of one vector one after the other, but that such of one kind
    that name elements go together.
    """
    first = np.concatenate([[True], which[1:] != which[:-1]])
    again = np.concatenate([[True], kinds[1:] != kinds[:-1]]) | np.isin(kinds, (Kind.SCALE, Kind.OFFSET))
    number = np.cumsum(first | again)
    return number - np.maximum.accumulate(np.where(first, number, 0))


def _change_elements(
    vectors: Lists, which: NDArray[np.intp], kind: Kind, indices: Lists, values: Lists
) -> NDArray[np.bool_]:
    """Set or add to elements; returns of which vectors a sum left float32's range."""
    alone = np.zeros(len(vectors.bounds) - 1, bool)
    of = np.repeat(which, indices.sizes)
    places = vectors.bounds[of] + indices.flat
    if kind == Kind.SPARSE:
        vectors.flat[places] = values.flat  # in order: the last of repeated places wins
        return alone
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(vectors.flat, places, values.flat)
    # Each sum saturates, not only the last.
    alone[of[~np.isfinite(vectors.flat[places])]] = True
    return alone


def _change_all(vectors: Lists, which: NDArray[np.intp], kind: Kind, numbers: NDArray[np.float32]) -> None:
    sizes = vectors.sizes[which]
    places = spans(vectors.bounds[which], sizes)
    with np.errstate(over="ignore", invalid="ignore"):
        operate = np.multiply if kind == Kind.SCALE else np.add
        changed = operate(vectors.flat[places], np.repeat(numbers, sizes))
    saturate(changed)
    vectors.flat[places] = changed


def _bounds(sizes: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
