"""Compaction: a snapshot and the tail fold to the same states as the full log, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.retention.compaction import Compaction, SegmentRange, run_to_end
from delta_prop_broker.retention.snapshot import Snapshot, open_snapshot, sort_key
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import Delta, KnownIds, Source, create, scale
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.state_rows import state_of
from tests.broker.durable import LOG_ID, SMALL, commit, open_log
from tests.broker.histories import Name, Rows, Step, Writer, comparable, steps, steps_with_ids
from tests.wire.duplicate_keys import DEEP, FLAT, NULLED, with_metadata

TINY = replace(SMALL, segment_bytes_max=900, bytes_max=1 << 22, retention_bytes=1 << 22)


def sealed_segments(log: DurableLog, start: int = 0) -> list[SegmentRange]:
    """Return the sealed segments from offset `start` on."""
    return [
        SegmentRange(segment.path, segment.base, segment.end)
        for segment in list(log.segments.all)[:-1]
        if segment.base >= start
    ]


def compact_segments(
    disk: Disk, segments: list[SegmentRange], previous: int | None = None, *, run_bytes_max: int = 1 << 20
) -> Snapshot:
    compaction = Compaction(
        disk, DIRECTORY, log_id=LOG_ID, segments=segments, previous=previous, run_bytes_max=run_bytes_max
    )
    assert run_to_end(compaction)
    return open_snapshot(disk, DIRECTORY, compaction.offset)


def states(snapshot: Snapshot) -> dict[Name, tuple[VectorState, int]]:
    found_states = {}
    for logged in snapshot.frames():
        batch = logged.batch
        for row in range(batch.count):
            name = (batch.namespaces[row], batch.keys[row])
            assert name not in found_states
            found_states[name] = (state_of(batch, row), logged.row_offset(row))
    return found_states


def check_rows(writer: Writer, snapshot: Snapshot, history: Rows) -> None:
    """Check that the snapshot equals the fold of the history, with the offset of each vector's last delta."""
    snapshot.verify()
    found, expected = states(snapshot), history.fold()
    assert {name: comparable(state) for name, (state, _) in found.items()} == {
        name: comparable(state) for name, state in expected.items()
    }
    assert list(found) == sorted(found, key=lambda name: sort_key(*name))
    for name, (state, offset) in found.items():
        assert (state.key, offset) in [(change[0], change[1]) for change in history.changes[name]]
        assert snapshot.find(*name) is not None
    counters = {
        batch.batch.origin: batch.batch.last for batch in writer.batches if batch.offset < snapshot.offset
    }
    assert {origin: mark.counter for origin, mark in snapshot.watermarks.items()} == counters
    assert snapshot.lamport == max(
        batch.lamport + batch.count - 1 for batch in writer.batches if batch.offset < snapshot.offset
    )


def write_history(disk: Disk, history: list[Step]) -> tuple[DurableLog, Writer]:
    log, _ = open_log(disk, TINY)
    writer = Writer(log)
    for step in history:
        writer.append(step)
    commit(log)
    return log, writer


@given(st.lists(steps_with_ids, min_size=8, max_size=30), st.sampled_from([300, 3_000, 1 << 20]))
def test_snapshot_equals_the_fold_of_all_rows_before_it(history: list[Step], run_bytes_max: int) -> None:
    disk = SimDisk()
    log, writer = write_history(disk, history)
    segments = sealed_segments(log)
    if segments:
        snapshot = compact_segments(disk, segments, run_bytes_max=run_bytes_max)
        check_rows(writer, snapshot, Rows.below(writer.batches, snapshot.offset))
        clocks: dict[int, dict[int, int]] = {}
        for logged in writer.batches:
            if logged.offset < snapshot.offset:
                for seen_origin, counter in logged.batch.clock:
                    clocks.setdefault(logged.batch.origin, {})[seen_origin] = counter
        assert {
            origin: dict(mark.clock) for origin, mark in snapshot.watermarks.items() if mark.clock
        } == clocks
    assert [name for name in disk.paths() if ".new" in name] == []


@given(st.lists(steps, min_size=12, max_size=40), st.data())
def test_chained_snapshots_equal_the_fold_of_all_rows(history: list[Step], data: st.DataObject) -> None:
    disk = SimDisk()
    log, writer = write_history(disk, [replace(step, lamport_lag=0) for step in history])
    remaining = sealed_segments(log)
    previous: int | None = None
    expected: dict[Name, VectorState] = {}
    while remaining:
        count = data.draw(st.integers(1, len(remaining)))
        start, taken = remaining[0].base, remaining[:count]
        bound = data.draw(st.sampled_from([300, 1 << 20]))
        snapshot = compact_segments(disk, taken, previous, run_bytes_max=bound)
        tail = Rows.below(writer.batches, snapshot.offset, start)
        # A deleted vector is not in the snapshot unless a later delta changed it.
        expected = {name: state for name, state in expected.items() if state.alive or name in tail.changes}
        for name, rows in tail.changes.items():
            for key, _, operation, patch in rows:
                expected[name] = apply(expected.get(name, VectorState()), operation, patch, key)
        found = states(snapshot)
        assert {name: comparable(state) for name, (state, _) in found.items()} == {
            name: comparable(state) for name, state in expected.items()
        }
        full_fold = Rows.below(writer.batches, snapshot.offset).fold()
        alive = {name: state.content for name, state in full_fold.items() if state.alive}
        assert {name: state.content for name, (state, _) in found.items() if state.alive} == alive
        snapshot.verify()
        previous, remaining = snapshot.offset, remaining[count:]
    assert len([name for name in disk.paths() if name.endswith(".snapshot")]) <= 1


def test_out_of_order_delta_is_ignored_and_counted() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, TINY)
    for base, (lamport, value, origin) in enumerate([(5, 1.0, 1), (9, 2.0, 1), (7, 3.0, 2)], start=1):
        batch = encode_vectors(
            ["v"], np.full((1, 1), value, np.float32), namespace="n", origin=origin, base=base
        )
        log.append(batch, lamport=lamport, source=Source.REPLICA)
        log.segments.last.size = 1 << 20  # the next batch starts a segment
    log.append(batch, lamport=10, source=Source.LOCAL)
    commit(log)
    first, second, third = sealed_segments(log)
    snapshot = compact_segments(disk, [first, second])
    snapshot = compact_segments(disk, [third], snapshot.offset)
    ((state, offset),) = states(snapshot).values()
    assert (state.content[1], state.ignored, state.key, offset) == (
        np.float32([2.0]).tobytes(), 1, (9, 1, 2), 1,
    )  # fmt: skip
    assert snapshot.facts.out_of_order == 1


@pytest.mark.parametrize("flag", KnownIds)
def test_row_with_an_id_of_the_previous_snapshot_is_ignored_only_if_flag_is_all(flag: KnownIds) -> None:
    disk = SimDisk()
    log, _ = open_log(disk, TINY)
    operations = [create([1.0]), scale(2), scale(2), create([7.0])]
    ids = [None, b"1" * 16, b"1" * 16, None]
    for base, (operation, id_) in enumerate(zip(operations, ids, strict=True), start=1):
        batch = encode_batch([Delta("v", operation, "n", id=id_)], origin=1, base=base)
        known_ids = flag if base == 3 else KnownIds.NONE
        log.append(batch, lamport=base, source=Source.REPLICA, known_ids=known_ids)
        log.segments.last.size = 1 << 20
    commit(log)
    first, second, third = sealed_segments(log)
    snapshot = compact_segments(disk, [first, second])
    snapshot = compact_segments(disk, [third], snapshot.offset)
    ((state, offset),) = states(snapshot).values()
    is_ignored = flag is KnownIds.ALL
    assert (state.content[1], state.ignored) == (
        np.float32([2 if is_ignored else 4]).tobytes(),
        int(is_ignored),
    )
    assert (state.key, offset) == ((3, 1, 3), 2)


@pytest.mark.parametrize("packed", [FLAT, DEEP, NULLED])
def test_duplicate_metadata_key_folds_to_its_last_value(packed: bytes) -> None:
    disk = SimDisk()
    log, _ = open_log(disk, TINY)
    expected: dict[str, VectorState] = {}
    for base in range(1, 40):
        delta = Delta(f"v{base % 3}", create([float(base)]) if base % 2 else scale(2.0), "n")
        batch = with_metadata({0: packed}, deltas=[delta], base=base)
        log.append(batch, lamport=base, source=Source.REPLICA)
        commit(log)
        before = expected.get(delta.vector_id, VectorState())
        expected[delta.vector_id] = apply(before, batch.operation(0), batch.metadata(0), (base, 1, base))
        if log.segments.all[-1].base == base - 1:
            compacted = dict(expected)
            compacted[delta.vector_id] = before  # the batch is the first of a segment that is not compacted
    snapshot = compact_segments(disk, sealed_segments(log))
    found = {key: comparable(state) for (_, key), (state, _) in states(snapshot).items()}
    assert found == {key: comparable(state) for key, state in compacted.items()}
