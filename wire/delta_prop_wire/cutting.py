"""Cuts rows out of a batch that lies in the log, column by column, and reads cut frames row by row.

A cut frame says of its rows what the whole one says, and where they stand; names that no row of it has are
left out. Its body is the one that `encode_batch` would make of these rows.
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from delta_prop_wire.batch import SPARSE_KINDS, U16, U32, U64, Batch
from delta_prop_wire.delta import Delta, Dot, Kind, Operation, Source
from delta_prop_wire.encode import assemble, name_table
from delta_prop_wire.errors import Refused
from delta_prop_wire.layout import CLOCK_ENTRY, ENTRY_WIDTHS, Column
from delta_prop_wire.spec import ACK_LEVEL_SHIFT, PRIORITY_SHIFT, Attribute, ErrorCode
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.frames import BatchFrame

T = TypeVar("T")

FEW_ROWS = 50
LONG_PART_BYTES = 100
"""Fewer parts than that, or longer ones, are copied one by one; more and shorter ones by a mask of bytes."""

_END, _ENDS = struct.Struct("<I"), struct.Struct("<II")
_APPEND_TIME = struct.Struct("<Q")
_APPEND_TIME_AT = 32
_KEPT = Attribute.TRANSACTIONAL | 3 << ACK_LEVEL_SHIFT | 3 << PRIORITY_SHIFT
_WHOLE_VECTORS = 1 << Kind.CREATE | 1 << Kind.DENSE
_BARE = frozenset({Kind.DELETE, Kind.METADATA})
_VALUE_KINDS = frozenset({Kind.CREATE, Kind.DENSE, Kind.SCALE, Kind.OFFSET})
_ENTRIES = 1 << Column.PARENTS | 1 << Column.EXPECTS | 1 << Column.TAGS


class Row(NamedTuple):
    """A delta and its place: offset and Lamport number."""

    offset: int
    lamport: int
    delta: Delta


def cut(logged: LoggedBatch, rows: NDArray[np.intp]) -> list[bytes]:
    """The frame of some rows of a batch, as parts to send one behind the other: head, then body.

    `rows` rise. Where the frame would be above its bound, since each row tells its place, it is two.
    """
    batch = logged.batch
    assert not batch.is_control, "such rows are never delivered"
    assert not batch.is_state, "states are no changes"
    try:
        body = _cut_body(logged, rows)
    except Refused as refused:
        if refused.code is not ErrorCode.TOO_LARGE or len(rows) == 1:
            raise
        half = len(rows) // 2
        return cut(logged, rows[:half]) + cut(logged, rows[half:])
    first = logged.row_offset(int(rows[0]))
    time = _APPEND_TIME.unpack_from(logged.head, _APPEND_TIME_AT)[0] if logged.head else 0
    head, _ = pack_logged_head(
        body,
        first,
        lamport=logged.lamport + first - logged.offset,
        source=logged.source,
        time=time,
        previous_crc=0,
        synced=0,
        known_ids=logged.known_ids,
    )
    return [head, bytes(body.raw)]


def part_of(batch: Batch, rows: NDArray[np.intp], *, previous: int, clock: Sequence[Dot]) -> Batch:
    """Return some rows of a batch as a batch, under the same dots, in a frame with its own checksum.

    `rows` rise. `previous`: the origin's last counter before them; `clock`: the entries that it carries.
    """
    columns, *content = _cut_columns(batch, rows)
    counters = _counters_of(batch, rows)
    if clock:
        columns[Column.CLOCK] = b"".join(CLOCK_ENTRY.pack(*entry) for entry in clock)
    leaps = int(counters[0]) != previous + 1 or int(counters[-1]) - int(counters[0]) != len(rows) - 1
    if leaps:
        columns[Column.COUNTERS] = counters.tobytes()
    return _assembled(batch, columns, counters, (content[0], content[1]), previous=previous if leaps else 0)


def rows_of(frame: BatchFrame) -> Iterator[Row]:
    """The deltas of a frame from a log, each with its place; of one that only fills places, none."""
    batch, stamp = frame.batch, frame.stamp
    assert stamp is not None, "only a log knows the places of rows"
    if batch.is_control:
        return
    offsets: Iterable[int] = range(frame.sequence, frame.sequence + batch.count)
    if batch.row_offsets is not None:
        offsets = batch.row_offsets.tolist()
    ahead = stamp.lamport - frame.sequence
    for offset, delta in zip(offsets, deltas_of(batch, stamp.source), strict=True):
        yield Row(offset, offset + ahead, delta)


def deltas_of(batch: Batch, source: Source = Source.LOCAL) -> Iterator[Delta]:
    """What each row says; the same as `Batch.delta` of one after the other, in a third of the time."""
    count, keys, namespaces, clock = batch.count, batch.keys, batch.namespaces, batch.clock
    ids: Iterable[bytes | None] = repeat(None, count) if batch.ids is None else batch.ids
    counters: Iterable[int] = range(batch.base, batch.base + count)
    if batch.counters is not None:
        counters = batch.counters.tolist()
    parents, topics = _by_row(batch.parents), _by_row(batch.tags)
    expects = dict(reversed(batch.expects))
    changes = map(batch.metadata, range(count)) if batch.has_metadata else repeat(None, count)
    times: Iterable[int] = repeat(batch.hybrid_time, count)
    if batch.columns_mask >> Column.TIMES & 1:
        times = map(batch.timestamp, range(count))
    for row, (key, namespace, operation, id_, counter, time, metadata) in enumerate(
        zip(keys, namespaces, _operations(batch), ids, counters, times, changes, strict=True)
    ):
        yield Delta(
            key,
            operation,
            namespace,
            id_,
            Dot(batch.origin, counter),
            parents.get(row, ()),
            clock,
            time,
            batch.priority,
            source,
            metadata,
            topics.get(row, ()),
            expects.get(row),
        )


def _operations(batch: Batch) -> Iterator[Operation]:
    values, indices = batch.values, batch.indices
    at = batch.value_bounds.tolist()
    index_at = batch.index_bounds.tolist() if len(indices) else at
    blobs = batch.column(Column.BLOBS) or b""
    blob_at = batch.blob_bounds.tolist()
    for row, kind in enumerate(batch.kinds):
        if kind in _BARE:
            yield Operation(kind)
        elif kind in SPARSE_KINDS:
            yield Operation(kind, values[at[row] : at[row + 1]], indices[index_at[row] : index_at[row + 1]])
        elif kind in _VALUE_KINDS:
            yield Operation(kind, values[at[row] : at[row + 1]])
        else:
            yield Operation(kind, data=bytes(blobs[blob_at[row] : blob_at[row + 1]]))


def _by_row(entries: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    found: dict[int, tuple[T, ...]] = {}
    for row, entry in entries:
        found[row] = (*found.get(row, ()), entry)
    return found


# --- a body


def _cut_body(logged: LoggedBatch, rows: NDArray[np.intp]) -> Batch:
    batch = logged.batch
    columns, kinds_mask, dimension = _cut_columns(batch, rows)
    if batch.columns_mask >> Column.CLOCK & 1:
        columns[Column.CLOCK] = bytes(_raw(batch, Column.CLOCK))
    counters = _counters_of(batch, rows)
    offsets = _picked(batch, Column.ROW_OFFSETS, U64, rows)
    offsets = _up_from(logged.offset, rows) if offsets is None else offsets
    columns[Column.COUNTERS], columns[Column.ROW_OFFSETS] = counters.tobytes(), offsets.tobytes()
    previous = batch.previous if batch.leaps else batch.base - 1
    return _assembled(batch, columns, counters, (kinds_mask, dimension), previous=previous)


def _cut_columns(batch: Batch, rows: NDArray[np.intp]) -> tuple[dict[Column, bytes], int, int]:
    """Cut the columns of these rows; return them with the kinds mask and the dimension."""
    columns: dict[Column, bytes] = {}
    _cut_parts(columns, batch, rows, Column.KEY_ENDS, Column.KEYS)
    _cut_namespaces(columns, batch, rows)
    kinds = _picked(batch, Column.KINDS, _U8, rows)
    kinds_mask = batch.kinds_mask
    if kinds is not None:
        kinds_mask = sum(1 << kind for kind in set(kinds.tolist()))
        if kinds_mask & (kinds_mask - 1):
            columns[Column.KINDS] = kinds.tobytes()
    for column, dtype in ((Column.IDS, _ID), (Column.TIMES, U64)):
        picked = _picked(batch, column, dtype, rows)
        if picked is not None:
            columns[column] = picked.tobytes()
    dimension = _cut_numbers(columns, batch, rows, kinds, kinds_mask)
    for ends, parts in ((Column.BLOB_ENDS, Column.BLOBS), (Column.METADATA_ENDS, Column.METADATA)):
        if batch.columns_mask >> parts & 1:
            _cut_parts(columns, batch, rows, ends, parts)
    if batch.columns_mask & _ENTRIES:
        _cut_entries(columns, batch, rows)
    return columns, kinds_mask, dimension


def _assembled(
    batch: Batch,
    columns: dict[Column, bytes],
    counters: NDArray[np.uint64],
    content: tuple[int, int],
    *,
    previous: int,
) -> Batch:
    kinds_mask, dimension = content
    return assemble(
        columns,
        attributes=batch.attributes & _KEPT,
        count=len(counters),
        origin=batch.origin,
        epoch=batch.epoch,
        base=int(counters[0]),
        hybrid_time=batch.hybrid_time,
        kinds_mask=kinds_mask,
        dimension=dimension,
        previous=previous,
    )


def _cut_parts(
    columns: dict[Column, bytes], batch: Batch, rows: NDArray[np.intp], ends: Column, parts: Column
) -> None:
    """A column of parts of any length, and the one of their ends; neither where nothing is left."""
    if len(rows) < FEW_ROWS:
        content, stops = _few_parts(batch, rows.tolist(), ends, parts)
    else:
        content, sizes = _gather(_raw(batch, parts), batch._bounds(ends, 0), rows)
        stops = _ends(sizes)
    if content or parts is Column.KEYS:
        columns[parts], columns[ends] = content, stops


def _few_parts(batch: Batch, rows: list[int], ends: Column, parts: Column) -> tuple[bytes, bytes]:
    """The same without numpy: the parts, end to end, and their ends."""
    raw, stops = _raw(batch, parts), _raw(batch, ends)
    found, ends_now, at = [], [], 0
    for row in rows:
        start, stop = _ENDS.unpack_from(stops, 4 * row - 4) if row else (0, _END.unpack_from(stops)[0])
        found.append(raw[start:stop])
        at += stop - start
        ends_now.append(at)
    return b"".join(found), struct.pack(f"<{len(rows)}I", *ends_now)


def _cut_namespaces(columns: dict[Column, bytes], batch: Batch, rows: NDArray[np.intp]) -> None:
    """The table holds the names of these rows alone: nobody is told of others."""
    index = _picked(batch, Column.NAMESPACE_INDEX, U16, rows)
    if index is None:
        columns[Column.NAMESPACES] = name_table(batch.namespace_names)
        return
    places = index.tolist()
    names = list(dict.fromkeys(batch.namespace_names[place] for place in places))
    columns[Column.NAMESPACES] = name_table(names)
    if len(names) > 1:
        place_of = {name: place for place, name in enumerate(names)}
        table = [place_of.get(name, 0) for name in batch.namespace_names]
        columns[Column.NAMESPACE_INDEX] = np.array([table[place] for place in places], U16).tobytes()


def _cut_numbers(
    columns: dict[Column, bytes],
    batch: Batch,
    rows: NDArray[np.intp],
    kinds: NDArray[np.uint8] | None,
    kinds_mask: int,
) -> int:
    """Values and indices; returns the dimension that the rows' vectors have in common, else 0."""
    width = batch.row_values
    if width == 0:
        return 0
    if width is not None:
        columns[Column.VALUES] = batch.values.reshape(-1, width)[rows].tobytes()
        sizes = None
    else:
        bounds = batch.value_bounds * U32.itemsize
        values, sizes = _gather(_raw(batch, Column.VALUES), bounds, rows)
        if values:
            columns[Column.VALUES] = values
        if (sizes != sizes[0]).any():
            columns[Column.VALUE_ENDS] = _ends(sizes // U32.itemsize)
    if batch.columns_mask >> Column.INDICES & 1:
        bounds = batch.index_bounds * U32.itemsize
        indices, _ = _gather(_raw(batch, Column.INDICES), bounds, rows)
        if indices:
            columns[Column.INDICES] = indices
    if not kinds_mask & _WHOLE_VECTORS:
        return 0
    if sizes is None:
        return width or 0
    whole = sizes if kinds is None else sizes[(kinds == Kind.CREATE) | (kinds == Kind.DENSE)]
    return int(whole[0]) // U32.itemsize if (whole == whole[0]).all() else 0


def _cut_entries(columns: dict[Column, bytes], batch: Batch, rows: NDArray[np.intp]) -> None:
    """Columns whose entries name their row: those of rows that are left, under their new numbers."""
    row_now = np.full(batch.count, -1, np.int64)
    row_now[rows] = np.arange(len(rows))
    for column in (Column.PARENTS, Column.EXPECTS, Column.TAGS):
        raw = batch.column(column)
        if raw is None:
            continue
        words = np.frombuffer(raw, U32).reshape(-1, ENTRY_WIDTHS[column] // U32.itemsize)
        now = row_now[words[:, 0]]
        left = words[now >= 0]
        if not len(left):
            continue
        left[:, 0] = now[now >= 0]
        if column is Column.TAGS:
            all_names = batch._names(Column.TAG_NAMES)
            names = dict.fromkeys(all_names[place] for place in left[:, 1].tolist())
            columns[Column.TAG_NAMES] = name_table(names)
            place_of = {name: place for place, name in enumerate(names)}
            left[:, 1] = [place_of[all_names[place]] for place in left[:, 1].tolist()]
        columns[column] = left.tobytes()


# --- columns

_U8, _ID = np.dtype("u1"), np.dtype("V16")


def _picked(
    batch: Batch, column: Column, dtype: np.dtype[Any], rows: NDArray[np.intp]
) -> NDArray[Any] | None:
    """These rows of a column of one entry a row, None where it is absent."""
    if not batch.columns_mask >> column & 1:
        return None
    entries = batch._array(column, dtype)
    return None if entries is None else entries[rows]


def _raw(batch: Batch, column: Column) -> memoryview:
    return batch.column(column) or memoryview(b"")


def _counters_of(batch: Batch, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
    counters = _picked(batch, Column.COUNTERS, U64, rows)
    return _up_from(batch.base, rows) if counters is None else counters


def _up_from(first: int, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
    """What rows have that count up from `first`."""
    return rows.astype(U64) + np.uint64(first)


def _gather(
    raw: memoryview, bounds: NDArray[np.int64], rows: NDArray[np.intp]
) -> tuple[bytes, NDArray[np.int64]]:
    """The rows' parts, end to end, and how long each is; row i's lies from bounds[i] to bounds[i + 1]."""
    starts, stops = bounds[rows], bounds[rows + 1]
    sizes = stops - starts
    if int(rows[-1]) - int(rows[0]) == len(rows) - 1:
        return bytes(raw[int(starts[0]) : int(stops[-1])]), sizes
    if len(rows) < FEW_ROWS or sizes.sum() > LONG_PART_BYTES * len(rows):
        return b"".join([raw[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]), sizes
    wanted = np.zeros(len(bounds) - 1, bool)
    wanted[rows] = True
    return np.frombuffer(raw, _U8)[np.repeat(wanted, np.diff(bounds))].tobytes(), sizes


def _ends(sizes: NDArray[np.int64]) -> bytes:
    return np.cumsum(sizes).astype(U32).tobytes()
