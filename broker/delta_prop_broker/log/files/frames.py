"""Frames as a segment holds them: back to back, each checked whenever it is read.

The stamp's checksum covers the frame header, so length and offset are known to be right before a byte of
the body is looked at; the body's checksum stands in the stamp too, and the stamp before it is named in it.
A compressed frame is given as the plain one that it was; only its size is that on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.damage import BadFrame
from delta_prop_broker.log.files.compressed import (
    HEAD_BYTES,
    PEEK_BYTES,
    codec_of,
    plain_body,
    plain_header,
    stored_size,
)
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import PeerError
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


class Place(NamedTuple):
    """A frame that was found sound, and where; `size` is that on disk, `codec` 0 where it is plain."""

    position: int
    size: int
    logged: LoggedBatch
    stamp: Stamp
    codec: int = 0

    @property
    def end(self) -> int:
        """Position of the byte behind it."""
        return self.position + self.size


class Head(NamedTuple):
    """What the first bytes of a frame say; `plain` is the header of a compressed one as it was at first."""

    size: int
    offset: int
    stamp: Stamp
    plain: bytes | None = None


def read_head(raw: memoryview) -> Head:
    """Read the head of a logged frame, from its first `PEEK_BYTES`. Raises PeerError."""
    known = unpack_logged_head(raw) if len(raw) >= HEAD_BYTES else None
    if known is not None:
        sequence, length, stamp = known
        return Head(HEADER_BYTES + length, sequence, stamp)
    header = unpack_header(raw)
    if header.type is not FrameType.BATCH:
        raise PeerError(ErrorCode.BAD_FRAME, f"a {header.type.name} frame; a log holds batches alone")
    plain = plain_header(header, raw) if header.flags & Flag.COMPRESSED else None
    found = unpack_stamp(raw[HEADER_BYTES:HEAD_BYTES], raw[:HEADER_BYTES] if plain is None else plain)
    size = HEADER_BYTES + header.length if plain is None else stored_size(header)
    return Head(size, header.sequence, found, plain)


class Walk:
    """Goes through the frames of a file, from one whose position and offset are known.

    Iterating raises BadFrame where the next sound frame should be and is not; `position`, `offset` and
    `crc` say how far it came. `previous_crc` None: not known, so the first frame's is believed.
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

    def __iter__(self) -> Iterator[Place]:
        while self.position < self._end:
            yield self._next()

    def go_on(self, file: File, end: int) -> None:
        """Read on, in the same file opened anew, to where the part to walk ends now."""
        self._file, self._end = file, end

    def back(self, place: Place) -> None:
        """Step back before the frame that was given last."""
        self.position, self.offset = place.position, place.logged.offset
        self.crc = place.stamp.previous_crc

    @property
    def chunk_bytes(self) -> int:
        """What it holds of the file."""
        return len(self._chunk)

    def _next(self) -> Place:
        at = self.position
        raw = self._view(PEEK_BYTES)
        if len(raw) < HEAD_BYTES:
            raise BadFrame(
                at, self.offset, f"the file ends {len(raw)} bytes into a frame's head", skip=ALIGNMENT
            )
        try:
            head = read_head(raw)
        except PeerError as error:
            raise BadFrame(at, self.offset, error.message, skip=ALIGNMENT) from None
        frame = self._view(head.size)
        if len(frame) < head.size:
            reason = f"the file ends {len(frame)} bytes into a frame of {head.size}"
            raise BadFrame(at, self.offset, reason, skip=_skip(head))
        stamp = head.stamp
        if head.offset != self.offset:
            reason = f"a frame of offset {head.offset} lies where offset {self.offset} belongs"
            raise BadFrame(at, self.offset, reason, skip=_skip(head), misplaced=True)
        if self.crc is not None and stamp.previous_crc != self.crc:
            reason = f"the frame follows stamp {stamp.previous_crc:#010x}, before it lies {self.crc:#010x}"
            raise BadFrame(at, self.offset, reason, skip=_skip(head), misplaced=True)
        batch = self._body(frame, head)
        if head.plain is None:
            raw_head, codec = bytes(frame[:HEAD_BYTES]), 0
        else:
            raw_head, codec = head.plain + bytes(frame[HEADER_BYTES:HEAD_BYTES]), codec_of(frame)
        logged = LoggedBatch(
            batch, head.offset, stamp.lamport, stamp.source, raw_head, known_ids=stamp.known_ids
        )  # fmt: skip
        self.position = at + head.size
        self.offset = logged.next_offset
        self.crc = stamp.crc
        return Place(at, head.size, logged, stamp, codec)

    def _body(self, frame: memoryview, head: Head) -> Batch:
        # A copy, so that a batch that is kept does not keep the whole chunk it came in. What its checksums
        # bind to its place is what was appended, so its columns are not looked over again.
        if head.plain is None:
            body = bytes(frame[HEAD_BYTES:])
        else:
            try:
                body = plain_body(frame)
            except PeerError as error:
                raise BadFrame(self.position, self.offset, error.message, skip=_skip(head)) from None
        found, told = crc32c(memoryview(body)[:-CRC_BYTES]), int.from_bytes(body[-CRC_BYTES:], "little")
        if found != told or len(body) < _BODY_BYTES_MIN:
            reason = f"the body's checksum is {found:#010x}, it says {told:#010x}"
            raise BadFrame(self.position, self.offset, reason, skip=head.size)
        if told != head.stamp.body_crc:
            reason = f"the stamp is of body {head.stamp.body_crc:#010x}, the body is {told:#010x}"
            raise BadFrame(self.position, self.offset, reason, skip=head.size)
        return Batch(body)

    def _view(self, size: int) -> memoryview:
        """`size` bytes from the present position on; fewer only where the file, or the part walked, ends."""
        at = self.position - self._chunk_at
        if at + size > len(self._chunk):
            wanted = min(max(size, self._chunk_bytes), self._end - self.position)
            self._chunk = memoryview(self._file.read(self.position, wanted))
            self._chunk_at, at = self.position, 0
        return self._chunk[at : at + size]


def _skip(head: Head) -> int:
    """How far the next head is at least: the length of a compressed frame stands in its seal alone."""
    return head.size if head.plain is None else ALIGNMENT


def heads_behind(
    file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, Head]]:
    """Heads that look sound from `position` on, beyond damage: evidence of what was written, no more.

    Steps over bodies where a head is sound, by 8 bytes where it is not.
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
        except PeerError:
            position += ALIGNMENT
            continue
        yield position, head
        position += head.size
