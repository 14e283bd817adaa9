"""The fast path of receiving: takes frames that arrived together, with batches of one origin, as one run.

Pure. Does what `codec.py` and `connection.py` do frame by frame, in a few steps for each. A run ends before
any frame that is invalid or of another form; `codec.py` decodes that one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_wire import heterogeneous, homogeneous
from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import SMALLEST_BODY_BYTES, body_is_valid, homogeneous_body_is_valid
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import origin_partition
from delta_prop_wire.frames import Credit
from delta_prop_wire.homogeneous import decode_keys
from delta_prop_wire.row_templates import learn_template, parse_with_template
from delta_prop_wire.spec import (
    COUNTER_MAX,
    HEADER_BYTES,
    MAGIC,
    STAMP_BYTES,
    VERSION,
    Attribute,
    Flag,
    FrameType,
)
from delta_prop_wire.stamp import PRODUCER_HEAD, pack_producer_rest

if TYPE_CHECKING:
    from delta_prop_wire.buffer import ReceiveBuffer
    from delta_prop_wire.credit_window import CreditWindow
    from delta_prop_wire.homogeneous import KeyColumns

FRAMES_MAX = 64
"""The maximum of frames in a run, since taking one blocks the event loop."""

_HEAD = struct.Struct(">IQI")
"""The frame header, with its first four bytes as one number."""
assert _HEAD.size == HEADER_BYTES
_BODY_AT = HEADER_BYTES + STAMP_BYTES
_UNBOUNDED = Credit(1 << 63, 1 << 63)
_LENGTH_MIN = STAMP_BYTES + SMALLEST_BODY_BYTES
_ACK_WANTED = int(Flag.ACK_WANTED)
_MIXED = Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES
_STARTS = {
    MAGIC << 24 | VERSION << 16 | FrameType.BATCH << 8 | flags: bool(flags & _ACK_WANTED)
    for high in (0, Flag.HIGH_PRIORITY)
    for flags in (Flag.BATCHED | high, Flag.BATCHED | high | Flag.ACK_WANTED)
}
"""The first four bytes of a frame that a run may have, to True if it wants an acknowledgement."""


@dataclass(slots=True)
class FrameRun:
    """Batches of one origin and epoch, whose counters and sequences continue from one to the next.

    `sequence`: of the first row. `rows`, `size`: deltas and bytes of all frames, as charged to credit.
    """

    sequence: int
    ack_wanted: bool
    batches: list[Batch]
    rows: int
    size: int


class FrameRunReader:
    """A reader of runs from one receive buffer."""

    def __init__(self, buffer: ReceiveBuffer) -> None:
        self._buffer = buffer
        self._frames_max = FRAMES_MAX

    def take(self, window: CreditWindow, payload_bytes_max: int, sequence_min: int) -> FrameRun | None:
        """Take the frames of a run from the buffer, while they are whole and the window is open.

        Return None if there are none. `sequence_min`: the lowest sequence allowed for the first row, since
        sequences of a connection rise.
        """
        view, begin, end = self._buffer.unread()
        at, run_start, rows = begin, 0, 0
        sequence = first_sequence = 0
        producer_rest = b""
        rows_left, bytes_left = window.remaining or _UNBOUNDED
        batches: list[Batch] = []
        undecoded: list[Batch] = []
        key_columns: list[KeyColumns] = []
        # A frame may come while both balances are above 0, and is charged in full.
        while (
            end - at > _BODY_AT
            and len(batches) < self._frames_max
            and rows < rows_left
            and at - begin < bytes_left
        ):
            start, first, length = _HEAD.unpack_from(view, at)
            stop = at + HEADER_BYTES + length
            if not batches:
                if first < sequence_min:
                    break
                run_start, sequence, first_sequence = start, first, first
            if start != run_start or start not in _STARTS or first != sequence or not first:
                break
            if stop > end or not _LENGTH_MIN <= length <= payload_bytes_max:
                break
            # The body is a separate object, so that a stored batch pins nothing else.
            body = bytes(view[at + _BODY_AT : stop])
            batch = parse_with_template(body) or Batch(body)
            if (batches and not _continues_run(batches[-1], batch)) or first + batch.count > COUNTER_MAX:
                break
            header, crc, rest = PRODUCER_HEAD.unpack_from(view, at)
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
            at = stop
        intact = _decode_batches(batches, undecoded, key_columns) if undecoded else len(batches)
        return self._take_run(first_sequence, run_start, batches, intact, window)

    def _take_run(
        self, sequence: int, start: int, batches: list[Batch], intact: int, window: CreditWindow
    ) -> FrameRun | None:
        # Frames left out are checked again, so after that fewer are taken at a time.
        self._frames_max = 1 if intact < len(batches) else min(2 * self._frames_max, FRAMES_MAX)
        del batches[intact:]
        if not batches:
            return None
        rows, size = sum([batch.count for batch in batches]), sum([batch.size for batch in batches])
        self._buffer.skip(size)
        window.spend(rows, size)
        return FrameRun(sequence, _STARTS[start], batches, rows, size)


def _decode_columns(batch: Batch) -> KeyColumns | None:
    """Decode all columns of a batch but its vector ids, and return those; None if anything is invalid."""
    if batch.homogeneous:
        return homogeneous.decode_columns(batch) if homogeneous_body_is_valid(batch) else None
    return (
        heterogeneous.decode_columns(batch)
        if heterogeneous.common_columns_only(batch) and body_is_valid(batch)
        else None
    )


def _decode_batches(batches: list[Batch], undecoded: list[Batch], key_columns: list[KeyColumns]) -> int:
    """Decode the vector ids of the undecoded batches, and check rows that differ.

    Return how many of `batches`, from the first on, are valid.
    """
    decoded = decode_keys(undecoded, key_columns)
    differing = [batch for batch in undecoded[:decoded] if not batch.homogeneous]
    if differing and not heterogeneous.rows_are_valid(differing):
        invalid = next(batch for batch in differing if not heterogeneous.rows_are_valid([batch]))
        invalid.decoded = False
        decoded = undecoded.index(invalid)
    for batch in undecoded[:decoded]:
        if batch.homogeneous:
            learn_template(batch)
        else:
            heterogeneous.mark_validated(batch)
    return len(batches) if decoded == len(undecoded) else batches.index(undecoded[decoded])


def _continues_run(previous: Batch, batch: Batch) -> bool:
    """True if a batch is the next one of the same origin and epoch, with the same attributes."""
    return (
        batch.base == previous.base + previous.count
        and batch.origin == previous.origin
        and batch.epoch == previous.epoch
        and not (batch.attributes ^ previous.attributes) & ~_MIXED
    )
