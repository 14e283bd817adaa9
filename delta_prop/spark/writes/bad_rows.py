"""A row that was refused, told so that its user finds it: by its vector id, or by what stands around it.

Looks at that one row alone, once there is a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.bounds import FLOAT_BOUND
from delta_prop_wire.errors import InvalidDelta

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 100
_OF_NUMBERS = ("vector", "values", "factor", "amount")


def named(error: InvalidDelta, given: dict[str, pa.Array], before: int) -> InvalidDelta:
    """The same fault of a row of these columns; its number in a block says nothing to a user.

    `before`: rows of the partition before these.
    """
    field, row, ids = error.field or "delta", error.row, given.get("vector_id")
    if row is None or ids is None:
        return error
    if field == "vector_id" and not ids[row].is_valid:
        return InvalidDelta(field, _without_id(ids, row, before))
    reason = (field in _OF_NUMBERS and _too_large(given, row)) or error.reason
    return InvalidDelta(field, f"of vector_id {ids[row].as_py()!r:.{_SHOWN}}: {reason}")


def _without_id(ids: pa.Array, row: int, before: int) -> str:
    """Where a row is that nothing names."""
    near = ""
    for other, where in ((row - 1, "behind"), (row + 1, "before")):
        if 0 <= other < len(ids) and ids[other].is_valid:
            near = f", {where} vector_id {ids[other].as_py()!r:.{_SHOWN}}"
            break
    return (
        f"missing in row {before + row:,} of its partition, counted from 0{near}: each row needs one; look "
        'with df.where("vector_id is null"), leave those out with df.where("vector_id is not null")'
    )


def _too_large(given: dict[str, pa.Array], row: int) -> str | None:
    """What is said of a double that is finite, and infinite as a float32; None: there is none."""
    for name in ("vector", "values"):
        column = given.get(name)
        numbers = None if column is None else column[row].as_py()
        for place, number in enumerate(numbers or ()):
            with np.errstate(over="ignore"):
                fits = number is None or np.isfinite(np.float32(number)) or not np.isfinite(number)
            if not fits:
                return (
                    f"number {place} is {number!r}, which does not fit in float32: numbers are finite and "
                    f"within {FLOAT_BOUND}: clamp it or leave it out"
                )
    return None
