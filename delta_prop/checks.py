"""What callers hand in, looked over before anything moves: each refusal names what, its bound and the cure.

Pure, and blind to what the service holds; what depends on that is checked where it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from delta_prop.published import Published
from delta_prop_wire.bounds import (
    check_indices,
    check_name,
    check_parents,
    check_shape,
    check_size,
    check_whole,
    finite,
)
from delta_prop_wire.delta import Delta, Dot, Kind, Operation, Priority, create
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.spec import BATCH_ROWS_MAX, DIMENSION_MAX, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from delta_prop_wire.topics import Topic
from delta_prop_wire.validate import is_simple, validate_batch, validate_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from delta_prop_wire.batch import Batch

T = TypeVar("T")

Cause: TypeAlias = Published | Dot | bytes
"""What names a delta that has its place or will get it: an acknowledgement, a dot, a 16-byte id."""


def check_deltas(deltas: Sequence[Delta]) -> Priority:
    """The priority of deltas that may share a call. Raises InvalidDelta, UsageError."""
    if not 1 <= len(deltas) <= BATCH_ROWS_MAX:
        raise UsageError(f"{len(deltas)} deltas in one call: give 1 to {BATCH_ROWS_MAX}")
    first = deltas[0]
    for row, delta in enumerate(deltas):
        if is_transform(delta):
            raise UsageError("a transform is read and resolved first: use the propagator's publish, alone")
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


def are_simple(deltas: Sequence[Delta]) -> bool:
    """Whether `check_deltas` would pass and each of these is simple: the short way of it."""
    if not 1 <= len(deltas) <= BATCH_ROWS_MAX or type(deltas[0]) is not Delta:
        return False
    priority, source = deltas[0].priority, deltas[0].source
    for delta in deltas:
        if type(delta) is not Delta or delta.priority is not priority or delta.source is not source:
            return False
        if not is_simple(delta):
            return False
    return True


def looked_over(deltas: Sequence[Delta]) -> tuple[Priority, bool]:
    """What `check_deltas` tells, and whether all of them are simple. Raises as that does."""
    return (deltas[0].priority, True) if are_simple(deltas) else (check_deltas(deltas), False)


def _check_tuples(delta: Delta, row: int) -> None:
    for field, many in (("parents", delta.parents), ("topics", delta.topics)):
        if not isinstance(many, tuple | list):
            raise InvalidDelta(field, f"{many!r:.80} is a {type(many).__name__}: give a tuple", row=row)


def is_transform(delta: Delta) -> bool:
    """Whether a delta has to be resolved before it is queued. Raises UsageError for what is no delta."""
    if not isinstance(delta, Delta):
        if isinstance(delta, list | tuple | Iterator):
            raise UsageError(f"a {type(delta).__name__} is not a Delta: unpack it, as in publish(*deltas)")
        raise UsageError(f"{delta!r:.80} is not a Delta: create one with Delta(vector_id, operation)")
    if not isinstance(delta.operation, Operation):
        raise InvalidDelta(
            "operation", f"{delta.operation!r:.80} is no operation: make one with create, sparse, scale…"
        )
    return delta.operation.kind == Kind.TRANSFORM


def check_batch(batch: Batch) -> None:
    """Refuse a producer's batch for its first bad row, a transform too. Raises InvalidDelta."""
    validate_batch(batch)
    if batch.kinds_mask >> Kind.TRANSFORM & 1 and not batch.is_control:
        raise unresolved(batch.kinds.index(Kind.TRANSFORM))


def unresolved(row: int | None = None) -> InvalidDelta:
    """Make the refusal of a transform: in a log its result would depend on where it is applied."""
    return InvalidDelta(
        "op", "transform names a function, and no server applies it: send its result", row=row
    )


def check_columns(
    ids: Sequence[str], matrix: ArrayLike, *, namespace: str, kind: Kind, priority: Priority
) -> NDArray[np.float32]:
    """The matrix as float32 rows, one for each id. Raises InvalidDelta, UsageError."""
    if kind not in (Kind.CREATE, Kind.DENSE):
        raise UsageError(f"kind {kind!r}: columns hold whole vectors, so CREATE or DENSE")
    rows = _checked_rows(ids, matrix, namespace, kind, priority)
    check_size(4 * rows.shape[1])
    return rows


def check_parts(
    ids: Sequence[str],
    matrix: ArrayLike,
    indices: ArrayLike,
    *,
    namespace: str,
    kind: Kind,
    priority: Priority,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Numbers and where they go, a row of both for each id. Raises InvalidDelta, UsageError."""
    if kind not in (Kind.SPARSE, Kind.SPARSE_ADD):
        raise UsageError(f"kind {kind!r}: with indices columns hold parts, so SPARSE or SPARSE_ADD")
    rows = _checked_rows(ids, matrix, namespace, kind, priority)
    check_size(8 * rows.shape[1])
    return rows, _places(indices, rows.shape)


def _checked_rows(
    ids: Sequence[str], matrix: ArrayLike, namespace: str, kind: Kind, priority: Priority
) -> NDArray[np.float32]:
    if isinstance(ids, str):
        raise UsageError(f"ids {ids!r:.80} is one text: give a list of texts, one a row")
    if not hasattr(ids, "__len__"):
        raise UsageError(f"ids: a {type(ids).__name__} has no length: give a list of texts, one a row")
    check_whole("priority", priority, max(Priority))
    rows = _numbers(matrix)
    if rows.ndim != 2 or len(rows) != len(ids):
        raise InvalidDelta("matrix", f"shape {rows.shape} for {len(ids)} ids: give one row an id")
    if not 1 <= len(ids) <= BATCH_ROWS_MAX:
        raise InvalidDelta("matrix", f"{len(ids)} rows: give 1 to {BATCH_ROWS_MAX}, more in several calls")
    check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
    check_shape(kind, rows.shape[1], 0)
    if not finite(rows.reshape(-1)):
        row = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        validate_delta(Delta(ids[row], create(rows[row]), namespace))
    if not are_simple_names(ids):
        for vector_id in ids:
            check_name("vector_id", vector_id, VECTOR_ID_BYTES_MAX)
    return rows


def are_simple_names(ids: Sequence[str]) -> bool:
    """Whether all are vector ids of printable ASCII, told without a look at each."""
    try:
        text = "".join(ids)
    except TypeError:
        return False
    short = len(text) <= VECTOR_ID_BYTES_MAX or max(map(len, ids)) <= VECTOR_ID_BYTES_MAX
    return short and text.isascii() and text.isprintable() and all(ids)


def _places(indices: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.uint32]:
    """Indices as an array of that shape, each within what a vector may have."""
    given = np.asarray(indices)
    if given.shape != shape:
        raise InvalidDelta("indices", f"shape {given.shape} for values of {shape}: give one index a value")
    if given.dtype != np.uint32:
        if given.size and (given.dtype.kind not in "ui" or given.min() < 0 or given.max() >= DIMENSION_MAX):
            raise InvalidDelta("indices", f"not all are whole numbers from 0 to {DIMENSION_MAX - 1}")
        given = given.astype(np.uint32)
    check_indices(given.reshape(-1), DIMENSION_MAX)
    return np.ascontiguousarray(given)


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """The seconds to wait; inf: for ever. Raises UsageError."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not timeout_s >= 0:  # NaN is neither
        raise UsageError(f"{name} {timeout_s!r:.40}: give 0 or more seconds")
    return timeout_s


def timeout_or(timeout_s: float | None, usual_s: float, name: str = "timeout_s") -> float:
    """The same, or what is usual where nothing is said. Raises UsageError."""
    return usual_s if timeout_s is None else check_timeout(timeout_s, name)


def check_instance(field: str, value: object, kind: type[T], cure: str) -> T:
    """The value of an argument that takes one class alone; `cure` makes one. Raises UsageError."""
    if isinstance(value, kind):
        return value
    found = type(value)
    module = "" if found.__module__ == "builtins" else f"{found.__module__}."
    raise UsageError(
        f"{field}: a {module}{found.__qualname__} is not a {kind.__name__}: create one with {cure}"
    )


def path_of(field: str, path: object) -> str:
    """A path on this machine. Raises UsageError."""
    if isinstance(path, str | PurePath) and str(path):
        return str(path)
    raise UsageError(f"{field} {path!r:.60}: give a path")


def cause_of(named: Cause) -> Dot | bytes:
    """The dot or id by which a delta is a parent. Raises UsageError."""
    if isinstance(named, Dot | bytes):
        return named
    if not isinstance(named, Published):
        raise UsageError(
            f"{named!r:.80} names no delta: give a receipt, what publish returned, a dot or an id"
        )
    if named.last_dot is None:
        raise UsageError("the named delta was a duplicate by id: name it by its id")
    return named.last_dot


def with_parents(deltas: Sequence[Delta], causes: Sequence[Cause]) -> Sequence[Delta]:
    """The deltas with these parents beside their own. Raises InvalidDelta where they are too many."""
    if not causes:
        return deltas
    named = [cause_of(cause) for cause in causes]
    changed = [replace(one, parents=tuple(dict.fromkeys((*one.parents, *named)))) for one in deltas]
    for delta in changed:
        check_parents(delta.parents)
    return changed


def parse_topics(topics: str | Iterable[str]) -> list[Topic]:
    """The topics of a subscription. Raises UsageError."""
    if not isinstance(topics, Iterable):
        raise UsageError(f"topics {topics!r:.80}: give a text or several")
    texts = [topics] if isinstance(topics, str) else list(topics)
    if not texts:
        raise UsageError('no topics: give "*" for everything')
    return [Topic.parse(text) for text in texts]


def _numbers(matrix: ArrayLike) -> NDArray[np.float32]:
    if type(matrix) is np.ndarray and matrix.dtype == np.float32 and matrix.flags.c_contiguous:
        return matrix
    try:
        given = np.asarray(matrix)
        if given.dtype.kind not in "fiub":
            raise TypeError(f"{given.dtype} is no type of real numbers")
        # A number too large for float32 becomes inf here and is refused below, with its row.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(given, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidDelta("matrix", f"{error}: give rows of equally many numbers") from None
