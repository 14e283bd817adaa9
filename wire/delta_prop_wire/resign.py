"""A body under another epoch, with another ack level, signed anew: for who sends on what others encoded.

Pure. Nothing else of it changes; its dots and its columns stay as they are.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.spec import ACK_LEVEL_SHIFT, CRC_BYTES

if TYPE_CHECKING:
    from delta_prop_wire.delta import AckLevel

_ATTRIBUTES, _ATTRIBUTES_AT = struct.Struct("<H"), 2
_EPOCH, _EPOCH_AT = struct.Struct("<I"), 16
_LEVEL_MASK = 3 << ACK_LEVEL_SHIFT


def resigned(batch: Batch, *, epoch: int, ack_level: AckLevel) -> Batch:
    """The same rows under this epoch, to be kept as this level says."""
    body = bytearray(batch.raw)
    _ATTRIBUTES.pack_into(
        body, _ATTRIBUTES_AT, batch.attributes & ~_LEVEL_MASK | ack_level << ACK_LEVEL_SHIFT
    )
    _EPOCH.pack_into(body, _EPOCH_AT, epoch)
    body[-CRC_BYTES:] = crc32c(memoryview(body)[:-CRC_BYTES]).to_bytes(CRC_BYTES, "little")
    return Batch(bytes(body))
