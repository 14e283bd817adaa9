"""The arithmetic of operations: apply, fold.

Pure, total and exact: an operation that cannot take effect is counted and raises no error, and the same
deltas give the same bytes on every machine. Numbers are float32, computed element by element, and saturate.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack
import numpy as np

from delta_prop_wire import metadata as patches
from delta_prop_wire.delta import FULL_KINDS, PARTIAL_KINDS, Kind, Operation

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT32_MAX = np.finfo(np.float32).max

Key: TypeAlias = tuple[int, int, int]
"""The canonical key of a delta: (Lamport number, origin, counter)."""

Patch: TypeAlias = "Mapping[str, Any] | None"


@dataclass(frozen=True, slots=True, eq=False)
class VectorState:
    """The state of one vector (fact): its numbers, or opaque bytes, or neither if it does not exist.

    `alive`: True if it exists. `ignored`: the number of deltas without effect. `key`: the canonical key of
    the last delta, with or without effect; None before any delta. `vector` (1-D, float32) belongs to the
    state: read or copy it, never write to it.
    """

    alive: bool = False
    vector: NDArray[np.float32] | None = None
    data: bytes | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ignored: int = 0
    key: Key | None = None

    @property
    def content(self) -> tuple[bool, bytes | None, bytes | None, bytes]:
        """The state without `ignored` and `key`, for comparison, with metadata in canonical order."""
        vector = None if self.vector is None else self.vector.astype("<f4", copy=False).tobytes()
        return (self.alive, vector, self.data, msgpack.packb(_sort_keys(self.metadata)))


def apply(
    state: VectorState, operation: Operation, metadata: Patch = None, key: Key | None = None
) -> VectorState:
    """Return the state after one more delta. If the operation has no effect, its patch has none either."""
    kind, key = operation.kind, state.key if key is None else key
    if kind == Kind.DELETE:
        return VectorState(ignored=state.ignored, key=key)
    vector, data, merged = state.vector, state.data, state.metadata
    has_effect = kind in FULL_KINDS
    if has_effect:
        vector, data = None, None
        if kind == Kind.OPAQUE:
            data = operation.data
        else:
            vector = np.array(operation.values, np.float32)  # copied, since a view would pin its batch
        if kind == Kind.CREATE:
            merged = {}
    elif kind == Kind.METADATA:
        has_effect = state.alive
    elif kind in PARTIAL_KINDS and vector is not None:
        vector = vector.copy()
        has_effect = apply_in_place(vector, operation)
    if not has_effect:
        return with_ignored(state, 1, key)
    if metadata is not None:
        merged = patches.merge(merged, metadata)
    return VectorState(True, vector, data, merged, state.ignored, key)


def apply_in_place(vector: NDArray[np.float32], operation: Operation) -> bool:
    """Apply a sparse, sparse_add, scale or offset operation to a vector (or row of a matrix) in place.

    Return False and change nothing if an index is not below the dimension or the kind is another one.
    """
    kind, values, indices = operation.kind, operation.values, operation.indices
    if values is None:
        return False
    if kind in (Kind.SCALE, Kind.OFFSET):
        with np.errstate(over="ignore"):
            (np.multiply if kind == Kind.SCALE else np.add)(vector, values[0], out=vector)
        saturate(vector)
        return True
    if indices is None or (len(indices) and int(indices.max()) >= len(vector)):
        return False
    if kind == Kind.SPARSE:
        vector[indices] = values  # of duplicate indices the last one wins
    elif kind == Kind.SPARSE_ADD:
        _add_at(vector, indices, values)
    return kind in (Kind.SPARSE, Kind.SPARSE_ADD)


def saturate(numbers: NDArray[np.float32]) -> None:
    """Clamp sums and products to float32's range, in place."""
    np.minimum(numbers, FLOAT32_MAX, out=numbers)
    np.maximum(numbers, -FLOAT32_MAX, out=numbers)


def with_ignored(state: VectorState, count: int, key: Key | None) -> VectorState:
    """Return the state after `count` deltas without effect, the last of which has `key`."""
    return VectorState(state.alive, state.vector, state.data, state.metadata, state.ignored + count, key)


def fold(
    rows: Iterable[tuple[Key, Operation, Patch]],
    onto: VectorState | None = None,
    *,
    without_effect: Container[Key] = (),
) -> VectorState:
    """Fold deltas, given in any order, into a state; duplicates (equal keys) have one effect.

    `onto`: a state to continue from; every row must sort after its key, else the caller has to fold the
    vector again from its first row. `without_effect`: keys of rows that only count as ignored, since an
    earlier row has their id (`duplicate_ids.py`).
    """
    state = VectorState() if onto is None else onto
    for key, operation, metadata in sorted(rows, key=itemgetter(0)):
        if state.key != key:
            assert state.key is None or state.key < key, "a row sorts before the state it is folded onto"
            is_ignored = key in without_effect
            state = with_ignored(state, 1, key) if is_ignored else apply(state, operation, metadata, key)
    return state


def _add_at(vector: NDArray[np.float32], indices: NDArray[np.uint32], values: NDArray[np.float32]) -> None:
    previous_values = vector[indices]
    with np.errstate(over="ignore"):
        np.add.at(vector, indices, values)  # duplicate indices add up, in order
        if np.isfinite(vector[indices]).all():
            return
        # Each sum saturates, not only the last, so that two sparse_add operations have the effect of their
        # concatenation.
        vector[indices] = previous_values
        for index, value in zip(indices.tolist(), values, strict=True):
            vector[index] = min(max(vector[index] + value, -FLOAT32_MAX), FLOAT32_MAX)


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sort_keys(value[name]) for name in sorted(value)}
    return [_sort_keys(item) for item in value] if isinstance(value, (list, tuple)) else value
