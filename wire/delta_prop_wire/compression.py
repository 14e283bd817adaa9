"""Compression of what stands behind a batch's stamp: codec u8, size u32 (little-endian), compressed bytes.

LZ4 and Zstandard are an extra and imported when first used. A size is believed only up to a frame's bound,
and nothing is allocated before it is checked.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from delta_prop_wire.errors import PeerError, UsageError
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX, STAMP_BYTES, ErrorCode

if TYPE_CHECKING:
    from typing_extensions import Buffer

BODY_BYTES_MIN = 1024
"""Smaller bodies travel as they are."""

_PREFIX = struct.Struct("<BI")
_CURE = "install delta-prop[compress]"


class Compression(IntEnum):
    """The codec: first byte of a compressed body."""

    LZ4 = 1
    ZSTD = 2


_MODULES = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard"}


def available() -> tuple[Compression, ...]:
    """The codecs that are installed: what a hello may offer."""
    return tuple(codec for codec, module in _MODULES.items() if find_spec(module) is not None)


def compress(body: Buffer, codec: Compression) -> bytes | None:
    """The compressed form; None where the body is small or does not shrink. Raises UsageError."""
    view = memoryview(body)
    if len(view) < BODY_BYTES_MIN:
        return None
    try:
        packed = _lz4(view) if codec is Compression.LZ4 else _zstd(view)
    except ImportError:
        raise UsageError(f"{codec.name} is not there to compress with: {_CURE}, or send as it is") from None
    return _PREFIX.pack(codec, len(view)) + packed if _PREFIX.size + len(packed) < len(view) else None


def uncompressed_size(compressed: Buffer) -> int:
    """The size that a compressed body will have. Raises PeerError where it is above a frame's bound."""
    view = memoryview(compressed)
    if len(view) <= _PREFIX.size:
        raise PeerError(
            ErrorCode.BAD_FRAME, f"a compressed body of {len(view)} bytes ends before its content"
        )
    size = int(_PREFIX.unpack_from(view)[1])
    if size > FRAME_PAYLOAD_BYTES_MAX - STAMP_BYTES:
        raise PeerError(
            ErrorCode.TOO_LARGE,
            f"a compressed body announces {size} bytes, allowed are {FRAME_PAYLOAD_BYTES_MAX - STAMP_BYTES}",
        )
    return size


def decompress(compressed: Buffer) -> bytes:
    """The body. Raises PeerError where it is not of the size it announces, or the codec is not there."""
    size = uncompressed_size(compressed)
    view = memoryview(compressed)
    number = view[0]
    if number not in Compression._value2member_map_:
        raise PeerError(ErrorCode.UNSUPPORTED_FLAG, f"compression {number}; known are 1 LZ4, 2 ZSTD")
    codec = Compression(number)
    packed = view[_PREFIX.size :]
    try:
        body = _unlz4(packed, size) if codec is Compression.LZ4 else _unzstd(packed, size)
    except ImportError:
        raise PeerError(
            ErrorCode.UNSUPPORTED_FLAG,
            f"the frame is compressed with {codec.name}, which is not installed here: {_CURE}, "
            "or send without compression",
        ) from None
    except ValueError as error:
        raise PeerError(
            ErrorCode.BAD_FRAME, f"the compressed body is not sound {codec.name}: {error}"
        ) from None
    if len(body) != size:
        raise PeerError(ErrorCode.BAD_FRAME, f"a compressed body announces {size} bytes and has {len(body)}")
    return body


def _lz4(body: memoryview) -> bytes:
    import lz4.block

    return bytes(lz4.block.compress(body, store_size=False))


def _unlz4(packed: memoryview, size: int) -> bytes:
    import lz4.block

    try:
        return bytes(lz4.block.decompress(packed, uncompressed_size=size))
    except lz4.block.LZ4BlockError as error:
        raise ValueError(error) from None


def _zstd(body: memoryview) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=3).compress(body))


def _unzstd(packed: memoryview, size: int) -> bytes:
    import zstandard

    try:
        # The library allocates what the content's own header says, whatever bound it is given.
        told: Any = zstandard.frame_content_size(packed)
        if told != size:
            raise ValueError(f"its header states {told} bytes, not the {size} announced")
        machine = zstandard.ZstdDecompressor(max_window_size=FRAME_PAYLOAD_BYTES_MAX)
        return bytes(machine.decompress(packed, max_output_size=size, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise ValueError(error) from None
