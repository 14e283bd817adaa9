"""The fast path of receiving: takes frames that arrived together, with batches of one origin, as one run.

Pure. Gives the same result as `codec.py` and `connection.py`, in fewer steps per frame. A run ends before any
frame that is invalid or does not continue it; `codec.py` decodes that frame.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import SMALLEST_BODY_BYTES
from delta_prop_wire.buffer import FRAMES_MAX, ReceiveBuffer
from delta_prop_wire.core import FrameRun
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import origin_partition
from delta_prop_wire.fast import heterogeneous, homogeneous
from delta_prop_wire.fast.homogeneous import KeyColumns, body_is_valid, decode_keys, homogeneous_body_is_valid
from delta_prop_wire.fast.row_templates import learn_template, parse_with_template
from delta_prop_wire.frames import Credit
from delta_prop_wire.spec import (
    COUNTER_MAX,
    CRC_BYTES,
    HEADER_BYTES,
    MAGIC,
    STAMP_BYTES,
    VERSION,
    Attribute,
    Flag,
    FrameType,
)
from delta_prop_wire.stamp import pack_producer_rest
from delta_prop_wire.validate import common_columns_only

if TYPE_CHECKING:
    from delta_prop_wire.credit_window import CreditWindow

_HEAD = struct.Struct(">IQI")
"""The frame header, with its first four bytes as one number."""
assert _HEAD.size == HEADER_BYTES
_PRODUCER_HEAD = struct.Struct(f"<{HEADER_BYTES}sI{STAMP_BYTES - CRC_BYTES}s")
"""The head of a producer's frame: header, stamp CRC, rest of the stamp."""
_BODY_AT = HEADER_BYTES + STAMP_BYTES
_UNBOUNDED = Credit(1 << 63, 1 << 63)
_LENGTH_MIN = STAMP_BYTES + SMALLEST_BODY_BYTES
_ACK_WANTED = int(Flag.ACK_WANTED)
_MIXED_ATTRIBUTES = Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES
_PREFIXES = {
    MAGIC << 24 | VERSION << 16 | FrameType.BATCH << 8 | flags: bool(flags & _ACK_WANTED)
    for high in (0, Flag.HIGH_PRIORITY)
    for flags in (Flag.BATCHED | high, Flag.BATCHED | high | Flag.ACK_WANTED)
}
"""Maps the first four bytes of a frame that may be in a run to whether it wants an acknowledgement."""


def take_run(
    buffer: ReceiveBuffer, window: CreditWindow, payload_bytes_max: int, sequence_min: int
) -> FrameRun | None:
    """Take the frames of a run from a buffer; return None if there are none (`Core.take_run`)."""
    view, start, received_end = buffer.unread()
    position, run_prefix, rows = start, 0, 0
    sequence = first_sequence = 0
    producer_rest = b""
    row_credit, byte_credit = window.remaining or _UNBOUNDED
    batches: list[Batch] = []
    undecoded: list[Batch] = []
    key_columns: list[KeyColumns] = []
    # A frame may be sent while both balances are above 0, and is charged in full.
    while (
        received_end - position > _BODY_AT
        and len(batches) < buffer.frames_max
        and rows < row_credit
        and position - start < byte_credit
    ):
        prefix, frame_sequence, length = _HEAD.unpack_from(view, position)
        frame_end = position + HEADER_BYTES + length
        if not batches:
            if frame_sequence < sequence_min:
                break
            run_prefix, sequence, first_sequence = prefix, frame_sequence, frame_sequence
        if (
            prefix != run_prefix
            or prefix not in _PREFIXES
            or frame_sequence != sequence
            or not frame_sequence
        ):
            break
        if frame_end > received_end or not _LENGTH_MIN <= length <= payload_bytes_max:
            break
        # The body is a separate object, so that a stored batch pins nothing else.
        body = bytes(view[position + _BODY_AT : frame_end])
        batch = parse_with_template(body) or Batch(body)
        if (batches and not _continues_run(batches[-1], batch)) or frame_sequence + batch.count > COUNTER_MAX:
            break
        header, crc, rest = _PRODUCER_HEAD.unpack_from(view, position)
        if not batches:
            producer_rest = pack_producer_rest(origin_partition(batch.origin))
        if rest != producer_rest or crc32c(header + rest) != crc:
            break
        if not batch.decoded:
            columns = _decode_columns(batch)
            if columns is None:
                break
            undecoded.append(batch)
            key_columns.append(columns)
        batches.append(batch)
        sequence += batch.count
        rows += batch.count
        position = frame_end
    valid_count = _decode_batches(batches, undecoded, key_columns) if undecoded else len(batches)
    # Frames after an invalid one are checked again in the next run, so the next runs are shorter.
    buffer.frames_max = 1 if valid_count < len(batches) else min(2 * buffer.frames_max, FRAMES_MAX)
    if not valid_count:
        return None
    if valid_count < len(batches):
        del batches[valid_count:]
        rows, position = (
            sum([batch.count for batch in batches]),
            start + sum([batch.size for batch in batches]),
        )
    size = position - start
    buffer.skip(size)
    window.spend(rows, size)
    return FrameRun(first_sequence, _PREFIXES[run_prefix], batches, rows, size)


def _decode_columns(batch: Batch) -> KeyColumns | None:
    """Check a body and decode its columns except for the vector ids; return the columns of these.

    None if it is invalid, or has rare columns.
    """
    if batch.homogeneous:
        return homogeneous.decode_columns(batch) if homogeneous_body_is_valid(batch) else None
    return (
        heterogeneous.decode_columns(batch) if common_columns_only(batch) and body_is_valid(batch) else None
    )


def _decode_batches(batches: list[Batch], undecoded: list[Batch], key_columns: list[KeyColumns]) -> int:
    """Decode the vector ids of the undecoded batches, and check the rows of heterogeneous ones.

    Return the number of valid batches before the first invalid one.
    """
    valid_count = decode_keys(undecoded, key_columns)
    mixed = [batch for batch in undecoded[:valid_count] if not batch.homogeneous]
    if mixed and not heterogeneous.rows_are_valid(mixed):
        invalid = next(batch for batch in mixed if not heterogeneous.rows_are_valid([batch]))
        invalid.decoded = False
        valid_count = undecoded.index(invalid)
    for index, batch in enumerate(undecoded[:valid_count]):
        if batch.homogeneous:
            learn_template(batch)
        elif not heterogeneous.mark_validated(batch):
            batch.decoded, valid_count = False, index
            break
    return len(batches) if valid_count == len(undecoded) else batches.index(undecoded[valid_count])


def _continues_run(previous: Batch, batch: Batch) -> bool:
    """True if a batch is the next one of the same origin and epoch, with the same attributes."""
    return (
        batch.base == previous.base + previous.count
        and batch.origin == previous.origin
        and batch.epoch == previous.epoch
        and not (batch.attributes ^ previous.attributes) & ~_MIXED_ATTRIBUTES
    )
