"""Compares the content of rows of batches, regardless of their dots and of the rows around them.

Pure. Ranges of rows are compared by columns, so the cost hardly depends on the number of rows.
"""

from __future__ import annotations

from math import copysign
from typing import TYPE_CHECKING, Any

from delta_prop_wire.layout import Column

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch


def same_contents(
    batch: Batch, row: int, other: Batch, other_row: int, count: int = 1, *, compare_operands: bool = True
) -> bool:
    """True if `count` rows of two batches change the same facts in the same way.

    Compares vector id, namespace, kind, operand bytes (unless `compare_operands` is False), metadata change
    and topics. Ignores dot, id, parents, clock, times, priority, expectation and ack level.
    """
    row_slice, other_slice = slice(row, row + count), slice(other_row, other_row + count)
    return (
        batch.keys[row_slice] == other.keys[other_slice]
        and batch.kinds[row_slice] == other.kinds[other_slice]
        and _same_namespaces(batch, row_slice, other, other_slice)
        and (not compare_operands or _same_operands(batch, row_slice, other, other_slice))
        and _same_metadata(batch, row_slice, other, other_slice)
        and _same_topics(batch, row_slice, other, other_slice)
    )


def first_difference(batch: Batch, row: int, other: Batch, other_row: int, count: int) -> int | None:
    """Return the index of the first row in which two ranges of `count` rows differ; None if none does."""
    if same_contents(batch, row, other, other_row, count):
        return None
    # The first `same_count` rows agree; the first `differing_count` rows do not.
    same_count, differing_count = 0, count
    while differing_count - same_count > 1:
        middle = (same_count + differing_count) // 2
        if same_contents(batch, row + same_count, other, other_row + same_count, middle - same_count):
            same_count = middle
        else:
            differing_count = middle
    return same_count


def _same_namespaces(batch: Batch, row_slice: slice, other: Batch, other_slice: slice) -> bool:
    if batch.namespace is not None and other.namespace is not None:
        return batch.namespace == other.namespace
    return batch.namespaces[row_slice] == other.namespaces[other_slice]


def _same_operands(batch: Batch, row_slice: slice, other: Batch, other_slice: slice) -> bool:
    return _operands(batch, row_slice) == _operands(other, other_slice)


def _operands(batch: Batch, row_slice: slice) -> tuple[tuple[bytes, bytes], ...]:
    return (
        _row_parts(batch, Column.VALUES, batch.value_bounds, row_slice, 4),
        _row_parts(batch, Column.INDICES, batch.index_bounds, row_slice, 4),
        _row_parts(batch, Column.BLOBS, batch.blob_bounds, row_slice),
    )


def _row_parts(
    batch: Batch, column: Column, bounds: NDArray[np.int64], row_slice: slice, width: int = 1
) -> tuple[bytes, bytes]:
    """Return the length of each row's part of a column (as bytes), and these parts end to end.

    `width`: the bytes of one unit of `bounds`.
    """
    stops = bounds[row_slice.start : row_slice.stop + 1]
    start, stop = int(stops[0]), int(stops[-1])
    raw = batch.column(column)
    content = b"" if raw is None else bytes(raw[start * width : stop * width])
    return (stops - start).tobytes(), content


def _same_metadata(batch: Batch, row_slice: slice, other: Batch, other_slice: slice) -> bool:
    if not batch.has_metadata and not other.has_metadata:
        return True
    metadata = _row_parts(batch, Column.METADATA, batch._metadata_bounds, row_slice)
    if metadata == _row_parts(other, Column.METADATA, other._metadata_bounds, other_slice):
        return True
    if batch.unreadable_row is not None or other.unreadable_row is not None:
        return False  # an unreadable row is refused, so only identical bytes count as equal
    rows, other_rows = range(row_slice.start, row_slice.stop), range(other_slice.start, other_slice.stop)
    return all(
        _same_json(batch.metadata(row), other.metadata(other_row))
        for row, other_row in zip(rows, other_rows, strict=True)
    )


def _same_json(value: Any, other: Any) -> bool:
    """True if two values are equal, with members in any order.

    True, 1 and 1.0 are three different values; 0.0 and -0.0 are two.
    """
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same_json(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same_json, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return value == other and copysign(1.0, value) == copysign(1.0, other)
    return type(value) is type(other) and bool(value == other)


def _same_topics(batch: Batch, row_slice: slice, other: Batch, other_slice: slice) -> bool:
    if not batch.row_topics and not other.row_topics:
        return True
    rows, other_rows = range(row_slice.start, row_slice.stop), range(other_slice.start, other_slice.stop)
    return all(
        set(batch._topics_by_row.get(row, ())) == set(other._topics_by_row.get(other_row, ()))
        for row, other_row in zip(rows, other_rows, strict=True)
    )
