"""The stamp: 48 bytes between frame header and body, never compressed.

Its checksum covers the frame header and the rest of the stamp. A producer fills in stream and partition only.
The log's stamp binds a batch to its offset: it holds the checksum of the previous stamp, so that a missing
or exchanged frame breaks the checksum chain.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from delta_prop_wire.core_mode import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import KnownIds, Priority, Source
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.header import pack_header, unpack_header
from delta_prop_wire.spec import (
    COUNTER_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    PRIORITY_SHIFT,
    STAMP_BYTES,
    VERSION,
    ErrorCode,
    Flag,
    FrameType,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_wire.batch import Batch

_REST = struct.Struct("<IIHBBQQIIQ")
"""leader epoch, stream, partition, source, known ids, append time, Lamport number, previous stamp's CRC,
body CRC, synced offset: 44 bytes, after the stamp's own CRC (u32)."""

_CRC = struct.Struct("<I")
_HEADER = struct.Struct(">BBBBQI")
_STAMP = struct.Struct("<I" + _REST.format.removeprefix("<"))
assert _STAMP.size == STAMP_BYTES
_UNCOMPRESSED_FLAGS = frozenset(
    Flag.BATCHED | more
    for more in (0, Flag.ACK_WANTED, Flag.HIGH_PRIORITY, Flag.ACK_WANTED | Flag.HIGH_PRIORITY)
)
_FLAGS_OF = tuple(int(Flag.BATCHED | (lane <= Priority.HIGH and Flag.HIGH_PRIORITY)) for lane in Priority)
_BATCH = int(FrameType.BATCH)
_SOURCES = tuple(Source)
assert [*map(int, _SOURCES)] == [*range(len(_SOURCES))]
_KNOWN_IDS = tuple(KnownIds)
assert [*map(int, _KNOWN_IDS)] == [*range(len(_KNOWN_IDS))]


@dataclass(slots=True)
class Stamp:
    """The log's facts about a batch. Never changed.

    `lamport` is row 0's; row i has `lamport + i`. `append_time` is in microseconds since 1970, information
    only. `previous_crc` is the `crc` of the previous stamp in the partition, `body_crc` the checksum of the
    batch's body (0: unknown). `synced_offset`: the log had synced all rows below it when it wrote the stamp.
    `leader_epoch`, `stream` and `partition` identify the log. `known_ids`: the share of a forwarded batch's
    ids that had been accepted before it was logged here. `unpack_stamp` sets `crc`, which comparisons ignore.
    """

    lamport: int = 0
    source: Source = Source.LOCAL
    append_time: int = 0
    previous_crc: int = 0
    body_crc: int = 0
    synced_offset: int = 0
    leader_epoch: int = 0
    stream: int = 0
    partition: int = 0
    known_ids: KnownIds = KnownIds.NONE
    crc: int = field(default=0, compare=False)

    @property
    def is_from_producer(self) -> bool:
        """True if a producer wrote it: only stream and partition are set."""
        return self == Stamp(stream=self.stream, partition=self.partition)


PRODUCER_HEAD = struct.Struct(f"<{HEADER_BYTES}sI{_REST.size}s")
"""The head of a producer's frame: header, stamp CRC, rest of the stamp."""


def pack_producer_stamp(header: bytes, partition: int) -> bytes:
    """Return the 48 bytes of a producer's stamp for a frame header (16 bytes, of the uncompressed frame)."""
    rest = pack_producer_rest(partition)
    return _CRC.pack(crc32c(header + rest)) + rest


@lru_cache(maxsize=1024)
def pack_producer_rest(partition: int) -> bytes:
    """Return the bytes after the CRC in a producer's stamp."""
    return _REST.pack(0, 0, partition, *(0,) * 7)


def pack_stamp(stamp: Stamp, header: Buffer) -> bytes:
    """Return the 48 bytes of `stamp` for a frame header (16 bytes, of the uncompressed frame)."""
    rest = _REST.pack(
        stamp.leader_epoch,
        stamp.stream,
        stamp.partition,
        stamp.source,
        stamp.known_ids,
        stamp.append_time,
        stamp.lamport,
        stamp.previous_crc,
        stamp.body_crc,
        stamp.synced_offset,
    )
    return _CRC.pack(crc32c(rest, crc32c(header))) + rest


def unpack_stamp(raw: Buffer, header: Buffer) -> Stamp:
    """Read the 48 bytes that follow a frame header. Raises ProtocolError."""
    view = memoryview(raw)
    stated = stamp_crc(view)
    computed = crc32c(view[_CRC.size :], crc32c(header))
    if stated != computed:
        raise ProtocolError(
            ErrorCode.CHECKSUM,
            f"stamp checksum is {computed:#010x}; the frame states {stated:#010x}: send the frame again",
        )
    epoch, stream, partition, source, known_ids, time, lamport, previous, body, synced_offset = (
        _REST.unpack_from(view, _CRC.size)
    )
    if source >= len(_SOURCES) or known_ids >= len(_KNOWN_IDS):
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"stamp: source {source}, known ids {known_ids}: send source 0 to 3, known ids 0 to 2",
        )
    if lamport > COUNTER_MAX or synced_offset > COUNTER_MAX:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"stamp: Lamport number {lamport}, synced offset {synced_offset}: keep both up to {COUNTER_MAX}",
        )
    rest = (epoch, stream, partition, _KNOWN_IDS[known_ids])
    return Stamp(lamport, _SOURCES[source], time, previous, body, synced_offset, *rest, crc=stated)


def pack_logged_head(
    batch: Batch,
    offset: int,
    *,
    lamport: int,
    source: Source,
    time: int,
    previous_crc: int,
    synced_offset: int,
    known_ids: KnownIds = KnownIds.NONE,
) -> tuple[bytes, int]:
    """Return the 64 bytes that a log writes before a batch's body, and the stamp's checksum.

    Does the same as `codec.encode_head`, in fewer steps. `time` is in microseconds since 1970.
    """
    if not core_mode.is_fast:
        return _pack_logged_head_by_parts(
            batch,
            offset,
            Stamp(lamport, source, time, previous_crc, batch.crc, synced_offset, known_ids=known_ids),
        )
    flags = _FLAGS_OF[batch.attributes >> PRIORITY_SHIFT & 3]
    header = _HEADER.pack(MAGIC, VERSION, _BATCH, flags, offset, STAMP_BYTES + len(batch.raw))
    rest = _REST.pack(0, 0, 0, source, known_ids, time, lamport, previous_crc, batch.crc, synced_offset)
    crc = crc32c(rest, crc32c(header))
    return header + _CRC.pack(crc) + rest, crc


def _pack_logged_head_by_parts(batch: Batch, offset: int, stamp: Stamp) -> tuple[bytes, int]:
    flags = Flag.BATCHED | (Flag.HIGH_PRIORITY if batch.priority <= Priority.HIGH else 0)
    header = pack_header(FrameType.BATCH, flags, offset, STAMP_BYTES + len(batch.raw))
    packed = pack_stamp(stamp, header)
    return header + packed, stamp_crc(packed)


def unpack_logged_head(raw: Buffer) -> tuple[int, int, Stamp] | None:
    """Read sequence, payload length and stamp from the 64-byte head of an uncompressed BATCH frame in a log.

    Does the same as `unpack_header` and `unpack_stamp`, in fewer steps; None for any other or invalid frame,
    for which these two functions raise the error.
    """
    view = memoryview(raw)
    if not core_mode.is_fast:
        return _unpack_logged_head_by_parts(view)
    magic, version, kind, flags, sequence, length = _HEADER.unpack_from(view)
    stated, epoch, stream, partition, source, known_ids, time, lamport, previous, body, synced_offset = (
        _STAMP.unpack_from(view, HEADER_BYTES)
    )
    if stated != crc32c(
        view[HEADER_BYTES + _CRC.size : HEADER_BYTES + STAMP_BYTES], crc32c(view[:HEADER_BYTES])
    ):
        return None
    if magic != MAGIC or version != VERSION or kind != _BATCH or flags not in _UNCOMPRESSED_FLAGS:
        return None
    if length > FRAME_PAYLOAD_BYTES_MAX or length < STAMP_BYTES:
        return None
    if (
        source >= len(_SOURCES)
        or known_ids >= len(_KNOWN_IDS)
        or lamport > COUNTER_MAX
        or synced_offset > COUNTER_MAX
    ):
        return None
    rest = (epoch, stream, partition, _KNOWN_IDS[known_ids], stated)
    stamp = Stamp(lamport, _SOURCES[source], time, previous, body, synced_offset, *rest)
    return sequence, length, stamp


def _unpack_logged_head_by_parts(view: memoryview) -> tuple[int, int, Stamp] | None:
    try:
        header = unpack_header(view)
        stamp = unpack_stamp(view[HEADER_BYTES : HEADER_BYTES + STAMP_BYTES], view[:HEADER_BYTES])
    except ProtocolError:
        return None
    is_plain = header.type is FrameType.BATCH and not header.flags & Flag.COMPRESSED
    return (header.sequence, header.length, stamp) if is_plain else None


def stamp_crc(raw: Buffer) -> int:
    """Read the checksum of a packed stamp; the next stamp holds it as `previous_crc`."""
    return int(_CRC.unpack_from(raw)[0])
