"""Frames with a valid header and checksum, around a valid or invalid map."""

from __future__ import annotations

from delta_prop_wire.crc import crc32c
from delta_prop_wire.header import pack_header
from delta_prop_wire.spec import FrameType


def frame_with_checksum(kind: FrameType, packed: bytes, *, flags: int = 0, sequence: int = 1) -> bytes:
    """Return a frame of these bytes, valid or not, with a valid header and checksum."""
    content = pack_header(kind, flags, sequence, len(packed) + 4) + packed
    return content + crc32c(content).to_bytes(4, "little")
