"""A log is copied while it is written to; the copy is a whole log, or none."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.log.corruption import LogCorrupted
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.files.paths import DIRECTORY
from delta_prop_broker.log.readonly import backup
from delta_prop_broker.log.readonly.backup import BackupFailed, BackupReport, copy_log
from delta_prop_broker.log.readonly.inspect import inspect
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError
from tests.broker.compressed import COMPRESSED, rewrite, shrinking
from tests.broker.durable import Writer, commit, contents, open_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, File

SETTINGS = replace(COMPRESSED, retention_bytes=20_000)


def copied(
    source: Disk, target: Disk, *, drawn: bytes = b"\x06\0", pauses: list[float] | None = None
) -> BackupReport:
    return copy_log(
        source,
        target,
        DIRECTORY,
        files=("cursors",),
        directories=("groups", "set-aside"),
        draw=lambda size: drawn[:size],
        pause=(pauses if pauses is not None else []).append,
    )


class Watched:
    """A disk to read from, on which something happens before each call."""

    name = "source"

    def __init__(self, disk: SimDisk, happen: Callable[[], object]) -> None:
        self._disk = disk
        self._happen = happen

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        assert read_only, "a copy changes nothing"
        assert not create
        self._happen()
        return self._disk.open(path, read_only=True)

    def list(self, path: str) -> list[str]:
        self._happen()
        return self._disk.list(path)


class Service:
    """A log that is written to, rolled, cut down and compressed, as told."""

    def __init__(self, batches: int = 12) -> None:
        self.disk = SimDisk()
        self.log, _ = open_log(self.disk, SETTINGS)
        self.writer = Writer(self.log)
        for _ in range(batches):
            self.write()

    def write(self) -> None:
        self.writer.append_batch(shrinking(6, self.writer.counter + 1))
        commit(self.log)

    def retain(self) -> None:
        self.write()
        self.log.retain()
        commit(self.log)

    def compact(self) -> None:
        """Put dropped rows in a snapshot first."""
        self.write()
        self.log.retain()
        self.disk.put(f"{DIRECTORY}/{self.log.start_offset:020}.snapshot", b"all before it")
        commit(self.log)

    def compress(self) -> None:
        self.write()
        rewrite(self.log)

    def reopen(self) -> None:
        self.log.close()
        self.log, _ = open_log(self.disk, SETTINGS)
        self.writer.log = self.log

    def crash(self) -> None:
        """Another process takes the log over, in a new epoch."""
        self.disk.put("lock", b"")
        self.log._segments.close()
        self.disk._locked.clear()
        self.log, _ = open_log(self.disk, SETTINGS)
        self.writer.log = self.log


def judged(target: SimDisk, service: Service, told: BackupReport, *, synced: int) -> DurableLog:
    """The copy is a log of its own that holds what the source held, and goes on."""
    log, report = open_log(target, SETTINGS)
    assert report.clean
    found = contents(log)
    assert found == {at: raw for at, raw in service.writer.appended.items() if at in found}
    assert (log.start_offset, log.next_offset) == (told.start_offset, told.next_offset)
    assert log.next_offset >= synced
    assert (log.log_id, log.epoch) == (service.log.log_id, told.epoch)
    assert log.epoch > service.log.epoch
    assert log.epoch_end(service.log.epoch) == told.next_offset, "beyond it, a cursor of the source is ahead"
    assert not [one for one in inspect(target) if isinstance(one, LogCorrupted)]
    Writer(log, counter=log.next_offset).append(2)
    commit(log)
    return log


def test_a_log_at_rest_is_copied_as_it_is() -> None:
    service, target = Service(), SimDisk()
    service.disk.put("cursors", b"how far sinks are")
    service.disk.put("groups/a.cursor", b"how far a is")
    service.disk.put("groups/a.cursor.lock", b"7")
    service.disk.put("set-aside/s.journal", b"what waits")
    service.disk.put(f"{DIRECTORY}/{7:020}.state", b"something of offset 7")
    told = copied(service.disk, target)
    assert (told.start_offset, told.next_offset, told.epoch, told.retries) == (0, 72, 1 + 7, 0)
    assert (told.segments, told.files) == (6, 4)
    for path in ("cursors", "groups/a.cursor", "set-aside/s.journal", f"{DIRECTORY}/{7:020}.state"):
        assert target.peek(path) == service.disk.peek(path)
    assert "lock" not in target.paths()
    assert "groups/a.cursor.lock" not in target.paths()
    judged(target, service, told, synced=72)


@pytest.mark.parametrize("what", ["write", "retain", "compact", "compress", "reopen", "crash"])
def test_whatever_happens_at_whatever_call_the_copy_is_whole(what: str, full: bool) -> None:
    whole = count()
    copied(Watched(Service().disk, lambda: next(whole)), SimDisk())  # type: ignore[arg-type]
    calls, again = next(whole), 0
    for number in range(0, calls, 1 if full else 2):
        service, at = Service(), count()
        synced = service.log.synced

        def happen(service: Service = service, at: count[int] = at, number: int = number) -> None:
            if next(at) == number:
                for _ in range(4):
                    getattr(service, what)()

        target = SimDisk()
        told = copied(Watched(service.disk, happen), target)  # type: ignore[arg-type]
        again += told.retries
        assert next(at) > number
        judged(target, service, told, synced=synced)
        if what == "compact" and told.start_offset:
            assert f"{DIRECTORY}/{told.start_offset:020}.snapshot" in target.paths()
    print(f"{calls} calls, begun again {again} times")
    assert (again > 0) == (what not in ("write", "compress"))


def test_a_log_that_changes_on_and_on_is_given_up_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "TRIES", 5)
    service, pauses = Service(), list[float]()
    with pytest.raises(BackupFailed, match=r"changed under its copy 5 times.*raise its retention"):
        copied(Watched(service.disk, service.retain), SimDisk(), pauses=pauses)  # type: ignore[arg-type]
    assert len(pauses) == 5


@pytest.mark.parametrize("segments", [1, 6], ids=["the only one", "the oldest"])
def test_a_segment_that_is_deleted_beneath_is_damage_at_once(segments: int, full: bool) -> None:
    calls, batches = 1, 1 if segments == 1 else 12
    number = told = 0
    while number < calls:
        service, at, pauses = Service(batches), count(), list[float]()
        assert len(service.log._segments.all) == segments

        def happen(service: Service = service, at: count[int] = at, number: int = number) -> None:
            if next(at) == number:
                service.disk.remove(service.log._segments.all[0].path)

        damage: LogCorrupted | None = None
        try:
            copied(Watched(service.disk, happen), SimDisk(), pauses=pauses)  # type: ignore[arg-type]
        except LogCorrupted as error:
            damage, told = error, told + 1
        if damage is not None:
            assert (damage.path, damage.offset) == (service.log._segments.all[0].path, 0)
            assert "the file is missing" in damage.reason
        assert len(pauses) <= 1, "looked at once more where it was listed before"
        calls = next(at)
        number += 1 if full else 2
    assert told > 3


def test_what_is_written_and_not_synced_is_not_in_the_copy() -> None:
    disk, target = SimDisk(), SimDisk()
    settings = replace(SETTINGS, read_level=AckLevel.LOGGED)
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    for level in (AckLevel.DURABLE, AckLevel.LOGGED):
        writer.append(3, level=level)
        commit(log)
    assert (log.synced, log.written) == (3, 6)
    assert copied(disk, target).next_offset == 3
    log, report = open_log(target, settings)
    assert (log.next_offset, report.clean, report.truncated_tail) == (3, True, None)


def test_a_copy_of_a_copy_is_a_history_of_its_own_too() -> None:
    service = Service()
    first, second, third = SimDisk(), SimDisk(), SimDisk()
    copied(service.disk, first)
    told = [copied(first, second, drawn=b"\0\0"), copied(first, third, drawn=b"\xff\xff")]
    assert [one.epoch for one in told] == [8 + 1, 8 + 65_536]
    log, _ = open_log(second, SETTINGS)
    assert contents(log) == service.writer.appended
    assert [log.epoch_end(epoch) for epoch in (1, 8, 9)] == [72, 72, None]


def test_a_damaged_log_is_not_copied() -> None:
    service, target = Service(), SimDisk()
    path = f"{DIRECTORY}/{24:020}.log"
    service.disk.flip(path, 2_000)
    with pytest.raises(LogCorrupted) as caught:
        copied(service.disk, target)
    assert (caught.value.path, caught.value.offset, caught.value.end) == (path, 30, 36)
    with pytest.raises(UsageError, match="no log to copy"):
        copied(target, SimDisk())


def test_a_copy_that_was_cut_off_is_no_log_and_a_whole_one_survives_a_power_cut() -> None:
    service = Service(6)
    whole = SimDisk()
    told = copied(service.disk, whole)
    calls = [call.number for call in whole.trace if call.name in CHANGING]
    for number in calls:
        target = SimDisk(number)
        target.crash_at(number)
        with pytest.raises(SimCrash):
            copied(service.disk, target)
        found = target.crash(number)
        if "format" in found.paths():
            judged(found, service, told, synced=36)
            continue
        with pytest.raises((LogCorrupted, UsageError)):
            open_log(found, SETTINGS, read_only=True)
    print(f"{len(calls)} calls of a copy")
    for seed in range(10):
        judged(whole.crash(seed), service, told, synced=36)
