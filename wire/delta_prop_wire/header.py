"""The frame header: 16 bytes, big-endian, in front of every frame.

Refuses what the header alone shows to be wrong, before a byte of the payload is stored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.spec import (
    DELTA_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    STAMP_BYTES,
    VERSION,
    ErrorCode,
    Flag,
    FrameType,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

CONTROL_PAYLOAD_BYTES_MAX = 64 * 1024
DELTA_PAYLOAD_BYTES_MAX = DELTA_BYTES_MAX + 256 * 1024
"""Fits a delta of the maximum size with its names, metadata, parents and clock."""

_HEADER = struct.Struct(">BBBBQI")
assert _HEADER.size == HEADER_BYTES

_PAYLOAD_BYTES_MAX = {
    **dict.fromkeys(FrameType, CONTROL_PAYLOAD_BYTES_MAX),
    FrameType.DELTA: DELTA_PAYLOAD_BYTES_MAX,
    FrameType.BATCH: FRAME_PAYLOAD_BYTES_MAX,
}
_REQUIRED_FLAGS = {**dict.fromkeys(FrameType, 0), FrameType.BATCH: int(Flag.BATCHED)}
_RESERVED_FLAGS = 0xF0
"""Flags reserved for later versions: ignored on control frames, whose checksum covers them."""
_ALLOWED_FLAGS = {
    **dict.fromkeys(FrameType, _RESERVED_FLAGS),
    FrameType.DELTA: Flag.ACK_WANTED | Flag.HIGH_PRIORITY,
    FrameType.BATCH: Flag.ACK_WANTED | Flag.HIGH_PRIORITY | Flag.COMPRESSED,
}
_VALID_HEADERS = {
    (int(kind), flags): (kind, _PAYLOAD_BYTES_MAX[kind])
    for kind in FrameType
    for flags in range(256)
    if flags & ~_ALLOWED_FLAGS[kind] == _REQUIRED_FLAGS[kind]
}
"""Maps (type, flags) of every valid header to its frame type and the bound of its payload."""


class Header(NamedTuple):
    """Type, flags, sequence, length of the payload."""

    type: FrameType
    flags: int
    sequence: int
    length: int


def pack_header(kind: FrameType, flags: int, sequence: int, length: int) -> bytes:
    """Return the 16 bytes of a header."""
    return _HEADER.pack(MAGIC, VERSION, kind, flags, sequence, length)


def unpack_header(raw: Buffer, payload_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX) -> Header:
    """Read and check 16 bytes. Raises ProtocolError."""
    magic, version, kind, flags, sequence, length = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        _raise_bad_frame(f"the frame starts with byte {magic:#04x}: start each frame with {MAGIC:#04x}")
    if version != VERSION:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_VERSION, f"frame version {version} is not supported: send version {VERSION}"
        )
    frame_type_and_bound = _VALID_HEADERS.get((kind, flags))
    if frame_type_and_bound is None:
        _raise_invalid_header(kind, flags)
    frame_type, bound = frame_type_and_bound
    bytes_max = min(payload_bytes_max, bound)
    if length > bytes_max:
        raise ProtocolError(
            ErrorCode.TOO_LARGE,
            f"a {frame_type.name} frame announces {length} bytes; the maximum is {bytes_max}: "
            "send less at once",
        )
    if frame_type is FrameType.BATCH and length < STAMP_BYTES:
        _raise_bad_frame(
            f"a BATCH frame announces {length} bytes of payload; its stamp alone has {STAMP_BYTES}: "
            "count all bytes that follow the header"
        )
    return Header(frame_type, flags, sequence, length)


def _raise_invalid_header(kind: int, flags: int) -> NoReturn:
    if kind not in FrameType._value2member_map_:
        _raise_bad_frame(f"frame type {kind} is unknown: send a type from 0 to {max(FrameType)}")
    name = FrameType(kind).name
    if flags & _RESERVED_FLAGS & ~_ALLOWED_FLAGS[FrameType(kind)]:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_FLAG, f"flags {flags:#04x} have reserved bits set: send bits 4 to 7 as 0"
        )
    if (flags & Flag.BATCHED) != _REQUIRED_FLAGS[FrameType(kind)]:
        _raise_bad_frame(
            f"flags {flags:#04x} on a {name} frame: set bit 3 (batched) on BATCH frames, and on no others"
        )
    if flags & Flag.COMPRESSED:
        _raise_bad_frame(f"bit 2 (compressed) on a {name} frame: compress BATCH frames only")
    _raise_bad_frame(f"flags {flags:#04x} on a {name} frame: set bits 0 and 1 on DELTA and BATCH frames only")


def _raise_bad_frame(message: str) -> NoReturn:
    raise ProtocolError(ErrorCode.BAD_FRAME, message)
