"""Applies sparse, sparse_add, scale and offset to the numbers of many vectors at once.

The results equal those of `algebra.apply_in_place` exactly: the same float32 operations on each element, in
the same order.
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
"""Maximum number of rounds (see `_assign_rounds`); a vector that needs more is folded row by row."""


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Lists of numbers: row i has `flat[bounds[i]:bounds[i + 1]]`."""

    bounds: NDArray[np.int64]
    flat: NDArray[Any]

    @classmethod
    def of(cls, column: pa.Array) -> Lists:
        """Return the lists of an Arrow array without nulls."""
        return cls(_to_bounds(pc.list_value_length(column).to_numpy()), column.flatten().to_numpy())

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Length of each list."""
        return np.diff(self.bounds)

    def array(self) -> pa.Array:
        """Return the lists as an Arrow array."""
        return pa.ListArray.from_arrays(pa.array(self.bounds.astype(np.int32)), pa.array(self.flat))

    def take(self, rows: NDArray[np.intp]) -> Lists:
        """Return copies of the lists at `rows`; row -1 gives an empty list."""
        sizes = np.where(rows < 0, 0, self.sizes[rows])
        width = int(sizes[0]) if len(sizes) else 0
        is_uniform = width and (sizes == width).all() and len(self.flat) % width == 0
        if is_uniform and (self.sizes == width).all():
            return Lists(_to_bounds(sizes), self.flat.reshape(-1, width)[rows].reshape(-1))
        return Lists(_to_bounds(sizes), self.flat[expand_spans(self.bounds[rows], sizes)])

    def highest(self) -> NDArray[np.int64]:
        """Return the highest number of each list, -1 for an empty one."""
        highest = np.full(len(self.bounds) - 1, -1, np.int64)
        is_nonempty = self.sizes > 0
        if is_nonempty.any():
            highest[is_nonempty] = np.maximum.reduceat(self.flat, self.bounds[:-1][is_nonempty])
        return highest


def expand_spans(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions start, start + 1, … of each span, one span after the other."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


def change_numbers(
    vectors: Lists, vector_of: NDArray[np.intp], kinds: NDArray[np.uint8], indices: Lists, values: Lists
) -> NDArray[np.bool_]:
    """Change vectors in place: change i is of vector `vector_of[i]`, which never decreases.

    All changes must have an effect. Returns a mask of the vectors that must be folded separately; their
    numbers are then invalid.
    """
    separate = np.zeros(len(vectors.bounds) - 1, bool)
    if not len(vector_of):
        return separate
    rounds = _assign_rounds(vector_of, kinds)
    separate[vector_of[rounds >= ROUNDS_MAX]] = True
    for round_number in range(min(int(rounds.max()) + 1, ROUNDS_MAX)):
        in_round = rounds == round_number
        for kind in (Kind.SPARSE, Kind.SPARSE_ADD):
            rows = (in_round & (kinds == kind)).nonzero()[0]
            if len(rows):
                separate |= _change_elements(
                    vectors, vector_of[rows], kind, indices.take(rows), values.take(rows)
                )
        for kind in (Kind.SCALE, Kind.OFFSET):
            rows = (in_round & (kinds == kind)).nonzero()[0]
            if len(rows):
                _change_all(vectors, vector_of[rows], kind, values.flat[values.bounds[rows]])
    return separate


def _assign_rounds(vector_of: NDArray[np.intp], kinds: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the round of each change.

    A vector's changes are applied one per round, but consecutive sparse changes share a round, and so do
    consecutive sparse_adds.
    """
    is_first = np.concatenate([[True], vector_of[1:] != vector_of[:-1]])
    has_new_kind = np.concatenate([[True], kinds[1:] != kinds[:-1]]) | np.isin(
        kinds, (Kind.SCALE, Kind.OFFSET)
    )
    number = np.cumsum(is_first | has_new_kind)
    return number - np.maximum.accumulate(np.where(is_first, number, 0))


def _change_elements(
    vectors: Lists, vector_of: NDArray[np.intp], kind: Kind, indices: Lists, values: Lists
) -> NDArray[np.bool_]:
    """Set or add to elements; return a mask of the vectors where a sum left float32's range."""
    separate = np.zeros(len(vectors.bounds) - 1, bool)
    owners = np.repeat(vector_of, indices.sizes)
    positions = vectors.bounds[owners] + indices.flat
    if kind == Kind.SPARSE:
        vectors.flat[positions] = values.flat  # in order, so the last value of an element wins
        return separate
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(vectors.flat, positions, values.flat)
    # The algebra saturates after each sum, which these sums at once cannot reproduce.
    separate[owners[~np.isfinite(vectors.flat[positions])]] = True
    return separate


def _change_all(
    vectors: Lists, vector_of: NDArray[np.intp], kind: Kind, numbers: NDArray[np.float32]
) -> None:
    sizes = vectors.sizes[vector_of]
    positions = expand_spans(vectors.bounds[vector_of], sizes)
    with np.errstate(over="ignore", invalid="ignore"):
        operate = np.multiply if kind == Kind.SCALE else np.add
        changed = operate(vectors.flat[positions], np.repeat(numbers, sizes))
    saturate(changed)
    vectors.flat[positions] = changed


def _to_bounds(sizes: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
