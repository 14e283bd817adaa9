"""Special rules for batches that were forwarded from another service's log.

That service accepted them, so here they are never refused permanently, and none of their dots becomes a
no-op. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.calls.outcomes import PublishAck
from delta_prop_wire.batch import Batch
from delta_prop_wire.control_rows import read_noop, uses_dots
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.slicing import select_rows
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.ingest.origins import Origins
    from delta_prop.partition.ingest.work import SequencedBatch
    from delta_prop_broker.log.contract import Log


FORWARDED_LAMPORT_MAX = 1 << 62
"""Maximum Lamport number of a forwarded batch, so that the service's own numbers fit above it."""


def check_numbers(work: SequencedBatch) -> None:
    """Refuse counters and Lamport numbers that a store could not hold, before anything uses them.

    Also refuse states, and a log's own control rows, from a forwarder. Nothing else of its deltas is checked:
    their service did that.
    """
    if work.is_forwarded and (work.batch.is_state or work.batch.row_offsets is not None):
        raise InvalidDelta("batch", "holds states, or offsets of rows: forward frames as a log has them")
    if work.is_forwarded and not uses_dots(work.batch):
        raise InvalidDelta("batch", "holds another log's own control rows: forward only those of type 0")
    last, lamport = work.batch.last, work.lamport or 0
    if last > COUNTER_MAX or not 0 <= lamport <= FORWARDED_LAMPORT_MAX:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"counter {last} or Lamport number {lamport} is above its bound "
            f"({COUNTER_MAX}, {FORWARDED_LAMPORT_MAX}): a producer counts from 1, a service from its log",
        )


def admit(origins: Origins, work: SequencedBatch, watermark: int, now: float) -> None:
    """Admit the origin of a forwarded batch, which sends no hello. Raises Refused."""
    batch, owner = work.batch, work.sender.owner
    if origins.get(batch.origin) is None:
        origins.check_capacity([batch.origin], owner, bounded=False)
        origins.note_forwarded(batch.origin, owner, batch.epoch, now, watermark)


def ack_covered(batch: Batch, first_offsets: Mapping[int, int | None], log: Log) -> PublishAck:
    """Return the answer to a batch whose dots are all up to the watermark, whoever sent them."""
    return PublishAck(first_offsets[0], batch.dot(0), batch.count, log.ack_level, first_offsets)


def drop_known_rows(work: SequencedBatch, watermark: int) -> int:
    """Leave out the rows up to the watermark, which are here already in other batches; return how many.

    Another service's log may have lost its tail, after which its producer continued with other batches.
    """
    batch = work.batch
    if batch.base > watermark:
        return 0
    rows = [row for row in range(batch.count) if batch.counter(row) > watermark]
    if batch.is_control:
        work.batch = _slice_noop(batch, rows, watermark)
    else:
        previous = watermark if batch.has_gaps else batch.counter(rows[0]) - 1
        work.batch = select_rows(batch, np.array(rows, np.intp), previous=previous, clock=batch.clock)
    if work.lamport is not None:
        work.lamport += rows[0]
    return rows[0]


def _slice_noop(batch: Batch, rows: list[int], watermark: int) -> Batch:
    counters = [batch.counter(row) for row in rows]
    return encode_noop(
        origin=batch.origin,
        base=counters[0],
        count=len(rows),
        code=read_noop(batch).code,
        epoch=batch.epoch,
        clock=batch.clock,
        previous=watermark if batch.has_gaps else 0,
        counters=counters if batch.has_gaps else None,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )
