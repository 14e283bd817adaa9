"""Encodes deltas into a batch, once; from then on the same bytes are sent, stored and delivered.

Checks nothing that `validate.py` checks: callers validate first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from delta_prop_wire.batch import Batch
from delta_prop_wire.control_rows import add_type, pack_refused
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, ParentPosition, Priority
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.layout import (
    BODY_HEADER,
    CLOCK_ENTRY,
    COLUMN_MASK,
    EXPECT,
    NAME_LENGTH,
    PARENT,
    POSITION,
    POSITION_FORM,
    TAG,
    Column,
)
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
    from delta_prop_core import PackedRows
    from numpy.typing import NDArray

_ATTRIBUTE_OF = {
    Column.IDS: Attribute.IDS,
    Column.PARENTS: Attribute.PARENTS,
    Column.CLOCK: Attribute.CLOCK,
    Column.KINDS: Attribute.MIXED_KINDS,
    Column.NAMESPACE_INDEX: Attribute.MIXED_NAMESPACES,
    Column.ROW_OFFSETS: Attribute.ROW_OFFSETS,
    Column.COUNTERS: Attribute.COUNTER_GAPS,
    Column.STATE_ORIGINS: Attribute.STATE_ROWS,
}
_ZEROS = bytes(ALIGNMENT)
_LARGE_BYTES = 64 * 1024
"""From this many bytes on it is faster to checksum the parts one by one than to join them first."""
_TEXT = {str}


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
    parent_positions: Sequence[tuple[int, int, ParentPosition]] = (),
) -> Batch:
    """Encode deltas under the dots (origin, base), (origin, base + 1), … or, with gaps, under `counters`.

    `clock` holds the entries of other origins that changed since this origin's previous batch.
    `parent_positions`: (row, index among all parents, log position) of parents in other partitions. Ignores
    the dot, clock and priority of each delta: they are fields of the batch. Raises InvalidDelta if only some
    rows have ids, Refused (TOO_LARGE) above the frame's bound.
    """
    count = len(deltas)
    if not 1 <= count <= BATCH_ROWS_MAX:
        raise InvalidDelta("batch", f"{count} deltas; a batch holds 1 to {BATCH_ROWS_MAX}: split it")
    if counters is None and row_offsets is None and not previous and not parent_positions:
        packed = _pack_deltas(deltas)
        if packed is not None:
            batch = encode_rows(
                packed,
                origin=origin,
                base=base,
                epoch=epoch,
                clock=clock,
                ack_level=ack_level,
                priority=priority,
                hybrid_time=hybrid_time,
            )
            if batch is not None:
                return batch
    columns, mask, dimension = columns_of(deltas)
    _add_clock(columns, clock)
    _add_ids(columns, deltas)
    if counters is not None:
        columns[Column.COUNTERS] = struct.pack(f"<{count}Q", *counters)
    if row_offsets is not None:
        columns[Column.ROW_OFFSETS] = struct.pack(f"<{count}Q", *row_offsets)
    _add_rare_columns(columns, deltas, parent_positions)
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


def _pack_deltas(deltas: Sequence[Delta]) -> list[PackedRows] | None:
    """Return the deltas as the core packs them; None if it leaves one to Python."""
    pack = core_mode.core.pack_delta
    rows: list[PackedRows] = []
    for delta in deltas:
        row = pack(delta)
        if row is None:
            return None
        rows.append(row)
    return rows


def name_columns(namespaces: Sequence[str], vector_ids: Sequence[str]) -> dict[Column, bytes]:
    """Encode the columns of the rows' vector ids and namespaces."""
    columns: dict[Column, bytes] = {}
    _add_texts(columns, vector_ids)
    _add_namespaces(columns, namespaces)
    return columns


def columns_of(deltas: Sequence[Delta]) -> tuple[dict[Column, bytes], int, int]:
    """Encode names, operations and metadata; return the columns, the mask of kinds and the dimension."""
    columns = name_columns([delta.namespace for delta in deltas], [delta.vector_id for delta in deltas])
    mask = _add_kinds(columns, deltas)
    dimension = _add_payload(columns, deltas)
    _add_metadata(columns, deltas)
    return columns, mask, dimension


def name_table(names: Iterable[str]) -> bytes:
    """Encode a table of names as a column."""
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
    """Encode full vectors, one per row of `matrix` (n × dimension, float32), without a loop over rows.

    With `indices` (same shape, uint32), `matrix` holds the operands of SPARSE or SPARSE_ADD operations.
    """
    pack = core_mode.core.pack_columns
    packed = pack([*keys], matrix, indices, namespace, kind) if ids is None else None
    if packed is not None:
        batch = encode_rows(
            [packed],
            origin=origin,
            base=base,
            epoch=epoch,
            clock=clock,
            ack_level=ack_level,
            priority=priority,
            hybrid_time=hybrid_time,
        )
        if batch is not None:
            return batch
    columns: dict[Column, bytes] = {}
    _add_clock(columns, clock)
    _add_texts(columns, keys)
    columns[Column.NAMESPACES] = name_table([namespace])
    if ids is not None:
        columns[Column.IDS] = b"".join(ids)
    if indices is not None:
        columns[Column.INDICES] = np.ascontiguousarray(indices, "<u4").tobytes()
    columns[Column.VALUES] = np.ascontiguousarray(matrix, "<f4").tobytes()
    batch = assemble(
        columns,
        attributes=ack_level << ACK_LEVEL_SHIFT | priority << PRIORITY_SHIFT,
        count=len(keys),
        origin=origin,
        epoch=epoch,
        base=base,
        hybrid_time=hybrid_time,
        kinds_mask=1 << kind,
        dimension=matrix.shape[1] if indices is None else 0,
    )
    if set(map(type, keys)) == _TEXT:
        batch.keys = list(keys)  # saves decoding, and shares the strings of recurring names
    batch.namespace, batch.namespace_names, batch.values_per_row = namespace, (namespace,), matrix.shape[1]
    return batch


def encode_rows(
    rows: Sequence[PackedRows],
    *,
    origin: int,
    base: int,
    epoch: int = 1,
    clock: Sequence[Dot] = (),
    ack_level: AckLevel,
    priority: Priority,
    hybrid_time: int,
) -> Batch | None:
    """Encode rows that the core has packed, as `encode_batch` does; None if the core does not."""
    attributes = ack_level << ACK_LEVEL_SHIFT | priority << PRIORITY_SHIFT
    header = attributes, origin, epoch, base, hybrid_time
    batch = core_mode.core.encode_rows(rows, header, _pack_clock(clock) if clock else b"")
    if batch is not None and clock:
        batch.validated = False  # callers check clocks
    return batch


def encode_opaque(
    deltas: Sequence[Delta], *, origin: int, base: int, epoch: int, ack_level: AckLevel, priority: Priority
) -> Batch | None:
    """Encode deltas that pass `is_opaque_only`, as `encode_batch` does; None if one has a timestamp."""
    if any(delta.timestamp for delta in deltas):
        return None
    columns = name_columns([delta.namespace for delta in deltas], [delta.vector_id for delta in deltas])
    blobs = [delta.operation.data for delta in deltas]
    if any(blobs):
        columns[Column.BLOBS] = b"".join(blobs)
        columns[Column.BLOB_ENDS] = pack_ends(map(len, blobs))
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


def encode_noop(
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
    first_offsets: Sequence[int | None] | None = None,
    ids: Sequence[bytes] | None = None,
) -> Batch:
    """Encode the no-op record that fills the offsets of refused deltas, one control row per dot.

    `clock`: the refused frame's clock entries, since later frames of the origin send only changes.
    `refused_crc`: the checksum of the refused body, which identifies a duplicate of it. `first_offsets`: the
    offset of the first copy of each row's id, if the ids had been accepted before. `ids`: the refused deltas'
    ids.
    """
    columns: dict[Column, bytes] = {}
    _add_clock(columns, clock)
    if ids is not None:
        columns[Column.IDS] = b"".join(ids)
    if counters is not None:
        columns[Column.COUNTERS] = struct.pack(f"<{count}Q", *counters)
    rows = pack_refused(count, code, refused_crc, first_offsets)
    columns[Column.BLOB_ENDS] = pack_ends(map(len, rows))
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
    """Re-encode a control batch of format 1 of the data directory, with the type at the start of each row."""
    present = [column for column in Column if batch.columns_mask >> column & 1]
    columns = {column: raw for column in present if (raw := batch.column(column)) is not None}
    rows = [add_type(batch.blob(row)) for row in range(batch.count)]
    columns[Column.BLOB_ENDS], columns[Column.BLOBS] = (
        memoryview(pack_ends(map(len, rows))),
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
    """Encode a body from its columns: header, directory, columns, checksum. Raises Refused (TOO_LARGE).

    The elements of a view must be bytes.
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
        raise too_large_error(length)
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
        content_bytes = b"".join((header, directory, *parts))
        return Batch(content_bytes + crc32c(content_bytes).to_bytes(CRC_BYTES, "little"))
    crc = crc32c(directory, crc32c(header))
    for part in parts:
        crc = crc32c(part, crc)
    return Batch(b"".join((header, directory, *parts, crc.to_bytes(CRC_BYTES, "little"))))


def too_large_error(length: int) -> Refused:
    return Refused(
        ErrorCode.TOO_LARGE,
        f"a batch of {length} bytes; the maximum of a frame is {FRAME_PAYLOAD_BYTES_MAX}: "
        "send fewer deltas at once",
    )


def _add_clock(columns: dict[Column, bytes], clock: Iterable[Dot]) -> None:
    if packed := _pack_clock(clock):
        columns[Column.CLOCK] = packed


def _pack_clock(clock: Iterable[Dot]) -> bytes:
    return b"".join(CLOCK_ENTRY.pack(*entry) for entry in sorted(clock))


def _add_texts(columns: dict[Column, bytes], texts: Sequence[str]) -> None:
    columns[Column.KEYS], columns[Column.KEY_ENDS] = pack_texts(texts)


def pack_texts(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the texts end to end, and the end of each."""
    joined = "".join(texts)
    if joined.isascii():
        return joined.encode("ascii"), pack_ends(map(len, texts))
    encoded = [text.encode() for text in texts]
    return b"".join(encoded), pack_ends(map(len, encoded))


def pack_ends(sizes: Iterable[int]) -> bytes:
    stops = list(accumulate(sizes))
    return struct.pack(f"<{len(stops)}I", *stops)


def _add_namespaces(columns: dict[Column, bytes], namespaces: Sequence[str]) -> None:
    table = {name: index for index, name in enumerate(dict.fromkeys(namespaces))}
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
            "id", "missing; other rows of the batch have one: give all rows an id, or none", row=row
        )
    columns[Column.IDS] = b"".join(ids)


def _add_rare_columns(
    columns: dict[Column, bytes],
    deltas: Sequence[Delta],
    parent_positions: Sequence[tuple[int, int, ParentPosition]],
) -> None:
    parents: list[bytes] = []
    position_of = {parent: position for _, parent, position in parent_positions}
    parent_count = 0
    tags: list[bytes] = []
    expects: list[bytes] = []
    names: dict[str, int] = {}
    for row, delta in enumerate(deltas):
        for parent in delta.parents:
            if isinstance(parent, bytes):
                parents.append(PARENT.pack(row, 1, parent))
            else:
                parents.append(PARENT.pack(row, 0, CLOCK_ENTRY.pack(*parent)))
            if (position := position_of.get(parent_count)) is not None:
                parents.append(PARENT.pack(row, POSITION_FORM, POSITION.pack(*position)))
            parent_count += 1
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
    """Add numbers, indices and bytes; return the rows' common dimension, 0 if there is none."""
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
        columns[Column.VALUE_ENDS] = pack_ends(sizes)
    if values:
        columns[Column.VALUES] = b"".join(values)
    if indices:
        columns[Column.INDICES] = b"".join(indices)
    if any(blobs):
        columns[Column.BLOBS] = b"".join(blobs)
        columns[Column.BLOB_ENDS] = pack_ends(map(len, blobs))
    return dimensions.pop() if len(dimensions) == 1 else 0


def _add_metadata(columns: dict[Column, bytes], deltas: Sequence[Delta]) -> None:
    if all(delta.metadata is None for delta in deltas):
        return
    packed = [b"" if delta.metadata is None else _pack_metadata(delta.metadata) for delta in deltas]
    columns[Column.METADATA] = b"".join(packed)
    columns[Column.METADATA_ENDS] = pack_ends(map(len, packed))


def _pack_metadata(metadata: Any) -> bytes:
    if isinstance(metadata, PackedMetadata):
        return metadata.packed
    return bytes(msgpack.packb(dict(metadata)))
