"""Encodes deltas into a batch, once; from then on the bytes travel, rest and arrive as they are.

Checks nothing that `validate.py` checks: who encodes has validated.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from delta_prop_wire.batch import Batch
from delta_prop_wire.control_rows import add_type, pack_refused
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Kind, Priority
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.layout import (
    BODY_HEADER,
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
from delta_prop_wire.names import laid_out
from delta_prop_wire.packed_metadata import PackedMetadata
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    ALIGNMENT,
    BATCH_ROWS_MAX,
    BODY_HEADER_BYTES,
    BODY_VERSION,
    CRC_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    PRIORITY_SHIFT,
    STAMP_BYTES,
    Attribute,
    ErrorCode,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from delta_prop_wire.delta import Delta, Dot, Place

_ATTRIBUTE_OF = {
    Column.IDS: Attribute.IDS,
    Column.PARENTS: Attribute.PARENTS,
    Column.CLOCK: Attribute.CLOCK,
    Column.KINDS: Attribute.MIXED_KINDS,
    Column.NAMESPACE_INDEX: Attribute.MIXED_NAMESPACES,
    Column.ROW_OFFSETS: Attribute.ROW_OFFSETS,
    Column.COUNTERS: Attribute.COUNTERS_LEAP,
    Column.STATE_ORIGINS: Attribute.STATE_ROWS,
}
_ZEROS = bytes(ALIGNMENT)
_LARGE_BYTES = 64 * 1024
"""So much takes less to sign piece by piece than to copy once more."""
_TEXT = {str}
_PLAIN_NAMES = 1 << Column.KEY_ENDS | 1 << Column.KEYS | 1 << Column.NAMESPACES | 1 << Column.VALUES
_SPARSE_NAMES = _PLAIN_NAMES | 1 << Column.INDICES
_PLAIN_HEAD = struct.Struct(f"{BODY_HEADER.format}Q4I")
_SPARSE_HEAD = struct.Struct(f"{BODY_HEADER.format}Q5I4x")
"""Header and directory of a body with four or five columns."""
_PADDING = [b"", *(bytes(ALIGNMENT - size) for size in range(1, ALIGNMENT))]
"""What follows a column, by what its length leaves."""
_U32, _F32 = np.dtype("<u4"), np.dtype("<f4")
_NO_INDICES = np.zeros(0, np.uint32)


def encode_batch(
    deltas: Sequence[Delta],
    *,
    origin: int,
    base: int,
    epoch: int = 1,
    clock: Sequence[Dot] = (),
    previous: int = 0,
    counters: Sequence[int] | None = None,
    row_offsets: Sequence[int] | None = None,
    ack_level: AckLevel = AckLevel.MEMORY,
    priority: Priority = Priority.NORMAL,
    hybrid_time: int = 0,
    places: Sequence[tuple[int, int, Place]] = (),
) -> Batch:
    """Encode deltas under the dots (origin, base), (origin, base + 1), … or, leaping, under `counters`.

    `clock` holds the entries of other origins that changed since this origin's previous batch. `places`:
    (row, which of all parents, place) of those in other partitions.
    A delta's own dot, clock and priority are not looked at: they belong to the batch.
    Raises InvalidDelta where ids are given for some rows only, TOO_LARGE beyond the frame's bound.
    """
    count = len(deltas)
    if not 1 <= count <= BATCH_ROWS_MAX:
        raise InvalidDelta("batch", f"{count} deltas; a batch holds 1 to {BATCH_ROWS_MAX}: split it")
    columns, mask, dimension = columns_of(deltas)
    _add_clock(columns, clock)
    _add_ids(columns, deltas)
    if counters is not None:
        columns[Column.COUNTERS] = struct.pack(f"<{count}Q", *counters)
    if row_offsets is not None:
        columns[Column.ROW_OFFSETS] = struct.pack(f"<{count}Q", *row_offsets)
    _add_exceptions(columns, deltas, places)
    times = [delta.timestamp for delta in deltas]
    hybrid_time = hybrid_time or times[0]
    if any(time not in (0, hybrid_time) for time in times):
        columns[Column.TIMES] = struct.pack(f"<{count}Q", *times)
    attributes = ack_level << ACK_LEVEL_SHIFT | priority << PRIORITY_SHIFT
    return assemble(
        columns,
        attributes=attributes,
        count=count,
        origin=origin,
        epoch=epoch,
        base=base,
        hybrid_time=hybrid_time,
        kinds_mask=mask,
        dimension=dimension,
        previous=previous,
    )


def name_columns(namespaces: Sequence[str], vector_ids: Sequence[str]) -> dict[Column, bytes]:
    """The columns that name the rows."""
    columns: dict[Column, bytes] = {}
    _add_texts(columns, vector_ids)
    _add_namespaces(columns, namespaces)
    return columns


def columns_of(deltas: Sequence[Delta]) -> tuple[dict[Column, bytes], int, int]:
    """Columns of what deltas say (names, operations, metadata), their kinds as a mask, their dimension."""
    columns = name_columns([delta.namespace for delta in deltas], [delta.vector_id for delta in deltas])
    mask = _add_kinds(columns, deltas)
    dimension = _add_payload(columns, deltas)
    _add_metadata(columns, deltas)
    return columns, mask, dimension


def name_table(names: Iterable[str]) -> bytes:
    """A table of names, as it stands in a column."""
    encoded = [name.encode() for name in names]
    return b"".join(NAME_LENGTH.pack(len(name)) + name for name in encoded)


def encode_vectors(
    keys: Sequence[str],
    matrix: NDArray[np.float32],
    *,
    indices: NDArray[np.uint32] | None = None,
    namespace: str,
    origin: int,
    base: int,
    kind: Kind = Kind.CREATE,
    epoch: int = 1,
    clock: Sequence[Dot] = (),
    ids: Sequence[bytes] | None = None,
    ack_level: AckLevel = AckLevel.MEMORY,
    priority: Priority = Priority.NORMAL,
    hybrid_time: int = 0,
) -> Batch:
    """Encode whole vectors, one a row of `matrix` (n × dimension, float32), without a loop over rows.

    With `indices` (of the same shape, uint32) what elements of vectors become, of kind SPARSE or SPARSE_ADD.
    """
    return encode_columns(
        keys,
        [np.ascontiguousarray(matrix, "<f4").data],
        None if indices is None else [np.ascontiguousarray(indices, "<u4").data],
        width=matrix.shape[1],
        namespace=namespace,
        kind=kind,
        origin=origin,
        base=base,
        epoch=epoch,
        clock=clock,
        ids=ids,
        ack_level=ack_level,
        priority=priority,
        hybrid_time=hybrid_time,
    )


def encode_columns(
    keys: Sequence[str],
    values: Sequence[Buffer],
    indices: Sequence[Buffer] | None,
    *,
    width: int,
    namespace: str,
    kind: int,
    origin: int,
    base: int,
    epoch: int = 1,
    clock: Sequence[Dot] = (),
    ids: Sequence[bytes] | None = None,
    ack_level: AckLevel = AckLevel.MEMORY,
    priority: Priority = Priority.NORMAL,
    hybrid_time: int = 0,
    names: tuple[bytes, bytes] | None = None,
) -> Batch:
    """Encode rows of `width` numbers each, end to end as little-endian float32, with their indices as uint32
    where they are parts of vectors; either in pieces, which are copied once. What the columns hold is handed
    to the batch, which need not decode it. `names`: what `names.laid_out` gives of the keys, if it was asked.
    """
    attributes = ack_level << ACK_LEVEL_SHIFT | priority << PRIORITY_SHIFT
    if clock or ids is not None:
        columns: dict[Column, bytes] = {}
        _add_clock(columns, clock)
        _add_texts(columns, keys)
        columns[Column.NAMESPACES] = name_table([namespace])
        if ids is not None:
            columns[Column.IDS] = b"".join(ids)
        if indices is not None:
            columns[Column.INDICES] = b"".join(indices)
        columns[Column.VALUES] = b"".join(values)
        batch = assemble(
            columns,
            attributes=attributes,
            count=len(keys),
            origin=origin,
            epoch=epoch,
            base=base,
            hybrid_time=hybrid_time,
            kinds_mask=1 << kind,
            dimension=width if indices is None else 0,
        )
    else:
        header = attributes, len(keys), origin, epoch, 0, base, hybrid_time, 1 << kind
        batch = _plain_batch(
            header, keys, namespace, width=width, values=values, indices=indices, given=names
        )
    if set(map(type, keys)) == _TEXT:
        batch.keys = list(keys)  # else they would be decoded; and names that come often are kept once
    batch.namespace, batch.namespace_names, batch.row_values = namespace, (namespace,), width
    return batch


def encode_opaque(
    deltas: Sequence[Delta],
    *,
    origin: int,
    base: int,
    epoch: int,
    ack_level: AckLevel = AckLevel.MEMORY,
    priority: Priority = Priority.NORMAL,
) -> Batch:
    """The short way of `encode_batch`, to the same bytes, for what `validate.is_simple` is true of."""
    times = [delta.timestamp for delta in deltas]
    if any(times):
        return encode_batch(
            deltas, origin=origin, base=base, epoch=epoch, ack_level=ack_level, priority=priority
        )
    columns = name_columns([delta.namespace for delta in deltas], [delta.vector_id for delta in deltas])
    blobs = [delta.operation.data for delta in deltas]
    if any(blobs):
        columns[Column.BLOBS] = b"".join(blobs)
        columns[Column.BLOB_ENDS] = _ends(map(len, blobs))
    return assemble(
        columns,
        attributes=ack_level << ACK_LEVEL_SHIFT | priority << PRIORITY_SHIFT,
        count=len(deltas),
        origin=origin,
        epoch=epoch,
        base=base,
        hybrid_time=0,
        kinds_mask=1 << Kind.OPAQUE,
    )


def encode_void(
    *,
    origin: int,
    base: int,
    count: int,
    code: ErrorCode,
    epoch: int = 1,
    clock: Sequence[Dot] = (),
    previous: int = 0,
    counters: Sequence[int] | None = None,
    priority: Priority = Priority.NORMAL,
    hybrid_time: int = 0,
    refused_crc: int | None = None,
    firsts: Sequence[int | None] | None = None,
    ids: Sequence[bytes] | None = None,
) -> Batch:
    """Encode the control row that fills the place of refused dots, one row a dot.

    It keeps the refused frame's clock entries, since later frames of the origin send only changes.
    `refused_crc`: the checksum of the refused body, by which a repeat of it is told. `firsts`: the offset of
    each row's first copy, where the ids had been accepted before. `ids`: those that the refused deltas had.
    """
    columns: dict[Column, bytes] = {}
    _add_clock(columns, clock)
    if ids is not None:
        columns[Column.IDS] = b"".join(ids)
    if counters is not None:
        columns[Column.COUNTERS] = struct.pack(f"<{count}Q", *counters)
    rows = pack_refused(count, code, refused_crc, firsts)
    columns[Column.BLOB_ENDS] = _ends(map(len, rows))
    columns[Column.BLOBS] = b"".join(rows)
    return assemble(
        columns,
        attributes=Attribute.CONTROL | priority << PRIORITY_SHIFT,
        count=count,
        origin=origin,
        epoch=epoch,
        base=base,
        hybrid_time=hybrid_time,
        kinds_mask=1 << Kind.OPAQUE,
        previous=previous,
    )


def with_control_types(batch: Batch) -> Batch:
    """Encode a control batch of format 1 of the data directory anew, each row with its type in front."""
    present = [column for column in Column if batch.columns_mask >> column & 1]
    columns = {column: raw for column in present if (raw := batch.column(column)) is not None}
    rows = [add_type(batch.blob(row)) for row in range(batch.count)]
    columns[Column.BLOB_ENDS], columns[Column.BLOBS] = (
        memoryview(_ends(map(len, rows))),
        memoryview(b"".join(rows)),
    )
    return assemble(
        columns,
        attributes=batch.attributes,
        count=batch.count,
        origin=batch.origin,
        epoch=batch.epoch,
        base=batch.base,
        hybrid_time=batch.hybrid_time,
        kinds_mask=batch.kinds_mask,
        dimension=batch.dimension,
        previous=batch.previous,
    )


def assemble(
    columns: Mapping[Column, bytes | memoryview],
    *,
    attributes: int,
    count: int,
    origin: int,
    epoch: int,
    base: int,
    hybrid_time: int,
    kinds_mask: int,
    dimension: int = 0,
    previous: int = 0,
) -> Batch:
    """Lay the columns out behind their header and sign them. Raises Refused (TOO_LARGE).

    A view has bytes for its elements.
    """
    mask, lengths, parts = 0, list[int](), list[bytes | memoryview]()
    for column in sorted(columns):
        content = columns[column]
        mask |= 1 << column
        lengths.append(len(content))
        parts.append(content)
        if len(content) % ALIGNMENT:
            parts.append(_ZEROS[len(content) % ALIGNMENT :])
        attributes |= _ATTRIBUTE_OF.get(column, 0)
    directory = COLUMN_MASK.pack(mask) + struct.pack(f"<{len(lengths)}I", *lengths)
    if len(lengths) % 2:
        directory += _ZEROS[:4]
    length = BODY_HEADER_BYTES + len(directory) + sum(map(len, parts))
    if STAMP_BYTES + length + ALIGNMENT > FRAME_PAYLOAD_BYTES_MAX:
        raise _too_large(length)
    header = BODY_HEADER.pack(
        BODY_VERSION,
        BODY_HEADER_BYTES // 8,
        attributes,
        count,
        origin,
        epoch,
        0,
        base,
        hybrid_time,
        kinds_mask,
        dimension,
        length,
        previous,
    )
    parts.append(_ZEROS[: -(length + CRC_BYTES) % ALIGNMENT])
    if length < _LARGE_BYTES:
        signed = b"".join((header, directory, *parts))
        return Batch(signed + crc32c(signed).to_bytes(CRC_BYTES, "little"))
    crc = crc32c(directory, crc32c(header))
    for part in parts:
        crc = crc32c(part, crc)
    return Batch(b"".join((header, directory, *parts, crc.to_bytes(CRC_BYTES, "little"))))


def _plain_batch(
    header: tuple[int, ...],
    keys: Sequence[str],
    namespace: str,
    *,
    width: int,
    values: Sequence[Buffer],
    indices: Sequence[Buffer] | None,
    given: tuple[bytes, bytes] | None,
) -> Batch:
    """`assemble` in a third of the time, for columns that say nothing by their presence alone.

    `header`: its fields from the attributes to the mask of kinds. Names come first, then numbers, in the
    order of columns.
    """
    count = len(keys)
    texts, ends = given or laid_out(keys, FRAME_PAYLOAD_BYTES_MAX) or _texts(keys)
    names_size, names = _one_name(namespace)
    numbers, size = count * width, 4 * count * width
    padding = _PADDING[size % ALIGNMENT]
    more, texts_padding = _PADDING[len(ends) % ALIGNMENT], _PADDING[len(texts) % ALIGNMENT]
    sizes: tuple[int, ...]
    columns: tuple[Buffer, ...]
    if indices is None:
        head, mask, sizes, dimension = _PLAIN_HEAD, _PLAIN_NAMES, (size,), width
        columns = (*values, padding)
    else:
        head, mask, sizes, dimension = _SPARSE_HEAD, _SPARSE_NAMES, (size, size), 0
        columns = (*indices, padding, *values, padding)
    numbers_at = head.size + len(ends) + len(more) + len(texts) + len(texts_padding) + len(names)
    length = numbers_at + len(sizes) * (size + len(padding))
    if STAMP_BYTES + length + ALIGNMENT > FRAME_PAYLOAD_BYTES_MAX:
        raise _too_large(length)
    start = head.pack(
        BODY_VERSION, BODY_HEADER_BYTES // 8, *header, dimension, length, 0,
        mask, 4 * count, len(texts), names_size, *sizes,
    )  # fmt: skip
    end = _ZEROS[: -(length + CRC_BYTES) % ALIGNMENT]
    signed = b"".join((start, ends, more, texts, texts_padding, names, *columns, end))
    crc = crc32c(signed)
    raw = signed + crc.to_bytes(CRC_BYTES, "little")
    batch = Batch(raw)
    batch.crc = crc
    batch.last = batch.base + count - 1
    if indices is None:
        batch.indices, batch.index_highest = _NO_INDICES, -1
    else:
        batch.indices = np.frombuffer(raw, _U32, numbers, numbers_at)
        numbers_at += size + len(padding)
    batch.values = np.frombuffer(raw, _F32, numbers, numbers_at)
    return batch


def _too_large(length: int) -> Refused:
    return Refused(
        ErrorCode.TOO_LARGE,
        f"a batch of {length} bytes is above a frame's {FRAME_PAYLOAD_BYTES_MAX}: send fewer at once",
    )


@lru_cache(maxsize=1024)
def _one_name(name: str) -> tuple[int, bytes]:
    """The table of one name: its length, and its bytes up to where the next column begins."""
    names = name_table([name])
    return len(names), names + _PADDING[len(names) % ALIGNMENT]


def _add_clock(columns: dict[Column, bytes], clock: Iterable[Dot]) -> None:
    entries = sorted(clock)
    if entries:
        columns[Column.CLOCK] = b"".join(CLOCK_ENTRY.pack(*entry) for entry in entries)


def _add_texts(columns: dict[Column, bytes], texts: Sequence[str]) -> None:
    columns[Column.KEYS], columns[Column.KEY_ENDS] = _texts(texts)


def _texts(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """Texts end to end, and where each ends."""
    whole = "".join(texts)
    if whole.isascii():
        return whole.encode("ascii"), _ends(map(len, texts))
    encoded = [text.encode() for text in texts]
    return b"".join(encoded), _ends(map(len, encoded))


def _ends(sizes: Iterable[int]) -> bytes:
    stops = list(accumulate(sizes))
    return struct.pack(f"<{len(stops)}I", *stops)


def _add_namespaces(columns: dict[Column, bytes], namespaces: Sequence[str]) -> None:
    table = {name: place for place, name in enumerate(dict.fromkeys(namespaces))}
    columns[Column.NAMESPACES] = name_table(table)
    if len(table) > 1:
        columns[Column.NAMESPACE_INDEX] = struct.pack(
            f"<{len(namespaces)}H", *(table[name] for name in namespaces)
        )


def _add_kinds(columns: dict[Column, bytes], deltas: Sequence[Delta]) -> int:
    kinds = bytes(delta.operation.kind for delta in deltas)
    present = set(kinds)
    if len(present) > 1:
        columns[Column.KINDS] = kinds
    mask = 0
    for kind in present:
        mask |= 1 << kind
    return mask


def _add_ids(columns: dict[Column, bytes], deltas: Sequence[Delta]) -> None:
    ids = [delta.id for delta in deltas if delta.id is not None]
    if not ids:
        return
    if len(ids) != len(deltas):
        row = next(row for row, delta in enumerate(deltas) if delta.id is None)
        raise InvalidDelta(
            "id", "missing, while other rows have one: give all rows of a batch an id or none", row=row
        )
    columns[Column.IDS] = b"".join(ids)


def _add_exceptions(
    columns: dict[Column, bytes], deltas: Sequence[Delta], places: Sequence[tuple[int, int, Place]]
) -> None:
    parents: list[bytes] = []
    place_of = {parent: place for _, parent, place in places}
    named = 0
    tags: list[bytes] = []
    expects: list[bytes] = []
    names: dict[str, int] = {}
    for row, delta in enumerate(deltas):
        for parent in delta.parents:
            if isinstance(parent, bytes):
                parents.append(PARENT.pack(row, 1, parent))
            else:
                parents.append(PARENT.pack(row, 0, CLOCK_ENTRY.pack(*parent)))
            if (place := place_of.get(named)) is not None:
                parents.append(PARENT.pack(row, PLACE_FORM, PLACE.pack(*place)))
            named += 1
        tags.extend(TAG.pack(row, names.setdefault(tag, len(names))) for tag in delta.topics)
        if delta.expect is not None:
            expects.append(EXPECT.pack(row, 0, *delta.expect))
    if parents:
        columns[Column.PARENTS] = b"".join(parents)
    if tags:
        columns[Column.TAG_NAMES] = name_table(names)
        columns[Column.TAGS] = b"".join(tags)
    if expects:
        columns[Column.EXPECTS] = b"".join(expects)


def _add_payload(columns: dict[Column, bytes], deltas: Sequence[Delta]) -> int:
    """Add numbers, indices and bytes; return the rows' common dimension, 0 where there is none."""
    sizes, values, indices, blobs, dimensions = [], [], [], [], set()
    for delta in deltas:
        operation = delta.operation
        numbers = operation.values
        sizes.append(0 if numbers is None else len(numbers))
        if numbers is not None:
            values.append(numbers.astype("<f4", copy=False).tobytes())
        if operation.indices is not None:
            indices.append(operation.indices.astype("<u4", copy=False).tobytes())
        if operation.kind in (Kind.CREATE, Kind.DENSE):
            dimensions.add(sizes[-1])
        blobs.append(operation.data)
    if len(set(sizes)) > 1:
        columns[Column.VALUE_ENDS] = _ends(sizes)
    if values:
        columns[Column.VALUES] = b"".join(values)
    if indices:
        columns[Column.INDICES] = b"".join(indices)
    if any(blobs):
        columns[Column.BLOBS] = b"".join(blobs)
        columns[Column.BLOB_ENDS] = _ends(map(len, blobs))
    return dimensions.pop() if len(dimensions) == 1 else 0


def _add_metadata(columns: dict[Column, bytes], deltas: Sequence[Delta]) -> None:
    if all(delta.metadata is None for delta in deltas):
        return
    packed = [b"" if delta.metadata is None else _pack(delta.metadata) for delta in deltas]
    columns[Column.METADATA] = b"".join(packed)
    columns[Column.METADATA_ENDS] = _ends(map(len, packed))


def _pack(metadata: Any) -> bytes:
    if isinstance(metadata, PackedMetadata):
        return metadata.packed
    return bytes(msgpack.packb(dict(metadata)))
