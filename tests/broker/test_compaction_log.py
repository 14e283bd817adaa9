"""A compacting log removes only what a snapshot covers, by age or size, also when the disk fails."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace

import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.retention.compaction import run_to_end
from delta_prop_broker.retention.snapshot import snapshot_offsets, snapshot_path
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import Delta, Source, create, scale, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state_rows import state_of
from tests.broker.durable import EVERYTHING, SMALL, Clock, commit, open_log

COMPACT = replace(
    SMALL, compact=True, retention_bytes=6_000, bytes_max=30_000, segment_bytes_max=1_500, retention_s=1e6
)
KEYS = 5  # number of vectors


def delta_at(offset: int) -> Delta:
    key = f"v-{offset % KEYS}"
    if offset < KEYS:
        return Delta(key, create([float(offset), 1.0]), "n", metadata={"n": offset})
    operation = (scale(-1.0), sparse_add([1], [1.0]))[offset // KEYS % 2]
    return Delta(key, operation, "n", metadata={"n": offset} if offset % 3 else None)


@dataclass
class Service:
    """Appends, commits, compacts and retains in turn, as a service does.

    Rows below the offset `acked` are durable; `removed` counts segments.
    """

    disk: SimDisk
    acked: int = 0
    removed: int = 0
    compactions: int = 0
    clock: Clock = field(default_factory=Clock)
    log: DurableLog = field(init=False)

    def open(self) -> None:
        self.log, _ = open_log(self.disk, COMPACT, clock=self.clock)

    def append(self, count: int) -> None:
        for _ in range(count):
            offset = self.log.next_offset
            batch = encode_batch([delta_at(offset), delta_at(offset + 1)], origin=1, base=offset + 1)
            self.log.append(batch, lamport=offset + 1, source=Source.LOCAL)
            if offset % 4 == 0:
                self.commit()

    def commit(self) -> None:
        commit(self.log)
        self.acked = max(self.acked, self.log.synced)

    def compact(self) -> None:
        compaction = self.log.take_compaction()
        if compaction is not None:
            completed = False
            try:
                completed = run_to_end(compaction)
            finally:
                self.log.finish_compaction(compaction, made=completed)
            self.compactions += completed
        self.removed += self.log.retain()
        self.commit()

    def run(self) -> None:
        self.open()
        for _ in range(4):
            self.append(20)
            self.compact()
        self.log.close()


def check(disk: SimDisk, acked: int) -> None:
    """Check that the snapshot and the tail fold to all appended rows, at least those below `acked`."""
    log, _ = open_log(disk, COMPACT)
    assert log.next_offset >= acked
    states: dict[str, VectorState] = {}
    offset = 0
    snapshot = log.snapshot()
    assert snapshot is not None or log.start_offset == 0
    if snapshot is not None:
        snapshot.verify()
        offset = snapshot.offset
        assert log.start_offset <= offset <= log.next_offset
        for logged in snapshot.frames():
            for row, key in enumerate(logged.batch.keys):
                states[key] = state_of(logged.batch, row)
        snapshot.close()
    while batches := log.read(offset, **EVERYTHING):
        for logged in batches:
            for row, key in enumerate(logged.batch.keys):
                operation, metadata = logged.batch.operation(row), logged.batch.metadata(row)
                states[key] = apply(states.get(key, VectorState()), operation, metadata, logged.key(row))
        offset = batches[-1].next_offset
    expected: dict[str, VectorState] = {}
    for offset in range(log.next_offset):
        delta = delta_at(offset)
        key = delta.vector_id
        expected[key] = apply(
            expected.get(key, VectorState()), delta.operation, delta.metadata, (offset + 1, 1, offset + 1)
        )
    assert {key: (*state.content, state.key) for key, state in states.items()} == {
        key: (*state.content, state.key) for key, state in expected.items()
    }
    names = disk.list(DIRECTORY)
    assert len(snapshot_offsets(names)) <= 1
    assert not any(name.endswith(".new") for name in names)
    log.close()


def test_segments_covered_by_a_snapshot_are_removed() -> None:
    service = Service(SimDisk())
    service.run()
    assert service.compactions >= 2
    assert service.removed >= 8
    check(service.disk.crash(), service.acked)


def test_no_segment_is_removed_without_a_snapshot() -> None:
    service = Service(SimDisk())
    service.open()
    service.append(60)
    assert service.log.statistics().bytes > COMPACT.retention_bytes
    service.clock.wait(COMPACT.retention_s)
    assert service.log.retain() == 0
    with pytest.raises(Refused, match="a snapshot is being made of the oldest rows") as caught:
        service.append(1_000)
    assert caught.value.code is ErrorCode.LOG_FULL
    assert caught.value.retryable
    service.compact()
    assert service.removed > 0
    service.append(2)


def test_holder_blocks_compaction_but_evictable_holder_blocks_only_removal() -> None:
    service = Service(SimDisk())
    service.open()
    service.log.hold("slow", lambda: 0)
    service.append(40)
    assert service.log.take_compaction() is None
    service.log.release("slow")
    service.log.hold("evictable", lambda: 0, lambda: None)
    service.compact()
    assert (service.compactions, service.removed) == (1, 0)
    service.log.release("evictable")
    service.compact()
    assert service.removed > 0
    check(service.disk.crash(), service.acked)


def test_rows_within_min_compaction_lag_are_not_compacted() -> None:
    clock = Clock()
    settings = replace(COMPACT, retention_bytes=20_000, bytes_max=40_000, min_compaction_lag_s=50.0)
    log, _ = open_log(SimDisk(), settings, clock=clock)
    for offset in range(40):
        batch = encode_batch([delta_at(offset)], origin=1, base=offset + 1)
        log.append(batch, lamport=offset + 1, source=Source.LOCAL)
        commit(log)
    segments = list(log.segments.all)
    assert len(segments) > 4
    clock.step_us = 1
    clock.us = segments[0].latest_time + 49_000_000
    assert log.take_compaction() is None
    clock.us = segments[1].latest_time + 50_000_001
    compaction = log.take_compaction()
    assert compaction is not None
    assert compaction.offset == segments[1].end
    clock.us = segments[-1].latest_time + 99_000_000
    assert log.take_compaction() is None, "one compaction at a time"


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_aborted_compaction_leaves_no_files(has_snapshot: bool) -> None:
    service = Service(SimDisk())
    service.open()
    service.append(40)
    if has_snapshot:
        service.compact()
        service.append(40)
    before = service.disk.paths()
    compaction = service.log.take_compaction()
    assert compaction is not None
    assert not compaction.step()
    compaction.abort()
    service.log.finish_compaction(compaction, made=False)
    assert service.disk.paths() == before
    service.compact()
    check(service.disk.crash(), service.acked)


def test_crash_at_any_call_preserves_acknowledged_rows(full: bool) -> None:
    fault_free = Service(SimDisk())
    fault_free.run()
    calls = fault_free.disk.calls
    crash_counts = {"snapshot": 0, "no snapshot": 0, "temporary file": 0}
    for number in range(1, calls + 1, 1 if full else 17):
        for seed in range(5 if full else 1):
            disk = SimDisk(seed)
            disk.crash_at(number)
            service = Service(disk)
            with pytest.raises(SimCrash):
                service.run()
            disk.heal()
            crashed = disk.crash(seed)
            names = crashed.list(DIRECTORY)
            crash_counts["temporary file"] += any(name.endswith(".new") for name in names)
            crash_counts["snapshot" if snapshot_offsets(names) else "no snapshot"] += 1
            check(crashed, service.acked)
            check(disk.kill(), service.acked)
    print(f"{calls} calls: {crash_counts}")
    assert min(crash_counts.values()) > 0


def test_disk_error_during_compaction_preserves_the_log(full: bool) -> None:
    fault_free = Service(SimDisk())
    fault_free.open()
    fault_free.append(60)
    first = fault_free.disk.calls
    fault_free.compact()
    failures = 0
    for number in range(first + 1, fault_free.disk.calls, 1 if full else 7):
        service = Service(SimDisk())
        service.open()
        service.append(60)
        service.disk.fail(number, errno.ENOSPC)
        try:
            service.compact()
        except OSError:
            failures += 1
        service.disk.heal()
        check(service.disk.kill(), service.acked)
    assert failures > 3


def test_corrupted_snapshot_is_reported_and_stops_removal() -> None:
    service = Service(SimDisk())
    service.run()
    (offset,) = snapshot_offsets(service.disk.list(DIRECTORY))
    service.disk.flip(snapshot_path(DIRECTORY, offset), 20, 1)
    log, _ = open_log(service.disk, COMPACT, clock=service.clock)
    with pytest.raises(LogCorrupted, match=r"\.snapshot, byte 0: its header does not fit its checksum"):
        log.snapshot()
    service.log = log
    service.append(50)
    service.clock.wait(COMPACT.retention_s)
    assert log.take_compaction() is None
    assert log.retain() == 0
    with pytest.raises(Refused, match="its snapshot cannot be used"):
        service.append(1_000)


@pytest.mark.parametrize("wrong", [{"min_compaction_lag_s": 0.0}, {"compact_memory_bytes_max": 0}])
def test_invalid_compaction_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="give a number above 0"):
        replace(COMPACT, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_snapshot_with_unsynced_name_is_not_trusted_after_restart(seed: int) -> None:
    service = Service(SimDisk(seed))
    service.open()
    service.append(60)
    compaction = service.log.take_compaction()
    assert compaction is not None
    service.disk.fail(lambda call: call.name == "sync_directory", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        run_to_end(compaction)
    service.disk = service.disk.kill()
    service.open()
    service.log.retain()
    service.commit()
    check(service.disk.crash(seed), service.acked)
