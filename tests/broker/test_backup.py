"""The backup of a log, even of one that changes during the copy, is a complete log of its own, or fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.catalogue.store import PLACE_OF_DEFAULT
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.readonly import backup
from delta_prop_broker.readonly.backup import BackupFailed, BackupReport, copy_directory
from delta_prop_broker.readonly.inspect import inspect
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError
from tests.broker.compressed import COMPRESSED, compress_next_segment, compressible_batch
from tests.broker.durable import FixedRandomness, Writer, commit, contents, open_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, File

SETTINGS = replace(COMPRESSED, retention_bytes=20_000)


def run_backup(
    source: Disk, target: Disk, *, epoch_step: bytes = b"\x06\0", pauses: list[float] | None = None
) -> BackupReport:
    reports = copy_directory(
        source,
        target,
        files=("cursors",),
        directories=("groups", "set-aside"),
        randomness=FixedRandomness(epoch_step),
        pause=(pauses if pauses is not None else []).append,
    )
    return reports[PLACE_OF_DEFAULT]


class HookedDisk:
    """A read-only disk that calls a hook before each call."""

    name = "source"

    def __init__(self, disk: SimDisk, hook: Callable[[], object]) -> None:
        self._disk = disk
        self._hook = hook

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        assert read_only, "a backup must not write to its source"
        assert not create
        self._hook()
        return self._disk.open(path, read_only=True)

    def list(self, path: str) -> list[str]:
        self._hook()
        return self._disk.list(path)


class Service:
    """A log that changes while it is copied; each method is one kind of change."""

    def __init__(self, batches: int = 12) -> None:
        self.disk = SimDisk()
        self.log, _ = open_log(self.disk, SETTINGS)
        self.writer = Writer(self.log)
        for _ in range(batches):
            self.write()

    def write(self) -> None:
        self.writer.append_batch(compressible_batch(6, self.writer.counter + 1))
        commit(self.log)

    def retain(self) -> None:
        self.write()
        self.log.retain()
        commit(self.log)

    def compact(self) -> None:
        """Remove the oldest rows, and put a file in place of the snapshot that covers them."""
        self.write()
        self.log.retain()
        self.disk.put(f"{DIRECTORY}/{self.log.start_offset:020}.snapshot", b"snapshot of the removed rows")
        commit(self.log)

    def compress(self) -> None:
        self.write()
        compress_next_segment(self.log)

    def reopen(self) -> None:
        self.log.close()
        self.log, _ = open_log(self.disk, SETTINGS)
        self.writer.log = self.log

    def crash(self) -> None:
        """Let another process take over the log, in a new epoch."""
        self.disk.put("lock", b"")
        self.log.segments.close()
        self.disk._locked.clear()
        self.log, _ = open_log(self.disk, SETTINGS)
        self.writer.log = self.log


def check_copy(target: SimDisk, service: Service, copy_report: BackupReport, *, synced: int) -> DurableLog:
    """Check that the copy is a log of its own with the rows of its source, and that it accepts appends."""
    log, report = open_log(target, SETTINGS)
    assert report.clean
    found = contents(log)
    assert found == {offset: raw for offset, raw in service.writer.appended.items() if offset in found}
    assert (log.start_offset, log.next_offset) == (copy_report.start_offset, copy_report.next_offset)
    assert log.next_offset >= synced
    assert (log.log_id, log.epoch) == (service.log.log_id, copy_report.epoch)
    assert log.epoch > service.log.epoch
    assert log.epoch_end(service.log.epoch) == copy_report.next_offset, (
        "a source's cursor beyond the copy must be ahead of it"
    )
    assert not [entry for entry in inspect(target) if isinstance(entry, LogCorrupted)]
    Writer(log, counter=log.next_offset).append(2)
    commit(log)
    return log


def test_idle_log_is_copied_unchanged() -> None:
    service, target = Service(), SimDisk()
    service.disk.put("cursors", b"cursors of sinks")
    service.disk.put("groups/a.cursor", b"cursor of a")
    service.disk.put("groups/a.cursor.lock", b"7")
    service.disk.put("set-aside/s.journal", b"quarantined deltas")
    service.disk.put(f"{DIRECTORY}/{7:020}.state", b"state at offset 7")
    report = run_backup(service.disk, target)
    assert (report.start_offset, report.next_offset, report.epoch, report.retries) == (0, 72, 1 + 7, 0)
    assert (report.segments, report.files) == (6, 4)
    for path in ("cursors", "groups/a.cursor", "set-aside/s.journal", f"{DIRECTORY}/{7:020}.state"):
        assert target.peek(path) == service.disk.peek(path)
    assert "lock" not in target.paths()
    assert "groups/a.cursor.lock" not in target.paths()
    check_copy(target, service, report, synced=72)


@pytest.mark.parametrize("change", ["write", "retain", "compact", "compress", "reopen", "crash"])
def test_change_at_any_call_leaves_a_complete_copy(change: str, full: bool) -> None:
    call_counter = count()
    run_backup(HookedDisk(Service().disk, lambda: next(call_counter)), SimDisk())  # type: ignore[arg-type]
    calls, retries = next(call_counter), 0
    for number in range(0, calls, 1 if full else 2):
        service, call_counter = Service(), count()
        synced = service.log.synced

        def hook(
            service: Service = service, call_counter: count[int] = call_counter, number: int = number
        ) -> None:
            if next(call_counter) == number:
                for _ in range(4):
                    getattr(service, change)()

        target = SimDisk()
        report = run_backup(HookedDisk(service.disk, hook), target)  # type: ignore[arg-type]
        retries += report.retries
        assert next(call_counter) > number
        check_copy(target, service, report, synced=synced)
        if change == "compact" and report.start_offset:
            assert f"{DIRECTORY}/{report.start_offset:020}.snapshot" in target.paths()
    print(f"{calls} calls, retried {retries} times")
    does_invalidate_copy = change not in ("write", "compress")
    assert (retries > 0) == does_invalidate_copy


def test_copy_of_an_ever_changing_log_fails_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "TRIES", 5)
    service, pauses = Service(), list[float]()
    with pytest.raises(BackupFailed, match=r"changed under its copy 5 times.*raise its retention"):
        run_backup(HookedDisk(service.disk, service.retain), SimDisk(), pauses=pauses)  # type: ignore[arg-type]
    assert len(pauses) == 5


@pytest.mark.parametrize("segment_count", [1, 6], ids=["the only one", "the oldest"])
def test_segment_deleted_during_copy_is_reported_as_corruption(segment_count: int, full: bool) -> None:
    calls, batches = 1, 1 if segment_count == 1 else 12
    number = reported = 0
    while number < calls:
        service, call_counter, pauses = Service(batches), count(), list[float]()
        assert len(service.log.segments.all) == segment_count

        def hook(
            service: Service = service, call_counter: count[int] = call_counter, number: int = number
        ) -> None:
            if next(call_counter) == number:
                service.disk.remove(service.log.segments.all[0].path)

        error_found: LogCorrupted | None = None
        try:
            run_backup(HookedDisk(service.disk, hook), SimDisk(), pauses=pauses)  # type: ignore[arg-type]
        except LogCorrupted as error:
            error_found, reported = error, reported + 1
        if error_found is not None:
            assert (error_found.path, error_found.offset) == (service.log.segments.all[0].path, 0)
            assert "the file is missing" in error_found.reason
        assert len(pauses) <= 1, (
            "the copy is retried at most once: if the segment was listed before it was deleted"
        )
        calls = next(call_counter)
        number += 1 if full else 2
    assert reported > 3


def test_unsynced_rows_are_not_in_the_copy() -> None:
    disk, target = SimDisk(), SimDisk()
    settings = replace(SETTINGS, read_level=AckLevel.LOGGED)
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    for level in (AckLevel.DURABLE, AckLevel.LOGGED):
        writer.append(3, level=level)
        commit(log)
    assert (log.synced, log.written) == (3, 6)
    assert run_backup(disk, target).next_offset == 3
    log, report = open_log(target, settings)
    assert (log.next_offset, report.clean, report.truncated_tail) == (3, True, None)


def test_copy_of_a_copy_starts_its_own_epoch() -> None:
    service = Service()
    first, second, third = SimDisk(), SimDisk(), SimDisk()
    run_backup(service.disk, first)
    reports = [
        run_backup(first, second, epoch_step=b"\0\0"),
        run_backup(first, third, epoch_step=b"\xff\xff"),
    ]
    assert [report.epoch for report in reports] == [8 + 1, 8 + 65_536]
    log, _ = open_log(second, SETTINGS)
    assert contents(log) == service.writer.appended
    assert [log.epoch_end(epoch) for epoch in (1, 8, 9)] == [72, 72, None]


def test_corrupted_log_is_not_copied() -> None:
    service, target = Service(), SimDisk()
    path = f"{DIRECTORY}/{24:020}.log"
    service.disk.flip(path, 2_000)
    with pytest.raises(LogCorrupted) as caught:
        run_backup(service.disk, target)
    assert (caught.value.path, caught.value.offset, caught.value.end) == (path, 30, 36)
    with pytest.raises(UsageError, match="no log to copy"):
        run_backup(target, SimDisk())


def test_crash_during_copy_leaves_no_log_or_a_complete_one() -> None:
    service = Service(6)
    complete = SimDisk()
    report = run_backup(service.disk, complete)
    calls = [call.number for call in complete.trace if call.name in CHANGING]
    for number in calls:
        target = SimDisk(number)
        target.crash_at(number)
        with pytest.raises(SimCrash):
            run_backup(service.disk, target)
        crashed = target.crash(number)
        if "format" in crashed.paths():
            check_copy(crashed, service, report, synced=36)
            continue
        with pytest.raises((LogCorrupted, UsageError)):
            open_log(crashed, SETTINGS, read_only=True)
    print(f"{len(calls)} disk calls of a copy")
    for seed in range(10):
        check_copy(complete.crash(seed), service, report, synced=36)
