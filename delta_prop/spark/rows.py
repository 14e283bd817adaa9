"""Batches of the log as Arrow record batches: columns to columns, what lies in the log is not copied twice.

Needs pyarrow, not Spark.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop_wire.delta import Kind
from delta_prop_wire.layout import Column
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch, LoggedBatch

SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("vector_id", pa.string(), nullable=False),
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("vector", pa.list_(pa.float32())),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("data", pa.binary()),
        pa.field("metadata", pa.string()),
        pa.field("topics", pa.list_(pa.string())),
        pa.field("id", pa.binary()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("priority", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("counter", pa.int64(), nullable=False),
        pa.field("lamport", pa.int64(), nullable=False),
    ]
)
"""Columns of deltas that were read."""

MERGE_ROWS = 10_000
MERGE_BYTES = 8 * 1024 * 1024
"""Batches of the log that are smaller go on together, up to so much."""
_OPERATIONS = pa.array([kind_name(kind) for kind in range(64)], pa.string())
_PARTS = np.array([Kind.SPARSE, Kind.SPARSE_ADD])
_BYTES = np.array([Kind.TRANSFORM, Kind.OPAQUE, *range(max(Kind) + 1, 64)])


def to_arrow(logged: LoggedBatch) -> pa.RecordBatch:
    """A batch of the log as rows of `SCHEMA`; control rows have none."""
    batch = logged.batch
    count = batch.count
    kinds = np.frombuffer(batch.kinds, np.uint8)
    offsets = batch.row_offsets
    places = (
        np.arange(logged.offset, logged.offset + count, dtype=np.int64)
        if offsets is None
        else offsets.astype(np.int64)
    )
    counters = batch.counters
    numbers, indices = batch.value_bounds, batch.index_bounds
    parts, whole = np.isin(kinds, _PARTS), ~np.isin(kinds, _PARTS) & (np.diff(numbers) > 0)
    columns = [
        pa.array(places),
        _text_column(batch, Column.KEY_ENDS, Column.KEYS),
        _names_column(batch),
        _OPERATIONS.take(pa.array(kinds)),
        _list_column(numbers, batch.values, whole, pa.float32()),
        _list_column(indices, batch.indices.view(np.int32), parts, pa.int32()),
        _list_column(numbers, batch.values, parts, pa.float32()),
        _blob_column(batch, kinds),
        _metadata_column(batch),
        _topics_column(batch),
        pa.array([None] * count if batch.ids is None else batch.ids, pa.binary()),
        _time_column(batch),
        _repeated(batch.priority.name.lower(), count),
        _repeated(logged.source.name.lower(), count),
        _repeated(f"{batch.origin:016x}", count),
        pa.array(
            np.arange(batch.base, batch.base + count, dtype=np.int64)
            if counters is None
            else counters.astype(np.int64)
        ),
        pa.array(logged.lamport + (places - logged.offset)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def merged(
    batches: Iterable[LoggedBatch], columns: Sequence[tuple[str, bool]] | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of the log as rows, small ones together. `columns`: those that are wanted, by name, and whether
    they are declared to hold nulls.
    """
    schema = SCHEMA
    if columns is not None:
        schema = pa.schema([SCHEMA.field(name).with_nullable(nullable) for name, nullable in columns])
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for one in batches:
        if rows and (rows + one.count > MERGE_ROWS or size + one.batch.size > MERGE_BYTES):
            yield _together(waiting)
            waiting, rows, size = [], 0, 0
        found = to_arrow(one)
        picked = [found.column(name) for name in schema.names]
        waiting.append(pa.RecordBatch.from_arrays(picked, schema=schema))
        rows, size = rows + one.count, size + one.batch.size
    if waiting:
        yield _together(waiting)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), count)


def _text_column(batch: Batch, ends: Column, texts: Column) -> pa.Array:
    stops, content = batch.column(ends), batch.column(texts)
    assert stops is not None
    bounds = np.concatenate([[0], np.frombuffer(stops, "<u4")]).astype(np.int32)
    data = pa.py_buffer(b"" if content is None else content)
    return pa.StringArray.from_buffers(batch.count, pa.py_buffer(bounds), data)


def _names_column(batch: Batch) -> pa.Array:
    names = batch.namespace_names
    if len(names) == 1:
        return _repeated(names[0], batch.count)
    index = batch.column(Column.NAMESPACE_INDEX)
    assert index is not None
    return pa.array(names, pa.string()).take(pa.array(np.frombuffer(index, "<u2")))


def _list_column(
    bounds: NDArray[np.int64], flat: NDArray[Any], there: NDArray[np.bool_], kind: pa.DataType
) -> pa.Array:
    """Lists where `there` is true, null elsewhere; the numbers stay where they lie."""
    if not there.any():
        return pa.nulls(len(there), pa.list_(kind))
    sizes = np.where(there, np.diff(bounds), 0)
    if not there.all() and int(sizes.sum()) != len(flat):
        flat = flat[np.repeat(there, np.diff(bounds))]
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    mask = None if there.all() else pa.array(~there)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat, kind), mask=mask)


def _blob_column(batch: Batch, kinds: NDArray[np.uint8]) -> pa.Array:
    there = np.isin(kinds, _BYTES)
    if not there.any():
        return pa.nulls(batch.count, pa.binary())
    content = batch.column(Column.BLOBS)
    bounds = pa.py_buffer(batch.blob_bounds.astype(np.int32))
    data = pa.py_buffer(b"" if content is None else content)
    found = pa.BinaryArray.from_buffers(pa.binary(), batch.count, [None, bounds, data])
    return found if there.all() else pc.if_else(pa.array(there), found, pa.scalar(None, pa.binary()))


def _metadata_column(batch: Batch) -> pa.Array:
    if not batch.has_metadata:
        return pa.nulls(batch.count, pa.string())
    patches = [batch.metadata(row) for row in range(batch.count)]
    texts = [None if patch is None else json.dumps(patch, ensure_ascii=False) for patch in patches]
    return pa.array(texts, pa.string())


def _topics_column(batch: Batch) -> pa.Array:
    kind = pa.list_(pa.string())
    if not batch.tags:
        return pa.nulls(batch.count, kind)
    found: list[list[str] | None] = [None] * batch.count
    for row, topic in batch.tags:
        found[row] = [*(found[row] or ()), topic]
    return pa.array(found, kind)


def _time_column(batch: Batch) -> pa.Array:
    kind = pa.timestamp("us", tz="UTC")
    own = batch.column(Column.TIMES)
    if own is None:
        ms = batch.hybrid_time >> 16
        return pa.nulls(batch.count, kind) if not ms else pa.repeat(pa.scalar(ms * 1000, kind), batch.count)
    times = np.frombuffer(own, "<u8") >> np.uint64(16)
    return pa.array((times * np.uint64(1000)).astype(np.int64), pa.int64(), mask=times == 0).cast(kind)
