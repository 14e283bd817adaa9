"""Frames as a segment holds them: contiguous, each checked whenever it is read.

The stamp's checksum covers the frame header, so length and offset are proven before the body is read; the
stamp also holds the body's checksum, and the checksum of the stamp before it. A compressed frame is returned
uncompressed, but with its size on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.corruption import BadFrame
from delta_prop_broker.segments.compressed import (
    HEAD_BYTES,
    PEEK_BYTES,
    codec_of,
    stored_size,
    uncompressed_body,
    uncompressed_header,
)
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.header import unpack_header
from delta_prop_wire.spec import (
    ALIGNMENT,
    BODY_HEADER_BYTES,
    CRC_BYTES,
    HEADER_BYTES,
    MAGIC,
    ErrorCode,
    Flag,
    FrameType,
)
from delta_prop_wire.stamp import Stamp, unpack_stamp

if TYPE_CHECKING:
    from delta_prop_broker.disk import File

CHUNK_BYTES = 1024 * 1024
_BODY_BYTES_MIN = BODY_HEADER_BYTES + CRC_BYTES


class FrameLocation(NamedTuple):
    """A valid frame and its location; `size` is its size on disk, `codec` is 0 if it is not compressed."""

    position: int
    size: int
    logged: LoggedBatch
    stamp: Stamp
    codec: int = 0

    @property
    def end(self) -> int:
        """The position of the byte after the frame."""
        return self.position + self.size


class FrameHead(NamedTuple):
    """The head of a frame. `uncompressed_header`: None unless the frame is compressed."""

    size: int
    offset: int
    stamp: Stamp
    uncompressed_header: bytes | None = None


def read_head(raw: memoryview) -> FrameHead:
    """Read the head of a logged frame, from its first `PEEK_BYTES`. Raises ProtocolError."""
    logged = core_mode.core.unpack_logged_head(raw) if len(raw) >= HEAD_BYTES else None
    if logged is not None:
        offset, length, stamp = logged
        return FrameHead(HEADER_BYTES + length, offset, stamp)
    header = unpack_header(raw)
    if header.type is not FrameType.BATCH:
        raise ProtocolError(ErrorCode.BAD_FRAME, f"a {header.type.name} frame, but a log holds only batches")
    uncompressed = uncompressed_header(header, raw) if header.flags & Flag.COMPRESSED else None
    stamp_in_clear = unpack_stamp(
        raw[HEADER_BYTES:HEAD_BYTES], raw[:HEADER_BYTES] if uncompressed is None else uncompressed
    )
    size = HEADER_BYTES + header.length if uncompressed is None else stored_size(header)
    offset = header.sequence  # the sequence of a logged frame is its offset
    return FrameHead(size, offset, stamp_in_clear, uncompressed)


class FrameScanner:
    """Scans the frames of a file, from a frame whose position and offset are known.

    Iterating raises BadFrame if the next frame is not valid; `position`, `offset` and `crc` are those after
    the last valid frame. `previous_crc`: checksum of the stamp before the first frame; None if it is unknown:
    then the checksum that the first frame names is trusted.
    """

    def __init__(
        self,
        file: File,
        *,
        position: int,
        offset: int,
        end: int,
        previous_crc: int | None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.position = position
        self.offset = offset
        self.crc = previous_crc
        self._file = file
        self._end = end
        self._chunk_bytes = chunk_bytes
        self._chunk = memoryview(b"")
        self._chunk_position = position

    def __iter__(self) -> Iterator[FrameLocation]:
        while self.position < self._end:
            yield self._next()

    def resume(self, file: File, end: int) -> None:
        """Continue in the same file, opened again, up to position `end`."""
        self._file, self._end = file, end

    def step_back(self, frame: FrameLocation) -> None:
        """Step back before the frame that was returned last."""
        self.position, self.offset = frame.position, frame.logged.offset
        self.crc = frame.stamp.previous_crc

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes of the file that are in memory."""
        return len(self._chunk)

    def _next(self) -> FrameLocation:
        position = self.position
        raw = self._view(PEEK_BYTES)
        if len(raw) < HEAD_BYTES:
            raise BadFrame(
                position, self.offset, f"the file ends {len(raw)} bytes into a frame's head", skip=ALIGNMENT
            )
        try:
            head = read_head(raw)
        except ProtocolError as error:
            raise BadFrame(position, self.offset, error.message, skip=ALIGNMENT) from None
        frame = self._view(head.size)
        if len(frame) < head.size:
            reason = f"the file ends {len(frame)} bytes into a frame of {head.size}"
            raise BadFrame(position, self.offset, reason, skip=_skip_bytes(head))
        stamp = head.stamp
        if head.offset != self.offset:
            reason = f"a frame of offset {head.offset} is where the frame of offset {self.offset} belongs"
            raise BadFrame(position, self.offset, reason, skip=_skip_bytes(head), is_misplaced=True)
        if self.crc is not None and stamp.previous_crc != self.crc:
            reason = f"the frame follows stamp {stamp.previous_crc:#010x}, but the last is {self.crc:#010x}"
            raise BadFrame(position, self.offset, reason, skip=_skip_bytes(head), is_misplaced=True)
        batch = self._read_body(frame, head)
        if head.uncompressed_header is None:
            raw_head, codec = bytes(frame[:HEAD_BYTES]), 0
        else:
            raw_head, codec = (
                head.uncompressed_header + bytes(frame[HEADER_BYTES:HEAD_BYTES]),
                codec_of(frame),
            )
        logged = LoggedBatch(
            batch, head.offset, stamp.lamport, stamp.source, raw_head, known_ids=stamp.known_ids
        )  # fmt: skip
        self.position = position + head.size
        self.offset = logged.next_offset
        self.crc = stamp.crc
        return FrameLocation(position, head.size, logged, stamp, codec)

    def _read_body(self, frame: memoryview, head: FrameHead) -> Batch:
        # The body is a copy, so that a stored batch does not keep the whole chunk in memory. Its checksums
        # prove that it was appended at this offset, so its columns are not validated again.
        if head.uncompressed_header is None:
            body = bytes(frame[HEAD_BYTES:])
        else:
            try:
                body = uncompressed_body(frame)
            except ProtocolError as error:
                raise BadFrame(self.position, self.offset, error.message, skip=_skip_bytes(head)) from None
        computed, stored = crc32c(memoryview(body)[:-CRC_BYTES]), int.from_bytes(body[-CRC_BYTES:], "little")
        if computed != stored or len(body) < _BODY_BYTES_MIN:
            reason = f"the body's checksum is {computed:#010x}, not {stored:#010x}"
            raise BadFrame(self.position, self.offset, reason, skip=head.size)
        if stored != head.stamp.body_crc:
            reason = f"the stamp names body {head.stamp.body_crc:#010x}, but the body is {stored:#010x}"
            raise BadFrame(self.position, self.offset, reason, skip=head.size)
        return Batch(body)

    def _view(self, size: int) -> memoryview:
        """Return `size` bytes from `position` on; fewer only at the end of the file or range."""
        start = self.position - self._chunk_position
        if start + size > len(self._chunk):
            read_bytes = min(max(size, self._chunk_bytes), self._end - self.position)
            self._chunk = memoryview(self._file.read(self.position, read_bytes))
            self._chunk_position, start = self.position, 0
        return self._chunk[start : start + size]


def _skip_bytes(head: FrameHead) -> int:
    """Return the minimum distance to the next head.

    The length in the header of a compressed frame is not proven yet: only the seal covers it.
    """
    return head.size if head.uncompressed_header is None else ALIGNMENT


def heads_after(
    file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, FrameHead]]:
    """Yield (position, head) of each head that looks valid, from `position` on.

    After corruption, bytes may look like a head by chance. Skips the body after a valid head, and 8 bytes
    where there is no valid head.
    """
    chunk, chunk_position = memoryview(b""), position
    while position + HEAD_BYTES <= end:
        start = position - chunk_position
        if start + PEEK_BYTES > len(chunk):
            chunk, chunk_position, start = memoryview(file.read(position, chunk_bytes)), position, 0
            if len(chunk) < HEAD_BYTES:
                return
        if chunk[start] != MAGIC:
            position += ALIGNMENT
            continue
        try:
            head = read_head(chunk[start : start + PEEK_BYTES])
        except ProtocolError:
            position += ALIGNMENT
            continue
        yield position, head
        position += head.size
