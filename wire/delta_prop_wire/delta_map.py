"""One delta as a msgpack map: the payload of a Delta frame, without its checksum.

Structure is checked here, and its breach ends the connection (PeerError); the bounds of the delta itself
are `validate.py`'s, whose refusal ends the delta alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from delta_prop_wire.delta import (
    ABSENT,
    AckLevel,
    Delta,
    Dot,
    Kind,
    Operation,
    Priority,
    Source,
    namespace_of,
)
from delta_prop_wire.packing import (
    U16_MAX,
    U32_MAX,
    Fields,
    blob,
    list_of,
    mapping,
    one_of,
    pack_map,
    record,
    text,
    uint,
    unpack_map,
)
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX, COUNTER_MAX, DELTA_BYTES_MAX, DELTA_ID_BYTES
from delta_prop_wire.topics import KIND_MAX

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ONE_NUMBER = frozenset({Kind.SCALE, Kind.OFFSET})
_SPARSE = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
_VALUES = _ONE_NUMBER | _SPARSE | {Kind.CREATE, Kind.DENSE}
_BARE = frozenset({Kind.DELETE, Kind.METADATA})

_text = text(DELTA_BYTES_MAX)
_bytes = blob(0, DELTA_BYTES_MAX)
_id = blob(DELTA_ID_BYTES, DELTA_ID_BYTES)
_counter = uint(COUNTER_MAX, least=1)
_lamport = uint(COUNTER_MAX)
_u64 = uint()
_stream = uint(U32_MAX)
_partition = uint(U16_MAX)
_pair = record(_u64, _counter)
_kind = uint(KIND_MAX)
_priority = one_of(Priority)
_source = one_of(Source)
_ack_level = one_of(AckLevel)
_topics = list_of(_text, CLOCK_ENTRIES_MAX)


class DeltaMap(NamedTuple):
    """What a map holds: the delta, what its acknowledgement is to promise (None: the default), from a log its
    Lamport number, and the stream and partition it belongs to.
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
    """The map of `delta`."""
    operation = delta.operation
    origin, counter = delta.dot or (None, None)
    has_values, has_data = _parts(operation.kind)
    return pack_map(
        {
            "vector_id": delta.vector_id,
            "namespace": delta.namespace,
            "op": int(operation.kind),
            "values": _raw(operation.values, "<f4") if has_values else None,
            "indices": _raw(operation.indices, "<u4") if operation.kind in _SPARSE else None,
            "data": operation.data if has_data else None,
            "id": delta.id,
            "origin": origin,
            "counter": counter,
            "parents": list(delta.parents) or None,
            "clock": sorted(delta.clock) or None,
            "timestamp": delta.timestamp or None,
            "priority": None if delta.priority is Priority.NORMAL else int(delta.priority),
            "source": None if delta.source is Source.LOCAL else int(delta.source),
            "metadata": delta.metadata,
            "topics": list(delta.topics) or None,
            "expect": delta.expect,
            "ack_level": None if ack_level is None else int(ack_level),
            "lamport": lamport,
            "stream": stream or None,
            "partition": partition,
        }
    )


def unpack_delta(packed: Buffer) -> DeltaMap:
    """Read a map. Raises PeerError, naming the field."""
    fields = unpack_map("Delta", packed)
    vector_id = fields.need("vector_id", _text)
    delta = Delta(
        vector_id=vector_id,
        operation=_unpack_operation(fields),
        namespace=fields.get("namespace", _text, None) or namespace_of(vector_id),
        id=fields.get("id", _id, None),
        dot=_unpack_dot(fields),
        parents=fields.get("parents", _parents, ()),
        clock=fields.get("clock", _clock, ()),
        timestamp=fields.get("timestamp", _u64, 0),
        priority=fields.get("priority", _priority, Priority.NORMAL),
        source=fields.get("source", _source, Source.LOCAL),
        metadata=fields.get("metadata", mapping, None),
        topics=fields.get("topics", _topics, ()),
        expect=fields.get("expect", _expect, None),
    )
    return DeltaMap(
        delta,
        fields.get("ack_level", _ack_level, None),
        fields.get("lamport", _lamport, None),
        fields.get("stream", _stream, 0),
        fields.get("partition", _partition, None),
    )


def _parts(kind: int) -> tuple[bool, bool]:
    """Whether an operation of this kind has values, and whether it has data."""
    return kind in _VALUES, kind not in _VALUES and kind not in _BARE


def _unpack_operation(fields: Fields) -> Operation:
    kind = fields.need("op", _kind)
    has_values, has_data = _parts(kind)
    wanted = {"values": has_values, "indices": kind in _SPARSE, "data": has_data}
    for name, belongs in wanted.items():
        if not belongs and name in fields:
            fields.refuse(name, f"does not belong to operation {kind}: leave it out")
    if has_data:
        return Operation(kind, data=fields.need("data", _bytes))
    if not has_values:
        return Operation(kind)
    values = np.frombuffer(fields.need("values", _words), "<f4")
    if kind in _ONE_NUMBER and len(values) != 1:
        fields.refuse("values", f"holds {len(values)} numbers; operation {kind} has one")
    if kind not in _SPARSE:
        return Operation(kind, values)
    indices = np.frombuffer(fields.need("indices", _words), "<u4")
    if len(indices) != len(values):
        fields.refuse("indices", f"holds {len(indices)} numbers beside {len(values)} values")
    return Operation(kind, values, indices)


def _unpack_dot(fields: Fields) -> Dot | None:
    if "origin" not in fields and "counter" not in fields:
        return None
    return Dot(fields.need("origin", _u64), fields.need("counter", _counter))


def _words(value: Any) -> bytes:
    raw = _bytes(value)
    if len(raw) % 4:
        raise ValueError(f"has {len(raw)} bytes, not a multiple of 4")
    return raw


def _dot(value: Any) -> Dot:
    return Dot(*_pair(value))


def _expect(value: Any) -> Dot:
    return ABSENT if value == [*ABSENT] else _dot(value)


def _parent(value: Any) -> Dot | bytes:
    return _id(value) if isinstance(value, bytes) else _dot(value)


_parents = list_of(_parent, CLOCK_ENTRIES_MAX)
_dots = list_of(_dot, CLOCK_ENTRIES_MAX)


def _clock(value: Any) -> tuple[Dot, ...]:
    entries = _dots(value)
    if any(a.origin >= b.origin for a, b in pairwise(entries)):
        raise ValueError("is not sorted by origin, each once")
    return entries


def _raw(numbers: Any, dtype: str) -> bytes:
    return bytes(numbers.astype(dtype, copy=False).tobytes())
