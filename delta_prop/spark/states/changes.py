"""Converts rows of the log, or states of a snapshot, to Arrow tables of changes, which `folding.py` folds.

Needs pyarrow, not Spark. A vector's key is its namespace and id with a NUL between them; kinds, dots and
patches are as in the log. Nothing loops over rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.spark.arrays import schema_of
from delta_prop_wire.layout import Column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch, LoggedBatch

STATE = 0x80
"""Flag in the kind of a row that is the full state of a vector at an offset, not a change."""

CHANGES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("values", pa.list_(pa.float32()), nullable=False),
        pa.field("indices", pa.list_(pa.uint32()), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("patch", pa.binary()),
        pa.field("id", pa.binary()),
        pa.field("known", pa.uint8(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("lamport", pa.uint64(), nullable=False),
        pa.field("origin", pa.uint64(), nullable=False),
        pa.field("counter", pa.uint64(), nullable=False),
        pa.field("ignored", pa.int64(), nullable=False),
    ]
)
"""`patch`: a merge patch in msgpack; of a state, all its metadata. `known`: `KnownIds` of the row's frame.
`ignored`: of a state, its number of deltas without effect.
"""

STATES_DDL = (
    "namespace string not null, vector_id string not null, alive boolean not null, vector array<float>, "
    "data binary, metadata string, offset long not null, lamport long not null, origin string not null, "
    "counter long not null, ignored long not null"
)
STATES = schema_of(STATES_DDL)
"""One row per vector: its state, and the delta that last changed it. `ignored`: deltas without effect."""

_KEY_BYTES_MAX = 1 << 13
"""Maximum length of a key."""


def changes_of(logged: LoggedBatch, end: int | None = None) -> pa.RecordBatch:
    """Return the rows of a batch of the log below offset `end`, or the states in a batch of a snapshot.

    A control batch gives no rows: it only fills offsets.
    """
    batch = logged.batch
    if batch.is_control:
        return EMPTY
    count, kinds = batch.count, np.frombuffer(batch.kinds, np.uint8)
    offsets = _row_offsets(logged)
    known = 0 if batch.ids is None else int(logged.known_ids)
    columns = {
        "key": keys_of(batch),
        "kind": kinds | np.uint8(STATE) if batch.is_state else kinds,
        "values": _to_list_array(batch.value_bounds, batch.values, pa.float32()),
        "indices": _to_list_array(batch.index_bounds, batch.indices, pa.uint32()),
        "data": _to_binary_array(batch.blob_bounds, batch.column(Column.BLOBS)),
        "patch": _patch_array(batch),
        "id": pa.nulls(count, pa.binary()) if batch.ids is None else pa.array(batch.ids, pa.binary()),
        "known": np.full(count, known, np.uint8),
        "offset": offsets,
        **_canonical_columns(logged, offsets),
    }
    changes = pa.RecordBatch.from_arrays([pa.array(columns[name]) for name in CHANGES.names], schema=CHANGES)
    if end is None or batch.is_state or int(offsets[-1]) < end:
        return changes
    return changes.slice(0, int(np.searchsorted(offsets, end)))


EMPTY = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in CHANGES], schema=CHANGES)
"""A batch without changes."""


def keys_of(batch: Batch) -> pa.Array:
    """Return the key of each row's vector."""
    ids = _to_text_array(batch.column(Column.KEY_ENDS), batch.column(Column.KEYS), batch.count)
    names = batch.namespace_names
    if len(names) == 1:
        return pc.binary_join_element_wise(pa.scalar(names[0]), ids, "\0")
    index = batch.column(Column.NAMESPACE_INDEX)
    assert index is not None
    return join_keys(pa.array(names, pa.string()).take(pa.array(np.frombuffer(index, "<u2"))), ids)


def join_keys(namespaces: pa.Array, vector_ids: pa.Array) -> pa.Array:
    """Return vectors' keys from their namespaces and ids."""
    return pc.binary_join_element_wise(namespaces, vector_ids, "\0")


def split_keys(keys: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the namespaces and the ids of vectors from their keys."""
    parts = pc.list_flatten(pc.split_pattern(keys, "\0", max_splits=1))
    positions = np.arange(2 * len(keys)).reshape(-1, 2)
    return parts.take(pa.array(positions[:, 0])), parts.take(pa.array(positions[:, 1]))


def buckets_of(keys: pa.Array, bucket_count: int) -> NDArray[np.int64]:
    """Return each vector's bucket, a hash of its key alone, so that all tasks agree."""
    bounds, flat = text_bounds(keys)
    sizes = np.diff(bounds)
    first = int(bounds[0])
    positions = np.arange(first, int(bounds[-1])) - np.repeat(bounds[:-1], sizes)
    terms = np.frombuffer(flat, np.uint8, len(positions), first).astype(np.uint32) * _POWERS[positions]
    hashes = np.add.reduceat(terms, bounds[:-1] - first) if len(terms) else np.zeros(len(keys), np.uint32)
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    return (hashes % np.uint32(bucket_count)).astype(np.int64)


def text_bounds(texts: pa.Array) -> tuple[NDArray[np.int32], Any]:
    """Return the bounds of each text of an array without nulls, and the bytes that they index."""
    stops, content = texts.buffers()[1:]
    bounds = np.frombuffer(stops, np.int32, len(texts) + 1, 4 * texts.offset)
    return bounds, b"" if content is None else content


def _compute_powers() -> NDArray[np.uint32]:
    powers = np.full(_KEY_BYTES_MAX, 0x9E3779B1, np.uint32)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS = _compute_powers()
"""One odd number for each position in a key; products and sums wrap around."""


def _row_offsets(logged: LoggedBatch) -> NDArray[np.int64]:
    row_offsets = logged.batch.row_offsets
    if row_offsets is not None:
        return row_offsets.astype(np.int64)
    return np.arange(logged.offset, logged.next_offset, dtype=np.int64)


def _canonical_columns(logged: LoggedBatch, offsets: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the columns of the canonical order, and the number of ignored deltas of each row."""
    batch = logged.batch
    if batch.is_state:
        columns = {"lamport": Column.STATE_LAMPORTS, "origin": Column.STATE_ORIGINS}
        columns["counter"] = Column.STATE_COUNTERS
        numbers = {name: np.frombuffer(batch.column(one), "<u8") for name, one in columns.items()}  # type: ignore[arg-type]
        ignored = batch.state_ignored
        return {**numbers, "ignored": _zeros(batch) if ignored is None else ignored.astype(np.int64)}
    counters = batch.counters
    if counters is None:
        counters = np.arange(batch.base, batch.base + batch.count, dtype=np.uint64)
    return {
        "lamport": (offsets + (logged.lamport - logged.offset)).astype(np.uint64),
        "origin": np.full(batch.count, batch.origin, np.uint64),
        "counter": counters,
        "ignored": _zeros(batch),
    }


def _zeros(batch: Batch) -> NDArray[np.int64]:
    return np.zeros(batch.count, np.int64)


def _to_text_array(ends: Any, content: Any, count: int) -> pa.Array:
    bounds = np.zeros(count + 1, np.int32)
    bounds[1:] = np.frombuffer(ends, "<u4")
    return pa.StringArray.from_buffers(count, pa.py_buffer(bounds), _to_buffer(content))


def _to_buffer(content: Any) -> pa.Buffer:
    return pa.py_buffer(b"" if content is None else content)


def _to_binary_array(bounds: NDArray[np.int64], content: Any, validity: pa.Buffer | None = None) -> pa.Array:
    ends = pa.py_buffer(bounds.astype(np.int32))
    return pa.BinaryArray.from_buffers(pa.binary(), len(bounds) - 1, [validity, ends, _to_buffer(content)])


def _to_list_array(bounds: NDArray[np.int64], flat: NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(flat, kind))


def _patch_array(batch: Batch) -> pa.Array:
    """Return each row's patch as in the batch, null if it has none."""
    content = batch.column(Column.METADATA)
    if content is None:
        return pa.nulls(batch.count, pa.binary())
    bounds = np.zeros(batch.count + 1, np.int64)
    bounds[1:] = np.frombuffer(batch.column(Column.METADATA_ENDS), "<u4")  # type: ignore[arg-type]
    validity = np.packbits(np.diff(bounds) > 0, bitorder="little")
    return _to_binary_array(bounds, content, pa.py_buffer(validity))
