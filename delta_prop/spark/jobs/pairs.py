"""Pairs two tables' facts by namespace and vector id, and names the row of an invalid fact.

Needs pyarrow, not Spark. Rows come sorted by namespace, vector id and table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.spark.states.folding_numbers import Lists
from delta_prop_wire.errors import InvalidDelta

if TYPE_CHECKING:
    from numpy.typing import NDArray

OLD, NEW = 0, 1
FACTS = ("namespace", "vector_id", "side", "vector", "data", "metadata", "wrong")
"""Columns of a fact, followed by one for each member of its metadata, as `"name":value`.

`wrong`: the message for a number that JSON, or a vector, cannot hold.
"""
MEMBER = "member:"
"""Prefix of the names of metadata columns."""
_TABLE_NAMES = ("old", "new")


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The facts of both tables in `rows`, paired by vector.

    `old`, `new`: by pair, the row of the old and of the new fact, -1 if absent. `vectors`, `has_vector`,
    `has_data`: by row.
    """

    rows: pa.RecordBatch
    old: NDArray[np.intp]
    new: NDArray[np.intp]
    vectors: Lists
    has_vector: NDArray[np.bool_]
    has_data: NDArray[np.bool_]


def is_first_of_vector(rows: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return a mask of each vector's first row."""
    is_first = np.ones(rows.num_rows, bool)
    same = [pc.equal(one.slice(1), one.slice(0, len(one) - 1)) for one in (rows.column(0), rows.column(1))]
    is_first[1:] = ~pc.fill_null(pc.and_(*same), False).to_numpy(zero_copy_only=False)
    return is_first


def pair_rows(rows: pa.RecordBatch) -> Pairs:
    """Pair sorted rows. Raises InvalidDelta for an invalid row."""
    is_first = is_first_of_vector(rows)
    pair_of = np.cumsum(is_first) - 1
    sides = rows.column("side").to_numpy()
    _check(rows, is_first, sides)
    rows_by_side = np.full((2, int(pair_of[-1]) + 1), -1, np.intp)
    rows_by_side[sides, pair_of] = np.arange(rows.num_rows)
    is_present = [rows.column(name).is_valid().to_numpy(zero_copy_only=False) for name in ("vector", "data")]
    column = rows.column("vector")
    vectors = Lists.of(pc.coalesce(column, pa.scalar([], column.type)))
    return Pairs(rows, rows_by_side[OLD], rows_by_side[NEW], vectors, *is_present)


def _check(rows: pa.RecordBatch, is_first: NDArray[np.bool_], sides: NDArray[Any]) -> None:
    """Raise InvalidDelta for the first fault of these rows."""
    ids = rows.column("vector_id")
    if ids.null_count:
        raise row_error(rows, int(np.argmax(ids.is_null().to_numpy(zero_copy_only=False))), "the key is NULL")
    duplicates = (~is_first[1:] & (sides[1:] == sides[:-1])).nonzero()[0]
    if len(duplicates):
        raise row_error(rows, int(duplicates[0]), "the key occurs more than once: keep one row")
    wrong = rows.column("wrong")
    if wrong.null_count < len(wrong):
        row = int(np.argmax(wrong.is_valid().to_numpy(zero_copy_only=False)))
        raise row_error(rows, row, str(wrong[row].as_py()))
    column = rows.column("vector")
    is_empty = pc.and_(column.is_null(), rows.column("data").is_null()).to_numpy(zero_copy_only=False)
    if is_empty.any():
        raise row_error(
            rows, int(np.argmax(is_empty)), "the vector is NULL: leave the row out to delete the fact"
        )
    flat = column.flatten()
    is_invalid = flat.is_null().to_numpy(zero_copy_only=False) | ~np.isfinite(
        pc.fill_null(flat, 0).to_numpy()
    )
    if is_invalid.any():
        sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(sizes)
        position = int(np.argmax(is_invalid))
        row = int(np.searchsorted(ends, position, "right"))
        index, number = position - int(ends[row] - sizes[row]), flat[position].as_py()
        shown = "NULL" if number is None else f"{number}, which is not a finite float32"
        raise row_error(rows, row, f"number {index} of the vector is {shown}")


def row_error(rows: pa.RecordBatch, row: int, reason: str) -> InvalidDelta:
    """Return the error of a row, with its table and vector id."""
    fields = {name: rows.column(name)[row].as_py() for name in ("vector_id", "side")}
    return InvalidDelta(
        f"{_TABLE_NAMES[fields['side']]} table", f"vector_id {fields['vector_id']!r:.100}: {reason}"
    )
