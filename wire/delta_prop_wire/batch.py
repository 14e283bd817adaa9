"""A batch: deltas that travel together, as an immutable view of the bytes that carry them.

Columns are decoded when first asked for, and kept. Nothing here rewrites a body: who needs other
bytes encodes another batch (`encode.py`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import numpy as np

from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, KnownIds, Operation, Place, Priority, Source
from delta_prop_wire.layout import (
    CLOCK_ENTRY,
    COLUMN_MASK,
    EXPECT,
    NAME_LENGTH,
    PARENT,
    PLACE,
    PLACE_FORM,
    TAG,
    Column,
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
    from collections.abc import Iterable

    from numpy.typing import NDArray

T = TypeVar("T")

SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
_IS_SPARSE = bytes(kind in SPARSE_KINDS for kind in range(256))
"""For `bytes.translate`."""
PRINTABLE = bytes(range(0x20, 0x7F))
"""ASCII without control characters."""
_CRC = struct.Struct("<I")
_WORD = struct.Struct("<Q")
_HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
_KINDS_AT = 40
"""Where a body begins to tell of its rows alone: kinds, dimension, lengths, columns."""


class Batch:
    """Columns of one body. Shapes: n rows; `values` float32 and `indices` uint32 of all rows, end to end."""

    __slots__ = (
        "__dict__",  # for what is decoded
        "ack_level", "attributes", "base", "columns_mask", "count", "dimension", "epoch", "is_control",
        "kind", "kinds_mask", "leaps", "length", "origin", "plain", "priority", "raw", "size",
    )  # fmt: skip

    def __init__(self, body: bytes | memoryview) -> None:
        """Read the header of a body that is known to be sound; `soundness.parse_batch` is for others."""
        self.raw = body
        """The body as it was given. A view of it would be two objects more for each batch that is kept."""
        self.attributes: int
        self.count: int
        self.origin: int
        self.epoch: int
        self.base: int
        self.kinds_mask: int
        self.dimension: int
        self.length: int
        """Bytes of the body without padding and checksum."""
        self.columns_mask: int
        """Bit k set where column k is present."""
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
        """Bytes of the whole frame."""
        self.kind: int | None = kinds.bit_length() - 1 if kinds & (kinds - 1) == 0 else None
        """The one kind of all rows, None where they differ."""
        self.ack_level = _LEVELS[self.attributes >> ACK_LEVEL_SHIFT & 3]
        """What the producer wants an acknowledgement to promise."""
        self.priority = _LANES[self.attributes >> PRIORITY_SHIFT & 3]
        """The lane of all rows."""
        self.is_control = self.attributes & _CONTROL != 0
        """Whether the rows only fill places: they take offsets and are never delivered."""
        self.leaps = self.attributes & _LEAPS != 0
        """Whether counters need not be contiguous."""
        self.plain = (columns & ~_NUMBERS == _NAMES or columns == _NAMES_AND_BLOBS) and not self.is_control
        """Whether all rows are of one kind and namespace and have but a vector id and numbers, or bytes.

        Without clock, parents, ids, metadata, topics, and with dots in a row: what most batches are.
        """

    # --- the header's words

    @property
    def body(self) -> memoryview:
        """The bytes of the body, with padding and checksum."""
        return memoryview(self.raw)

    @lazy
    def crc(self) -> int:
        """The checksum that the batch's producer gave it."""
        return int(_CRC.unpack_from(self.raw, len(self.raw) - CRC_BYTES)[0])

    def content_crc(self, before: int = 0) -> int:
        """The checksum of what the rows say, whoever says it and under which dots, continued from another."""
        return crc32c(memoryview(self.raw)[_KINDS_AT:-CRC_BYTES], before)

    @property
    def is_state(self) -> bool:
        """Whether each row is the whole state of a vector at an offset, no change (`states.py`)."""
        return bool(self.attributes & Attribute.STATE_ROWS)

    @property
    def hybrid_time(self) -> int:
        """When the rows were made, where they do not say it themselves."""
        return int(_WORD.unpack_from(self.raw, _TIME_AT)[0])

    @property
    def previous(self) -> int:
        """Where counters may leap, the one before the first row's."""
        return int(_WORD.unpack_from(self.raw, _PREVIOUS_AT)[0])

    @lazy
    def last(self) -> int:
        """Counter of the last row."""
        counters = self.counters if self.leaps else None
        return self.base + self.count - 1 if counters is None else int(counters[-1])

    # --- columns

    @lazy
    def _bounds_of(self) -> tuple[int, ...]:
        """Where the columns lie in the body: start and end of each that is present, in turn."""
        _, lengths, at = directory_of(self.columns_mask)
        bounds: tuple[int, ...] = ()
        for length in lengths.unpack_from(self.raw, DIRECTORY_AT):
            bounds += (at, at + length)
            at += length + -length % ALIGNMENT
        return bounds

    def _bounds_in(self, column: int) -> tuple[int, int] | None:
        """Where a column lies in the body, None where it is absent."""
        place = directory_of(self.columns_mask)[0].get(column)
        return None if place is None else self._bounds_of[place : place + 2]  # type: ignore[return-value]

    def column(self, column: Column) -> memoryview | None:
        """The raw bytes of a column, None where it is absent."""
        bounds = self._bounds_in(column)
        return None if bounds is None else self.body[bounds[0] : bounds[1]]

    def _array(self, column: Column, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        bounds = self._bounds_in(column)
        if bounds is None:
            return None
        start, end = bounds
        return np.frombuffer(self.raw, dtype, (end - start) // dtype.itemsize, start)

    @property
    def clock_entries(self) -> int:
        """The number of entries in the clock."""
        bounds = self._bounds_in(Column.CLOCK)
        return 0 if bounds is None else (bounds[1] - bounds[0]) // CLOCK_ENTRY.size

    @lazy
    def clock(self) -> tuple[Dot, ...]:
        """Clock entries of other origins that changed since this origin's previous batch, sorted."""
        raw = self.column(Column.CLOCK)
        return () if raw is None else tuple(Dot(*entry) for entry in CLOCK_ENTRY.iter_unpack(raw))

    @lazy
    def keys(self) -> list[str]:
        """The vector id of each row."""
        return self._texts(Column.KEY_ENDS, Column.KEYS)

    def let_names_go(self) -> None:
        """Forget the names of rows, which take as much memory as small deltas; who asks has them decoded."""
        if self.decoded:
            self.decoded = False
            del self.keys
            self.__dict__.pop("namespace_index", None)

    @lazy
    def namespace_names(self) -> tuple[str, ...]:
        """The table of namespaces."""
        return self._names(Column.NAMESPACES)

    @lazy
    def namespace(self) -> str | None:
        """The one namespace of all rows, None where they differ."""
        names = self.namespace_names
        return names[0] if len(names) == 1 else None

    @lazy
    def namespaces(self) -> list[str]:
        """The namespace of each row."""
        names = self.namespace_names or ("",)  # control rows have none
        index = self.namespace_index
        return [names[0]] * self.count if index is None else list(map(names.__getitem__, index))

    @lazy
    def namespace_index(self) -> list[int] | None:
        """The place in the table of each row's namespace, None where all have the first."""
        index = self._array(Column.NAMESPACE_INDEX, U16)
        return None if index is None else index.tolist()

    @lazy
    def kinds(self) -> bytes:
        """The kind of each row."""
        raw = self.column(Column.KINDS)
        return bytes((self.kinds_mask.bit_length() - 1,)) * self.count if raw is None else bytes(raw)

    @lazy
    def ids(self) -> list[bytes] | None:
        """The 16-byte id of each row, None where identity is the dot alone."""
        raw = self.column(Column.IDS)
        return None if raw is None else [bytes(raw[i : i + 16]) for i in range(0, len(raw), 16)]

    @lazy
    def counters(self) -> NDArray[np.uint64] | None:
        """The counter of each row where they may leap, else None."""
        return self._array(Column.COUNTERS, U64)

    @lazy
    def row_offsets(self) -> NDArray[np.uint64] | None:
        """Each row's offset in a frame cut by a filter, in one of states its last delta's; else None."""
        return self._array(Column.ROW_OFFSETS, U64)

    @lazy
    def state_keys(self) -> list[tuple[int, int, int]]:
        """Of each state row the canonical key of its last delta: (Lamport number, origin, counter)."""
        columns = (Column.STATE_LAMPORTS, Column.STATE_ORIGINS, Column.STATE_COUNTERS)
        lamports, origins, counters = (self._array(column, U64) for column in columns)
        assert lamports is not None
        assert origins is not None
        assert counters is not None
        return list(zip(lamports.tolist(), origins.tolist(), counters.tolist(), strict=True))

    @lazy
    def state_ignored(self) -> NDArray[np.uint64] | None:
        """Of each state row how many deltas had no effect, None where that is 0 for all."""
        return self._array(Column.STATE_IGNORED, U64)

    @lazy
    def parents(self) -> tuple[tuple[int, Dot | bytes], ...]:
        """(row, parent) for each parent that a row names."""
        raw = self.column(Column.PARENTS)
        if raw is None:
            return ()
        return tuple(
            (row, Dot(*CLOCK_ENTRY.unpack(name)) if form == 0 else name)
            for row, form, name in PARENT.iter_unpack(raw)
            if form != PLACE_FORM
        )

    @lazy
    def places(self) -> tuple[tuple[int, int, Place], ...]:
        """(row, which of `parents` it is of, place) for each parent that lies in another partition."""
        raw, found, parents = self.column(Column.PARENTS), [], 0
        for row, form, content in () if raw is None else PARENT.iter_unpack(raw):
            if form == PLACE_FORM:
                found.append((row, parents - 1, Place(*PLACE.unpack(content))))
            else:
                parents += 1
        return tuple(found)

    @lazy
    def expects(self) -> tuple[tuple[int, Dot], ...]:
        """(row, dot) for each row that is refused unless its vector's last delta is that dot."""
        raw = self.column(Column.EXPECTS)
        return () if raw is None else tuple((e[0], Dot(e[2], e[3])) for e in EXPECT.iter_unpack(raw))

    @lazy
    def tags(self) -> tuple[tuple[int, str], ...]:
        """(row, custom topic) for each custom topic of a row."""
        raw = self.column(Column.TAGS)
        if raw is None:
            return ()
        names = self._names(Column.TAG_NAMES)
        return tuple((row, names[name]) for row, name in TAG.iter_unpack(raw))

    @lazy
    def custom_topics(self) -> frozenset[str]:
        """All custom topics that some row has."""
        return frozenset(name for _, name in self.tags)

    @lazy
    def values(self) -> NDArray[np.float32]:
        """All rows' numbers, end to end."""
        array = self._array(Column.VALUES, F32)
        return NO_VALUES if array is None else array

    @lazy
    def indices(self) -> NDArray[np.uint32]:
        """All sparse rows' indices, end to end."""
        array = self._array(Column.INDICES, U32)
        return NO_INDICES if array is None else array

    @lazy
    def index_highest(self) -> int:
        """The highest index of all sparse rows, -1 where there is none."""
        indices = self.indices
        if len(indices) < _FEW:
            return max(indices.tolist(), default=-1)
        return int(_HIGHEST(indices))

    @lazy
    def row_values(self) -> int | None:
        """Numbers a row where all rows have as many, else None."""
        return None if self.columns_mask >> Column.VALUE_ENDS & 1 else len(self.values) // self.count

    @lazy
    def value_bounds(self) -> NDArray[np.int64]:
        """Row i's numbers are values[bounds[i]:bounds[i + 1]]."""
        return self._bounds(Column.VALUE_ENDS, self.row_values)

    @lazy
    def index_bounds(self) -> NDArray[np.int64]:
        """Row i's indices are indices[bounds[i]:bounds[i + 1]]."""
        bounds = self.value_bounds
        if self.kind is not None:
            return bounds if self.kind in SPARSE_KINDS else np.zeros_like(bounds)
        sparse = np.frombuffer(self.kinds.translate(_IS_SPARSE), np.uint8)
        return np.concatenate(([0], np.cumsum(np.diff(bounds) * sparse)))

    @lazy
    def blob_bounds(self) -> NDArray[np.int64]:
        """Row i's bytes lie from bounds[i] to bounds[i + 1] in the blobs."""
        return self._bounds(Column.BLOB_ENDS, 0)

    @property
    def has_metadata(self) -> bool:
        """Whether some row changes metadata."""
        return self.columns_mask >> Column.METADATA & 1 != 0

    decoded = False
    """Whether all its columns were found to be in shape, and vector ids decoded (`plain.py`, `mixed.py`)."""
    sound = False
    """Whether it was found to be within all bounds when it was read (`forms.py`, `mixed.py`)."""
    unreadable_row: int | None = None
    """The first row whose metadata change breaks a bound and cannot be read by `metadata`; a log has none."""
    key_bytes_bound: int
    """Of a batch that was decoded so: no vector id is longer, though it may be shorter."""

    # --- rows

    def counter(self, row: int) -> int:
        """The counter of a row."""
        counters = self.counters
        return self.base + row if counters is None else int(counters[row])

    def dot(self, row: int) -> Dot:
        """The identity of a row; of a state, its last delta's."""
        if self.is_state:
            _, origin, counter = self.state_keys[row]
            return Dot(origin, counter)
        return Dot(self.origin, self.counter(row))

    def blob(self, row: int) -> bytes:
        """The bytes of an opaque row, the name of a transform, the payload of an unknown kind."""
        raw = self.column(Column.BLOBS)
        if raw is None:
            return b""
        bounds = self.blob_bounds
        return bytes(raw[int(bounds[row]) : int(bounds[row + 1])])

    def operation(self, row: int) -> Operation:
        """The operation of a row; its arrays are read-only views of the body."""
        kind = self.kinds[row]
        if kind in _BLOB_FREE_KINDS:
            values = self._row_values_of(row) if kind in _VALUE_KINDS else None
            if kind not in SPARSE_KINDS:
                return Operation(kind, values)
            bounds = self.index_bounds
            return Operation(kind, values, self.indices[int(bounds[row]) : int(bounds[row + 1])])
        return Operation(kind, data=self.blob(row))

    def metadata(self, row: int) -> dict[str, Any] | None:
        """The metadata change of a row (a JSON merge patch), None where it has none.

        Of a key that stands twice the last value counts, wherever the row is read: a log may hold such maps.
        """
        packed = self.packed_metadata(row)
        return msgpack.unpackb(packed, strict_map_key=True) if len(packed) else None

    def packed_metadata(self, row: int) -> memoryview:
        """Return the metadata change of a row as it came, empty where it has none."""
        raw = self.column(Column.METADATA)
        if raw is None:
            return memoryview(b"")
        bounds = self._metadata_bounds
        return raw[int(bounds[row]) : int(bounds[row + 1])]

    def timestamp(self, row: int) -> int:
        """The hybrid time of a row."""
        times = self._array(Column.TIMES, U64)
        return self.hybrid_time if times is None else int(times[row])

    def delta(self, row: int, source: Source = Source.LOCAL) -> Delta:
        """Everything that a row says."""
        return Delta(
            vector_id=self.keys[row],
            operation=self.operation(row),
            namespace=self.namespaces[row],
            id=None if self.ids is None else self.ids[row],
            dot=self.dot(row),
            parents=self._parents_of.get(row, ()),
            clock=self.clock,
            timestamp=self.timestamp(row),
            priority=self.priority,
            source=source,
            metadata=self.metadata(row),
            topics=self._tags_of.get(row, ()),
            expect=self._expect_of.get(row),
        )

    # --- helpers

    @lazy
    def _parents_of(self) -> dict[int, tuple[Dot | bytes, ...]]:
        """As `parents`, by row: whoever goes through all rows must not go through all parents for each."""
        return _by_row(self.parents)

    @lazy
    def _tags_of(self) -> dict[int, tuple[str, ...]]:
        return _by_row(self.tags)

    @lazy
    def _expect_of(self) -> dict[int, Dot]:
        return dict(reversed(self.expects))  # of several the first

    def _row_values_of(self, row: int) -> NDArray[np.float32]:
        width = self.row_values
        if width is not None:
            return self.values[row * width : (row + 1) * width]
        bounds = self.value_bounds
        return self.values[int(bounds[row]) : int(bounds[row + 1])]

    @lazy
    def _metadata_bounds(self) -> NDArray[np.int64]:
        return self._bounds(Column.METADATA_ENDS, 0)

    def _bounds(self, column: Column, width: int | None) -> NDArray[np.int64]:
        ends = self._array(column, U32)
        if ends is None:
            return np.arange(self.count + 1, dtype=np.int64) * (width or 0)
        bounds = np.zeros(self.count + 1, np.int64)
        bounds[1:] = ends
        return bounds

    def _texts(self, ends: Column, texts: Column) -> list[str]:
        bounds, raw = self._bounds_in(ends), self.column(texts)
        if bounds is None or raw is None:
            return [""] * self.count
        stops = stops_of(self.count).unpack_from(self.raw, bounds[0])
        found, at = [], 0
        try:
            whole = str(raw, "ascii")  # one decode, then slices: characters and bytes count alike
        except UnicodeDecodeError:
            for stop in stops:
                found.append(str(raw[at:stop], "utf-8"))
                at = stop
        else:
            for stop in stops:
                found.append(whole[at:stop])
                at = stop
        return found

    def _names(self, column: Column) -> tuple[str, ...]:
        raw = self.column(column)
        if raw is None:
            return ()
        return _known_names(raw)


@dataclass(slots=True, eq=False, init=False)
class LoggedBatch:
    """A batch with its place in the log: row i has offset + i and Lamport number lamport + i. Never changed.

    One of state rows has its place in a snapshot instead: `offset` counts the snapshot's rows, and `key`
    and `row_offset` tell of each row's last delta.

    `next_offset` is the one after the last row. `head` is the 64 bytes of frame header and stamp, where the
    log keeps frames; a frame is head, then body. `known_ids`: a forwarded batch may repeat ids that stood in
    this log before (`twins.py`).
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
        """Where in the log a row stands; of a state, its last delta."""
        offsets = self.batch.row_offsets
        return self.offset + row if offsets is None else int(offsets[row])

    def key(self, row: int) -> tuple[int, int, int]:
        """The canonical key of a row: (Lamport number, origin, counter); of a state, its last delta's."""
        if self.batch.is_state:
            return self.batch.state_keys[row]
        return (self.lamport + row, self.batch.origin, self.batch.counter(row))


_VALUE_KINDS = frozenset({Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET})
_BLOB_FREE_KINDS = _VALUE_KINDS | {Kind.DELETE, Kind.METADATA}
NO_VALUES = np.zeros(0, np.float32)
NO_INDICES = np.zeros(0, np.uint32)
_CONTROL, _LEAPS = int(Attribute.CONTROL), int(Attribute.COUNTERS_LEAP)
_LEVELS, _LANES = tuple(AckLevel), tuple(Priority)
_HIGHEST = np.maximum.reduce
_FEW = 40
"""Below so many numbers a Python loop is quicker than a call of numpy."""
DIRECTORY_AT = BODY_HEADER_BYTES + COLUMN_MASK.size
_NUMBERS = 1 << Column.INDICES | 1 << Column.VALUES
_NAMES = 1 << Column.KEY_ENDS | 1 << Column.KEYS | 1 << Column.NAMESPACES
_NAMES_AND_BLOBS = _NAMES | 1 << Column.BLOB_ENDS | 1 << Column.BLOBS
_FEW_NAMES_BYTES = 128


_HEADER = struct.Struct("<2xHIQI4xQ8xQII8xQ")
"""What is read again and again of the body's header, and the mask of columns behind it."""
assert _HEADER.size == DIRECTORY_AT
_TIME_AT, _PREVIOUS_AT = 32, 56
U16, U32, U64, F32 = (np.dtype(name) for name in ("<u2", "<u4", "<u8", "<f4"))


@lru_cache(maxsize=1024)
def directory_of(mask: int) -> tuple[dict[int, int], struct.Struct, int]:
    """Of the columns in a mask: where the bounds of each stand, how to read the lengths, where they begin."""
    columns = [k for k in range(mask.bit_length()) if mask >> k & 1]
    lengths = struct.Struct(f"<{len(columns)}I")
    places = {column: 2 * place for place, column in enumerate(columns)}
    return places, lengths, DIRECTORY_AT + lengths.size + -lengths.size % ALIGNMENT


@lru_cache(maxsize=4096)
def stops_of(count: int) -> struct.Struct:
    """How to read where each of so many texts ends."""
    return struct.Struct(f"<{count}I")


def _by_row(entries: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    found: dict[int, list[T]] = {}
    for row, entry in entries:
        found.setdefault(row, []).append(entry)
    return {row: tuple(those) for row, those in found.items()}


def _names_in(raw: bytes) -> tuple[str, ...]:
    names, at = [], 0
    while at < len(raw):
        (length,) = NAME_LENGTH.unpack_from(raw, at)
        at += NAME_LENGTH.size
        names.append(str(raw[at : at + length], "utf-8"))
        at += length
    return tuple(names)


def _known_names(raw: bytes | memoryview) -> tuple[str, ...]:
    return _few_names(bytes(raw)) if len(raw) <= _FEW_NAMES_BYTES else _names_in(bytes(raw))


_few_names = lru_cache(maxsize=1024)(_names_in)
"""The same names come with batch after batch: those of a short table are decoded once."""
