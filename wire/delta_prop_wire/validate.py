"""Bounds of deltas: each refusal names the field, the value, its bound and the cure.

Pure. A batch is looked over by columns; only when something may be wrong does anyone look at rows, so
`validate_delta` alone says what is allowed, and `validate_batch` agrees with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from delta_prop_wire.batch import PRINTABLE
from delta_prop_wire.bounds import (
    BYTES_MAX,
    NUMBERS_MAX,
    NUMBERS_MIN,
    SPARSE_KINDS,
    check_clock,
    check_clock_order,
    check_count,
    check_dot,
    check_expect,
    check_indices,
    check_metadata,
    check_metadata_given,
    check_name,
    check_operation,
    check_parents,
    check_shape,
    check_size,
    check_topics,
    check_whole,
    clock_is_sound,
    finite,
    is_id,
    name_is_sound,
    refuse,
)
from delta_prop_wire.delta import ABSENT, Delta, Dot, Kind, Operation, Priority, Source
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.layout import Column
from delta_prop_wire.mixed import decode_mixed
from delta_prop_wire.packed_metadata import PackedMetadata, json_fault_of
from delta_prop_wire.plain import decode_plain
from delta_prop_wire.spec import (
    CLOCK_ENTRIES_MAX,
    COUNTER_MAX,
    DELTA_BYTES_MAX,
    DIMENSION_MAX,
    METADATA_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    PARENTS_PER_DELTA_MAX,
    TOPIC_BYTES_MAX,
    TOPICS_PER_DELTA_MAX,
    TRANSFORM_NAME_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch


def validate_delta(delta: Delta) -> None:
    """Raise InvalidDelta for the first thing that breaks a bound."""
    if not is_simple(delta):
        _check(delta)


def is_simple(delta: Delta) -> bool:
    """Whether a delta is sound and says no more than bytes of a fact, under names in ASCII: the short way of
    `validate_delta`.
    """
    operation = delta.operation
    if type(operation) is not Operation or operation.kind is not _OPAQUE:
        return False
    data, key, namespace = operation.data, delta.vector_id, delta.namespace
    return (
        operation.values is None
        and operation.indices is None
        and type(data) is bytes
        and len(data) <= DELTA_BYTES_MAX
        and delta.metadata is None
        and delta.id is None
        and delta.dot is None
        and delta.expect is None
        and delta.parents == ()
        and delta.clock == ()
        and delta.topics == ()
        and type(delta.timestamp) is int
        and 0 <= delta.timestamp < 1 << 64
        and type(delta.priority) is Priority
        and type(delta.source) is Source
        and type(key) is str
        and type(namespace) is str
        and key.isascii()
        and key.isprintable()
        and 0 < len(key) <= VECTOR_ID_BYTES_MAX
        and namespace.isascii()
        and namespace.isprintable()
        and 0 < len(namespace) <= NAMESPACE_BYTES_MAX
    )


def _check(delta: Delta) -> None:
    check_name("vector_id", delta.vector_id, VECTOR_ID_BYTES_MAX)
    check_name("namespace", delta.namespace, NAMESPACE_BYTES_MAX)
    size = check_operation(delta.operation)
    if delta.metadata is not None:
        size += check_metadata(delta.metadata)
    check_size(size)
    check_metadata_given(delta.operation.kind, delta.metadata is not None)
    if delta.id is not None and not is_id(delta.id):
        refuse("id", f"{delta.id!r:.60} is not 16 bytes: give an id of 16 bytes, or none")
    if delta.dot is not None:
        check_dot("dot", delta.dot)
    if delta.expect is not None:
        check_expect(delta.expect)
    if delta.parents:
        check_parents(delta.parents)
    if delta.topics:
        check_topics(delta.topics)
    check_whole("timestamp", delta.timestamp, (1 << 64) - 1)
    check_whole("priority", delta.priority, 3)
    check_whole("source", delta.source, 3)
    if delta.clock:  # last, as it belongs to the whole batch where there is one
        check_clock(delta.clock)


def validate_for_dimension(operation: Operation, dimension: int) -> None:
    """Raise InvalidDelta where a (valid) operation does not fit a namespace of that dimension."""
    if operation.kind in _WHOLE_VECTOR_KINDS and operation.values is not None:
        if len(operation.values) != dimension:
            refuse(
                "vector",
                f"{len(operation.values)} numbers; the first vector of this namespace fixed {dimension}: "
                "send as many, or use another namespace",
            )
    elif operation.kind in SPARSE_KINDS and operation.indices is not None:
        check_indices(operation.indices, dimension)


def validate_batch(batch: Batch) -> None:
    """Raise InvalidDelta with the first bad row. Control rows carry no delta and are not looked at."""
    if batch.sound or batch.is_control:
        return
    if batch.is_state:
        refuse("batch", "it holds state rows, which a snapshot makes: send changes")
    if plain_is_sound(batch):
        return
    columns = batch.columns_mask
    if columns >> Column.ROW_OFFSETS & 1:
        refuse("batch", "it names offsets, which a log gives: leave them out")
    sound = _names_are_sound(batch) and _numbers_are_sound(batch, columns)
    if not sound or not _extras_are_sound(batch, columns):
        _raise_first_fault(batch)


def plain_is_sound(batch: Batch) -> bool:
    """Whether a batch is plain and sound, told in few steps; where it is not, `validate_batch` says why."""
    if batch.sound:
        return True
    if not batch.decoded and not decode_plain(batch):
        return False
    kind, width, namespace = batch.kind, batch.row_values, batch.namespace
    return (
        kind is not None
        and width is not None
        and namespace is not None
        and NUMBERS_MIN[kind] <= width <= NUMBERS_MAX[kind]
        and kind not in _WITH_BYTES
        and (BYTES_MAX[kind] == DELTA_BYTES_MAX or not batch.columns_mask & _BLOBS)
        and batch.dimension == (width if kind in _WHOLE_VECTOR_KINDS else 0)
        and (batch.key_bytes_bound <= VECTOR_ID_BYTES_MAX or max(map(len, batch.keys)) <= VECTOR_ID_BYTES_MAX)
        and _is_namespace(namespace)
        and (not width or finite(batch.values))
        and batch.index_highest < DIMENSION_MAX
        # All rows together, so each of them; so many numbers as a row may have are never more.
        and (batch.size <= DELTA_BYTES_MAX or not batch.columns_mask & _BLOBS)
    )


def simple_is_sound(batch: Batch) -> bool:
    """The same for a simple batch, whose rows may differ."""
    return plain_is_sound(batch) if batch.plain else batch.sound or decode_mixed(batch)


@lru_cache(maxsize=1024)
def _is_namespace(name: str) -> bool:
    """The same few come with batch after batch."""
    return name_is_sound(name, NAMESPACE_BYTES_MAX)


def validate_batch_dimensions(batch: Batch, dimensions: Mapping[str, int]) -> dict[str, int]:
    """Check a valid batch against the dimensions of namespaces; return those that its own vectors fix.

    Raises InvalidDelta with the first row that does not fit. Rows count in order: a first vector fixes
    the dimension for the rows behind it.
    """
    names, width = batch.namespace_names, batch.dimension
    unknown = [name for name in names if name not in dimensions]
    # Plain to see without rows: which names are unknown, and that each of them has a vector of that width.
    plain = not unknown or len(names) == 1 or not batch.kinds_mask & (batch.kinds_mask - 1)
    if (width and plain) or not batch.kinds_mask & _VECTOR_BITS:
        known = [dimensions[name] for name in names if name in dimensions]
        fits = not width or all(dimension == width for dimension in known)
        if fits and batch.index_highest < min(known, default=width or DIMENSION_MAX):
            return dict.fromkeys(unknown, width) if width else {}
    fixed: dict[str, int] = {}
    for row, namespace in enumerate(batch.namespaces):
        operation = batch.operation(row)
        dimension = dimensions.get(namespace) or fixed.get(namespace)
        if dimension is not None:
            try:
                validate_for_dimension(operation, dimension)
            except InvalidDelta as error:
                raise _in_row(error, row) from None
        elif operation.kind in _WHOLE_VECTOR_KINDS and operation.values is not None:
            fixed[namespace] = len(operation.values)
    return fixed


_OPAQUE = Kind.OPAQUE
_WHOLE_VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
_IS_VECTOR = bytes(kind in _WHOLE_VECTOR_KINDS for kind in range(256))
_VECTOR_BITS = 1 << Kind.CREATE | 1 << Kind.DENSE
_METADATA_BIT = 1 << Kind.METADATA
_TRANSFORM = int(Kind.TRANSFORM)
_WITH_BYTES = frozenset({Kind.TRANSFORM, Kind.METADATA})
_ANY = np.logical_or.reduce
_SHAPES = np.array([NUMBERS_MIN, NUMBERS_MAX, BYTES_MAX], np.int64)
_BLOBS = 1 << Column.BLOBS
_VARIED = 1 << Column.KINDS | 1 << Column.VALUE_ENDS | 1 << Column.BLOBS
_EXTRAS = sum(
    1 << column for column in (Column.CLOCK, Column.PARENTS, Column.EXPECTS, Column.TAGS, Column.METADATA)
)


# --- a batch, by columns: False where a row may be at fault


def _names_are_sound(batch: Batch) -> bool:
    if not all(map(_is_namespace, batch.namespace_names)):
        return False
    if batch.decoded:  # so all are of printable ASCII, and none is empty
        return (
            batch.key_bytes_bound <= VECTOR_ID_BYTES_MAX or max(map(len, batch.keys)) <= VECTOR_ID_BYTES_MAX
        )
    raw, keys = batch.column(Column.KEYS), batch.keys
    if raw is None:
        return False
    if not bytes(raw).translate(None, PRINTABLE):  # ASCII: characters and bytes count alike
        fit = len(raw) <= VECTOR_ID_BYTES_MAX or max(map(len, keys)) <= VECTOR_ID_BYTES_MAX
        return fit and "" not in keys
    return all(name_is_sound(key, VECTOR_ID_BYTES_MAX) for key in keys)


def _numbers_are_sound(batch: Batch, columns: int) -> bool:
    if columns & _VARIED:
        shaped = _shapes_are_sound(batch)
    else:  # one kind, one width, no bytes
        kind, width = batch.kinds_mask.bit_length() - 1, len(batch.values) // batch.count
        shaped = NUMBERS_MIN[kind] <= width <= NUMBERS_MAX[kind]
        shaped = shaped and batch.dimension == (width if kind in _WHOLE_VECTOR_KINDS else 0)
        shaped = shaped and kind != _TRANSFORM
    return shaped and finite(batch.values) and batch.index_highest < DIMENSION_MAX


def _shapes_are_sound(batch: Batch) -> bool:
    kinds = np.frombuffer(batch.kinds, np.uint8)
    least, most, bytes_most = _SHAPES.take(kinds, 1)
    ends, blob_ends = batch.value_bounds, batch.blob_bounds
    numbers, sizes = ends[1:] - ends[:-1], blob_ends[1:] - blob_ends[:-1]
    if _ANY((numbers < least) | (numbers > most) | (sizes > bytes_most)):
        return False
    if batch.dimension != _common_dimension(batch.kinds, numbers):
        return False
    sound = not batch.kinds_mask >> Kind.TRANSFORM & 1
    return sound or all(
        _transform_is_sound(batch.blob(row)) for row in np.flatnonzero(kinds == Kind.TRANSFORM).tolist()
    )


def _common_dimension(kinds: bytes, numbers: NDArray[np.int64]) -> int:
    widths = {*compress(numbers.tolist(), kinds.translate(_IS_VECTOR))}
    return widths.pop() if len(widths) == 1 else 0


def _transform_is_sound(name: bytes) -> bool:
    try:
        return name_is_sound(str(name, "utf-8"), TRANSFORM_NAME_BYTES_MAX)
    except UnicodeDecodeError:
        return False


def _extras_are_sound(batch: Batch, columns: int) -> bool:
    if len(batch.raw) > DELTA_BYTES_MAX and int(_row_sizes(batch).max()) > DELTA_BYTES_MAX:
        return False
    if not columns & _EXTRAS and not batch.kinds_mask & _METADATA_BIT:
        return True
    return (
        batch.clock_entries <= CLOCK_ENTRIES_MAX
        and clock_is_sound(batch.clock)
        and _parents_are_sound(batch)
        and all(1 <= dot.counter <= COUNTER_MAX or dot == ABSENT for _, dot in batch.expects)
        and _tags_are_sound(batch)
        and _metadata_is_sound(batch)
    )


def _row_sizes(batch: Batch) -> NDArray[np.int64]:
    numbers = 4 * (np.diff(batch.value_bounds) + np.diff(batch.index_bounds))
    return numbers + np.diff(batch.blob_bounds) + _sizes(batch, Column.METADATA_ENDS)


def _sizes(batch: Batch, ends: Column) -> NDArray[np.int64]:
    """Bytes a row in the column that these ends belong to; zeros where it is absent."""
    sizes, raw = np.zeros(batch.count, np.int64), batch.column(ends)
    if raw is not None:
        stops = np.frombuffer(raw, "<u4")
        sizes[0], sizes[1:] = stops[0], stops[1:] - stops[:-1]
    return sizes


def _parents_are_sound(batch: Batch) -> bool:
    parents = batch.parents
    if batch.places or max(Counter(row for row, _ in parents).values(), default=0) > PARENTS_PER_DELTA_MAX:
        return False
    return all(isinstance(parent, bytes) or 1 <= parent.counter <= COUNTER_MAX for _, parent in parents)


def _tags_are_sound(batch: Batch) -> bool:
    if max(Counter(row for row, _ in batch.tags).values(), default=0) > TOPICS_PER_DELTA_MAX:
        return False
    return all(name_is_sound(name, TOPIC_BYTES_MAX) for name in batch.custom_topics)


def _metadata_is_sound(batch: Batch) -> bool:
    sizes = _sizes(batch, Column.METADATA_ENDS)
    if int(sizes.max()) > METADATA_BYTES_MAX:
        return False
    if (sizes[np.frombuffer(batch.kinds, np.uint8) == Kind.METADATA] == 0).any():
        return False
    raw, at = batch.column(Column.METADATA), 0
    for size in sizes.tolist():
        if size and raw is not None and json_fault_of(raw[at : at + size]):
            return False
        at += size
    return True


def _raise_first_fault(batch: Batch) -> NoReturn:
    """Look at each row until one is refused; then at what belongs to the batch as a whole."""
    parents: defaultdict[int, list[Dot | bytes]] = defaultdict(list)
    topics: defaultdict[int, list[str]] = defaultdict(list)
    for row, parent in batch.parents:
        parents[row].append(parent)
    for row, topic in batch.tags:
        topics[row].append(topic)
    expects = dict(batch.expects)
    places = {row: place for row, _, place in batch.places}
    numbers, blobs = np.diff(batch.value_bounds), np.diff(batch.blob_bounds)
    metadata_sizes = _sizes(batch, Column.METADATA_ENDS)
    for row, (key, namespace, kind) in enumerate(zip(batch.keys, batch.namespaces, batch.kinds, strict=True)):
        try:
            check_name("vector_id", key, VECTOR_ID_BYTES_MAX)
            check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
            check_shape(kind, int(numbers[row]), int(blobs[row]))  # a row shows no numbers its kind has not
            validate_delta(
                Delta(
                    vector_id=key,
                    operation=batch.operation(row),
                    namespace=namespace,
                    parents=tuple(parents.get(row, ())),
                    metadata=PackedMetadata(bytes(batch.packed_metadata(row)))
                    if metadata_sizes[row]
                    else None,
                    topics=tuple(topics.get(row, ())),
                    expect=expects.get(row),
                )
            )
            if row in places:
                refuse(
                    "parents",
                    f"one lies in partition {places[row].partition}, and this service has one partition: "
                    "name it by its dot alone",
                )
        except InvalidDelta as error:
            raise _in_row(error, row) from None
    check_count("clock", batch.clock_entries, CLOCK_ENTRIES_MAX)
    if batch.clock:
        check_clock(batch.clock)
        check_clock_order(batch.clock)
    for name in batch.namespace_names:
        check_name("namespace", name, NAMESPACE_BYTES_MAX)
    for name in batch.custom_topics:
        check_name("topics", name, TOPIC_BYTES_MAX)
    refuse("dimension", f"{batch.dimension} in the header: give what all vectors of the batch have, else 0")


def _in_row(error: InvalidDelta, row: int) -> InvalidDelta:
    field = error.field or ""
    return InvalidDelta(field, error.message.removeprefix(f"{field}: "), row=row)
