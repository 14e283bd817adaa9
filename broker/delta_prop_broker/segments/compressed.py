"""A frame as a compressed segment holds it: in the compressed form of the wire, sealed by a checksum.

    header (flag b2, length as compressed) · stamp, in the clear · codec, uncompressed size, compressed body
    · zeros up to 4 bytes before a multiple of 8 · CRC32C of all before it

The stamp is still the one from the append: its checksum covers the header of the uncompressed frame, which is
built from this header and the uncompressed size. The seal, the last checksum, is not part of the frame. It is
needed because a codec may turn other bytes into the same body, and nothing else covers the length in the
header.
"""

from __future__ import annotations

from delta_prop_broker.corruption import CodecMissing
from delta_prop_wire.compression import Compression, available_codecs, compress, decompress, uncompressed_size
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.header import Header, pack_header, unpack_header
from delta_prop_wire.spec import ALIGNMENT, CRC_BYTES, HEADER_BYTES, STAMP_BYTES, ErrorCode, Flag

HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
PEEK_BYTES = HEAD_BYTES + 8
"""Number of bytes at the start of a frame that show its size, and whether its head is valid."""


def compress_frame(head: bytes, body: memoryview, codec: Compression) -> bytes | None:
    """Return the compressed frame with this head (64 bytes) and body; None if it is no smaller.

    Decompresses the body and compares it, since the uncompressed frame is about to be removed.
    """
    packed = compress(body, codec)
    if packed is None or decompress(packed) != body:
        return None
    fields = unpack_header(head)
    length = STAMP_BYTES + len(packed)
    header = pack_header(fields.type, fields.flags | Flag.COMPRESSED, fields.sequence, length)
    frame = header + head[HEADER_BYTES:] + packed
    size = _sealed_size(len(frame))
    if size >= len(head) + len(body):
        return None
    frame += bytes(size - CRC_BYTES - len(frame))
    return frame + crc32c(frame).to_bytes(CRC_BYTES, "little")


def stored_size(header: Header) -> int:
    """Return the bytes that the compressed frame with this header takes, with its seal."""
    return _sealed_size(HEADER_BYTES + header.length)


def uncompressed_header(header: Header, peek: memoryview) -> bytes:
    """Return the uncompressed header, from the first `PEEK_BYTES` of the frame. Raises ProtocolError."""
    size = uncompressed_size(peek[HEAD_BYTES:])
    return pack_header(header.type, header.flags & ~Flag.COMPRESSED, header.sequence, STAMP_BYTES + size)


def codec_of(frame: memoryview) -> int:
    """Return the number of the codec of a compressed frame."""
    return frame[HEAD_BYTES]


def uncompressed_body(frame: memoryview) -> bytes:
    """Check the seal of the stored frame, and return its body. Raises ProtocolError, CodecMissing."""
    computed, stored = crc32c(frame[:-CRC_BYTES]), int.from_bytes(frame[-CRC_BYTES:], "little")
    if computed != stored:
        raise ProtocolError(
            ErrorCode.CHECKSUM, f"the compressed frame's checksum is {computed:#010x}, not {stored:#010x}"
        )
    length = unpack_header(frame).length
    try:
        return decompress(frame[HEAD_BYTES : HEADER_BYTES + length])
    except ProtocolError as error:
        if error.code is ErrorCode.UNSUPPORTED_FLAG:  # the seal fits, so the codec is missing
            raise CodecMissing(codec_name(codec_of(frame))) from None
        raise


def require_codecs(codecs: int) -> None:
    """Raise CodecMissing if one of these codecs (bit n for codec n) is not installed."""
    installed = sum(1 << codec for codec in available_codecs())
    missing = codecs & ~installed
    if missing:
        raise CodecMissing(codec_name(missing.bit_length() - 1))


def codec_name(number: int) -> str:
    """Return the name of a codec in settings and messages."""
    known = number in Compression._value2member_map_
    return Compression(number).name.lower() if known else f"codec {number}"


def _sealed_size(size: int) -> int:
    return -(-(size + CRC_BYTES) // ALIGNMENT) * ALIGNMENT
