"""Checks of callers' arguments before anything changes; each error names the field, its bound and the fix.

Pure, without the service's state; checks that depend on it are made where that state is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from delta_prop.calls.outcomes import PublishAck
from delta_prop_wire.batch import Batch
from delta_prop_wire.bounds import (
    all_finite,
    check_indices,
    check_integer,
    check_name,
    check_operand_sizes,
    check_parents,
    check_size,
)
from delta_prop_wire.delta import Delta, Dot, Kind, Operation, Priority, create
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.spec import BATCH_ROWS_MAX, DIMENSION_MAX, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from delta_prop_wire.topics import Topic
from delta_prop_wire.validate import is_opaque_only, validate_batch, validate_delta

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")

Dependency: TypeAlias = PublishAck | Dot | bytes
"""Name of a delta that is or will be appended: an acknowledgement, a dot or a 16-byte id."""


def check_deltas(deltas: Sequence[Delta]) -> Priority:
    """Return the priority of deltas that may share a call. Raises InvalidDelta, UsageError."""
    if not 1 <= len(deltas) <= BATCH_ROWS_MAX:
        raise UsageError(f"{len(deltas)} deltas in one call: give 1 to {BATCH_ROWS_MAX}")
    first = deltas[0]
    for row, delta in enumerate(deltas):
        if is_transform(delta):
            raise UsageError("a transform is not resolved yet: give it alone to the propagator's publish")
        if delta.parents != () or delta.topics != ():  # most deltas name neither
            _check_tuples(delta, row)
        validate_delta(delta)
        if delta.priority != first.priority or delta.source != first.source:
            raise UsageError(
                f"row {row}: priority {delta.priority:d} from source {delta.source:d}, but the first has "
                f"{first.priority:d} from {first.source:d}: send each in a call of its own"
            )
        if (delta.id is None) != (first.id is None):
            raise InvalidDelta("id", "give all deltas of one call an id, or none", row=row)
    return Priority(first.priority)


def has_only_opaque(deltas: Sequence[Delta]) -> bool:
    """True if each delta is opaque with common columns only and `check_deltas` would pass: a fast path."""
    if not 1 <= len(deltas) <= BATCH_ROWS_MAX or type(deltas[0]) is not Delta:
        return False
    priority, source = deltas[0].priority, deltas[0].source
    for delta in deltas:
        if type(delta) is not Delta or delta.priority is not priority or delta.source is not source:
            return False
        if not is_opaque_only(delta):
            return False
    return True


def validate(deltas: Sequence[Delta]) -> tuple[Priority, bool]:
    """Return the priority that `check_deltas` returns, and True if all deltas are opaque.

    Raises as `check_deltas` does.
    """
    return (deltas[0].priority, True) if has_only_opaque(deltas) else (check_deltas(deltas), False)


def _check_tuples(delta: Delta, row: int) -> None:
    for field, value in (("parents", delta.parents), ("topics", delta.topics)):
        if not isinstance(value, tuple | list):
            raise InvalidDelta(
                field, f"{value!r:.80} is of type {type(value).__name__}: give a tuple", row=row
            )


def is_transform(delta: Delta) -> bool:
    """True if a delta must be resolved before it is queued. Raises UsageError unless it is a Delta."""
    if not isinstance(delta, Delta):
        if isinstance(delta, list | tuple | Iterator):
            raise UsageError(f"type {type(delta).__name__} is not a Delta: unpack it, as in publish(*deltas)")
        raise UsageError(f"{delta!r:.80} is not a Delta: create one with Delta(vector_id, operation)")
    if not isinstance(delta.operation, Operation):
        raise InvalidDelta(
            "operation", f"{delta.operation!r:.80} is not an operation: use create, sparse, scale…"
        )
    return delta.operation.kind == Kind.TRANSFORM


def check_batch(batch: Batch) -> None:
    """Refuse a producer's batch for its first invalid row, or its first transform. Raises InvalidDelta."""
    validate_batch(batch)
    if batch.kinds_mask >> Kind.TRANSFORM & 1 and not batch.is_control:
        raise unresolved_transform(batch.kinds.index(Kind.TRANSFORM))


def unresolved_transform(row: int | None = None) -> InvalidDelta:
    """Return the refusal of a transform: a log must not hold one, as its result depends on who applies it."""
    return InvalidDelta(
        "op", "transform names a function, and no server applies it: send its result", row=row
    )


def check_columns(
    ids: Sequence[str], matrix: ArrayLike, *, namespace: str, kind: Kind, priority: Priority
) -> NDArray[np.float32]:
    """Return the matrix as float32 rows, one per id. Raises InvalidDelta, UsageError."""
    if kind not in (Kind.CREATE, Kind.DENSE):
        raise UsageError(f"kind {kind!r}: columns hold full vectors: give CREATE or DENSE")
    rows = _check_rows(ids, matrix, namespace, kind, priority)
    check_size(4 * rows.shape[1])
    return rows


def check_sparse_columns(
    ids: Sequence[str],
    matrix: ArrayLike,
    indices: ArrayLike,
    *,
    namespace: str,
    kind: Kind,
    priority: Priority,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return values and their indices, one row of each per id. Raises InvalidDelta, UsageError."""
    if kind not in (Kind.SPARSE, Kind.SPARSE_ADD):
        raise UsageError(f"kind {kind!r}: with indices columns hold some elements: give SPARSE or SPARSE_ADD")
    rows = _check_rows(ids, matrix, namespace, kind, priority)
    check_size(8 * rows.shape[1])
    return rows, _check_index_matrix(indices, rows.shape)


def _check_rows(
    ids: Sequence[str], matrix: ArrayLike, namespace: str, kind: Kind, priority: Priority
) -> NDArray[np.float32]:
    if isinstance(ids, str):
        raise UsageError(f"ids {ids!r:.80} is one text: give a list of texts, one per row")
    if not hasattr(ids, "__len__"):
        raise UsageError(f"ids: type {type(ids).__name__} has no length: give a list of texts, one per row")
    check_integer("priority", priority, max(Priority))
    rows = _to_float32(matrix)
    if rows.ndim != 2 or len(rows) != len(ids):
        raise InvalidDelta("matrix", f"shape {rows.shape} for {len(ids)} ids: give one row per id")
    if not 1 <= len(ids) <= BATCH_ROWS_MAX:
        raise InvalidDelta("matrix", f"{len(ids)} rows: give 1 to {BATCH_ROWS_MAX}, more in several calls")
    check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
    check_operand_sizes(kind, rows.shape[1], 0)
    if not all_finite(rows.reshape(-1)):
        row = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        validate_delta(Delta(ids[row], create(rows[row]), namespace))
    if not has_only_ascii_ids(ids):
        for vector_id in ids:
            check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
    return rows


def has_only_ascii_ids(ids: Sequence[str]) -> bool:
    """True if all ids are valid and printable ASCII; the joined text is checked, not each id."""
    try:
        text = "".join(ids)
    except TypeError:
        return False
    are_short = len(text) <= VECTOR_ID_BYTES_MAX or max(map(len, ids)) <= VECTOR_ID_BYTES_MAX
    return are_short and text.isascii() and text.isprintable() and all(ids)


def _check_index_matrix(indices: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.uint32]:
    """Return indices as an array of that shape, each below the maximum dimension."""
    array = np.asarray(indices)
    if array.shape != shape:
        raise InvalidDelta("indices", f"shape {array.shape}: give an index for each value, in shape {shape}")
    if array.dtype != np.uint32:
        if array.size and (array.dtype.kind not in "ui" or array.min() < 0 or array.max() >= DIMENSION_MAX):
            raise InvalidDelta(
                "indices", f"not all from 0 to {DIMENSION_MAX - 1}: give whole numbers in that range"
            )
        array = array.astype(np.uint32)
    check_indices(array.reshape(-1), DIMENSION_MAX)
    return np.ascontiguousarray(array)


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return the seconds to wait; inf: for ever. Raises UsageError."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not timeout_s >= 0:  # also for NaN
        raise UsageError(f"{name} {timeout_s!r:.40}: give 0 or more seconds")
    return timeout_s


def timeout_or_default(timeout_s: float | None, default_s: float, name: str = "timeout_s") -> float:
    """Return the checked timeout, or the default if None. Raises UsageError."""
    return default_s if timeout_s is None else check_timeout(timeout_s, name)


def check_instance(field: str, value: object, kind: type[T], fix: str) -> T:
    """Return an argument that must be a `kind`; `fix` says how to create one. Raises UsageError."""
    if isinstance(value, kind):
        return value
    actual = type(value)
    module = "" if actual.__module__ == "builtins" else f"{actual.__module__}."
    raise UsageError(
        f"{field}: type {module}{actual.__qualname__} is not a {kind.__name__}: create one with {fix}"
    )


def check_path(field: str, path: object) -> str:
    """Return a local path as text. Raises UsageError."""
    if isinstance(path, str | PurePath) and str(path):
        return str(path)
    raise UsageError(f"{field} {path!r:.60}: give a path")


def dependency_key(dependency: Dependency) -> Dot | bytes:
    """Return the dot or id by which a delta is named as a parent. Raises UsageError."""
    if isinstance(dependency, Dot | bytes):
        return dependency
    if not isinstance(dependency, PublishAck):
        raise UsageError(
            f"{dependency!r:.80} does not name a delta: give a receipt, a publish result, a dot or an id"
        )
    if dependency.last_dot is None:
        raise UsageError("the named delta was a duplicate by id: name it by its id")
    return dependency.last_dot


def with_parents(deltas: Sequence[Delta], dependencies: Sequence[Dependency]) -> Sequence[Delta]:
    """Return the deltas with these parents added to their own. Raises InvalidDelta if there are too many."""
    if not dependencies:
        return deltas
    parents = [dependency_key(dependency) for dependency in dependencies]
    changed = [replace(delta, parents=tuple(dict.fromkeys((*delta.parents, *parents)))) for delta in deltas]
    for delta in changed:
        check_parents(delta.parents)
    return changed


def parse_topics(topics: str | Iterable[str]) -> list[Topic]:
    """Return the topics of a subscription, parsed. Raises UsageError."""
    if not isinstance(topics, Iterable):
        raise UsageError(f"topics {topics!r:.80}: give a text or several")
    texts = [topics] if isinstance(topics, str) else list(topics)
    if not texts:
        raise UsageError('no topics: give "*" for everything')
    return [Topic.parse(text) for text in texts]


def _to_float32(matrix: ArrayLike) -> NDArray[np.float32]:
    if type(matrix) is np.ndarray and matrix.dtype == np.float32 and matrix.flags.c_contiguous:
        return matrix
    try:
        array = np.asarray(matrix)
        if array.dtype.kind not in "fiub":
            raise TypeError(f"{array.dtype} is not a type of real numbers")
        # A number too large for float32 becomes inf here and is refused below, with its row.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(array, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidDelta("matrix", f"{error}: give rows of equal length") from None
