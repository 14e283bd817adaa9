"""A frame as a compressed segment holds it: as it travels when compressed, and sealed by a checksum.

    header (flag b2, length as compressed) · stamp, in the clear · codec, plain size, compressed body
    · zeros up to 4 bytes before a multiple of 8 · CRC32C of all before it

The stamp stays the one that was made at the append: its checksum is over the header of the plain frame,
which is built from this one and the plain size. The seal is there because a codec may turn other bytes into
the same body, and because the length in this header is in no other checksum; it is not part of the frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import CodecMissing
from delta_prop_wire.compression import Compression, available, compress, decompress, uncompressed_size
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import PeerError
from delta_prop_wire.header import pack_header, unpack_header
from delta_prop_wire.spec import (
    ALIGNMENT,
    CRC_BYTES,
    HEADER_BYTES,
    STAMP_BYTES,
    ErrorCode,
    Flag,
)

if TYPE_CHECKING:
    from delta_prop_wire.header import Header

HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
PEEK_BYTES = HEAD_BYTES + 8
"""So much of a frame tells its size and whether its head is sound, compressed or not."""


def compress_frame(head: bytes, body: memoryview, codec: Compression) -> bytes | None:
    """The stored form of the frame with this head (64 bytes) and body; None where it is no smaller.

    What was compressed is unpacked once and compared: the plain frame is about to be given up.
    """
    packed = compress(body, codec)
    if packed is None or decompress(packed) != body:
        return None
    plain = unpack_header(head)
    header = pack_header(plain.type, plain.flags | Flag.COMPRESSED, plain.sequence, STAMP_BYTES + len(packed))
    frame = header + head[HEADER_BYTES:] + packed
    size = _sealed(len(frame))
    if size >= len(head) + len(body):
        return None
    frame += bytes(size - CRC_BYTES - len(frame))
    return frame + crc32c(frame).to_bytes(CRC_BYTES, "little")


def stored_size(header: Header) -> int:
    """The bytes that the compressed frame with this header takes, its seal with them."""
    return _sealed(HEADER_BYTES + header.length)


def plain_header(header: Header, peek: memoryview) -> bytes:
    """The header of the plain frame, from the first `PEEK_BYTES` of the compressed one. Raises PeerError."""
    size = uncompressed_size(peek[HEAD_BYTES:])
    return pack_header(header.type, header.flags & ~Flag.COMPRESSED, header.sequence, STAMP_BYTES + size)


def codec_of(frame: memoryview) -> int:
    """The number of the codec of a compressed frame."""
    return frame[HEAD_BYTES]


def plain_body(frame: memoryview) -> bytes:
    """The body, once the seal is found to fit all of the stored frame. Raises PeerError, CodecMissing."""
    found, told = crc32c(frame[:-CRC_BYTES]), int.from_bytes(frame[-CRC_BYTES:], "little")
    if found != told:
        raise PeerError(
            ErrorCode.CHECKSUM, f"the compressed frame's checksum is {found:#010x}, it says {told:#010x}"
        )
    length = unpack_header(frame).length
    try:
        return decompress(frame[HEAD_BYTES : HEADER_BYTES + length])
    except PeerError as error:
        if error.code is ErrorCode.UNSUPPORTED_FLAG:  # as it was written, so nothing is damaged
            raise CodecMissing(codec_name(codec_of(frame))) from None
        raise


def require(codecs: int) -> None:
    """Raise CodecMissing where one of these (bit n for codec n) is not installed."""
    there = sum(1 << codec for codec in available())
    missing = codecs & ~there
    if missing:
        raise CodecMissing(codec_name(missing.bit_length() - 1))


def codec_name(number: int) -> str:
    """What a codec is called in settings and messages."""
    known = number in Compression._value2member_map_
    return Compression(number).name.lower() if known else f"codec {number}"


def _sealed(size: int) -> int:
    return -(-(size + CRC_BYTES) // ALIGNMENT) * ALIGNMENT
