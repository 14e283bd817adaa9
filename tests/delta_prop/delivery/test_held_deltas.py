"""The index of a quarantine's held deltas."""

from __future__ import annotations

from delta_prop.delivery.held_deltas import HeldDeltas, QuarantinedDelta
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, create
from delta_prop_wire.encode import encode_batch
from tests.delta_prop.delivery.support import ORIGIN


def batch(offset: int, *keys: str) -> LoggedBatch:
    deltas = [Delta(key, create([1.0])) for key in keys]
    return LoggedBatch(encode_batch(deltas, origin=ORIGIN, base=offset + 1), offset, offset + 1, Source.LOCAL)


def record(logged: LoggedBatch, row: int, reason: str | None = None) -> QuarantinedDelta:
    return QuarantinedDelta(logged, row, 0, logged.offset + row, (), reason)


def test_removed_delta_stands_in_no_index() -> None:
    held, logged = HeldDeltas(), batch(0, "a", "a", "b")
    for row in range(3):
        held.add(record(logged, row, "no"))
    assert (held.bytes, held.extra_bytes(logged)) == (logged.batch.size, 0)
    assert held.first_offset_of(("default", "a")) == 0
    held.remove(0)
    assert held.first_offset_of(("default", "a")) == 1
    assert held.may_affect(batch(3, "a"))
    held.remove(1)
    assert not held.may_affect(batch(3, "a"))
    assert held.may_affect(batch(3, "b"))
    held.remove(2)
    assert (held.bytes, dict(held.vector_ids), held.records) == (0, {}, {})
    assert not held.may_affect(logged)


def test_dependent_of_a_removed_delta_is_blocked_by_the_next_rejected_one() -> None:
    held, logged = HeldDeltas(), batch(0, "a", "a", "a")
    for row, reason in enumerate(("no", "no", None)):
        held.add(record(logged, row, reason))
    held.records[2].blocked_by = held.find_blocker(held.records[2])
    assert held.records[2].blocked_by == 0
    held.remove(0)
    assert held.has_stale_blockers
    held.update_blockers()
    assert held.records[2].blocked_by == 1
