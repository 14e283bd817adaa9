"""A batch: deltas that travel together, as an immutable view of their encoded bytes.

Columns are decoded on first access, and stored. Nothing here rewrites a body: a caller that needs other
bytes encodes another batch (`encode.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import numpy as np

from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Kind,
    KnownIds,
    Operation,
    ParentPosition,
    Priority,
    Source,
)
from delta_prop_wire.layout import (
    CLOCK_ENTRY,
    COLUMN_MASK,
    EXPECT,
    PARENT,
    POSITION,
    POSITION_FORM,
    SHORT_NAMES_BYTES,
    TAG,
    Column,
    read_names,
    read_short_names,
)
from delta_prop_wire.lazy import lazy
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    ALIGNMENT,
    BODY_HEADER_BYTES,
    CRC_BYTES,
    HEADER_BYTES,
    PRIORITY_SHIFT,
    STAMP_BYTES,
    Attribute,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
_IS_SPARSE = bytes(kind in SPARSE_KINDS for kind in range(256))
"""Table for `bytes.translate`: kind to 1 if it is sparse, else 0."""
PRINTABLE = bytes(range(0x20, 0x7F))
"""The printable ASCII characters."""
_CRC = struct.Struct("<I")
_WORD = struct.Struct("<Q")
_HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
_CONTENT_AT = 40
"""Offset in a body of the part that describes only its rows: kinds, dimension, lengths, columns."""


class Batch:
    """The columns of a body of n rows; `values` (float32) and `indices` (uint32) hold all rows end to end."""

    __slots__ = (
        "__dict__",  # holds decoded columns
        "ack_level",
        "attributes",
        "base",
        "columns_mask",
        "count",
        "dimension",
        "epoch",
        "has_gaps",
        "homogeneous",
        "is_control",
        "kind",
        "kinds_mask",
        "length",
        "origin",
        "priority",
        "raw",
        "size",
    )  # fmt: skip

    def __init__(self, body: bytes | memoryview) -> None:
        """Read the header of a body known to be valid; `body_checks.parse_batch` reads any other."""
        self.raw = body
        """The body as it was given; a memoryview of it would cost two more objects per stored batch."""
        self.attributes: int
        """Bits of `Attribute`, the ack level and the priority."""
        self.count: int
        """The number of rows."""
        self.origin: int
        self.epoch: int
        """The producer epoch under which the rows were sent."""
        self.base: int
        """The counter of the first row."""
        self.kinds_mask: int
        """Bit k is set if a row has kind k."""
        self.dimension: int
        """The dimension of all full vectors; 0 if there are none or their dimensions differ."""
        self.length: int
        """Bytes of the body without padding and checksum."""
        self.columns_mask: int
        """Bit k is set if column k is present."""
        (
            self.attributes,
            self.count,
            self.origin,
            self.epoch,
            self.base,
            kinds,
            self.dimension,
            self.length,
            columns,
        ) = _HEADER.unpack_from(body)
        self.kinds_mask, self.columns_mask = kinds, columns
        self.size = _HEAD_BYTES + len(body)
        """The size of the whole frame in bytes."""
        self.kind: int | None = kinds.bit_length() - 1 if kinds & (kinds - 1) == 0 else None
        """The one kind of all rows, None if they differ."""
        self.ack_level = _LEVELS[self.attributes >> ACK_LEVEL_SHIFT & 3]
        """The ack level that the producer requests."""
        self.priority = _PRIORITIES[self.attributes >> PRIORITY_SHIFT & 3]
        """The priority of all rows."""
        self.is_control = self.attributes & _CONTROL != 0
        """True if the rows are control rows: they take offsets and are never delivered."""
        self.has_gaps = self.attributes & _GAPS != 0
        """True if counters may have gaps."""
        self.homogeneous = (
            columns & ~_NUMBER_COLUMNS == _KEY_COLUMNS or columns == _KEY_AND_BLOB_COLUMNS
        ) and not self.is_control
        """True if all rows have the same kind and namespace, and each row has only a vector id and
        either numbers or bytes.

        Such a batch has contiguous dots, and no clock, parents, ids, metadata or topics; most batches are so.
        """

    # --- the header's fields

    @property
    def body(self) -> memoryview:
        """The body's bytes, with padding and checksum."""
        return memoryview(self.raw)

    @lazy
    def crc(self) -> int:
        """The checksum that the producer computed."""
        return int(_CRC.unpack_from(self.raw, len(self.raw) - CRC_BYTES)[0])

    def content_crc(self, crc_before: int = 0) -> int:
        """Return the checksum of the rows' content, without origin and dots, continued from `crc_before`."""
        return crc32c(memoryview(self.raw)[_CONTENT_AT:-CRC_BYTES], crc_before)

    @property
    def is_state(self) -> bool:
        """True if each row is the full state of a vector at an offset, not a change (`state_rows.py`)."""
        return bool(self.attributes & Attribute.STATE_ROWS)

    @property
    def hybrid_time(self) -> int:
        """The time at which the rows were made, unless they have times of their own."""
        return int(_WORD.unpack_from(self.raw, _TIME_AT)[0])

    @property
    def previous(self) -> int:
        """If counters may have gaps: the counter of the origin's last delta before the first row."""
        return int(_WORD.unpack_from(self.raw, _PREVIOUS_AT)[0])

    @lazy
    def last(self) -> int:
        """The counter of the last row."""
        counters = self.counters if self.has_gaps else None
        return self.base + self.count - 1 if counters is None else int(counters[-1])

    # --- columns

    @lazy
    def column_bounds(self) -> dict[int, tuple[int, int]]:
        """Start and end in the body of each column that is present."""
        columns, lengths, start = directory_layout(self.columns_mask)
        bounds = {}
        for column, length in zip(columns, lengths.unpack_from(self.raw, DIRECTORY_AT), strict=True):
            bounds[column] = start, start + length
            start += length + -length % ALIGNMENT
        return bounds

    def column(self, column: int) -> memoryview | None:
        """Return the raw bytes of a column, None if it is absent."""
        bounds = self.column_bounds.get(column)
        return None if bounds is None else memoryview(self.raw)[bounds[0] : bounds[1]]

    def _array(self, column: Column, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        bounds = self.column_bounds.get(column)
        if bounds is None:
            return None
        start, end = bounds
        return np.frombuffer(self.raw, dtype, (end - start) // dtype.itemsize, start)

    @property
    def clock_entry_count(self) -> int:
        """The number of entries in the clock."""
        bounds = self.column_bounds.get(Column.CLOCK)
        return 0 if bounds is None else (bounds[1] - bounds[0]) // CLOCK_ENTRY.size

    @lazy
    def clock(self) -> tuple[Dot, ...]:
        """The clock's entries of other origins that changed since this origin's previous batch, sorted."""
        raw = self.column(Column.CLOCK)
        return () if raw is None else tuple(Dot(*entry) for entry in CLOCK_ENTRY.iter_unpack(raw))

    @lazy
    def keys(self) -> list[str]:
        """The vector id of each row."""
        return self._decode_texts(Column.KEY_ENDS, Column.KEYS)

    def drop_decoded_keys(self) -> None:
        """Drop the decoded vector ids, to free memory; the next access to `keys` decodes them again."""
        self.__dict__.pop("keys", None)
        self.__dict__.pop("namespace_index", None)

    @lazy
    def namespace_names(self) -> tuple[str, ...]:
        """The table of namespaces."""
        return self._name_table(Column.NAMESPACES)

    @lazy
    def namespace(self) -> str | None:
        """The one namespace of all rows, None if they differ."""
        names = self.namespace_names
        return names[0] if len(names) == 1 else None

    @lazy
    def namespaces(self) -> list[str]:
        """The namespace of each row."""
        names = self.namespace_names or ("",)  # control rows have no namespace
        index = self.namespace_index
        return [names[0]] * self.count if index is None else list(map(names.__getitem__, index))

    @lazy
    def namespace_index(self) -> list[int] | None:
        """For each row, the index of its namespace in the table; None if all rows have the first one."""
        index = self._array(Column.NAMESPACE_INDEX, U16)
        return None if index is None else index.tolist()

    @lazy
    def kinds(self) -> bytes:
        """The kind of each row."""
        raw = self.column(Column.KINDS)
        return bytes((self.kinds_mask.bit_length() - 1,)) * self.count if raw is None else bytes(raw)

    @lazy
    def ids(self) -> list[bytes] | None:
        """The 16-byte id of each row, None if dots are the only identity."""
        raw = self.column(Column.IDS)
        return None if raw is None else [bytes(raw[i : i + 16]) for i in range(0, len(raw), 16)]

    @lazy
    def counters(self) -> NDArray[np.uint64] | None:
        """The counter of each row if counters may have gaps, else None."""
        return self._array(Column.COUNTERS, U64)

    @lazy
    def row_offsets(self) -> NDArray[np.uint64] | None:
        """The offset of each row of a sliced frame, or of each state row's last delta; else None."""
        return self._array(Column.ROW_OFFSETS, U64)

    @lazy
    def state_keys(self) -> list[tuple[int, int, int]]:
        """The canonical key of each state row's last delta: (Lamport number, origin, counter)."""
        columns = (Column.STATE_LAMPORTS, Column.STATE_ORIGINS, Column.STATE_COUNTERS)
        lamports, origins, counters = (self._array(column, U64) for column in columns)
        assert lamports is not None
        assert origins is not None
        assert counters is not None
        return list(zip(lamports.tolist(), origins.tolist(), counters.tolist(), strict=True))

    @lazy
    def state_ignored(self) -> NDArray[np.uint64] | None:
        """The number of deltas without effect of each state row, None if it is 0 for all."""
        return self._array(Column.STATE_IGNORED, U64)

    @lazy
    def parents(self) -> tuple[tuple[int, Dot | bytes], ...]:
        """(row, parent) for each parent that a row names: the parent's dot or its 16-byte id."""
        raw = self.column(Column.PARENTS)
        if raw is None:
            return ()
        return tuple(
            (row, Dot(*CLOCK_ENTRY.unpack(name)) if form == 0 else name)
            for row, form, name in PARENT.iter_unpack(raw)
            if form != POSITION_FORM
        )

    @lazy
    def parent_positions(self) -> tuple[tuple[int, int, ParentPosition], ...]:
        """(row, index into `parents`, log position) for each parent that lies in another partition."""
        raw, positions, parent_count = self.column(Column.PARENTS), [], 0
        for row, form, content in () if raw is None else PARENT.iter_unpack(raw):
            if form == POSITION_FORM:
                positions.append((row, parent_count - 1, ParentPosition(*POSITION.unpack(content))))
            else:
                parent_count += 1
        return tuple(positions)

    @lazy
    def expects(self) -> tuple[tuple[int, Dot], ...]:
        """(row, dot) for each row that the service refuses unless its vector's last delta is that dot."""
        raw = self.column(Column.EXPECTS)
        return () if raw is None else tuple((e[0], Dot(e[2], e[3])) for e in EXPECT.iter_unpack(raw))

    @lazy
    def expect_by_row(self) -> dict[int, Dot]:
        """The expected dot of each row that has one; if a row has several entries, the first one counts."""
        return dict(reversed(self.expects))

    @lazy
    def row_topics(self) -> tuple[tuple[int, str], ...]:
        """(row, custom topic) for each custom topic of a row."""
        raw = self.column(Column.TAGS)
        if raw is None:
            return ()
        names = self._name_table(Column.TAG_NAMES)
        return tuple((row, names[name]) for row, name in TAG.iter_unpack(raw))

    @lazy
    def custom_topics(self) -> frozenset[str]:
        """All custom topics of the rows."""
        return frozenset(name for _, name in self.row_topics)

    @lazy
    def values(self) -> NDArray[np.float32]:
        """The numbers of all rows, end to end."""
        array = self._array(Column.VALUES, F32)
        return NO_VALUES if array is None else array

    @lazy
    def indices(self) -> NDArray[np.uint32]:
        """The indices of all sparse rows, end to end."""
        array = self._array(Column.INDICES, U32)
        return NO_INDICES if array is None else array

    @lazy
    def highest_index(self) -> int:
        """The highest index of all sparse rows, -1 if there is none."""
        indices = self.indices
        return int(np.maximum.reduce(indices)) if len(indices) else -1

    @lazy
    def values_per_row(self) -> int | None:
        """The number of values of each row if all rows have the same number, else None."""
        return None if self.columns_mask >> Column.VALUE_ENDS & 1 else len(self.values) // self.count

    @lazy
    def value_bounds(self) -> NDArray[np.int64]:
        """Bounds of the rows in `values`: row i's numbers are values[bounds[i]:bounds[i + 1]]."""
        return self._row_bounds(Column.VALUE_ENDS, self.values_per_row)

    @lazy
    def index_bounds(self) -> NDArray[np.int64]:
        """Bounds of the rows in `indices`: row i's are indices[bounds[i]:bounds[i + 1]]."""
        bounds = self.value_bounds
        if self.kind is not None:
            return bounds if self.kind in SPARSE_KINDS else np.zeros_like(bounds)
        sparse = np.frombuffer(self.kinds.translate(_IS_SPARSE), np.uint8)
        return np.concatenate(([0], np.cumsum(np.diff(bounds) * sparse)))

    @lazy
    def blob_bounds(self) -> NDArray[np.int64]:
        """Bounds of the rows in the blobs: row i's bytes go from bounds[i] to bounds[i + 1]."""
        return self._row_bounds(Column.BLOB_ENDS, 0)

    @property
    def has_metadata(self) -> bool:
        """True if some row changes metadata."""
        return self.columns_mask >> Column.METADATA & 1 != 0

    validated = False
    """True if all bounds were checked."""
    unreadable_row: int | None = None
    """The first row whose metadata change breaks a bound and cannot be read; None for a batch in a log."""

    # --- rows

    def counter(self, row: int) -> int:
        """Return the counter of a row."""
        counters = self.counters
        return self.base + row if counters is None else int(counters[row])

    def dot(self, row: int) -> Dot:
        """Return the identity of a row; for a state row, that of its last delta."""
        if self.is_state:
            _, origin, counter = self.state_keys[row]
            return Dot(origin, counter)
        return Dot(self.origin, self.counter(row))

    def blob(self, row: int) -> bytes:
        """Return the bytes of an opaque row, the name of a transform, or the payload of an unknown kind."""
        raw = self.column(Column.BLOBS)
        if raw is None:
            return b""
        bounds = self.blob_bounds
        return bytes(raw[int(bounds[row]) : int(bounds[row + 1])])

    def operation(self, row: int) -> Operation:
        """Return the operation of a row; its arrays are read-only views of the body."""
        kind = self.kinds[row]
        if kind in _BLOB_FREE_KINDS:
            values = self._values_of_row(row) if kind in _VALUE_KINDS else None
            if kind not in SPARSE_KINDS:
                return Operation(kind, values)
            bounds = self.index_bounds
            return Operation(kind, values, self.indices[int(bounds[row]) : int(bounds[row + 1])])
        return Operation(kind, data=self.blob(row))

    def metadata(self, row: int) -> dict[str, Any] | None:
        """Return the metadata change of a row (a JSON merge patch), None if it has none.

        If a key occurs twice, its last value counts; a log may hold such maps.
        """
        packed = self.packed_metadata(row)
        return msgpack.unpackb(packed, strict_map_key=True) if len(packed) else None

    def packed_metadata(self, row: int) -> memoryview:
        """Return the metadata change of a row as its producer packed it, empty if it has none."""
        raw = self.column(Column.METADATA)
        if raw is None:
            return memoryview(b"")
        bounds = self._metadata_bounds
        return raw[int(bounds[row]) : int(bounds[row + 1])]

    def timestamp(self, row: int) -> int:
        """Return the hybrid time of a row."""
        times = self._array(Column.TIMES, U64)
        return self.hybrid_time if times is None else int(times[row])

    def delta(self, row: int, source: Source = Source.LOCAL) -> Delta:
        """Return a row as a Delta."""
        return Delta(
            vector_id=self.keys[row],
            operation=self.operation(row),
            namespace=self.namespaces[row],
            id=None if self.ids is None else self.ids[row],
            dot=self.dot(row),
            parents=self._parents_by_row.get(row, ()),
            clock=self.clock,
            timestamp=self.timestamp(row),
            priority=self.priority,
            source=source,
            metadata=self.metadata(row),
            topics=self._topics_by_row.get(row, ()),
            expect=self.expect_by_row.get(row),
        )

    # --- helpers

    @lazy
    def _parents_by_row(self) -> dict[int, tuple[Dot | bytes, ...]]:
        """The parents by row, so that a walk over rows does not search all parents for each row."""
        return _group_by_row(self.parents)

    @lazy
    def _topics_by_row(self) -> dict[int, tuple[str, ...]]:
        return _group_by_row(self.row_topics)

    def _values_of_row(self, row: int) -> NDArray[np.float32]:
        width = self.values_per_row
        if width is not None:
            return self.values[row * width : (row + 1) * width]
        bounds = self.value_bounds
        return self.values[int(bounds[row]) : int(bounds[row + 1])]

    @lazy
    def _metadata_bounds(self) -> NDArray[np.int64]:
        return self._row_bounds(Column.METADATA_ENDS, 0)

    def _row_bounds(self, column: Column, width: int | None) -> NDArray[np.int64]:
        ends = self._array(column, U32)
        if ends is None:
            return np.arange(self.count + 1, dtype=np.int64) * (width or 0)
        bounds = np.zeros(self.count + 1, np.int64)
        bounds[1:] = ends
        return bounds

    def _decode_texts(self, ends: Column, texts: Column) -> list[str]:
        bounds, raw = self.column_bounds.get(ends), self.column(texts)
        if bounds is None or raw is None:
            return [""] * self.count
        stops = ends_struct(self.count).unpack_from(self.raw, bounds[0])
        decoded_texts, start = [], 0
        try:
            text = str(raw, "ascii")  # decoded once, then sliced: in ASCII a character is a byte
        except UnicodeDecodeError:
            for stop in stops:
                decoded_texts.append(str(raw[start:stop], "utf-8"))
                start = stop
        else:
            for stop in stops:
                decoded_texts.append(text[start:stop])
                start = stop
        return decoded_texts

    def _name_table(self, column: Column) -> tuple[str, ...]:
        raw = self.column(column)
        if raw is None:
            return ()
        return read_short_names(bytes(raw)) if len(raw) <= SHORT_NAMES_BYTES else read_names(bytes(raw))


@dataclass(slots=True, eq=False, init=False)
class LoggedBatch:
    """A batch with its offset: row i has offset + i and Lamport number lamport + i. Never changed.

    A batch of state rows belongs to a snapshot instead: `offset` counts the snapshot's rows, and `key` and
    `row_offset` return those of the last delta of a row's vector.

    `next_offset` is the offset after the last row. `source` is the entry point of its deltas. `head` is the
    64 bytes of frame header and stamp if the log stores frames, else empty. `known_ids`: the share of a
    forwarded batch's ids that had been accepted before (`duplicate_ids.py`).
    """

    batch: Batch
    offset: int
    lamport: int
    source: Source
    head: bytes
    known_ids: KnownIds
    count: int = field(init=False)
    next_offset: int = field(init=False)

    def __init__(
        self,
        batch: Batch,
        offset: int,
        lamport: int,
        source: Source,
        head: bytes = b"",
        *,
        known_ids: KnownIds = KnownIds.NONE,
    ) -> None:
        self.batch = batch
        self.offset = offset
        self.lamport = lamport
        self.source = source
        self.head = head
        self.known_ids = known_ids
        self.count = batch.count
        self.next_offset = offset + batch.count

    def row_offset(self, row: int) -> int:
        """Return the offset of a row; for a state row, that of its last delta."""
        offsets = self.batch.row_offsets
        return self.offset + row if offsets is None else int(offsets[row])

    def key(self, row: int) -> tuple[int, int, int]:
        """Return the canonical key (Lamport number, origin, counter) of a row or of a state's last delta."""
        if self.batch.is_state:
            return self.batch.state_keys[row]
        return (self.lamport + row, self.batch.origin, self.batch.counter(row))


_VALUE_KINDS = frozenset({Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET})
_BLOB_FREE_KINDS = _VALUE_KINDS | {Kind.DELETE, Kind.METADATA}
NO_VALUES = np.zeros(0, np.float32)
NO_INDICES = np.zeros(0, np.uint32)
_CONTROL, _GAPS = int(Attribute.CONTROL), int(Attribute.COUNTER_GAPS)
_LEVELS, _PRIORITIES = tuple(AckLevel), tuple(Priority)
DIRECTORY_AT = BODY_HEADER_BYTES + COLUMN_MASK.size
"""Offset in a body of its directory, the lengths of the columns."""
_NUMBER_COLUMNS = 1 << Column.INDICES | 1 << Column.VALUES
_KEY_COLUMNS = 1 << Column.KEY_ENDS | 1 << Column.KEYS | 1 << Column.NAMESPACES
_KEY_AND_BLOB_COLUMNS = _KEY_COLUMNS | 1 << Column.BLOB_ENDS | 1 << Column.BLOBS


_HEADER = struct.Struct("<2xHIQI4xQ8xQII8xQ")
"""The fields of the body's header that `Batch` reads, and the mask of columns after it."""
assert _HEADER.size == DIRECTORY_AT
_TIME_AT, _PREVIOUS_AT = 32, 56
"""Offsets in a body of the hybrid time and of the previous counter."""
U16, U32, U64, F32 = (np.dtype(name) for name in ("<u2", "<u4", "<u8", "<f4"))


@lru_cache(maxsize=1024)
def directory_layout(mask: int) -> tuple[tuple[int, ...], struct.Struct, int]:
    """Return the columns in a mask, the struct of their lengths, and the start of the first in the body."""
    columns = tuple(column for column in range(mask.bit_length()) if mask >> column & 1)
    lengths = struct.Struct(f"<{len(columns)}I")
    return columns, lengths, DIRECTORY_AT + lengths.size + -lengths.size % ALIGNMENT


@lru_cache(maxsize=4096)
def ends_struct(count: int) -> struct.Struct:
    """Return the struct that reads the ends of `count` texts."""
    return struct.Struct(f"<{count}I")


def _group_by_row(entries: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    entries_by_row: dict[int, list[T]] = {}
    for row, entry in entries:
        entries_by_row.setdefault(row, []).append(entry)
    return {row: tuple(row_entries) for row, row_entries in entries_by_row.items()}
