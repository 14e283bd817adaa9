"""One delta as a msgpack map: the payload of a Delta frame, without its checksum.

A map that cannot be read as a delta raises ProtocolError, which ends the connection. A readable delta is
returned even if it breaks bounds: `validate.py` checks them, as for batches, and refuses only the delta.
Metadata stays packed, since its bytes are checked and logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Kind,
    Operation,
    Priority,
    Source,
    namespace_of,
)
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.packed_metadata import PackedMetadata, read_packed
from delta_prop_wire.packing import (
    ITEMS_MAX,
    U16_MAX,
    U32_MAX,
    Fields,
    blob,
    list_of,
    one_of,
    pack_map,
    record,
    text,
    uint,
    unpack_map,
)
from delta_prop_wire.spec import COUNTER_MAX, DELTA_ID_BYTES, FRAME_PAYLOAD_BYTES_MAX, ErrorCode
from delta_prop_wire.topics import KIND_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
_VALUE_KINDS = _SPARSE_KINDS | {Kind.SCALE, Kind.OFFSET, Kind.CREATE, Kind.DENSE}
_NO_OPERAND_KINDS = frozenset({Kind.DELETE, Kind.METADATA})

_read_text = text(FRAME_PAYLOAD_BYTES_MAX)
_read_bytes = blob(0, FRAME_PAYLOAD_BYTES_MAX)
_read_id = blob(DELTA_ID_BYTES, DELTA_ID_BYTES)
_read_counter = uint(COUNTER_MAX, minimum=1)
_read_lamport = uint(COUNTER_MAX)
_read_u64 = uint()
_read_pair = record(_read_u64, _read_u64)
_read_stream = uint(U32_MAX)
_read_partition = uint(U16_MAX)
_read_kind = uint(KIND_MAX)
_read_priority = one_of(Priority)
_read_source = one_of(Source)
_read_ack_level = one_of(AckLevel)
_NIL = b"\xc0"
_read_topics = list_of(_read_text, ITEMS_MAX)
_METADATA_KEYS = frozenset(
    head + b"metadata" for head in (b"\xa8", b"\xd9\x08", b"\xda\0\x08", b"\xdb\0\0\0\x08")
)
"""The key "metadata" in each of its msgpack encodings."""


class DeltaMap(NamedTuple):
    """The content of a map: the delta and its addressing.

    `ack_level`: None for the server's default. `lamport`: the delta's Lamport number, in maps from a log.
    `stream`, `partition`: the log that it belongs to; `partition` None: that of the delta's origin.
    """

    delta: Delta
    ack_level: AckLevel | None
    lamport: int | None
    stream: int
    partition: int | None


def pack_delta(
    delta: Delta,
    ack_level: AckLevel | None = None,
    lamport: int | None = None,
    stream: int = 0,
    partition: int | None = None,
) -> bytes:
    """Pack a delta as a map."""
    operation = delta.operation
    origin, counter = delta.dot or (None, None)
    has_values, has_data = _payload_parts(operation.kind)
    return pack_map(
        {
            "vector_id": delta.vector_id,
            "namespace": delta.namespace,
            "op": int(operation.kind),
            "values": _to_bytes(operation.values, "<f4") if has_values else None,
            "indices": _to_bytes(operation.indices, "<u4") if operation.kind in _SPARSE_KINDS else None,
            "data": operation.data if has_data else None,
            "id": delta.id,
            "origin": origin,
            "counter": counter,
            "parents": list(delta.parents) or None,
            "clock": sorted(delta.clock) or None,
            "timestamp": delta.timestamp or None,
            "priority": None if delta.priority is Priority.NORMAL else int(delta.priority),
            "source": None if delta.source is Source.LOCAL else int(delta.source),
            "metadata": None if delta.metadata is None else dict(delta.metadata),
            "topics": list(delta.topics) or None,
            "expect": delta.expect,
            "ack_level": None if ack_level is None else int(ack_level),
            "lamport": lamport,
            "stream": stream or None,
            "partition": partition,
        }
    )


def unpack_delta(packed: Buffer) -> DeltaMap:
    """Read the map of a Delta frame. Raises ProtocolError, naming the field."""
    rest, patch = _split_metadata(bytes(packed))
    fields = unpack_map("Delta", rest)
    vector_id = fields.require("vector_id", _read_text)
    lamport = fields.get("lamport", _read_lamport, None)
    delta = Delta(
        vector_id=vector_id,
        operation=_unpack_operation(fields),
        namespace=_read_namespace(fields, vector_id),
        id=fields.get("id", _read_id, None),
        dot=_unpack_dot(fields),
        parents=fields.get("parents", _read_parents, ()),
        clock=fields.get("clock", _read_clock, ()),
        timestamp=fields.get("timestamp", _read_u64, 0),
        priority=fields.get("priority", _read_priority, Priority.NORMAL),
        source=fields.get("source", _read_source, Source.LOCAL),
        metadata=None if patch is None else _read_metadata(patch, is_logged=lamport is not None),
        topics=fields.get("topics", _read_topics, ()),
        expect=fields.get("expect", _read_dot, None),
    )
    return DeltaMap(
        delta,
        fields.get("ack_level", _read_ack_level, None),
        lamport,
        fields.get("stream", _read_stream, 0),
        fields.get("partition", _read_partition, None),
    )


def _split_metadata(packed: bytes) -> tuple[bytes, bytes | None]:
    """Return the map without its metadata, and the packed metadata or None if the map has none.

    A map that is malformed or has the key twice is returned whole; `unpack_map` then refuses it.
    """
    if b"metadata" not in packed:
        return packed, None
    unpacker = msgpack.Unpacker(read_size=len(packed), max_buffer_size=len(packed))
    unpacker.feed(packed)
    entries: list[tuple[int, int, int]] = []
    try:
        count = unpacker.read_map_header()
        members_start = start = unpacker.tell()
        for _ in range(count):
            unpacker.skip()
            value_start = unpacker.tell()
            unpacker.skip()
            end = unpacker.tell()
            if packed[start:value_start] in _METADATA_KEYS:
                entries.append((start, value_start, end))
            start = end
    except (ValueError, msgpack.UnpackException):
        return packed, None
    if len(entries) != 1:
        return packed, None
    start, value_start, end = entries[0]
    head: bytes = msgpack.Packer().pack_map_header(count - 1)
    patch = packed[value_start:end]
    return head + packed[members_start:start] + packed[end:], None if patch == _NIL else patch


def _read_metadata(packed: bytes, *, is_logged: bool) -> PackedMetadata | dict[str, Any]:
    """Read a metadata change. One from a producer is returned packed, for `validate.py` to check."""
    try:
        members = read_packed(packed)
    except ValueError as error:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, f"Delta: field 'metadata' is not a msgpack map ({error}): send one map"
        ) from None
    if not is_logged:
        return PackedMetadata(packed)
    if members is None:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, "Delta: field 'metadata' breaks the bounds of a log: shorten or flatten it"
        )
    return members


def _read_namespace(fields: Fields, vector_id: str) -> str:
    namespace = fields.get("namespace", _read_text, None)
    return namespace_of(vector_id) if namespace is None else namespace


def _payload_parts(kind: int) -> tuple[bool, bool]:
    """Return (has values, has data) for operations of this kind."""
    return kind in _VALUE_KINDS, kind not in _VALUE_KINDS and kind not in _NO_OPERAND_KINDS


def _unpack_operation(fields: Fields) -> Operation:
    """Return the operation with all operands in the map, even those that its kind does not have.

    An absent operand is empty. Refuses indices that do not pair with values.
    """
    kind = fields.require("op", _read_kind)
    values = _read_numbers(fields, "values", "<f4")
    indices = _read_numbers(fields, "indices", "<u4")
    index_count = len(values) if kind in _SPARSE_KINDS else 0
    if len(indices) != index_count:
        fields.refuse("indices", f"holds {len(indices)} numbers: send {index_count} with operation {kind}")
    has_values = kind in _VALUE_KINDS or len(values)
    return Operation(
        kind,
        values if has_values else None,
        indices if kind in _SPARSE_KINDS else None,
        fields.get("data", _read_bytes, b""),
    )


def _read_numbers(fields: Fields, name: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(fields.get(name, _read_words, b""), dtype)


def _unpack_dot(fields: Fields) -> Dot | None:
    if "origin" not in fields and "counter" not in fields:
        return None
    return Dot(fields.require("origin", _read_u64), fields.require("counter", _read_counter))


def _read_words(value: Any) -> bytes:
    raw = _read_bytes(value)
    if len(raw) % 4:
        raise ValueError(f"has {len(raw)} bytes: send a multiple of 4")
    return raw


def _read_dot(value: Any) -> Dot:
    return Dot(*_read_pair(value))


def _read_parent(value: Any) -> Dot | bytes:
    return _read_id(value) if isinstance(value, bytes) else _read_dot(value)


_read_parents = list_of(_read_parent, ITEMS_MAX)
_read_clock = list_of(_read_dot, ITEMS_MAX)


def _to_bytes(numbers: Any, dtype: str) -> bytes:
    return bytes(numbers.astype(dtype, copy=False).tobytes())
