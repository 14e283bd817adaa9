"""Runs: batches of one producer that came together, which are taken, offered and appended as one.

Pure. Other frames are read one by one, and their errors raised.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.body_checks import check_batch, read_header
from delta_prop_wire.delta import origin_partition
from delta_prop_wire.errors import ProtocolError
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
from delta_prop_wire.stamp import LogName, pack_producer_stamp
from delta_prop_wire.validate import batch_is_valid, common_columns_only

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

FRAMES_MAX = 64
"""The maximum number of frames taken at once, since taking them blocks the event loop."""
_HEADER = struct.Struct(">IQI")
"""Magic, version, type and flags as one number; sequence; length of the payload."""
_PREFIXES = frozenset(
    MAGIC << 24 | VERSION << 16 | FrameType.BATCH << 8 | Flag.BATCHED | flags
    for flags in (0, Flag.ACK_WANTED, Flag.HIGH_PRIORITY, Flag.ACK_WANTED | Flag.HIGH_PRIORITY)
)
_HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
_MIXED = Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES


@dataclass(slots=True)
class FrameRun:
    """Batches of one origin and epoch, whose counters and sequences continue from one to the next.

    They are valid, and have only common columns. `sequence`: the sequence of the first row. `rows`, `size`:
    the number of deltas and of bytes in all frames, as charged to credit.
    """

    sequence: int
    ack_wanted: bool
    batches: list[Batch]
    rows: int
    size: int


class RunLimits(NamedTuple):
    """The bounds of a run.

    `rows`, `bytes`: a frame may be taken while fewer are taken. `sequence_min`: the lowest sequence allowed
    for the first row, at least 1. `stream`: the stream that the frames are for.
    """

    frames_max: int
    rows: int
    bytes: int
    payload_bytes_max: int
    sequence_min: int
    stream: int = 0


def find_run(received: memoryview, limits: RunLimits) -> FrameRun | None:
    """Return the run at the start of received bytes, None if they begin with a frame that is in no run."""
    batches: list[Batch] = []
    run_key: tuple[int, ...] = ()
    rows = at = 0
    while len(batches) < limits.frames_max and rows < limits.rows and at < limits.bytes:
        frame = received[at:]
        if len(frame) <= _HEAD_BYTES:
            break
        prefix, sequence, length = _HEADER.unpack_from(frame)
        size = HEADER_BYTES + length
        if prefix not in _PREFIXES or length > limits.payload_bytes_max or size > len(frame):
            break
        if not batches and sequence < limits.sequence_min:
            break
        try:
            # The body is a separate object, so that a stored batch pins nothing else.
            batch = read_header(bytes(frame[_HEAD_BYTES:size]))
            key = (
                *(prefix, batch.origin, batch.epoch, batch.attributes & ~_MIXED),
                *(sequence - rows, batch.base - rows),
            )
            if (batches and key != run_key) or not common_columns_only(batch):
                break
            check_batch(batch)
        except ProtocolError:
            break
        log = LogName(limits.stream, origin_partition(batch.origin))
        stamp = pack_producer_stamp(bytes(frame[:HEADER_BYTES]), log)
        if frame[HEADER_BYTES:_HEAD_BYTES] != stamp or not batch_is_valid(batch):
            break
        if sequence + batch.count > COUNTER_MAX:
            break
        run_key = key
        batches.append(batch)
        rows += batch.count
        at += size
    if not batches:
        return None
    prefix, *_, first_sequence, _ = run_key
    return FrameRun(first_sequence, prefix & Flag.ACK_WANTED != 0, batches, rows, at)
