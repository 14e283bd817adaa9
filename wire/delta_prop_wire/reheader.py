"""Rewrites epoch and ack level in a body's header, for clients that send bodies that others encoded.

Pure. Only these fields and the checksum change; dots and columns stay as they are.
"""

from __future__ import annotations

import struct

from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.spec import ACK_LEVEL_SHIFT, CRC_BYTES

_ATTRIBUTES, _ATTRIBUTES_AT = struct.Struct("<H"), 2
_EPOCH, _EPOCH_AT = struct.Struct("<I"), 16
_LEVEL_MASK = 3 << ACK_LEVEL_SHIFT


def with_header(batch: Batch, *, epoch: int, ack_level: AckLevel) -> Batch:
    """Return a batch of the same rows with this epoch and ack level."""
    body = bytearray(batch.raw)
    _ATTRIBUTES.pack_into(
        body, _ATTRIBUTES_AT, batch.attributes & ~_LEVEL_MASK | ack_level << ACK_LEVEL_SHIFT
    )
    _EPOCH.pack_into(body, _EPOCH_AT, epoch)
    body[-CRC_BYTES:] = crc32c(memoryview(body)[:-CRC_BYTES]).to_bytes(CRC_BYTES, "little")
    return Batch(bytes(body))
