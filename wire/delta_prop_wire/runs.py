"""The short way in: frames that came together and hold simple batches of one origin are taken as one run.

Pure. It does what `codec.py` and `connection.py` do frame by frame, in a few steps for each. Where a frame is
anything else, or unsound, the run ends before it, and the long way says what it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_wire import mixed, plain
from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import origin_partition
from delta_prop_wire.forms import note_form, parse_known
from delta_prop_wire.frames import Credit
from delta_prop_wire.plain import decode_names
from delta_prop_wire.soundness import SMALLEST_BODY_BYTES, body_is_sound, plain_body_is_sound
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
from delta_prop_wire.stamp import SENT_HEAD, sent_rest

if TYPE_CHECKING:
    from delta_prop_wire.buffer import ReceiveBuffer
    from delta_prop_wire.plain import Names
    from delta_prop_wire.window import Window

FRAMES_MAX = 64
"""Frames of one run: whoever takes it keeps the event loop meanwhile."""

_HEAD = struct.Struct(">IQI")
"""The frame header, its first four bytes in one."""
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
"""The first four bytes of a frame that a run may have, and whether it wants its offsets told."""


@dataclass(slots=True)
class Run:
    """Simple batches of one origin and epoch, whose counters and sequences go on from one to the next.

    `sequence`: of the first row; `rows` and `size`: of all, in deltas and bytes as credits are charged.
    """

    sequence: int
    ack_wanted: bool
    batches: list[Batch]
    rows: int
    size: int


class Runs:
    """Takes runs out of one receive buffer."""

    def __init__(self, buffer: ReceiveBuffer) -> None:
        self._buffer = buffer
        self._frames_max = FRAMES_MAX

    def take(self, window: Window, payload_bytes_max: int, sequence_min: int) -> Run | None:
        """Take the frames of a run out of the buffer, as far as they are whole and the window is open.

        `sequence_min`: of the first row, as a sequence of its connection goes up. The others go on from it.
        """
        view, begin, end = self._buffer.held()
        at, start, rows = begin, 0, 0
        sequence = first_sequence = 0
        sent = b""
        rows_left, bytes_left = window.left or _UNBOUNDED
        batches: list[Batch] = []
        unnamed: list[Batch] = []
        names: list[Names] = []
        # A frame may come while both balances are above 0, and is charged in full.
        while (
            end - at > _BODY_AT
            and len(batches) < self._frames_max
            and rows < rows_left
            and at - begin < bytes_left
        ):
            told, first, length = _HEAD.unpack_from(view, at)
            stop = at + HEADER_BYTES + length
            if not batches:
                if first < sequence_min:
                    break
                start, sequence, first_sequence = told, first, first
            if told != start or told not in _STARTS or first != sequence or not first:
                break
            if stop > end or not _LENGTH_MIN <= length <= payload_bytes_max:
                break
            # A body of its own, so that a batch that is kept keeps nothing else.
            body = bytes(view[at + _BODY_AT : stop])
            batch = parse_known(body) or Batch(body)
            if (batches and not _goes_on(batches[-1], batch)) or first + batch.count > COUNTER_MAX:
                break
            header, crc, rest = SENT_HEAD.unpack_from(view, at)
            if not batches:
                sent = sent_rest(origin_partition(batch.origin))
            if rest != sent or crc32c(header + rest) != crc:
                break
            if not batch.decoded:
                named = _names_in(batch)
                if named is None:
                    break
                unnamed.append(batch)
                names.append(named)
            batches.append(batch)
            sequence += batch.count
            rows += batch.count
            at = stop
        whole = _decode(batches, unnamed, names) if unnamed else len(batches)
        return self._run(first_sequence, start, batches, whole, window)

    def _run(self, sequence: int, start: int, batches: list[Batch], whole: int, window: Window) -> Run | None:
        # What is left out is looked at again: where that happens, fewer at a time.
        self._frames_max = 1 if whole < len(batches) else min(2 * self._frames_max, FRAMES_MAX)
        del batches[whole:]
        if not batches:
            return None
        rows, size = sum([batch.count for batch in batches]), sum([batch.size for batch in batches])
        self._buffer.skip(size)
        window.spend(rows, size)
        return Run(sequence, _STARTS[start], batches, rows, size)


def _names_in(batch: Batch) -> Names | None:
    """The vector ids of a batch, whose other columns are found too; None where anything is not in order."""
    if batch.plain:
        return plain.decode_columns(batch) if plain_body_is_sound(batch) else None
    return mixed.decode_columns(batch) if mixed.is_simple(batch) and body_is_sound(batch) else None


def _decode(batches: list[Batch], unnamed: list[Batch], names: list[Names]) -> int:
    """Decode the vector ids of those of these batches that have none yet, and look over rows that differ; how
    many of the first batches are in order.
    """
    named = decode_names(unnamed, names)
    differing = [batch for batch in unnamed[:named] if not batch.plain]
    if differing and not mixed.rows_are_sound(differing):
        unsound = next(batch for batch in differing if not mixed.rows_are_sound([batch]))
        unsound.decoded = False
        named = unnamed.index(unsound)
    for batch in unnamed[:named]:
        if batch.plain:
            note_form(batch)
        else:
            mixed.note_sound(batch)
    return len(batches) if named == len(unnamed) else batches.index(unnamed[named])


def _goes_on(before: Batch, batch: Batch) -> bool:
    """Whether a batch is the next of the same origin, to be kept as the one before it."""
    return (
        batch.base == before.base + before.count
        and batch.origin == before.origin
        and batch.epoch == before.epoch
        and not (batch.attributes ^ before.attributes) & ~_MIXED
    )
