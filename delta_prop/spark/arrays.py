"""Arrow's arrays as numpy's and back, by their buffers, without a copy where none is needed.

Pyarrow's own conversions load pandas, which takes half a second in each of Spark's workers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray


def numbers_of(column: pa.Array) -> NDArray[Any]:
    """The numbers of an array; what stands for a null is anything."""
    kind = "i8" if pa.types.is_timestamp(column.type) else column.type.to_pandas_dtype()
    values: NDArray[Any] = np.frombuffer(column.buffers()[1] or b"", kind)
    return values[column.offset : column.offset + len(column)]


def valid_of(column: pa.Array) -> NDArray[np.bool_]:
    """Which elements are no nulls."""
    bits = column.buffers()[0]
    if not column.null_count or bits is None:
        return np.full(len(column), column.null_count == 0)
    told = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return told[column.offset : column.offset + len(column)].astype(bool)


def lengths_of(column: pa.Array) -> NDArray[np.int64]:
    """How long each list is; 0 for a null."""
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths = np.diff(ends).astype(np.int64)
    if column.null_count:
        lengths[~valid_of(column)] = 0
    return lengths


def array_of(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """An array of numbers of this type, which `values` are."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def flags_of(values: NDArray[np.bool_]) -> pa.Array:
    """An array of truth values."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def repeated(text: str, count: int) -> pa.Array:
    """The same text again and again, up to `BATCH_ROWS_MAX` times."""
    return _many(text).slice(0, count)


@lru_cache(maxsize=64)
def _many(text: str) -> pa.Array:
    raw = text.encode()
    ends = np.arange(BATCH_ROWS_MAX + 1, dtype=np.int32) * len(raw)
    return pa.StringArray.from_buffers(BATCH_ROWS_MAX, pa.py_buffer(ends), pa.py_buffer(raw * BATCH_ROWS_MAX))
