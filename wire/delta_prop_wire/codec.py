"""Frames to bytes and back: `encode`, `decode`, and `Decoder` for a stream of chunks.

Sans-IO. Whatever a peer sends can at worst raise PeerError; our own misuse raises UsageError.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

from delta_prop_wire.batch import Batch
from delta_prop_wire.buffer import ReceiveBuffer
from delta_prop_wire.compression import compress, decompress
from delta_prop_wire.control import pack_control, unpack_control
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Priority, origin_partition
from delta_prop_wire.delta_map import pack_delta, unpack_delta
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import BatchFrame, DeltaFrame
from delta_prop_wire.header import (
    CONTROL_PAYLOAD_BYTES_MAX,
    DELTA_PAYLOAD_BYTES_MAX,
    Header,
    pack_header,
    unpack_header,
)
from delta_prop_wire.runs import Runs
from delta_prop_wire.soundness import parse_batch
from delta_prop_wire.spec import (
    CLOCK_ENTRIES_MAX,
    COUNTER_MAX,
    CRC_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    HEADER_BYTES,
    STAMP_BYTES,
    Attribute,
    ErrorCode,
    Flag,
    FrameType,
)
from delta_prop_wire.stamp import pack_sent_stamp, pack_stamp, unpack_stamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.compression import Compression
    from delta_prop_wire.frames import Frame
    from delta_prop_wire.runs import Run
    from delta_prop_wire.stamp import Stamp
    from delta_prop_wire.window import Window


class _NeedBytes(Enum):
    NEED_BYTES = "NEED_BYTES"


NEED_BYTES: Final = _NeedBytes.NEED_BYTES
"""What `Decoder.next_event` returns while no whole frame has come."""


def encode(frame: Frame, *, compression: Compression | None = None) -> bytes:
    """The bytes of one frame; `compression` is for batches, where it pays.

    Raises Refused (TOO_LARGE) for a delta, UsageError for a control frame beyond its bound.
    """
    if isinstance(frame, BatchFrame):
        return _encode_batch(frame, compression)
    if isinstance(frame, DeltaFrame):
        return _encode_delta(frame)
    kind, payload = pack_control(frame)
    size_max = CONTROL_PAYLOAD_BYTES_MAX - CRC_BYTES
    if len(payload) > size_max:
        raise UsageError(f"{kind.name} of {len(payload)} bytes, allowed are {size_max}: say less at once")
    if not payload and kind is FrameType.HEARTBEAT:
        return pack_header(kind, 0, frame.sequence, 0)
    return _sealed(pack_header(kind, 0, frame.sequence, len(payload) + CRC_BYTES), payload)


def encode_head(
    batch: Batch, sequence: int, stamp: Stamp | None = None, *, ack_wanted: bool = False
) -> bytes:
    """The 64 bytes in front of a batch's body: frame header and stamp. The log stores this, then the body."""
    header = _batch_header(batch, sequence, ack_wanted)
    if stamp is None:
        return header + pack_sent_stamp(header, origin_partition(batch.origin))
    return header + pack_stamp(stamp, header)


def decode(raw: bytes | memoryview) -> Frame:
    """Read exactly one whole frame. Raises PeerError."""
    view = memoryview(raw)
    if len(view) < HEADER_BYTES:
        raise PeerError(ErrorCode.BAD_FRAME, f"{len(view)} bytes; a frame has at least {HEADER_BYTES}")
    header = unpack_header(view)
    if len(view) != HEADER_BYTES + header.length:
        raise PeerError(
            ErrorCode.BAD_FRAME, f"{len(view)} bytes; this frame has {HEADER_BYTES + header.length}"
        )
    if header.type is FrameType.BATCH:
        stamp_end = HEADER_BYTES + STAMP_BYTES
        return _decode_batch(header, view[HEADER_BYTES:stamp_end], view[stamp_end:])
    return _decode_other(header, view[HEADER_BYTES:])


class Decoder:
    """Bytes in, frames out: put them into `buffer`, tell `received`, ask `next_event` until NEED_BYTES.

    The first error latches: it is raised again at each later call, and nothing more is kept.
    `payload_bytes_max` may be lowered and raised between calls. `look_at` is called with the header of each
    frame before more of it is received; what it raises refuses the frame.
    """

    def __init__(
        self,
        *,
        payload_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX,
        look_at: Callable[[Header], None] | None = None,
    ) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._look_at = look_at
        self._buffer = ReceiveBuffer(FRAME_PAYLOAD_BYTES_MAX)
        self._runs = Runs(self._buffer)
        self._header: Header | None = None
        self._error: PeerError | None = None

    @property
    def held(self) -> ReceiveBuffer:
        """What was received and no event has used yet. To look at only; it is always the same one."""
        return self._buffer

    @property
    def buffered_bytes(self) -> int:
        """Bytes received that no event has used yet; not 0 where a peer ends within a frame."""
        return self._buffer.end - self._buffer.start

    @property
    def header(self) -> Header | None:
        """The frame that is being received, or on which it failed: its sequence is what a Nack names."""
        return self._header

    def buffer(self) -> memoryview:
        """Where the next bytes are to be received into. Raises UsageError before the events are taken."""
        header = self._header
        return self._buffer.room(0 if header is None else HEADER_BYTES + header.length)

    def received(self, count: int) -> None:
        """So many bytes lie in the buffer that was given last."""
        if self._error is None:
            self._buffer.received(count)

    def receive(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take bytes that were received elsewhere. Raises UsageError as `buffer` does."""
        if self._error is None:
            self._buffer.feed(chunk)

    def next_event(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        """The next whole frame. Raises PeerError."""
        if self._error is not None:
            raise PeerError(self._error.code, self._error.message)
        try:
            return self._next()
        except PeerError as error:
            self._error = error
            self._buffer.clear()
            raise

    def next_run(self, window: Window, sequence_min: int) -> Run | None:
        """The next whole frames where they can go the short way together, else None: ask `next_event` then.

        `window` is charged for them, and ends the run where it closes. The first sequence is not below
        `sequence_min`.
        """
        if self._error is not None:
            return None
        run = self._runs.take(window, self.payload_bytes_max, sequence_min)
        if run is not None:
            self._header = None
        return run

    def _next(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        header, buffer = self._header, self._buffer
        if header is None:
            raw = buffer.peek(HEADER_BYTES)
            if raw is None:
                return NEED_BYTES
            header = self._header = unpack_header(raw, self.payload_bytes_max)
            if self._look_at is not None:
                self._look_at(header)
        if len(buffer) < HEADER_BYTES + header.length:
            return NEED_BYTES
        buffer.take(HEADER_BYTES)
        if header.type is FrameType.BATCH:
            # The body by itself, so that a batch that is kept keeps nothing else.
            head = buffer.take(STAMP_BYTES)
            event: Frame = _decode_batch(header, head, buffer.take(header.length - STAMP_BYTES))
        else:
            event = _decode_other(header, buffer.take(header.length))
        self._header = None
        return event


def _decode_other(header: Header, payload: bytes | memoryview) -> Frame:
    if header.type is FrameType.DELTA:
        return _decode_delta(header, _unsealed(header, payload))
    if header.type is FrameType.HEARTBEAT and not header.length:
        return unpack_control(header.type, header.sequence, b"")
    return unpack_control(header.type, header.sequence, _unsealed(header, payload))


# --- frames of one map


def _sealed(header: bytes, packed: bytes) -> bytes:
    """A frame of this header and map, and the checksum of both."""
    signed = header + packed
    return signed + crc32c(signed).to_bytes(CRC_BYTES, "little")


def _unsealed(header: Header, payload: bytes | memoryview) -> bytes | memoryview:
    """The map in a payload, whose checksum is right. Raises PeerError."""
    if header.length < CRC_BYTES:
        raise PeerError(
            ErrorCode.BAD_FRAME,
            f"a {header.type.name} frame with {header.length} bytes of payload; its checksum alone has "
            f"{CRC_BYTES}",
        )
    packed, told = payload[:-CRC_BYTES], int.from_bytes(payload[-CRC_BYTES:], "little")
    found = crc32c(packed, crc32c(pack_header(*header)))
    if told != found:
        raise PeerError(
            ErrorCode.CHECKSUM,
            f"the checksum of this {header.type.name} frame is {found:#010x}, the frame says {told:#010x}",
        )
    return packed


# --- Delta


def _encode_delta(frame: DeltaFrame) -> bytes:
    place = frame.stream, frame.partition
    packed = pack_delta(frame.delta, frame.ack_level, frame.lamport, *place)
    length = len(packed) + CRC_BYTES
    if length > DELTA_PAYLOAD_BYTES_MAX:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"a delta of {length} bytes, allowed are {DELTA_PAYLOAD_BYTES_MAX}: make it smaller",
        )
    flags = _flags(frame.delta.priority, frame.ack_wanted)
    header = pack_header(FrameType.DELTA, flags, frame.sequence, length)
    return _sealed(header, packed)


def _decode_delta(header: Header, packed: bytes | memoryview) -> DeltaFrame:
    found = unpack_delta(packed)
    if header.sequence >= COUNTER_MAX:
        raise PeerError(
            ErrorCode.BAD_FRAME, f"sequence {header.sequence} goes beyond {COUNTER_MAX - 1}: start lower"
        )
    return DeltaFrame(header.sequence, found.delta, bool(header.flags & Flag.ACK_WANTED), *found[1:])


# --- Batch


def _encode_batch(frame: BatchFrame, compression: Compression | None) -> bytes:
    batch = frame.batch
    head = encode_head(batch, frame.sequence, frame.stamp, ack_wanted=frame.ack_wanted)
    packed = None if compression is None else compress(batch.body, compression)
    if packed is None:
        return b"".join((head, batch.body))
    flags = _flags(batch.priority, frame.ack_wanted) | Flag.BATCHED | Flag.COMPRESSED
    header = pack_header(FrameType.BATCH, flags, frame.sequence, STAMP_BYTES + len(packed))
    return b"".join((header, head[HEADER_BYTES:], packed))


def _decode_batch(header: Header, head: bytes | memoryview, body: bytes | memoryview) -> BatchFrame:
    if header.flags & Flag.COMPRESSED:
        body = decompress(memoryview(body))
    batch = parse_batch(body)
    if header.sequence + batch.count > COUNTER_MAX:
        raise PeerError(
            ErrorCode.BAD_FRAME,
            f"{batch.count} rows from sequence {header.sequence} on go beyond {COUNTER_MAX - 1}: start lower",
        )
    stamp = _decode_stamp(header, head, batch)
    if stamp is not None:
        _check_stamp(stamp, batch)
    if batch.attributes & Attribute.ROW_OFFSETS and not batch.is_state:
        _check_row_offsets(batch, header.sequence, stamp)
    return BatchFrame(header.sequence, batch, stamp, bool(header.flags & Flag.ACK_WANTED))


def _decode_stamp(header: Header, head: bytes | memoryview, batch: Batch) -> Stamp | None:
    # It is made before a frame is compressed: its checksum is over the header of the plain frame.
    flags = header.flags & ~Flag.COMPRESSED
    plain = pack_header(header.type, flags, header.sequence, STAMP_BYTES + len(batch.body))
    if head == pack_sent_stamp(plain, origin_partition(batch.origin)):
        return None
    return unpack_stamp(head, plain)


def _check_stamp(stamp: Stamp, batch: Batch) -> None:
    if stamp.body_crc not in (0, batch.crc):
        raise PeerError(
            ErrorCode.CHECKSUM,
            f"the stamp is of a body with checksum {stamp.body_crc:#010x}, this one has {batch.crc:#010x}",
        )
    if not stamp.is_sent:
        _check_of_log(batch)
    if stamp.lamport + batch.count > COUNTER_MAX:
        raise PeerError(
            ErrorCode.BAD_FRAME,
            f"Lamport number {stamp.lamport} of {batch.count} rows goes beyond {COUNTER_MAX - 1}",
        )


def _check_of_log(batch: Batch) -> None:
    """Hold the deltas of a log, which nobody judges again, to what readers rely upon. Raises PeerError."""
    if batch.unreadable_row is not None:
        raise PeerError(
            ErrorCode.BAD_FRAME,
            f"row {batch.unreadable_row}: a metadata change that no log takes, in a batch from a log",
        )
    count = batch.clock_entries
    if count > CLOCK_ENTRIES_MAX or any(a.origin >= b.origin for a, b in pairwise(batch.clock)):
        raise PeerError(
            ErrorCode.BAD_FRAME,
            f"a clock of {count} entries in a batch from a log, which is unsorted or too long: "
            f"allowed are {CLOCK_ENTRIES_MAX}",
        )


def _check_row_offsets(batch: Batch, sequence: int, stamp: Stamp | None) -> None:
    offsets = batch.row_offsets
    if stamp is None or offsets is None:
        raise PeerError(ErrorCode.BAD_FRAME, "row offsets without a stamp; only a log knows them")
    last, rising = int(offsets[-1]), bool((offsets[1:] > offsets[:-1]).all())
    if int(offsets[0]) != sequence or not rising or max(last, stamp.lamport + last - sequence) > COUNTER_MAX:
        raise PeerError(
            ErrorCode.BAD_FRAME,
            f"row offsets that do not rise from the frame's sequence {sequence} to at most {COUNTER_MAX}",
        )


def _batch_header(batch: Batch, sequence: int, ack_wanted: bool) -> bytes:
    flags = _flags(batch.priority, ack_wanted) | Flag.BATCHED
    return pack_header(FrameType.BATCH, flags, sequence, STAMP_BYTES + len(batch.body))


def _flags(priority: Priority, ack_wanted: bool) -> int:
    # A hint for who sorts by headers alone; the priority itself stands in the payload, which wins.
    high = Flag.HIGH_PRIORITY if priority <= Priority.HIGH else 0
    return high | (Flag.ACK_WANTED if ack_wanted else 0)
