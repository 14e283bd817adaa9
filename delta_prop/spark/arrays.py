"""Converts Arrow's arrays to numpy's and back, by their buffers, without a copy if possible.

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


_TYPES = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<int>": pa.list_(pa.int32()),
    "array<float>": pa.list_(pa.float32()),
    "array<string>": pa.list_(pa.string()),
}
"""Arrow's types by the names of Spark's."""


def schema_of(ddl: str) -> pa.Schema:
    """Return the Arrow schema of columns written as Spark's DDL: `name type`, or `name type not null`."""
    columns = (column.split(maxsplit=2) for column in ddl.split(","))
    return pa.schema([pa.field(name, _TYPES[kind], nullable=not rest) for name, kind, *rest in columns])


def numbers_of(column: pa.Array) -> NDArray[Any]:
    """Return the numbers of an array; the number of a null is arbitrary."""
    kind = "i8" if pa.types.is_timestamp(column.type) else column.type.to_pandas_dtype()
    values: NDArray[Any] = np.frombuffer(column.buffers()[1] or b"", kind)
    return values[column.offset : column.offset + len(column)]


def validity_of(column: pa.Array) -> NDArray[np.bool_]:
    """Return a mask of the elements that are not null."""
    bits = column.buffers()[0]
    if not column.null_count or bits is None:
        return np.full(len(column), column.null_count == 0)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return flags[column.offset : column.offset + len(column)].astype(bool)


def lengths_of(column: pa.Array) -> NDArray[np.int64]:
    """Return the length of each list, 0 for a null."""
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths = np.diff(ends).astype(np.int64)
    if column.null_count:
        lengths[~validity_of(column)] = 0
    return lengths


def concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches as one batch; copies them if there are several."""
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def array_of(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array over numbers that already have the type `kind`."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def flags_of(values: NDArray[np.bool_]) -> pa.Array:
    """Return an array of booleans."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def fill_text(text: str, count: int) -> pa.Array:
    """Return an array that repeats a text `count` times; `count` is up to `BATCH_ROWS_MAX`."""
    return _longest_fill(text).slice(0, count)


@lru_cache(maxsize=64)
def _longest_fill(text: str) -> pa.Array:
    raw = text.encode()
    ends = np.arange(BATCH_ROWS_MAX + 1, dtype=np.int32) * len(raw)
    return pa.StringArray.from_buffers(BATCH_ROWS_MAX, pa.py_buffer(ends), pa.py_buffer(raw * BATCH_ROWS_MAX))
