"""Validates deltas and batches: each refusal names the field, the value, its bound and the fix.

Pure. A batch is checked by columns, and row by row only if a column check fails. So `validate_delta` alone
defines what is valid, and `validate_batch` agrees with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from delta_prop_wire.batch import PRINTABLE, Batch
from delta_prop_wire.bounds import (
    BYTES_MAX,
    NUMBERS_MAX,
    NUMBERS_MIN,
    all_finite,
    check_clock,
    check_clock_order,
    check_count,
    check_dot,
    check_expect,
    check_integer,
    check_metadata,
    check_metadata_present,
    check_name,
    check_operand_sizes,
    check_operation,
    check_parents,
    check_size,
    check_topics,
    clock_is_valid,
    is_id,
    name_is_valid,
    refuse,
)
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import ABSENT, Delta, Dot, Kind, Operation, Priority, Source
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.layout import Column
from delta_prop_wire.packed_metadata import PackedMetadata, packed_json_fault
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
    Attribute,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def validate_delta(delta: Delta) -> None:
    """Raise InvalidDelta for the first part that breaks a bound."""
    if is_opaque_only(delta):
        return
    check_name("vector_id", delta.vector_id, VECTOR_ID_BYTES_MAX)
    check_name("namespace", delta.namespace, NAMESPACE_BYTES_MAX)
    size = check_operation(delta.operation)
    if delta.metadata is not None:
        size += check_metadata(delta.metadata)
    check_size(size)
    check_metadata_present(delta.operation.kind, delta.metadata is not None)
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
    check_integer("timestamp", delta.timestamp, (1 << 64) - 1)
    check_integer("priority", delta.priority, 3)
    check_integer("source", delta.source, 3)
    if delta.clock:  # last, since in a batch the clock belongs to the batch
        check_clock(delta.clock)


def is_opaque_only(delta: Delta) -> bool:
    """True if a delta is valid, and sets only the bytes of a fact, under names of printable ASCII."""
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


def validate_batch(batch: Batch) -> None:
    """Raise InvalidDelta that names the first bad row. Control rows hold no delta and are not checked."""
    if not (batch.is_control or batch_is_valid(batch)):
        _raise_first_fault(batch)


def batch_is_valid(batch: Batch) -> bool:
    """True if `validate_batch` accepts a batch that is not of control rows."""
    if not batch.validated:
        batch.validated = core_mode.core.batch_is_valid(batch) or _columns_are_valid(batch)
    return batch.validated


def common_columns_only(batch: Batch) -> bool:
    """True if a batch has nothing but operations of its rows, none of them a transform."""
    return not (
        batch.columns_mask & ~_COMMON_COLUMNS
        or batch.attributes & _RARE_ATTRIBUTES
        or batch.kinds_mask & _TRANSFORM_BIT
    )


def may_be_in_run(batch: Batch) -> bool:
    """True if a batch is valid, and has only common columns."""
    return common_columns_only(batch) and batch_is_valid(batch)


@lru_cache(maxsize=1024)
def namespace_is_valid(name: str) -> bool:
    """Check a namespace; cached, since batches reuse a few."""
    return name_is_valid(name, NAMESPACE_BYTES_MAX)


_COMMON_COLUMNS = sum(
    1 << column
    for column in (
        *(Column.KEY_ENDS, Column.KEYS, Column.NAMESPACES, Column.KINDS, Column.NAMESPACE_INDEX),
        *(Column.BLOB_ENDS, Column.BLOBS, Column.VALUE_ENDS, Column.INDICES, Column.VALUES),
    )
)
_RARE_ATTRIBUTES = sum(
    (
        *(Attribute.IDS, Attribute.PARENTS, Attribute.CLOCK, Attribute.CONTROL),
        *(Attribute.ROW_OFFSETS, Attribute.COUNTER_GAPS, Attribute.STATE_ROWS),
    )
)
_FULL_VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
_IS_VECTOR = bytes(kind in _FULL_VECTOR_KINDS for kind in range(256))
_METADATA_BIT = 1 << Kind.METADATA
_TRANSFORM = int(Kind.TRANSFORM)
_TRANSFORM_BIT = 1 << Kind.TRANSFORM
_OPAQUE = Kind.OPAQUE
_OPERAND_BOUNDS = np.array([NUMBERS_MIN, NUMBERS_MAX, BYTES_MAX], np.int64)
_EXTRA_COLUMNS = sum(
    1 << column for column in (Column.CLOCK, Column.PARENTS, Column.EXPECTS, Column.TAGS, Column.METADATA)
)


# --- checks of a batch by columns, which return False if a row may be invalid


def _columns_are_valid(batch: Batch) -> bool:
    columns = batch.columns_mask
    return not (batch.is_state or columns >> Column.ROW_OFFSETS & 1) and (
        _names_are_valid(batch) and _numbers_are_valid(batch) and _extras_are_valid(batch, columns)
    )


def _names_are_valid(batch: Batch) -> bool:
    if not all(map(namespace_is_valid, batch.namespace_names)):
        return False
    raw, keys = batch.column(Column.KEYS), batch.keys
    if raw is None:
        return False
    if not bytes(raw).translate(None, PRINTABLE):  # in ASCII a character is a byte
        are_short = len(raw) <= VECTOR_ID_BYTES_MAX or max(map(len, keys)) <= VECTOR_ID_BYTES_MAX
        return are_short and "" not in keys
    return all(name_is_valid(key, VECTOR_ID_BYTES_MAX) for key in keys)


def _numbers_are_valid(batch: Batch) -> bool:
    return _operands_are_valid(batch) and all_finite(batch.values) and batch.highest_index < DIMENSION_MAX


def _operands_are_valid(batch: Batch) -> bool:
    kind, width = batch.kind, batch.values_per_row
    if kind is None or width is None or kind == _TRANSFORM:
        return _operands_of_rows_are_valid(batch)
    if batch.dimension != (width if kind in _FULL_VECTOR_KINDS else 0):
        return False
    blobs, bytes_max = batch.column(Column.BLOBS) or b"", BYTES_MAX[kind]
    are_short = len(blobs) <= bytes_max or int(np.diff(batch.blob_bounds).max()) <= bytes_max
    return are_short and NUMBERS_MIN[kind] <= width <= NUMBERS_MAX[kind]


def _operands_of_rows_are_valid(batch: Batch) -> bool:
    kinds = np.frombuffer(batch.kinds, np.uint8)
    numbers_min, numbers_max, bytes_max = _OPERAND_BOUNDS.take(kinds, 1)
    widths, blob_sizes = np.diff(batch.value_bounds), np.diff(batch.blob_bounds)
    if ((widths < numbers_min) | (widths > numbers_max) | (blob_sizes > bytes_max)).any():
        return False
    if batch.dimension != _common_dimension(batch.kinds, widths):
        return False
    transforms = np.flatnonzero(kinds == _TRANSFORM).tolist()
    return all(_transform_is_valid(batch.blob(row)) for row in transforms)


def _common_dimension(kinds: bytes, widths: NDArray[np.int64]) -> int:
    """Return the number of values that all full vectors have, 0 if there are none or they differ."""
    dimensions = {*compress(widths.tolist(), kinds.translate(_IS_VECTOR))}
    return dimensions.pop() if len(dimensions) == 1 else 0


def _transform_is_valid(name: bytes) -> bool:
    try:
        return name_is_valid(str(name, "utf-8"), TRANSFORM_NAME_BYTES_MAX)
    except UnicodeDecodeError:
        return False


def _extras_are_valid(batch: Batch, columns: int) -> bool:
    if len(batch.raw) > DELTA_BYTES_MAX and int(_row_sizes(batch).max()) > DELTA_BYTES_MAX:
        return False
    if not columns & _EXTRA_COLUMNS and not batch.kinds_mask & _METADATA_BIT:
        return True
    return (
        batch.clock_entry_count <= CLOCK_ENTRIES_MAX
        and clock_is_valid(batch.clock)
        and _parents_are_valid(batch)
        and all(1 <= dot.counter <= COUNTER_MAX or dot == ABSENT for dot in batch.expect_by_row.values())
        and _tags_are_valid(batch)
        and _metadata_is_valid(batch)
    )


def _row_sizes(batch: Batch) -> NDArray[np.int64]:
    number_bytes = 4 * (np.diff(batch.value_bounds) + np.diff(batch.index_bounds))
    return number_bytes + np.diff(batch.blob_bounds) + _part_sizes(batch, Column.METADATA_ENDS)


def _part_sizes(batch: Batch, ends: Column) -> NDArray[np.int64]:
    """Return the length of each row's part, from a column of ends; zeros if that column is absent."""
    sizes, raw = np.zeros(batch.count, np.int64), batch.column(ends)
    if raw is not None:
        stops = np.frombuffer(raw, "<u4")
        sizes[0], sizes[1:] = stops[0], stops[1:] - stops[:-1]
    return sizes


def _parents_are_valid(batch: Batch) -> bool:
    parents = batch.parents
    if (
        batch.parent_positions
        or max(Counter(row for row, _ in parents).values(), default=0) > PARENTS_PER_DELTA_MAX
    ):
        return False
    return all(isinstance(parent, bytes) or 1 <= parent.counter <= COUNTER_MAX for _, parent in parents)


def _tags_are_valid(batch: Batch) -> bool:
    if max(Counter(row for row, _ in batch.row_topics).values(), default=0) > TOPICS_PER_DELTA_MAX:
        return False
    return all(name_is_valid(name, TOPIC_BYTES_MAX) for name in batch.custom_topics)


def _metadata_is_valid(batch: Batch) -> bool:
    sizes = _part_sizes(batch, Column.METADATA_ENDS)
    if int(sizes.max()) > METADATA_BYTES_MAX:
        return False
    if (sizes[np.frombuffer(batch.kinds, np.uint8) == Kind.METADATA] == 0).any():
        return False
    raw, start = batch.column(Column.METADATA), 0
    for size in sizes.tolist():
        if size and raw is not None and packed_json_fault(raw[start : start + size]):
            return False
        start += size
    return True


def _raise_first_fault(batch: Batch) -> NoReturn:
    """Check each row until one is refused, then the parts that belong to the batch."""
    if batch.is_state:
        refuse("batch", "state rows, which only a snapshot holds: send changes")
    if batch.columns_mask >> Column.ROW_OFFSETS & 1:
        refuse("batch", "row offsets, which only a log assigns: leave them out")
    parents: defaultdict[int, list[Dot | bytes]] = defaultdict(list)
    topics: defaultdict[int, list[str]] = defaultdict(list)
    for row, parent in batch.parents:
        parents[row].append(parent)
    for row, topic in batch.row_topics:
        topics[row].append(topic)
    positions = {row: position for row, _, position in batch.parent_positions}
    value_counts, blob_sizes = np.diff(batch.value_bounds), np.diff(batch.blob_bounds)
    metadata_sizes = _part_sizes(batch, Column.METADATA_ENDS)
    for row, (key, namespace, kind) in enumerate(zip(batch.keys, batch.namespaces, batch.kinds, strict=True)):
        try:
            check_name("vector_id", key, VECTOR_ID_BYTES_MAX)
            check_name("namespace", namespace, NAMESPACE_BYTES_MAX)
            # Checked here, since `operation` drops numbers that its kind does not take.
            check_operand_sizes(kind, int(value_counts[row]), int(blob_sizes[row]))
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
                    expect=batch.expect_by_row.get(row),
                )
            )
            if row in positions:
                refuse(
                    "parents",
                    f"a parent is in partition {positions[row].partition}, but this service has one "
                    "partition: name the parent by its dot alone",
                )
        except InvalidDelta as error:
            raise _with_row(error, row) from None
    check_count("clock", batch.clock_entry_count, CLOCK_ENTRIES_MAX)
    if batch.clock:
        check_clock(batch.clock)
        check_clock_order(batch.clock)
    for name in batch.namespace_names:
        check_name("namespace", name, NAMESPACE_BYTES_MAX)
    for name in batch.custom_topics:
        check_name("topics", name, TOPIC_BYTES_MAX)
    refuse(
        "dimension",
        f"{batch.dimension} in the header: give the dimension that all vectors of the batch have, else 0",
    )


def _with_row(error: InvalidDelta, row: int) -> InvalidDelta:
    field = error.field or ""
    return InvalidDelta(field, error.message.removeprefix(f"{field}: "), row=row)
