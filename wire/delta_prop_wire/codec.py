"""Frames to bytes and back: `encode`, `decode`, and `Decoder` for a stream of chunks.

Sans-IO. Any bytes of a peer can at worst raise ProtocolError; misuse by the caller raises UsageError.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.buffer import ReceiveBuffer
from delta_prop_wire.compression import Compression, compress, decompress
from delta_prop_wire.control import pack_control, unpack_control
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Priority, origin_partition
from delta_prop_wire.delta_map import pack_delta, unpack_delta
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.frame_runs import FRAMES_MAX, FrameRun, RunLimits, find_run
from delta_prop_wire.frames import BatchFrame, Credit, DeltaFrame, Frame
from delta_prop_wire.header import (
    CONTROL_PAYLOAD_BYTES_MAX,
    DELTA_PAYLOAD_BYTES_MAX,
    Header,
    pack_header,
    unpack_header,
)
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
from delta_prop_wire.stamp import LogName, Stamp, pack_producer_stamp, pack_stamp, unpack_stamp

if TYPE_CHECKING:
    from delta_prop_wire.credit_window import CreditWindow


_UNBOUNDED = Credit((1 << 63) - 1, (1 << 63) - 1)


class _NeedBytes(Enum):
    NEED_BYTES = "NEED_BYTES"


NEED_BYTES: Final = _NeedBytes.NEED_BYTES
"""Returned by `Decoder.next_event` until a whole frame has been received."""


def encode(frame: Frame, *, compression: Compression | None = None, stream: int = 0) -> bytes:
    """Encode one frame; `compression` applies to batches that shrink by it.

    `stream`: the stream that a batch without a stamp is for. Raises Refused (TOO_LARGE) for a delta above its
    bound, UsageError for a control frame above its bound.
    """
    if isinstance(frame, BatchFrame):
        return _encode_batch(frame, compression, stream)
    if isinstance(frame, DeltaFrame):
        return _encode_delta(frame)
    kind, payload = pack_control(frame)
    size_max = CONTROL_PAYLOAD_BYTES_MAX - CRC_BYTES
    if len(payload) > size_max:
        raise UsageError(f"{kind.name} of {len(payload)} bytes; the maximum is {size_max}: send less at once")
    if not payload and kind is FrameType.HEARTBEAT:
        return pack_header(kind, 0, frame.sequence, 0)
    return _append_checksum(pack_header(kind, 0, frame.sequence, len(payload) + CRC_BYTES), payload)


def encode_head(
    batch: Batch, sequence: int, stamp: Stamp | None = None, *, ack_wanted: bool = False, stream: int = 0
) -> bytes:
    """Encode the 64 bytes before a batch's body: frame header and stamp. A log stores them, then the body.

    `stamp`: None for a frame of a producer; then `stream` is the stream that it is for.
    """
    header = _batch_header(batch, sequence, ack_wanted)
    if stamp is None:
        return header + pack_producer_stamp(header, LogName(stream, origin_partition(batch.origin)))
    return header + pack_stamp(stamp, header)


def decode(raw: bytes | memoryview) -> Frame:
    """Decode exactly one whole frame. Raises ProtocolError."""
    view = memoryview(raw)
    if len(view) < HEADER_BYTES:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, f"{len(view)} bytes; a frame has at least {HEADER_BYTES}: send a whole frame"
        )
    header = unpack_header(view)
    if len(view) != HEADER_BYTES + header.length:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"{len(view)} bytes; this frame has {HEADER_BYTES + header.length}: send one whole frame",
        )
    if header.type is FrameType.BATCH:
        stamp_end = HEADER_BYTES + STAMP_BYTES
        return _decode_batch(header, view[HEADER_BYTES:stamp_end], view[stamp_end:])
    return _decode_other(header, view[HEADER_BYTES:])


class Decoder:
    """A decoder of a stream of bytes into frames.

    Write into `get_buffer()`, call `buffer_updated`, then call `next_event` until it returns NEED_BYTES.
    The first error latches: each later call raises it again, and no more bytes are stored.
    `payload_bytes_max` and `stream`, the stream that producers' batches are for, may change between calls.
    `on_header` is called with the header of each frame before
    more of the frame is received; a ProtocolError that it raises refuses the frame.
    """

    def __init__(
        self,
        *,
        payload_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX,
        on_header: Callable[[Header], None] | None = None,
    ) -> None:
        self.payload_bytes_max = payload_bytes_max
        self.stream = 0
        self._on_header = on_header
        self._buffer = ReceiveBuffer(FRAME_PAYLOAD_BYTES_MAX)
        self._header: Header | None = None
        self._error: ProtocolError | None = None

    @property
    def receive_buffer(self) -> ReceiveBuffer:
        """The bytes received and not yet used by an event, for reading only; always the same object."""
        return self._buffer

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes received and not used by an event; above 0 while a frame is incomplete."""
        return self._buffer.end - self._buffer.start

    @property
    def header(self) -> Header | None:
        """The header of the frame being received, or of the one that failed, whose sequence a Nack names."""
        return self._header

    def get_buffer(self) -> memoryview:
        """Return the memory to receive into. Raises UsageError if events have to be taken first."""
        header = self._header
        return self._buffer.get_buffer(0 if header is None else HEADER_BYTES + header.length)

    def buffer_updated(self, count: int) -> None:
        """Record that `count` bytes were written into the memory that `get_buffer` returned."""
        if self._error is None:
            self._buffer.buffer_updated(count)

    def receive(self, chunk: bytes | bytearray | memoryview) -> None:
        """Copy in bytes that were received elsewhere. Raises UsageError as `get_buffer` does."""
        if self._error is None:
            self._buffer.feed(chunk)

    def next_event(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        """Return the next whole frame, or NEED_BYTES. Raises ProtocolError."""
        if self._error is not None:
            raise ProtocolError(self._error.code, self._error.message)
        try:
            return self._next()
        except ProtocolError as error:
            self._error = error
            self._buffer.clear()
            raise

    def next_run(self, window: CreditWindow, sequence_min: int) -> FrameRun | None:
        """Return the next whole frames if they form a run, else None; the caller then calls `next_event`.

        Charges `window` for them; a closed window ends the run. `sequence_min`: the lowest sequence that the
        first frame may have, since the sequences of a connection rise.
        """
        if self._error is not None:
            return None
        received, credit = self._buffer.unread(), window.remaining or _UNBOUNDED
        limits = RunLimits(FRAMES_MAX, *credit, self.payload_bytes_max, max(sequence_min, 1), self.stream)
        run = core_mode.core.take_run(received, limits) or find_run(received, limits)
        if run is not None:
            self._header = None
            self._buffer.skip(run.size)
            window.spend(run.rows, run.size)
        return run

    def _next(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        header, buffer = self._header, self._buffer
        if header is None:
            raw = buffer.peek(HEADER_BYTES)
            if raw is None:
                return NEED_BYTES
            header = self._header = unpack_header(raw, self.payload_bytes_max)
            if self._on_header is not None:
                self._on_header(header)
        if len(buffer) < HEADER_BYTES + header.length:
            return NEED_BYTES
        buffer.take(HEADER_BYTES)
        if header.type is FrameType.BATCH:
            # The body is a separate object, so that a stored batch pins nothing else.
            raw_stamp = buffer.take(STAMP_BYTES)
            body = buffer.take(header.length - STAMP_BYTES)
            event: Frame = _decode_batch(header, raw_stamp, body, self.stream)
        else:
            event = _decode_other(header, buffer.take(header.length))
        self._header = None
        return event


def _decode_other(header: Header, payload: bytes | memoryview) -> Frame:
    if header.type is FrameType.DELTA:
        return _decode_delta(header, _verify_checksum(header, payload))
    if header.type is FrameType.HEARTBEAT and not header.length:
        return unpack_control(header.type, header.sequence, b"")
    return unpack_control(header.type, header.sequence, _verify_checksum(header, payload))


# --- frames of one map


def _append_checksum(header: bytes, packed: bytes) -> bytes:
    """Return a frame of this header and map, with the checksum of both."""
    content = header + packed
    return content + crc32c(content).to_bytes(CRC_BYTES, "little")


def _verify_checksum(header: Header, payload: bytes | memoryview) -> bytes | memoryview:
    """Return the map in a payload after checking its checksum. Raises ProtocolError."""
    if header.length < CRC_BYTES:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"a {header.type.name} frame with {header.length} bytes of payload; its checksum alone has "
            f"{CRC_BYTES}: end the payload with a checksum",
        )
    packed, stated = payload[:-CRC_BYTES], int.from_bytes(payload[-CRC_BYTES:], "little")
    computed = crc32c(packed, crc32c(pack_header(*header)))
    if stated != computed:
        raise ProtocolError(
            ErrorCode.CHECKSUM,
            f"{header.type.name} frame checksum is {computed:#010x}; the frame states {stated:#010x}: "
            "send the frame again",
        )
    return packed


# --- Delta


def _encode_delta(frame: DeltaFrame) -> bytes:
    packed = pack_delta(frame.delta, frame.ack_level, frame.lamport, frame.stream, frame.partition)
    length = len(packed) + CRC_BYTES
    if length > DELTA_PAYLOAD_BYTES_MAX:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"a delta of {length} bytes; the maximum is {DELTA_PAYLOAD_BYTES_MAX}: split it",
        )
    flags = _flags(frame.delta.priority, frame.ack_wanted)
    header = pack_header(FrameType.DELTA, flags, frame.sequence, length)
    return _append_checksum(header, packed)


def _decode_delta(header: Header, packed: bytes | memoryview) -> DeltaFrame:
    delta_map = unpack_delta(packed)
    if header.sequence >= COUNTER_MAX:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, f"sequence {header.sequence} is above {COUNTER_MAX - 1}: start lower"
        )
    return DeltaFrame(header.sequence, delta_map.delta, bool(header.flags & Flag.ACK_WANTED), *delta_map[1:])


# --- Batch


def _encode_batch(frame: BatchFrame, compression: Compression | None, stream: int) -> bytes:
    batch = frame.batch
    head = encode_head(batch, frame.sequence, frame.stamp, ack_wanted=frame.ack_wanted, stream=stream)
    packed = None if compression is None else compress(batch.body, compression)
    if packed is None:
        return b"".join((head, batch.body))
    flags = _flags(batch.priority, frame.ack_wanted) | Flag.BATCHED | Flag.COMPRESSED
    header = pack_header(FrameType.BATCH, flags, frame.sequence, STAMP_BYTES + len(packed))
    return b"".join((header, head[HEADER_BYTES:], packed))


def _decode_batch(
    header: Header, raw_stamp: bytes | memoryview, body: bytes | memoryview, stream: int = 0
) -> BatchFrame:
    if header.flags & Flag.COMPRESSED:
        body = decompress(memoryview(body))
    batch = parse_batch(body)
    if header.sequence + batch.count > COUNTER_MAX:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"{batch.count} rows from sequence {header.sequence} on end above {COUNTER_MAX - 1}: start lower",
        )
    stamp = _decode_stamp(header, raw_stamp, batch, stream)
    if stamp is not None:
        _check_stamp(stamp, batch)
    if batch.attributes & Attribute.ROW_OFFSETS and not batch.is_state:
        _check_row_offsets(batch, header.sequence, stamp)
    return BatchFrame(header.sequence, batch, stamp, bool(header.flags & Flag.ACK_WANTED))


def _decode_stamp(header: Header, raw_stamp: bytes | memoryview, batch: Batch, stream: int) -> Stamp | None:
    """Return the stamp; None if it is a producer's for this batch and stream. Raises ProtocolError."""
    # The stamp's checksum covers the header of the uncompressed frame, since compression comes later.
    flags = header.flags & ~Flag.COMPRESSED
    uncompressed = pack_header(header.type, flags, header.sequence, STAMP_BYTES + len(batch.body))
    if raw_stamp == pack_producer_stamp(uncompressed, LogName(stream, origin_partition(batch.origin))):
        return None
    return unpack_stamp(raw_stamp, uncompressed)


def _check_stamp(stamp: Stamp, batch: Batch) -> None:
    if stamp.body_crc not in (0, batch.crc):
        raise ProtocolError(
            ErrorCode.CHECKSUM,
            f"the stamp is of a body with checksum {stamp.body_crc:#010x}; this body has {batch.crc:#010x}: "
            "send each body with its own stamp",
        )
    if not stamp.is_from_producer:
        _check_logged_batch(batch)
    if stamp.lamport + batch.count > COUNTER_MAX:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"Lamport number {stamp.lamport} of {batch.count} rows ends above {COUNTER_MAX - 1}: start lower",
        )


def _check_logged_batch(batch: Batch) -> None:
    """Check the bounds that readers of a log rely on, since they do not validate. Raises ProtocolError."""
    if batch.unreadable_row is not None:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"row {batch.unreadable_row} of a batch from a log: its metadata change breaks the bounds of a "
            "log: send what the log holds",
        )
    count = batch.clock_entry_count
    if count > CLOCK_ENTRIES_MAX or any(a.origin >= b.origin for a, b in pairwise(batch.clock)):
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"clock of {count} entries in a batch from a log: send up to {CLOCK_ENTRIES_MAX}, sorted by "
            "origin",
        )


def _check_row_offsets(batch: Batch, sequence: int, stamp: Stamp | None) -> None:
    offsets = batch.row_offsets
    if stamp is None or offsets is None:
        raise ProtocolError(ErrorCode.BAD_FRAME, "row offsets without a log's stamp: leave them out")
    last, is_rising = int(offsets[-1]), bool((offsets[1:] > offsets[:-1]).all())
    if (
        int(offsets[0]) != sequence
        or not is_rising
        or max(last, stamp.lamport + last - sequence) > COUNTER_MAX
    ):
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"row offsets do not rise from the frame's sequence {sequence}: send rising offsets up to "
            f"{COUNTER_MAX}",
        )


def _batch_header(batch: Batch, sequence: int, ack_wanted: bool) -> bytes:
    flags = _flags(batch.priority, ack_wanted) | Flag.BATCHED
    return pack_header(FrameType.BATCH, flags, sequence, STAMP_BYTES + len(batch.body))


def _flags(priority: Priority, ack_wanted: bool) -> int:
    # The flag is a hint for code that reads headers only; the payload's priority counts.
    high = Flag.HIGH_PRIORITY if priority <= Priority.HIGH else 0
    return high | (Flag.ACK_WANTED if ack_wanted else 0)
