"""Tombstones stay in snapshots for their time; those of erased vectors are left out at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.retention.compaction import Compaction, SegmentRange, run_to_end
from delta_prop_broker.retention.snapshot import Snapshot, open_snapshot, sort_key
from delta_prop_broker.retention.tombstones import NO_AGE, TombstoneLimit
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Operation, Source, create, delete, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.state_rows import state_of
from tests.broker.durable import LOG_ID, SMALL, commit, open_log

HOUR_US = 3_600_000_000


class CompactedLog:
    """A log whose rows are compacted on request; each request is made at an open time."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.log: DurableLog = open_log(self.disk, SMALL)[0]
        self.previous: int | None = None

    def append(self, vector_id: str, operation: Operation) -> None:
        base = self.log.next_offset + 1
        batch = encode_batch([Delta(vector_id, operation, "n")], origin=1, base=base)
        self.log.append(batch, lamport=base, source=Source.LOCAL)

    def compact(self, *, seen_us: int = 0, old_us: float = 0, erased: str = "") -> Snapshot:
        self.append("newest", create([1.0]))
        self.log.replace_rows()
        self.append("newest", create([2.0]))
        commit(self.log)
        segments = [
            SegmentRange(segment.path, segment.base, segment.end)
            for segment in list(self.log.segments.all)[:-1]
            if segment.base >= (self.previous or 0)
        ]
        compaction = Compaction(
            self.disk, DIRECTORY, log_id=LOG_ID, segments=segments, previous=self.previous,
            run_bytes_max=1 << 20,
            tombstones=TombstoneLimit(
                seen_us, old_us, frozenset([sort_key("n", erased)]) if erased else frozenset()
            ),
        )  # fmt: skip
        assert run_to_end(compaction)
        self.previous = compaction.offset
        snapshot = open_snapshot(self.disk, DIRECTORY, compaction.offset)
        assert compaction.made.tombstones_below == snapshot.facts.tombstones.below
        return snapshot


def life(snapshot: Snapshot) -> dict[str, bool]:
    """Return which vectors of the snapshot are alive, without the newest."""
    found = {}
    for logged in snapshot.frames():
        for row, vector_id in enumerate(logged.batch.keys):
            found[vector_id] = state_of(logged.batch, row).alive
    found.pop("newest")
    return found


def test_tombstone_stays_for_its_time_and_is_then_left_out() -> None:
    log = CompactedLog()
    for vector_id in ("a", "b"):
        log.append(vector_id, create([1.0]))
    log.append("a", delete())
    assert life(log.compact(seen_us=1 * HOUR_US, old_us=-23 * HOUR_US)) == {"a": False, "b": True}
    log.append("b", delete())
    assert life(log.compact(seen_us=2 * HOUR_US, old_us=-22 * HOUR_US)) == {"a": False, "b": False}
    assert life(log.compact(seen_us=24 * HOUR_US, old_us=0)) == {"a": False, "b": False}
    assert life(log.compact(seen_us=25 * HOUR_US + 1, old_us=HOUR_US + 1)) == {"b": False}
    assert life(log.compact(seen_us=48 * HOUR_US, old_us=24 * HOUR_US)) == {"b": False}
    assert life(log.compact(seen_us=50 * HOUR_US, old_us=26 * HOUR_US)) == {}


def test_vector_that_was_rewritten_is_no_tombstone() -> None:
    log = CompactedLog()
    log.append("a", create([1.0]))
    log.append("a", delete())
    log.compact(seen_us=1)
    log.append("a", create([2.0]))
    assert life(log.compact(seen_us=2, old_us=2)) == {"a": True}
    assert life(log.compact(seen_us=3, old_us=3)) == {"a": True}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1), st.integers(0, 60))
def test_tombstones_are_left_out_after_their_time_and_not_before(
    snapshots: list[tuple[int, int]], retention: int
) -> None:
    """Each snapshot comes after some time, with so many more rows."""
    age, offset, now, reached_at = NO_AGE, 0, 0, {0: -retention}
    for time, rows in snapshots:
        now, offset = now + time, offset + rows
        reached_at[offset] = now
        age = age.next(offset, seen_us=now, old_us=now - retention)
        assert reached_at[age.below] <= now - retention
    for more in (1, 2, 3):
        now += retention
        age = age.next(offset + more, seen_us=now, old_us=now - retention)
    assert age.below >= offset


@pytest.mark.parametrize("is_folded", [False, True])
@pytest.mark.parametrize("has_base", [False, True])
def test_erased_vector_is_left_out_at_once(is_folded: bool, has_base: bool) -> None:
    log = CompactedLog()
    for vector_id in ("a", "b", "c"):
        log.append(vector_id, create([1.0]))
    log.append("c", delete())
    if has_base:
        log.compact(old_us=-1)
    if is_folded:
        log.append("b", sparse_add([0], [1.0]))
    log.append("b", delete())
    assert life(log.compact(old_us=-1, erased="b")) == {"a": True, "c": False}


def test_erased_vector_that_is_alive_stays() -> None:
    log = CompactedLog()
    log.append("b", delete())
    log.append("b", create([3.0]))
    assert life(log.compact(erased="b")) == {"b": True}
