"""Names an invalid row for its user: by its vector id, or by the rows next to it.

It reads only that one row, after the fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.bounds import FLOAT_BOUND
from delta_prop_wire.errors import InvalidDelta

if TYPE_CHECKING:
    import pyarrow as pa

_ID_CHARS_MAX = 100
_NUMBER_FIELDS = ("vector", "values", "factor", "amount")


def name_row(error: InvalidDelta, given: dict[str, pa.Array], before: int) -> InvalidDelta:
    """Return the error with the row's vector id, as the row's number in a block means nothing to a user.

    `before`: the number of rows of the partition that come before these.
    """
    field, row, ids = error.field or "delta", error.row, given.get("vector_id")
    if row is None or ids is None:
        return error
    if field == "vector_id" and not ids[row].is_valid:
        return InvalidDelta(field, _locate_row(ids, row, before))
    reason = (field in _NUMBER_FIELDS and _overflow_reason(given, row)) or error.reason
    return InvalidDelta(field, f"of vector_id {ids[row].as_py()!r:.{_ID_CHARS_MAX}}: {reason}")


def _locate_row(ids: pa.Array, row: int, before: int) -> str:
    """Locate a row without a vector id."""
    near = ""
    for other, where in ((row - 1, "after"), (row + 1, "before")):
        if 0 <= other < len(ids) and ids[other].is_valid:
            near = f", {where} vector_id {ids[other].as_py()!r:.{_ID_CHARS_MAX}}"
            break
    return (
        f"missing in row {before + row:,} of its partition, counted from 0{near}: show such rows with "
        'df.where("vector_id is null"), leave them out with df.where("vector_id is not null")'
    )


def _overflow_reason(given: dict[str, pa.Array], row: int) -> str | None:
    """Return the reason for a finite double that overflows float32, None if there is none."""
    for name in ("vector", "values"):
        column = given.get(name)
        numbers = None if column is None else column[row].as_py()
        for position, number in enumerate(numbers or ()):
            with np.errstate(over="ignore"):
                fits = number is None or np.isfinite(np.float32(number)) or not np.isfinite(number)
            if not fits:
                return (
                    f"number {position} is {number!r}, which does not fit in float32: numbers are finite and "
                    f"within {FLOAT_BOUND}: clamp it or leave it out"
                )
    return None
