"""The methods of the fast core: each takes what is usual and valid, and leaves all else to the general way.

Pure.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgpack

from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import SMALLEST_BODY_BYTES
from delta_prop_wire.control_values import read_cursor
from delta_prop_wire.core import Core
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, Kind, KnownIds, Operation, Priority, Source
from delta_prop_wire.fast.encoders import encode_columns, encode_opaque, pack_ascii_keys
from delta_prop_wire.fast.frame_runs import take_run
from delta_prop_wire.fast.heterogeneous import decode_heterogeneous, heterogeneous_is_intact
from delta_prop_wire.fast.homogeneous import homogeneous_is_intact, homogeneous_is_valid
from delta_prop_wire.fast.row_templates import encode_row, learn_template, parse_with_template
from delta_prop_wire.frames import Ack
from delta_prop_wire.packing import pack
from delta_prop_wire.spec import (
    COUNTER_MAX,
    CRC_BYTES,
    DELTA_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    NAMESPACE_BYTES_MAX,
    PRIORITY_SHIFT,
    STAMP_BYTES,
    VECTOR_ID_BYTES_MAX,
    VERSION,
    Flag,
    FrameType,
)
from delta_prop_wire.stamp import Stamp

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OPAQUE = Kind.OPAQUE
_PREFIXES = tuple(
    bytes((MAGIC, VERSION, FrameType.BATCH, Flag.BATCHED | (lane <= Priority.HIGH and Flag.HIGH_PRIORITY)))
    for lane in Priority
)
"""The first four bytes of a logged frame, by its priority."""
_HEADER = struct.Struct(">4sQI")
_PRODUCED_STAMP = struct.Struct("<10xBBQQIIQ")
"""The stamp after its checksum, if leader epoch, stream and partition are 0."""
_STAMP = struct.Struct("<IIIHBBQQIIQ")
assert _STAMP.size == STAMP_BYTES
_UNCOMPRESSED_PREFIXES = frozenset(
    prefix[:3] + bytes((prefix[3] | more,)) for prefix in _PREFIXES for more in (0, Flag.ACK_WANTED)
)
_SOURCES, _KNOWN_IDS = tuple(Source), tuple(KnownIds)
_NO_EXTRAS = (None, None, None, None, False, 0, 0)
_SHORT_BYTES_MAX = 64
_ONE_FIELD = 0x81
"""The lead byte of a map of one field."""


class FastCore(Core):
    """The fast core. Its methods do what those of `Core` say."""

    __slots__ = ()

    encode_columns = staticmethod(encode_columns)
    encode_opaque = staticmethod(encode_opaque)
    encode_row = staticmethod(encode_row)
    pack_keys = staticmethod(pack_ascii_keys)
    take_run = staticmethod(take_run)

    def parse_batch(self, body: bytes | memoryview) -> Batch | None:
        parsed = parse_with_template(body)
        if parsed is not None or len(body) < SMALLEST_BODY_BYTES:
            return parsed
        batch = Batch(body)
        if not batch.homogeneous:
            return batch if heterogeneous_is_intact(batch) else None
        if not homogeneous_is_intact(batch):
            return None
        learn_template(batch)
        return batch

    def batch_is_valid(self, batch: Batch) -> bool:
        if batch.validated:
            return True
        return homogeneous_is_valid(batch) if batch.homogeneous else decode_heterogeneous(batch)

    def is_opaque_only(self, delta: Delta) -> bool:
        operation = delta.operation
        if type(operation) is not Operation or operation.kind is not _OPAQUE:
            return False
        data, key, namespace = operation.data, delta.vector_id, delta.namespace
        return (
            operation.values is None
            and operation.indices is None
            and type(data) is bytes
            and len(data) <= DELTA_BYTES_MAX
            and delta.metadata is None
            and delta.id is None
            and delta.dot is None
            and delta.expect is None
            and delta.parents == ()
            and delta.clock == ()
            and delta.topics == ()
            and type(delta.timestamp) is int
            and 0 <= delta.timestamp < 1 << 64
            and type(delta.priority) is Priority
            and type(delta.source) is Source
            and type(key) is str
            and type(namespace) is str
            and key.isascii()
            and key.isprintable()
            and 0 < len(key) <= VECTOR_ID_BYTES_MAX
            and namespace.isascii()
            and namespace.isprintable()
            and 0 < len(namespace) <= NAMESPACE_BYTES_MAX
        )

    def pack_logged_head(
        self,
        batch: Batch,
        offset: int,
        *,
        lamport: int,
        source: Source,
        time: int,
        previous_crc: int,
        synced_offset: int,
        known_ids: KnownIds,
    ) -> tuple[bytes, int]:
        prefix = _PREFIXES[batch.attributes >> PRIORITY_SHIFT & 3]
        header = _HEADER.pack(prefix, offset, STAMP_BYTES + len(batch.raw))
        rest = _PRODUCED_STAMP.pack(source, known_ids, time, lamport, previous_crc, batch.crc, synced_offset)
        crc = crc32c(header + rest)
        return header + crc.to_bytes(CRC_BYTES, "little") + rest, crc

    def unpack_logged_head(self, raw: Buffer) -> tuple[int, int, Stamp] | None:
        view = memoryview(raw)
        prefix, sequence, length = _HEADER.unpack_from(view)
        stated, epoch, stream, partition, source, known_ids, time, lamport, previous, body, synced_offset = (
            _STAMP.unpack_from(view, HEADER_BYTES)
        )
        rest = view[HEADER_BYTES + CRC_BYTES : HEADER_BYTES + STAMP_BYTES]
        if (
            stated != crc32c(rest, crc32c(view[:HEADER_BYTES]))
            or prefix not in _UNCOMPRESSED_PREFIXES
            or not STAMP_BYTES <= length <= FRAME_PAYLOAD_BYTES_MAX
            or source >= len(_SOURCES)
            or known_ids >= len(_KNOWN_IDS)
            or lamport > COUNTER_MAX
            or synced_offset > COUNTER_MAX
        ):
            return None
        log = epoch, stream, partition, _KNOWN_IDS[known_ids], stated
        return sequence, length, Stamp(lamport, _SOURCES[source], time, previous, body, synced_offset, *log)

    def pack_ack(self, ack: Ack) -> bytes | None:
        """Pack an Ack that holds only ranges and credit, as most Acks of a server do."""
        extras = (
            ack.cursor, ack.processed, ack.correlation_id, ack.response, ack.more, ack.stream, ack.partition
        )  # fmt: skip
        if ack.credit is None or not ack.ranges or extras != _NO_EXTRAS:
            return None
        return pack({"ranges": ack.ranges, "credit": ack.credit})

    def unpack_ack(self, sequence: int, payload: Buffer) -> Ack | None:
        """Read an Ack of only a cursor, as most of subscribers are, without a check of its structure."""
        raw = memoryview(payload)
        if not 0 < len(raw) <= _SHORT_BYTES_MAX or raw[0] != _ONE_FIELD:
            return None
        try:
            return Ack(sequence, cursor=read_cursor(msgpack.unpackb(raw).get("cursor")))
        except ValueError:  # the general way finds and reports the fault, if there is one
            return None
