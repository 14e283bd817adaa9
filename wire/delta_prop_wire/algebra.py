"""The arithmetic of operations: apply, compose, fold.

Pure, total and exact: an operation that cannot take effect is counted, never an error, and the same
deltas give the same bytes on every machine. Numbers are float32, element by element, and saturate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgpack
import numpy as np

from delta_prop_wire import metadata as patches
from delta_prop_wire.delta import PARTIAL_KINDS, WHOLE_KINDS, Dot, Kind, Operation
from delta_prop_wire.spec import DELTA_BYTES_MAX, METADATA_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from numpy.typing import NDArray

FLOAT32_MAX = np.finfo(np.float32).max

Key: TypeAlias = tuple[int, int, int]
"""The canonical key of a delta: (Lamport number, origin, counter)."""

Patch: TypeAlias = "Mapping[str, Any] | None"


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is known of one vector (fact): a vector, or opaque bytes, or neither where it is not alive.

    `ignored` counts deltas without effect. `key` is the last delta's canonical key, with or without
    effect; None: never heard of. `vector` belongs to the state: read it, copy it, never write to it.
    """

    alive: bool = False
    vector: NDArray[np.float32] | None = None
    data: bytes | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ignored: int = 0
    key: Key | None = None

    @property
    def content(self) -> tuple[bool, bytes | None, bytes | None, bytes]:
        """What two equal states have in common, in comparable form, metadata in canonical order."""
        vector = None if self.vector is None else self.vector.astype("<f4", copy=False).tobytes()
        return (self.alive, vector, self.data, msgpack.packb(_sorted(self.metadata)))


class Change(NamedTuple):
    """The part of a delta that acts on state: its operation and the metadata patch that rides on it."""

    operation: Operation
    metadata: Patch = None


def apply(state: State, operation: Operation, metadata: Patch = None, key: Key | None = None) -> State:
    """The state after one more delta. Where the operation has no effect, neither has its metadata patch."""
    kind, key = operation.kind, state.key if key is None else key
    if kind == Kind.DELETE:
        return State(ignored=state.ignored, key=key)
    vector, data, kept = state.vector, state.data, state.metadata
    effective = kind in WHOLE_KINDS
    if effective:
        vector, data = None, None
        if kind == Kind.OPAQUE:
            data = operation.data
        else:
            vector = np.array(operation.values, np.float32)  # a copy: a view would keep its whole batch alive
        if kind == Kind.CREATE:
            kept = {}
    elif kind == Kind.METADATA:
        effective = state.alive
    elif kind in PARTIAL_KINDS and vector is not None:
        vector = vector.copy()
        effective = change(vector, operation)
    if not effective:
        return ignoring(state, 1, key)
    if metadata is not None:
        kept = patches.merge(kept, metadata)
    return State(True, vector, data, kept, state.ignored, key)


def change(vector: NDArray[np.float32], operation: Operation) -> bool:
    """Do a sparse, sparse_add, scale or offset to a vector in its place, which may be a row of a matrix.

    False, and nothing is changed, where an index is not below the dimension or the kind is another one.
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
        vector[indices] = values  # the last of repeated indices wins
    elif kind == Kind.SPARSE_ADD:
        _add_at(vector, indices, values)
    return kind in (Kind.SPARSE, Kind.SPARSE_ADD)


def saturate(numbers: NDArray[np.float32]) -> None:
    """Bring sums and products that left float32's range back to its ends, in their place."""
    np.minimum(numbers, FLOAT32_MAX, out=numbers)
    np.maximum(numbers, -FLOAT32_MAX, out=numbers)


def ignoring(state: State, count: int, key: Key | None) -> State:
    """The state after so many deltas without effect, of which the last has that key."""
    return State(state.alive, state.vector, state.data, state.metadata, state.ignored + count, key)


def fold(
    rows: Iterable[tuple[Key, Operation, Patch]],
    onto: State | None = None,
    *,
    without_effect: Container[Key] = (),
) -> State:
    """The state that deltas give, in whatever order they come; repeats (equal keys) have one effect.

    `onto` is a state to go on from: then every row sorts behind its key. A row that sorts before it
    cannot be added any more; the vector is folded again, from its first row.
    `without_effect`: rows that only count, since an earlier one has their id (`twins.py`).
    """
    state = State() if onto is None else onto
    for key, operation, metadata in sorted(rows, key=itemgetter(0)):
        if state.key != key:
            assert state.key is None or state.key < key, "a row sorts before the state it is folded onto"
            none = key in without_effect
            state = ignoring(state, 1, key) if none else apply(state, operation, metadata, key)
    return state


def concurrent(head: Dot | None, origin: int, clock: Mapping[int, int]) -> bool:
    """Whether a delta of `origin`, which has seen `clock` (whole), did not know its vector's last one."""
    return head is not None and head.origin != origin and clock.get(head.origin, 0) < head.counter


def compose(first: Change, second: Change, dimension: int | None = None) -> tuple[Change, ...]:
    """One change that does what `first` and then `second` do to the content of any state; else both.

    Kinds are kept and nothing is approximated: what has no single exact form stays two changes, and so
    does what this version does not know. With `dimension` the promise is for vectors of that dimension
    only, which lets more pairs of sparse changes become one.
    """
    a, b = first.operation.kind, second.operation.kind
    both = (first, second)
    if a not in _COMPOSED_KINDS or b not in _COMPOSED_KINDS:
        return both
    if b in (Kind.CREATE, Kind.DELETE):
        return (second,)
    if a == Kind.DELETE:
        return (first,) if b in PARTIAL_KINDS else both
    if b in WHOLE_KINDS:
        return _compose_whole(first, second) or both
    if a in WHOLE_KINDS:
        return _compose_onto_whole(first, second) or both
    return _compose_partial(first, second, dimension) or both


_COMPOSED_KINDS = (WHOLE_KINDS | PARTIAL_KINDS | {Kind.DELETE}) - {Kind.TRANSFORM}
_SPARSE_KINDS = (Kind.SPARSE, Kind.SPARSE_ADD)


def _add_at(vector: NDArray[np.float32], indices: NDArray[np.uint32], values: NDArray[np.float32]) -> None:
    before = vector[indices]
    with np.errstate(over="ignore"):
        np.add.at(vector, indices, values)  # repeated indices add up, in order
        if np.isfinite(vector[indices]).all():
            return
        # Saturating each sum, not only the last, makes two such changes equal to their concatenation.
        vector[indices] = before
        for index, value in zip(indices.tolist(), values, strict=True):
            vector[index] = min(max(vector[index] + value, -FLOAT32_MAX), FLOAT32_MAX)


def _compose_whole(first: Change, second: Change) -> tuple[Change, ...] | None:
    """Second sets a whole vector or opaque bytes, but leaves the metadata of a living one."""
    a = first.operation.kind
    if a in PARTIAL_KINDS:  # it may or may not have had effect, so its patch cannot move over
        return None if first.metadata else (second,)
    if a != Kind.CREATE:
        return _with_metadata(second.operation, first, second)
    if second.operation.kind == Kind.OPAQUE:
        return None  # opaque bytes cannot clear metadata
    return _with_metadata(Operation(Kind.CREATE, second.operation.values), first, second)


def _compose_onto_whole(first: Change, second: Change) -> tuple[Change, ...] | None:
    """First sets the whole, so what second does to it is known now."""
    operation = first.operation
    if second.operation.kind != Kind.METADATA:
        if operation.kind == Kind.OPAQUE:
            return (first,)
        vector = np.array(operation.values, np.float32)
        if not change(vector, second.operation):
            return (first,)
        operation = Operation(operation.kind, vector)
    return _with_metadata(operation, first, second)


def _compose_partial(first: Change, second: Change, dimension: int | None) -> tuple[Change, ...] | None:
    a, b = first.operation, second.operation
    if a.kind == b.kind == Kind.METADATA:
        return _with_metadata(a, first, second)
    if a.kind not in _SPARSE_KINDS or b.kind not in _SPARSE_KINDS or not _same_reach(a, b, dimension):
        return None
    joined = _join(a, b)
    return None if joined is None else _with_metadata(joined, first, second)


def _same_reach(a: Operation, b: Operation, dimension: int | None) -> bool:
    """Whether two sparse operations take effect on just the same vectors."""
    reach_a, reach_b = _reach(a), _reach(b)
    return reach_a == reach_b or (dimension is not None and max(reach_a, reach_b) <= dimension)


def _reach(operation: Operation) -> int:
    indices = operation.indices
    # Every vector has an element, so an empty operation reaches as far as one on element 0.
    return 1 if indices is None or not len(indices) else int(indices.max()) + 1


def _join(a: Operation, b: Operation) -> Operation | None:
    (indices_a, values_a), (indices_b, values_b) = _pairs(a), _pairs(b)
    if a.kind == b.kind:
        indices = np.concatenate((indices_a, indices_b))
        values = np.concatenate((values_a, values_b))
        if a.kind == Kind.SPARSE:
            indices, values = _last_ones(indices, values)
        return Operation(a.kind, values, indices) if 8 * len(values) <= DELTA_BYTES_MAX else None
    if b.kind == Kind.SPARSE:  # what was added is overwritten, if all of it is
        return b if np.isin(indices_a, indices_b).all() else None
    if not np.isin(indices_b, indices_a).all():
        return None
    indices, values = _last_ones(indices_a, values_a)
    _add_at(values, np.searchsorted(indices, indices_b).astype(np.uint32), values_b)
    return Operation(Kind.SPARSE, values, indices)


def _pairs(operation: Operation) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    assert operation.indices is not None
    assert operation.values is not None
    return operation.indices, operation.values


def _last_ones(
    indices: NDArray[np.uint32], values: NDArray[np.float32]
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Each index once, with its last value, in rising order."""
    unique, places = np.unique(indices[::-1], return_index=True)
    return unique, values[::-1][places]


def _with_metadata(operation: Operation, first: Change, second: Change) -> tuple[Change, ...] | None:
    """The operation with both patches as one, None where no patch of a sound size does what both do."""
    a, b = first.metadata, second.metadata
    if operation.kind == Kind.CREATE:
        patch: Patch = None if not a and not b else patches.merge(patches.merge({}, a or {}), b or {})
    elif a is None or b is None:
        return (Change(operation, b if a is None else a),)
    else:
        patch = patches.compose(a, b)
        if patch is None:
            return None
    if patch is not None and len(msgpack.packb(patch)) > METADATA_BYTES_MAX:
        return None
    return (Change(operation, patch),)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value
