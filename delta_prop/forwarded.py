"""What is other for batches that come from another service's log.

That service accepted them, so here nothing of them is refused for good, and no dot of theirs becomes void.
Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.receipt import Published
from delta_prop_wire.control_rows import read_void, uses_dots
from delta_prop_wire.cutting import part_of
from delta_prop_wire.encode import encode_void
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop.ingest.origins import Origins
    from delta_prop.ingest.work import Sequenced
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch


LAMPORT_GIVEN_MAX = 1 << 62
"""Lamport numbers that forwarders may give, so that the service's own have room above them."""


def check_numbers(work: Sequenced) -> None:
    """Counters and Lamport numbers that a store could not keep are refused before they mean anything.

    So are states and a log's own control rows that a forwarder brings. Of its deltas nothing else is judged:
    their service did that.
    """
    if work.forwards and (work.batch.is_state or work.batch.row_offsets is not None):
        raise InvalidDelta("batch", "holds states, or offsets of rows: forward frames as a log has them")
    if work.forwards and not uses_dots(work.batch):
        raise InvalidDelta("batch", "holds another log's own control rows: forward those of type 0 alone")
    last, lamport = work.batch.last, work.lamport or 0
    if last > COUNTER_MAX or not 0 <= lamport <= LAMPORT_GIVEN_MAX:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"counter {last} or Lamport number {lamport} is above its bound "
            f"({COUNTER_MAX}, {LAMPORT_GIVEN_MAX}): a producer counts from 1, a service from its log",
        )


def admit(origins: Origins, work: Sequenced, have: int, now: float) -> None:
    """Admit the origin of a batch, whose watermark is `have`: nobody says hello for it. Raises Refused."""
    batch, owner = work.batch, work.session.owner
    if origins.get(batch.origin) is None:
        origins.check_room([batch.origin], owner, bounded=False)
        origins.note_forwarded(batch.origin, owner, batch.epoch, now, have)


def covered(batch: Batch, firsts: Mapping[int, int | None], log: Log) -> Published:
    """The answer to a batch whose dots all lie below the watermark, whoever brought them."""
    return Published(firsts[0], batch.dot(0), batch.count, log.level, firsts)


def cut_at(work: Sequenced, have: int) -> int:
    """Leave out the rows up to the watermark, which are here already, under another cut; return how many.

    Another service's log may have lost its tail, and its producer have gone on with other batches.
    """
    batch = work.batch
    if batch.base > have:
        return 0
    rows = [row for row in range(batch.count) if batch.counter(row) > have]
    if batch.is_control:
        work.batch = _void_rest(batch, rows, have)
    else:
        previous = have if batch.leaps else batch.counter(rows[0]) - 1
        work.batch = part_of(batch, np.array(rows, np.intp), previous=previous, clock=batch.clock)
    if work.lamport is not None:
        work.lamport += rows[0]
    return rows[0]


def _void_rest(batch: Batch, rows: list[int], have: int) -> Batch:
    counters = [batch.counter(row) for row in rows]
    return encode_void(
        origin=batch.origin,
        base=counters[0],
        count=len(rows),
        code=read_void(batch).code,
        epoch=batch.epoch,
        clock=batch.clock,
        previous=have if batch.leaps else 0,
        counters=counters if batch.leaps else None,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )
