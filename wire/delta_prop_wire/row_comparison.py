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
    one: Batch, row: int, other: Batch, other_row: int, count: int = 1, *, operands: bool = True
) -> bool:
    """True if `count` rows of two batches change the same facts in the same way.

    Compares vector id, namespace, kind, operand bytes (unless `operands` is False), metadata change and
    topics. Ignores dot, id, parents, clock, times, priority, expectation and ack level.
    """
    mine, theirs = slice(row, row + count), slice(other_row, other_row + count)
    return (
        one.keys[mine] == other.keys[theirs]
        and one.kinds[mine] == other.kinds[theirs]
        and _same_namespaces(one, mine, other, theirs)
        and (not operands or _same_operands(one, mine, other, theirs))
        and _same_metadata(one, mine, other, theirs)
        and _same_topics(one, mine, other, theirs)
    )


def first_difference(one: Batch, row: int, other: Batch, other_row: int, count: int) -> int | None:
    """Return the index of the first row in which two ranges of `count` rows differ; None if none does."""
    if same_contents(one, row, other, other_row, count):
        return None
    same, different = 0, count  # the first `same` rows agree; of the first `different` rows one differs
    while different - same > 1:
        middle = (same + different) // 2
        if same_contents(one, row + same, other, other_row + same, middle - same):
            same = middle
        else:
            different = middle
    return same


def _same_namespaces(one: Batch, mine: slice, other: Batch, theirs: slice) -> bool:
    if one.namespace is not None and other.namespace is not None:
        return one.namespace == other.namespace
    return one.namespaces[mine] == other.namespaces[theirs]


def _same_operands(one: Batch, mine: slice, other: Batch, theirs: slice) -> bool:
    return _operands(one, mine) == _operands(other, theirs)


def _operands(batch: Batch, rows: slice) -> tuple[tuple[bytes, bytes], ...]:
    return (
        _part(batch, Column.VALUES, batch.value_bounds, rows, 4),
        _part(batch, Column.INDICES, batch.index_bounds, rows, 4),
        _part(batch, Column.BLOBS, batch.blob_bounds, rows),
    )


def _part(
    batch: Batch, column: Column, bounds: NDArray[np.int64], rows: slice, width: int = 1
) -> tuple[bytes, bytes]:
    """Return the length of each row's part of a column (as bytes), and these parts end to end."""
    stops = bounds[rows.start : rows.stop + 1]
    start, stop = int(stops[0]), int(stops[-1])
    raw = batch.column(column)
    content = b"" if raw is None else bytes(raw[start * width : stop * width])
    return (stops - start).tobytes(), content


def _same_metadata(one: Batch, mine: slice, other: Batch, theirs: slice) -> bool:
    if not one.has_metadata and not other.has_metadata:
        return True
    metadata = _part(one, Column.METADATA, one._metadata_bounds, mine)
    if metadata == _part(other, Column.METADATA, other._metadata_bounds, theirs):
        return True
    if one.unreadable_row is not None or other.unreadable_row is not None:
        return False  # an unreadable row is refused, so only identical bytes count as equal
    rows, other_rows = range(mine.start, mine.stop), range(theirs.start, theirs.stop)
    return all(
        _same_json(one.metadata(row), other.metadata(other_row))
        for row, other_row in zip(rows, other_rows, strict=True)
    )


def _same_json(one: Any, other: Any) -> bool:
    """True if two values are equal, with members in any order.

    True, 1 and 1.0 are three different values; 0.0 and -0.0 are two.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_json, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other and copysign(1.0, one) == copysign(1.0, other)
    return type(one) is type(other) and bool(one == other)


def _same_topics(one: Batch, mine: slice, other: Batch, theirs: slice) -> bool:
    if not one.tags and not other.tags:
        return True
    rows, other_rows = range(mine.start, mine.stop), range(theirs.start, theirs.stop)
    return all(
        set(one._tags_by_row.get(row, ())) == set(other._tags_by_row.get(other_row, ()))
        for row, other_row in zip(rows, other_rows, strict=True)
    )
