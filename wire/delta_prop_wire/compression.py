"""Compression of a batch's body: codec u8, size u32 (little-endian), compressed bytes.

LZ4 and Zstandard are an optional extra, imported on first use. An announced size above a frame's bound is
rejected, and nothing is allocated before that check.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from delta_prop_wire.errors import ProtocolError, UsageError
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX, STAMP_BYTES, ErrorCode

if TYPE_CHECKING:
    from typing_extensions import Buffer

BODY_BYTES_MIN = 1024
"""Smaller bodies travel uncompressed."""

_PREFIX = struct.Struct("<BI")
_FIX = "install delta-prop[compress]"


class Compression(IntEnum):
    """The codecs; a compressed body starts with the number of its codec."""

    LZ4 = 1
    ZSTD = 2


_MODULES = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard"}


def available_codecs() -> tuple[Compression, ...]:
    """Return the codecs that are installed, which a hello may offer."""
    return tuple(codec for codec, module in _MODULES.items() if find_spec(module) is not None)


def compress(body: Buffer, codec: Compression) -> bytes | None:
    """Compress a body; None if it is small or does not shrink. Raises UsageError if the codec is missing."""
    view = memoryview(body)
    if len(view) < BODY_BYTES_MIN:
        return None
    try:
        packed = _compress_lz4(view) if codec is Compression.LZ4 else _compress_zstd(view)
    except ImportError:
        raise UsageError(f"compression {codec.name} is not installed: {_FIX}, or send uncompressed") from None
    return _PREFIX.pack(codec, len(view)) + packed if _PREFIX.size + len(packed) < len(view) else None


def uncompressed_size(compressed: Buffer) -> int:
    """Return the size that a compressed body announces. Raises ProtocolError above a frame's bound."""
    view = memoryview(compressed)
    if len(view) <= _PREFIX.size:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"a compressed body of {len(view)} bytes has no content: send codec, size and content",
        )
    size = int(_PREFIX.unpack_from(view)[1])
    if size > FRAME_PAYLOAD_BYTES_MAX - STAMP_BYTES:
        raise ProtocolError(
            ErrorCode.TOO_LARGE,
            f"a compressed body announces {size} bytes; "
            f"the maximum is {FRAME_PAYLOAD_BYTES_MAX - STAMP_BYTES}: send less at once",
        )
    return size


def decompress(compressed: Buffer) -> bytes:
    """Decompress a body. Raises ProtocolError if it is malformed or its codec is not available here."""
    size = uncompressed_size(compressed)
    view = memoryview(compressed)
    number = view[0]
    if number not in Compression._value2member_map_:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_FLAG, f"compression {number} is unknown: send 1 (LZ4) or 2 (ZSTD)"
        )
    codec = Compression(number)
    packed = view[_PREFIX.size :]
    try:
        body = _decompress_lz4(packed, size) if codec is Compression.LZ4 else _decompress_zstd(packed, size)
    except ImportError:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_FLAG,
            f"the frame is compressed with {codec.name}, which is not installed here: {_FIX}, "
            "or send without compression",
        ) from None
    except ValueError as error:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"the compressed body is not valid {codec.name}: {error}: compress it again",
        ) from None
    if len(body) != size:
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"a compressed body announces {size} bytes and holds {len(body)}: announce its true size",
        )
    return body


def _compress_lz4(body: memoryview) -> bytes:
    import lz4.block

    return bytes(lz4.block.compress(body, store_size=False))


def _decompress_lz4(packed: memoryview, size: int) -> bytes:
    import lz4.block

    try:
        return bytes(lz4.block.decompress(packed, uncompressed_size=size))
    except lz4.block.LZ4BlockError as error:
        raise ValueError(error) from None


def _compress_zstd(body: memoryview) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=3).compress(body))


def _decompress_zstd(packed: memoryview, size: int) -> bytes:
    import zstandard

    try:
        # The library allocates the size in the content's own header, whatever bound it is given.
        stated: Any = zstandard.frame_content_size(packed)
        if stated != size:
            raise ValueError(f"its header states {stated} bytes, not the {size} announced")
        decompressor = zstandard.ZstdDecompressor(max_window_size=FRAME_PAYLOAD_BYTES_MAX)
        return bytes(decompressor.decompress(packed, max_output_size=size, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise ValueError(error) from None
