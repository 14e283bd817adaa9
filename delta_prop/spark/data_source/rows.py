"""Converts batches of the log to Arrow record batches by columns, with at most one copy.

Needs pyarrow, not Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.spark.arrays import array_of, concat_batches, fill_text, flags_of, schema_of
from delta_prop_wire.delta import Kind
from delta_prop_wire.layout import Column
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch, LoggedBatch

SCHEMA = schema_of(
    "offset long not null, vector_id string not null, namespace string not null, op string not null, "
    "vector array<float>, indices array<int>, values array<float>, data binary, metadata string, "
    "topics array<string>, id binary, timestamp timestamp, priority string not null, "
    "source string not null, origin string not null, counter long not null, lamport long not null"
)
"""Columns that a read returns."""
STREAM_SCHEMA = SCHEMA.insert(1, pa.field("partition", pa.int32(), nullable=False))
"""Columns that a read of a named stream returns."""

MERGE_ROWS = 10_000
MERGE_BYTES = 8 * 1024 * 1024
"""Bounds up to which small batches of the log are merged."""
UNMERGED_ROWS = 2_000
"""A batch with at least this many rows is not merged, which would copy it."""
_SPARSE_KINDS = np.array([Kind.SPARSE, Kind.SPARSE_ADD])
_BLOB_KINDS = np.array([Kind.TRANSFORM, Kind.OPAQUE, *range(max(Kind) + 1, 64)])


def to_arrow(logged: LoggedBatch, schema: pa.Schema = SCHEMA, partition: int = 0) -> pa.RecordBatch:
    """Return a batch of the log as rows with the columns of `schema`, which are columns of `STREAM_SCHEMA`.

    `partition`: the number of the log's partition.
    """
    inputs = _BatchColumns(logged, partition)
    columns = [_COLUMN_MAKERS[name](inputs) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def merge_batches(
    batches: Iterable[LoggedBatch],
    columns: Sequence[tuple[str, bool]] | None = None,
    partition: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of a partition's log as rows, and merge small batches.

    `columns`: (name, True if it is declared nullable) of each column to return; None: those of `SCHEMA`.
    """
    schema = SCHEMA
    if columns is not None:
        schema = pa.schema([STREAM_SCHEMA.field(name).with_nullable(nullable) for name, nullable in columns])
    pending: list[pa.RecordBatch] = []
    row_count = size = 0
    for logged in batches:
        is_large = logged.count >= UNMERGED_ROWS
        is_full = row_count + logged.count > MERGE_ROWS or size + logged.batch.size > MERGE_BYTES
        if row_count and (is_large or is_full):
            yield concat_batches(pending)
            pending, row_count, size = [], 0, 0
        rows = to_arrow(logged, schema, partition)
        if is_large:
            yield rows
            continue
        pending.append(rows)
        row_count, size = row_count + logged.count, size + logged.batch.size
    if pending:
        yield concat_batches(pending)


class _BatchColumns:
    """Intermediate columns of a batch, each computed once."""

    def __init__(self, logged: LoggedBatch, partition: int) -> None:
        self.logged = logged
        self.partition = partition
        self.batch = logged.batch
        self.count = logged.batch.count

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Offsets of the rows."""
        offsets = self.batch.row_offsets
        if offsets is not None:
            return offsets.astype(np.int64)
        return np.arange(self.logged.offset, self.logged.next_offset, dtype=np.int64)

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """Operation kinds of the rows."""
        return np.frombuffer(self.batch.kinds, np.uint8)

    @cached_property
    def is_sparse(self) -> NDArray[np.bool_]:
        """Mask of the rows that change some elements of a vector."""
        if self.batch.kind is not None:
            return np.full(self.count, self.batch.kind in _SPARSE_KINDS)
        return np.isin(self.kinds, _SPARSE_KINDS)

    @cached_property
    def is_full(self) -> NDArray[np.bool_]:
        """Mask of the rows with numbers for a full vector."""
        return ~self.is_sparse & (np.diff(self.batch.value_bounds) > 0)


def _to_int64(values: NDArray[np.int64]) -> pa.Array:
    return array_of(values, pa.int64())


def _text_column(batch: Batch, ends: Column, texts: Column) -> pa.Array:
    ends_content, content = batch.column(ends), batch.column(texts)
    assert ends_content is not None
    bounds = np.zeros(batch.count + 1, np.int32)
    bounds[1:] = np.frombuffer(ends_content, "<u4")
    data = pa.py_buffer(b"" if content is None else content)
    return pa.StringArray.from_buffers(batch.count, pa.py_buffer(bounds), data)


def _namespaces_column(batch: Batch) -> pa.Array:
    names = batch.namespace_names
    if len(names) == 1:
        return fill_text(names[0], batch.count)
    index = batch.column(Column.NAMESPACE_INDEX)
    assert index is not None
    return pa.array(names, pa.string()).take(array_of(np.frombuffer(index, "<u2"), pa.uint16()))


def _operations_column(inputs: _BatchColumns) -> pa.Array:
    if inputs.batch.kind is not None:
        return fill_text(kind_name(inputs.batch.kind), inputs.count)
    return _operation_names().take(array_of(inputs.kinds, pa.uint8()))


@lru_cache(maxsize=1)
def _operation_names() -> pa.Array:
    return pa.array([kind_name(kind) for kind in range(64)], pa.string())


def _list_column(
    bounds: NDArray[np.int64], flat: NDArray[Any], is_present: NDArray[np.bool_], kind: pa.DataType
) -> pa.Array:
    """Return the lists, null where `is_present` is false; copy the numbers only if necessary."""
    if not is_present.any():
        return pa.nulls(len(is_present), pa.list_(kind))
    all_present = bool(is_present.all())
    ends = bounds.astype(np.int32)
    if not all_present:
        sizes = np.where(is_present, np.diff(bounds), 0)
        if int(sizes.sum()) != len(flat):
            flat = flat[np.repeat(is_present, np.diff(bounds))]
        ends[1:] = np.cumsum(sizes)
    offsets, values = array_of(ends, pa.int32()), array_of(flat, kind)
    return pa.ListArray.from_arrays(offsets, values, mask=None if all_present else flags_of(~is_present))


def _blob_column(inputs: _BatchColumns) -> pa.Array:
    batch, is_present = inputs.batch, np.isin(inputs.kinds, _BLOB_KINDS)
    if not is_present.any():
        return pa.nulls(batch.count, pa.binary())
    content = batch.column(Column.BLOBS)
    bounds = pa.py_buffer(batch.blob_bounds.astype(np.int32))
    data = pa.py_buffer(b"" if content is None else content)
    blobs = pa.BinaryArray.from_buffers(pa.binary(), batch.count, [None, bounds, data])
    if is_present.all():
        return blobs
    return pc.if_else(flags_of(is_present), blobs, pa.nulls(batch.count, pa.binary()))


def _metadata_column(batch: Batch) -> pa.Array:
    if not batch.has_metadata:
        return pa.nulls(batch.count, pa.string())
    patches = [batch.metadata(row) for row in range(batch.count)]
    texts = [None if patch is None else json.dumps(patch, ensure_ascii=False) for patch in patches]
    return pa.array(texts, pa.string())


def _topics_column(batch: Batch) -> pa.Array:
    kind = pa.list_(pa.string())
    if not batch.row_topics:
        return pa.nulls(batch.count, kind)
    topics: list[list[str] | None] = [None] * batch.count
    for row, topic in batch.row_topics:
        topics[row] = [*(topics[row] or ()), topic]
    return pa.array(topics, kind)


def _time_column(batch: Batch) -> pa.Array:
    kind = pa.timestamp("us", tz="UTC")
    times_column = batch.column(Column.TIMES)
    if times_column is None:
        ms = batch.hybrid_time >> 16
        return array_of(np.full(batch.count, ms * 1000), kind) if ms else pa.nulls(batch.count, kind)
    times = np.frombuffer(times_column, "<u8") >> np.uint64(16)
    return pa.array((times * np.uint64(1000)).astype(np.int64), pa.int64(), mask=times == 0).cast(kind)


def _counters_column(inputs: _BatchColumns) -> pa.Array:
    batch, counters = inputs.batch, inputs.batch.counters
    if counters is None:
        return _to_int64(np.arange(batch.base, batch.base + batch.count, dtype=np.int64))
    return _to_int64(counters.astype(np.int64))


def _ids_column(inputs: _BatchColumns) -> pa.Array:
    ids = inputs.batch.ids
    return pa.nulls(inputs.count, pa.binary()) if ids is None else pa.array(ids, pa.binary())


_COLUMN_MAKERS: dict[str, Callable[[_BatchColumns], pa.Array]] = {
    "offset": lambda inputs: _to_int64(inputs.offsets),
    "partition": lambda inputs: array_of(np.full(inputs.count, inputs.partition, np.int32), pa.int32()),
    "vector_id": lambda inputs: _text_column(inputs.batch, Column.KEY_ENDS, Column.KEYS),
    "namespace": lambda inputs: _namespaces_column(inputs.batch),
    "op": _operations_column,
    "vector": lambda inputs: _list_column(
        inputs.batch.value_bounds, inputs.batch.values, inputs.is_full, pa.float32()
    ),
    "indices": lambda inputs: _list_column(
        inputs.batch.index_bounds, inputs.batch.indices.view(np.int32), inputs.is_sparse, pa.int32()
    ),
    "values": lambda inputs: _list_column(
        inputs.batch.value_bounds, inputs.batch.values, inputs.is_sparse, pa.float32()
    ),
    "data": _blob_column,
    "metadata": lambda inputs: _metadata_column(inputs.batch),
    "topics": lambda inputs: _topics_column(inputs.batch),
    "id": _ids_column,
    "timestamp": lambda inputs: _time_column(inputs.batch),
    "priority": lambda inputs: fill_text(inputs.batch.priority.name.lower(), inputs.count),
    "source": lambda inputs: fill_text(inputs.logged.source.name.lower(), inputs.count),
    "origin": lambda inputs: fill_text(f"{inputs.batch.origin:016x}", inputs.count),
    "counter": _counters_column,
    "lamport": lambda inputs: _to_int64(inputs.logged.lamport + (inputs.offsets - inputs.logged.offset)),
}
assert list(_COLUMN_MAKERS) == STREAM_SCHEMA.names
