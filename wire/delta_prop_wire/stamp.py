"""The stamp: 48 bytes between frame header and body, never compressed.

Its checksum covers the frame header and the rest of the stamp. A producer fills in stream and partition only.
The log's stamp binds a batch to its offset: it holds the checksum of the previous stamp, so that a missing
or exchanged frame breaks the checksum chain.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import KnownIds, Priority, Source
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.header import pack_header
from delta_prop_wire.spec import (
    COUNTER_MAX,
    STAMP_BYTES,
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
_SOURCES = tuple(Source)
assert [*map(int, _SOURCES)] == [*range(len(_SOURCES))]
_KNOWN_IDS = tuple(KnownIds)
assert [*map(int, _KNOWN_IDS)] == [*range(len(_KNOWN_IDS))]


class LogName(NamedTuple):
    """The name of a log: the id of its stream, and its number among the stream's partitions."""

    stream: int = 0
    partition: int = 0


DEFAULT_LOG = LogName()


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


class LoggedRun(NamedTuple):
    """Batches with their offsets and stamps.

    `parts`: the bytes to write, head and body of each in turn. `size`: their number of bytes. `crc`: the
    checksum of the last stamp. `entries`: for the index of the segment, offset and position of a frame, and
    the checksum of the stamp before it.
    """

    batches: list[LoggedBatch]
    parts: list[Buffer]
    size: int
    crc: int
    entries: list[tuple[int, int, int]]


def pack_producer_stamp(header: bytes, log: LogName) -> bytes:
    """Return the 48 bytes of a producer's stamp for a frame header (16 bytes, of the uncompressed frame)."""
    rest = pack_producer_rest(log)
    return _CRC.pack(crc32c(header + rest)) + rest


@lru_cache(maxsize=1024)
def pack_producer_rest(log: LogName) -> bytes:
    """Return the bytes after the CRC in a producer's stamp."""
    return _REST.pack(0, *log, *(0,) * 7)


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
    log: LogName = DEFAULT_LOG,
) -> tuple[bytes, int]:
    """Return the 64 bytes that a log writes before a batch's body, and the stamp's checksum.

    `time` is in microseconds since 1970.
    """
    packed_head = core_mode.core.pack_logged_head(
        batch, offset, lamport=lamport, source=source, time=time, previous_crc=previous_crc,
        synced_offset=synced_offset, known_ids=known_ids, log=log,
    )  # fmt: skip
    if packed_head is not None:
        return packed_head
    flags = Flag.BATCHED | (Flag.HIGH_PRIORITY if batch.priority <= Priority.HIGH else 0)
    header = pack_header(FrameType.BATCH, flags, offset, STAMP_BYTES + len(batch.raw))
    rest = _REST.pack(0, *log, source, known_ids, time, lamport, previous_crc, batch.crc, synced_offset)
    crc = crc32c(header + rest)
    return header + _CRC.pack(crc) + rest, crc


def log_run(
    batches: list[Batch],
    offset: int,
    *,
    lamport: int,
    source: Source,
    time: int,
    previous_crc: int,
    synced_offset: int,
    index: tuple[int, int, int],
    log: LogName = DEFAULT_LOG,
) -> LoggedRun:
    """Give batches their offsets and stamps, one after the other, as `pack_logged_head` does.

    `index`: the size of the segment, the size from which on the next frame has an entry in its index, and the
    distance of entries.
    """
    run = core_mode.core.log_run(
        batches, offset, lamport=lamport, source=source, time=time, previous_crc=previous_crc,
        synced_offset=synced_offset, index=index, log=log,
    )  # fmt: skip
    if run is not None:
        return run
    logged_batches: list[LoggedBatch] = []
    parts: list[Buffer] = []
    entries: list[tuple[int, int, int]] = []
    start, due, step = index
    position = start
    for batch in batches:
        if position >= due:
            entries.append((offset, position, previous_crc))
            due = position + step
        head, previous_crc = pack_logged_head(
            batch, offset, lamport=lamport, source=source, time=time, previous_crc=previous_crc,
            synced_offset=synced_offset, log=log,
        )  # fmt: skip
        logged_batches.append(LoggedBatch(batch, offset, lamport, source, head))
        parts += (head, batch.raw)
        position += batch.size
        offset += batch.count
        lamport += batch.count
    return LoggedRun(logged_batches, parts, position - start, previous_crc, entries)


def stamp_crc(raw: Buffer) -> int:
    """Read the checksum of a packed stamp; the next stamp holds it as `previous_crc`."""
    return int(_CRC.unpack_from(raw)[0])
