"""The frame header: 16 bytes, big-endian, in front of every frame.

What the header alone can refuse is refused here, before a byte of the payload is kept.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from delta_prop_wire.errors import PeerError
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
"""A delta of the greatest size, with its names, metadata, parents and clock around it."""

_HEADER = struct.Struct(">BBBBQI")
assert _HEADER.size == HEADER_BYTES

_PAYLOAD_BYTES_MAX = {
    **dict.fromkeys(FrameType, CONTROL_PAYLOAD_BYTES_MAX),
    FrameType.DELTA: DELTA_PAYLOAD_BYTES_MAX,
    FrameType.BATCH: FRAME_PAYLOAD_BYTES_MAX,
}
_FLAGS_MUST = {**dict.fromkeys(FrameType, 0), FrameType.BATCH: int(Flag.BATCHED)}
_LATER = 0xF0
"""Flags that only a later version knows: passed over on control frames, whose checksum covers them."""
_FLAGS_MAY = {
    **dict.fromkeys(FrameType, _LATER),
    FrameType.DELTA: Flag.ACK_WANTED | Flag.HIGH_PRIORITY,
    FrameType.BATCH: Flag.ACK_WANTED | Flag.HIGH_PRIORITY | Flag.COMPRESSED,
}
_SOUND = {
    (int(kind), flags): (kind, _PAYLOAD_BYTES_MAX[kind])
    for kind in FrameType
    for flags in range(256)
    if flags & ~_FLAGS_MAY[kind] == _FLAGS_MUST[kind]
}
"""(type, flags) of every header that may be, with the type's bound of the payload."""


class Header(NamedTuple):
    """type, flags, sequence, length of the payload."""

    type: FrameType
    flags: int
    sequence: int
    length: int


def pack_header(kind: FrameType, flags: int, sequence: int, length: int) -> bytes:
    """The 16 bytes."""
    return _HEADER.pack(MAGIC, VERSION, kind, flags, sequence, length)


def unpack_header(raw: Buffer, payload_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX) -> Header:
    """Read and check 16 bytes. Raises PeerError."""
    magic, version, kind, flags, sequence, length = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        _bad(f"the frame starts with byte {magic:#04x}; every frame starts with {MAGIC:#04x}")
    if version != VERSION:
        raise PeerError(ErrorCode.UNSUPPORTED_VERSION, f"frame version {version}; known is {VERSION}")
    sound = _SOUND.get((kind, flags))
    if sound is None:
        _refuse_form(kind, flags)
    frame_type, bound = sound[0], min(payload_bytes_max, sound[1])
    if length > bound:
        raise PeerError(
            ErrorCode.TOO_LARGE,
            f"a {frame_type.name} frame announces {length} bytes, allowed are {bound}: send less at once",
        )
    if frame_type is FrameType.BATCH and length < STAMP_BYTES:
        _bad(f"a BATCH frame announces {length} bytes of payload; its stamp alone has {STAMP_BYTES}")
    return Header(frame_type, flags, sequence, length)


def _refuse_form(kind: int, flags: int) -> NoReturn:
    if kind not in FrameType._value2member_map_:
        _bad(f"frame type {kind}; known are 0 to {max(FrameType)}")
    name = FrameType(kind).name
    if flags & _LATER & ~_FLAGS_MAY[FrameType(kind)]:
        raise PeerError(
            ErrorCode.UNSUPPORTED_FLAG, f"flags {flags:#04x} have reserved bits set; send bits 4 to 7 as 0"
        )
    if (flags & Flag.BATCHED) != _FLAGS_MUST[FrameType(kind)]:
        _bad(f"flag b3 (batched) is set exactly on BATCH frames; this {name} has flags {flags:#04x}")
    if flags & Flag.COMPRESSED:
        _bad(f"flag b2 (compressed) on a {name} frame; only BATCH frames are compressed")
    _bad(f"flags {flags:#04x} on a {name} frame; b0 and b1 belong to DELTA and BATCH frames")


def _bad(message: str) -> NoReturn:
    raise PeerError(ErrorCode.BAD_FRAME, message)
