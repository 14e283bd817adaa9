"""A log migrated from format 1 equals one written in format 2; an interrupted migration can be resumed."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.corruption import FormatOutdated, InsufficientDiskSpace, LogBusy, LogCorrupted
from delta_prop_broker.readonly.inspect import inspect, inspect_checkpoints, inspect_snapshots
from delta_prop_broker.recovery import migration
from delta_prop_broker.recovery.recovery import recover
from delta_prop_broker.retention.compaction import run_to_end
from delta_prop_broker.segments.identity import FORMAT, Format, _pack_format, read_format
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire.delta import Dot, Source
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import UsageError
from tests.broker.compressed import compress_next_segment, compressible_batch
from tests.broker.durable import SMALL, Clock, FixedRandomness, commit, contents, open_log
from tests.broker.test_checkpoints import write_checkpoint
from tests.broker.test_compaction_log import delta_at
from tests.golden.migrating import migrate_disk
from tests.wire.control_batches import without_types

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.recovery.migration import MigrationPlan
    from delta_prop_wire.batch import Batch

ORIGIN = 16
CONTROL_SHARE = 0.2
CODE_WITH_ZERO_BYTE = 256
"""An error code whose first byte is 0, like type 0. So the current compaction, with which these tests make
snapshots, counts rows without types as the compaction of format 1 did.
"""
SETTINGS = replace(
    SMALL, compact=True, retention_bytes=12_000, bytes_max=60_000, segment_bytes_max=3_000, retention_s=1e6
)


class History:
    """A log with random appends, compressions, compactions and checkpoints, drawn from a seed.

    `typed`: its control rows begin with their types, so its format is 2, not 1.
    """

    def __init__(self, seed: int, *, typed: bool, steps: int = 60) -> None:
        self.disk = SimDisk()
        self._rng = random.Random(seed)
        self._seed, self._typed = seed, typed
        compress = ("none", "lz4", "zstd")[seed % 3]
        self.settings = replace(SETTINGS, compress=compress)
        self.log, _ = open_log(self.disk, self.settings, clock=Clock())
        self._last = 0
        self._run(steps)
        if not typed:
            self.disk.put("format", _pack_format(Format(1, "test")))

    def _run(self, steps: int) -> None:
        rng, log = self._rng, self.log
        for _ in range(steps):
            choice, rows = rng.random(), rng.randint(1, 3)
            if choice < CONTROL_SHARE:
                self._append(self._control(rows if rng.random() < 0.8 else 100))
            elif choice < CONTROL_SHARE + 0.2:
                self._append(compressible_batch(6, self._last + 1, origin=ORIGIN))
            else:
                last, deltas = self._last, [delta_at(self._last + row) for row in range(rows)]
                self._append(encode_batch(deltas, origin=ORIGIN, base=last + 1))
            if rng.random() < 0.7:
                commit(log)
            if choice > 0.9:
                commit(log)
                write_checkpoint(log)
            if rng.random() < 0.1:
                while self.settings.compress != "none" and compress_next_segment(log) is not None:
                    pass
        commit(log)
        self._compact()
        for _ in range(3):
            self._append(self._control(2))
            self._append(compressible_batch(6, self._last + 1, origin=ORIGIN))
            commit(log)
        write_checkpoint(log)
        log.close()

    def _control(self, rows: int) -> Batch:
        variant = self._rng.randrange(3)
        typed = encode_noop(
            origin=ORIGIN,
            base=self._last + 1,
            count=rows,
            code=CODE_WITH_ZERO_BYTE,  # type: ignore[arg-type]
            clock=[Dot(3, self._last)] if variant else (),
            refused_crc=self._last if variant else None,
            first_offsets=[None, *range(rows - 1)] if variant > 1 else None,
            ids=[bytes((row,)) * 16 for row in range(rows)] if variant == 1 else None,
        )
        return typed if self._typed else without_types(typed)

    def _append(self, batch: Batch) -> None:
        self.log.append(batch, lamport=2 * self.log.next_offset + 1, source=Source.LOCAL)
        self._last += batch.count

    def _compact(self) -> None:
        compaction = self.log.take_compaction()
        if compaction is not None:
            self.log.finish_compaction(compaction, made=run_to_end(compaction))
            if self._seed % 2:  # otherwise a crash came before the covered segments were removed
                self.log.retain()
                commit(self.log)


def bodies(log: DurableLog, first: int = 0) -> dict[int, bytes]:
    return {
        location.logged.offset: bytes(location.logged.batch.body)
        for location in log.frames()
        if location.logged.offset >= first
    }


def check_migrated(
    disk: SimDisk, history: History, expected_bodies: dict[int, bytes], *, failed: bool = False
) -> None:
    """Check that the migrated log is valid, opens by its indexes and checkpoint, and has the expected bodies.

    `failed`: the disk may have lost or failed to read an index or the checkpoint.
    """
    assert read_format(disk) == (FORMAT, "test", False)
    assert not [path for path in disk.paths() if path.endswith(".new")]
    for entries in (inspect(disk), inspect_snapshots(disk), inspect_checkpoints(disk)):
        assert not [entry for entry in entries if isinstance(entry, LogCorrupted)]
    log, report = open_log(disk, history.settings)
    assert (report.clean, report.notes) == (True, [])
    if not failed:
        assert (report.indexes_rebuilt, report.scanned_bytes) == (0, 0)
        assert report.checkpoint == history.log.next_offset
    assert bodies(log) == expected_bodies
    assert contents(log).keys() == expected_bodies.keys()
    log.close()


SEEDS = pytest.mark.parametrize("seed", range(12))


@SEEDS
def test_migrated_log_equals_one_written_in_the_current_format(seed: int) -> None:
    old, new = History(seed, typed=False), History(seed, typed=True)
    new_stamps = {
        location.logged.offset: location.stamp
        for location in open_log(new.disk, new.settings, read_only=True)[0].frames()
    }
    with pytest.raises(FormatOutdated):
        open_log(old.disk, old.settings)
    report = migrate_disk(old.disk)
    assert (report.from_format, report.to_format, report.completed) == (1, FORMAT, False)
    assert report.control_batches > 0
    log, _ = open_log(old.disk, old.settings, read_only=True)
    first = max(log.start_offset, min(new_stamps))
    expected_log = open_log(new.disk, new.settings, read_only=True)[0]
    assert bodies(log, first) == bodies(expected_log, first)
    migrated_stamps = {
        location.logged.offset: location.stamp for location in log.frames() if location.logged.offset >= first
    }
    for offset, stamp in migrated_stamps.items():
        expected_stamp = replace(
            new_stamps[offset], previous_crc=stamp.previous_crc, append_time=stamp.append_time
        )
        assert stamp == expected_stamp, offset
    snapshot, expected_snapshot = log.snapshot(), expected_log.snapshot()
    assert (snapshot is None) == (expected_snapshot is None)
    if snapshot is not None and expected_snapshot is not None:
        snapshot.verify()
        if snapshot.offset == expected_snapshot.offset:
            assert snapshot.watermarks == expected_snapshot.watermarks
        snapshot.close()
        expected_snapshot.close()
    check_migrated(old.disk, old, bodies(log))


def test_histories_cover_every_case_of_a_migration() -> None:
    """The histories have snapshots, checkpoints, compressed control rows, segments without control rows."""
    covered = set[str]()
    for seed in range(12):
        history = History(seed, typed=False)
        plans: list[MigrationPlan] = []
        before = {path: history.disk.peek(path) for path in history.disk.paths()}
        migrate_disk(history.disk, plans)
        after = {path: history.disk.peek(path) for path in history.disk.paths()}
        covered |= {path.rpartition(".")[2] for path, raw in after.items() if raw != before.get(path)}
        covered |= {"untouched segment"} if plans[0].segments_rewritten < plans[0].segments else set()
        log, _ = open_log(history.disk, history.settings, read_only=True)
        covered |= (
            {"compressed"}
            if any(location.codec and location.logged.batch.is_control for location in log.frames())
            else set()
        )
    assert covered >= {"log", "index", "snapshot", "checkpoint", "untouched segment", "compressed"}, covered


def test_migration_without_control_rows_rewrites_no_segment() -> None:
    disk, plans = SimDisk(), list[migration.MigrationPlan]()
    log, _ = open_log(disk, SETTINGS, clock=Clock())
    for number in range(40):
        log.append(
            encode_batch([delta_at(number)], origin=ORIGIN, base=number + 1),
            lamport=number + 1,
            source=Source.LOCAL,
        )
        commit(log)
    write_checkpoint(log)
    log.close()
    disk.put("format", _pack_format(Format(1, "test")))
    before = {path: disk.peek(path) for path in disk.paths()}
    report = migrate_disk(disk, plans)
    assert (report.control_batches, report.segments_rewritten, report.bytes_written) == (0, 0, 0)
    assert plans[0].start_offset is None
    changed = {path for path in disk.paths() if disk.peek(path) != before.get(path)}
    assert changed <= {"format", f"{DIRECTORY}/mark", f"{DIRECTORY}/log"}


def test_migrated_directory_is_left_unchanged() -> None:
    history = History(1, typed=False)
    migrate_disk(history.disk)
    before = {path: history.disk.peek(path) for path in history.disk.paths()}
    assert migrate_disk(history.disk).segments_rewritten == 0
    assert {path: history.disk.peek(path) for path in history.disk.paths()} == before


def test_directory_without_a_log_or_in_use_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a data directory"):
        migrate_disk(SimDisk())
    history = History(1, typed=False)
    lock = history.disk.lock("lock")
    with pytest.raises(LogBusy):
        migrate_disk(history.disk)
    lock.release()


def test_corrupted_log_is_refused_and_keeps_its_old_format() -> None:
    history = History(2, typed=False)
    path = next(path for path in history.disk.paths() if path.endswith(".log"))
    history.disk.flip(path, 70, 1)
    with pytest.raises(LogCorrupted):
        migrate_disk(history.disk)
    assert read_format(history.disk) == (1, "test", False)


def test_lack_of_disk_space_is_reported_before_any_write() -> None:
    history = History(4, typed=False)
    disk = history.disk
    segments = {path: disk.peek(path) for path in disk.paths() if path.endswith(".log")}
    disk.capacity_bytes = disk.used_bytes + 900_000
    plans: list[MigrationPlan] = []
    with pytest.raises(InsufficientDiskSpace, match=r"bytes free, but the migration needs [0-9,]+, "):
        migrate_disk(disk, plans)
    assert plans[0].bytes_needed > plans[0].bytes_free
    assert {path: disk.peek(path) for path in segments} == segments
    assert not [path for path in disk.paths() if path.endswith(".new")]
    disk.capacity_bytes = disk.used_bytes + plans[0].bytes_needed + 100
    migrate_disk(disk)
    check_migrated(disk, history, bodies(open_log(disk, history.settings, read_only=True)[0]))


# --- interrupted


def is_old(disk: SimDisk, expected_bodies: dict[int, bytes]) -> bool:
    """Return False if the log has the new format, else True: an earlier version finds the expected bodies."""
    format_file = read_format(disk)
    assert format_file is not None
    if format_file.number == FORMAT:
        return False
    copy = disk.kill()
    recovered = recover(copy, DIRECTORY, randomness=FixedRandomness(), made_by="", oldest_format=1)
    recovered.close()
    copy.put("format", _pack_format(Format(FORMAT, "test")))
    assert bodies(open_log(copy, SETTINGS, read_only=True)[0]) == expected_bodies
    return True


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_crash_at_any_call_leaves_the_old_or_the_new_directory(seed: int, full: bool) -> None:
    old = History(seed, typed=False, steps=30)
    assert read_format(old.disk) == (1, "test", False)
    before = bodies(open_old_log(old))
    migrated = old.disk.kill()
    migrate_disk(migrated)
    expected_bodies = bodies(open_log(migrated.kill(), old.settings, read_only=True)[0])
    numbers = [call.number for call in migrated.trace if call.name in CHANGING]
    outcomes = {"old": 0, "unfinished": 0, "new": 0}
    # a normal run crashes each seed at other calls, and all at the last ones, where the migration is complete
    for number in numbers if full else [*numbers[seed:-10:3], *numbers[-10:]]:
        for attempt in range(4 if full else 1):
            disk = old.disk.kill()
            disk.crash_at(number)
            with pytest.raises(SimCrash):
                migrate_disk(disk)
            disk.heal()
            for after in (disk.crash(number + attempt), disk.kill()):
                is_unchanged, found_format = is_old(after, before), read_format(after)
                assert found_format is not None
                outcomes["old" if is_unchanged else "unfinished" if found_format.unfinished else "new"] += 1
                if is_unchanged or found_format.unfinished:
                    with pytest.raises(FormatOutdated, match="log migrate"):
                        open_log(after, old.settings)
                migrate_disk(after)
                check_migrated(after, old, expected_bodies, failed=True)
    assert min(outcomes.values()) > 0


def open_old_log(history: History) -> DurableLog:
    """Open the log of format 1 as an earlier version would."""
    copy = history.disk.kill()
    copy.put("format", _pack_format(Format(FORMAT, "test")))
    return open_log(copy, history.settings, read_only=True)[0]


def test_migration_can_be_resumed_after_a_crash_while_resuming() -> None:
    old = History(5, typed=False, steps=30)
    migrated = old.disk.kill()
    migrate_disk(migrated)
    expected_bodies = bodies(open_log(migrated.kill(), old.settings, read_only=True)[0])
    interrupted = old.disk.kill()
    interrupted.crash_at(lambda call: call.name == "rename" and call.path.endswith(".log.new"))
    with pytest.raises(SimCrash):
        migrate_disk(interrupted)
    interrupted = interrupted.kill()
    resumed = interrupted.kill()
    assert migrate_disk(resumed).completed
    calls = resumed.calls
    check_migrated(resumed, old, expected_bodies)
    for number in range(1, calls + 1):
        disk = interrupted.kill()
        disk.crash_at(number)
        with pytest.raises(SimCrash):
            migrate_disk(disk)
        disk.heal()
        disk = disk.crash(number)
        migrate_disk(disk)
        check_migrated(disk, old, expected_bodies, failed=True)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_failed_call_is_reported_and_migration_can_be_rerun(error: int, full: bool) -> None:
    old = History(0, typed=False, steps=30)
    before = bodies(open_old_log(old))
    migrated = old.disk.kill()
    migrate_disk(migrated)
    expected_bodies = bodies(open_log(migrated.kill(), old.settings, read_only=True)[0])
    numbers = range(1, migrated.calls + 1)
    numbers = numbers if full else numbers[error % 3 :: 3]  # each error at other calls
    failures = 0
    for number in numbers:
        disk = old.disk.kill()
        disk.fail(number, error)
        try:
            migrate_disk(disk)
        except (OSError, LogCorrupted):
            failures += 1
        disk.heal()
        if read_format(disk) == (1, "test", False):
            suffixes = (".log.new", ".index.new", ".snapshot.new", ".checkpoint.new")
            assert not [path for path in disk.paths() if path.endswith(suffixes)]
        after = disk.crash(number)
        is_old(after, before)
        migrate_disk(after)
        check_migrated(after, old, expected_bodies, failed=True)
        migrate_disk(disk)
        check_migrated(disk, old, expected_bodies, failed=True)
    assert failures > len(numbers) / 2


def test_unsynced_format_is_rewritten_before_any_file_is_replaced() -> None:
    old = History(1, typed=False, steps=30)
    before = bodies(open_old_log(old))
    migrated = old.disk.kill()
    migrate_disk(migrated)
    expected_bodies = bodies(open_log(migrated.kill(), old.settings, read_only=True)[0])
    for seed in range(20):
        disk = old.disk.kill()
        disk.fail(lambda call: call.name == "sync_directory" and not call.path)
        with pytest.raises(OSError, match="Input/output"):
            migrate_disk(disk)
        disk.crash_at(lambda call: call.name == "sync_directory" and call.path == DIRECTORY, "after")
        with pytest.raises(SimCrash):
            migrate_disk(disk)
        disk.heal()
        after = disk.crash(seed)
        assert not is_old(after, before)
        migrate_disk(after)
        check_migrated(after, old, expected_bodies, failed=True)


def test_compressed_segment_is_not_compressed_twice() -> None:
    old = History(2, typed=False)
    log = open_old_log(old)
    tried = [segment.base for segment in log.segments.all if segment.compression_tried]
    assert tried
    migrate_disk(old.disk)
    log, _ = open_log(old.disk, old.settings, read_only=True)
    assert [segment.base for segment in log.segments.all if segment.compression_tried] == tried
