"""Frames as a segment holds them: contiguous, each checked whenever it is read.

The stamp's checksum covers the frame header, so length and offset are proven before the body is read; the
stamp also holds the body's checksum, and the checksum of the stamp before it.
A compressed frame is returned uncompressed; only its size is the one on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.corruption import BadFrame
from delta_prop_broker.log.files.compressed import (
    HEAD_BYTES,
    PEEK_BYTES,
    codec_of,
    stored_size,
    uncompressed_body,
    uncompressed_header,
)
from delta_prop_wire.batch import Batch, LoggedBatch
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
from delta_prop_wire.stamp import Stamp, unpack_logged_head, unpack_stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.disk import File

CHUNK_BYTES = 1024 * 1024
_BODY_BYTES_MIN = BODY_HEADER_BYTES + CRC_BYTES


class FrameLocation(NamedTuple):
    """A valid frame and its location; `size` is the one on disk, `codec` 0 if it is not compressed."""

    position: int
    size: int
    logged: LoggedBatch
    stamp: Stamp
    codec: int = 0

    @property
    def end(self) -> int:
        """Position of the byte after it."""
        return self.position + self.size


class FrameHead(NamedTuple):
    """The head of a frame, from its first bytes; `uncompressed_header` only if the frame is compressed."""

    size: int
    offset: int
    stamp: Stamp
    uncompressed_header: bytes | None = None


def read_head(raw: memoryview) -> FrameHead:
    """Read the head of a logged frame, from its first `PEEK_BYTES`. Raises ProtocolError."""
    logged = unpack_logged_head(raw) if len(raw) >= HEAD_BYTES else None
    if logged is not None:
        sequence, length, stamp = logged
        return FrameHead(HEADER_BYTES + length, sequence, stamp)
    header = unpack_header(raw)
    if header.type is not FrameType.BATCH:
        raise ProtocolError(ErrorCode.BAD_FRAME, f"a {header.type.name} frame: a log holds only batches")
    clear = uncompressed_header(header, raw) if header.flags & Flag.COMPRESSED else None
    found = unpack_stamp(raw[HEADER_BYTES:HEAD_BYTES], raw[:HEADER_BYTES] if clear is None else clear)
    size = HEADER_BYTES + header.length if clear is None else stored_size(header)
    return FrameHead(size, header.sequence, found, clear)


class FrameScanner:
    """Scans the frames of a file, from one whose position and offset are known.

    Iterating raises BadFrame where the next frame is not valid; `position`, `offset` and `crc` are those
    after the last valid one. `previous_crc` None: not known, so the first frame's is trusted.
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
        self._chunk_at = position

    def __iter__(self) -> Iterator[FrameLocation]:
        while self.position < self._end:
            yield self._next()

    def resume(self, file: File, end: int) -> None:
        """Continue in the same file, opened once more, up to its present end."""
        self._file, self._end = file, end

    def step_back(self, frame: FrameLocation) -> None:
        """Step back before the frame that was returned last."""
        self.position, self.offset = frame.position, frame.logged.offset
        self.crc = frame.stamp.previous_crc

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the file in memory."""
        return len(self._chunk)

    def _next(self) -> FrameLocation:
        at = self.position
        raw = self._view(PEEK_BYTES)
        if len(raw) < HEAD_BYTES:
            raise BadFrame(
                at, self.offset, f"the file ends {len(raw)} bytes into a frame's head", skip=ALIGNMENT
            )
        try:
            head = read_head(raw)
        except ProtocolError as error:
            raise BadFrame(at, self.offset, error.message, skip=ALIGNMENT) from None
        frame = self._view(head.size)
        if len(frame) < head.size:
            reason = f"the file ends {len(frame)} bytes into a frame of {head.size}"
            raise BadFrame(at, self.offset, reason, skip=_skip_bytes(head))
        stamp = head.stamp
        if head.offset != self.offset:
            reason = f"a frame of offset {head.offset} lies where offset {self.offset} belongs"
            raise BadFrame(at, self.offset, reason, skip=_skip_bytes(head), is_misplaced=True)
        if self.crc is not None and stamp.previous_crc != self.crc:
            reason = f"the frame follows stamp {stamp.previous_crc:#010x}, before it lies {self.crc:#010x}"
            raise BadFrame(at, self.offset, reason, skip=_skip_bytes(head), is_misplaced=True)
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
        self.position = at + head.size
        self.offset = logged.next_offset
        self.crc = stamp.crc
        return FrameLocation(at, head.size, logged, stamp, codec)

    def _read_body(self, frame: memoryview, head: FrameHead) -> Batch:
        # A copy, so that a stored batch does not keep the full chunk in memory. Its checksums prove that it
        # is what was appended at this place, so its columns are not validated once more.
        if head.uncompressed_header is None:
            body = bytes(frame[HEAD_BYTES:])
        else:
            try:
                body = uncompressed_body(frame)
            except ProtocolError as error:
                raise BadFrame(self.position, self.offset, error.message, skip=_skip_bytes(head)) from None
        found, stored = crc32c(memoryview(body)[:-CRC_BYTES]), int.from_bytes(body[-CRC_BYTES:], "little")
        if found != stored or len(body) < _BODY_BYTES_MIN:
            reason = f"the body's checksum is {found:#010x}, it says {stored:#010x}"
            raise BadFrame(self.position, self.offset, reason, skip=head.size)
        if stored != head.stamp.body_crc:
            reason = f"the stamp is of body {head.stamp.body_crc:#010x}, the body is {stored:#010x}"
            raise BadFrame(self.position, self.offset, reason, skip=head.size)
        return Batch(body)

    def _view(self, size: int) -> memoryview:
        """Return `size` bytes from the present position on; fewer only at the end of the file or range."""
        at = self.position - self._chunk_at
        if at + size > len(self._chunk):
            wanted = min(max(size, self._chunk_bytes), self._end - self.position)
            self._chunk = memoryview(self._file.read(self.position, wanted))
            self._chunk_at, at = self.position, 0
        return self._chunk[at : at + size]


def _skip_bytes(head: FrameHead) -> int:
    """Return the minimum distance to the next head; only its seal proves a compressed frame's length."""
    return head.size if head.uncompressed_header is None else ALIGNMENT


def heads_after(
    file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, FrameHead]]:
    """Yield heads that look valid from `position` on, after corruption: only evidence of what was written.

    Skips the body after a valid head, and 8 bytes where there is none.
    """
    chunk, chunk_at = memoryview(b""), position
    while position + HEAD_BYTES <= end:
        at = position - chunk_at
        if at + PEEK_BYTES > len(chunk):
            chunk, chunk_at, at = memoryview(file.read(position, chunk_bytes)), position, 0
            if len(chunk) < HEAD_BYTES:
                return
        if chunk[at] != MAGIC:
            position += ALIGNMENT
            continue
        try:
            head = read_head(chunk[at : at + PEEK_BYTES])
        except ProtocolError:
            position += ALIGNMENT
            continue
        yield position, head
        position += head.size
