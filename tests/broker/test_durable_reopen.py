"""A log recovered in place keeps its synced rows and equals a log newly opened from the same disk."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.segments.paths import RESERVE_PATH
from delta_prop_broker.segments.reserve import DiskFull, Reserve
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.broker.crash_scenario import SCENARIO_DURABLE, SCENARIO_LOGGED
from tests.broker.durable import SEGMENTS, SMALL, Clock, Writer, commit, contents, open_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_simulations.disk import Call

LEVELS = pytest.mark.parametrize("logged", [False, True], ids=["durable", "logged"])
KINDS = ("EIO", "ENOSPC", "short")


class Session:
    """A log that is recovered after each failure, and the rows that it must keep."""

    def __init__(self, disk: SimDisk, *, logged: bool) -> None:
        self.disk, self.clock = disk, Clock()
        self.log, _ = open_log(disk, SCENARIO_LOGGED if logged else SCENARIO_DURABLE, clock=self.clock)
        self.writer = Writer(self.log)
        self.acknowledged: dict[int, bytes] = {}
        self.recovery_count = 0
        self.is_reading = False  # the test itself reads: no fault may occur then

    def read_all(self) -> dict[int, bytes]:
        self.is_reading = True
        frames = contents(self.log)
        self.is_reading = False
        return frames

    def fails_from(self, number: int) -> Callable[[Call], bool]:
        return lambda call: call.number >= number and not self.is_reading

    def run(self) -> None:
        for step in range(10):
            for number in range(1 + step % 3):
                level = AckLevel.LOGGED if step % 4 != 3 else AckLevel.DURABLE
                with suppress(Refused):
                    self.writer.append(1 + (step + number) % 4, level=level, dimension=1 + 20 * (step % 2))
            try:
                commit(self.log)
            except OSError:
                self.recover()
            self.acknowledged = {
                offset: raw for offset, raw in self.writer.appended.items() if self.log.start_offset <= offset
            }
            self.acknowledged = {
                offset: raw for offset, raw in self.acknowledged.items() if offset < self.log.synced
            }
            if step % 4 == 3:
                self.log.retain()
        self.log.close()

    def recover(self) -> None:
        """Retry the recovery until it succeeds; compare the log with one newly opened from the same disk."""
        log, before = self.log, self.read_all()
        assert log.high_watermark == log.synced, "rows that a failed sync may have lost must not be visible"
        for _ in range(10):
            killed_disk = self.disk.kill()
            try:
                recovered = log.recover_in_place()
            except OSError:
                assert self.read_all() == before, "the log must be readable until it is recovered"
                continue
            log.resume(recovered)
            break
        fresh, _ = open_log(killed_disk)
        now = self.read_all()
        assert (now, log.next_offset, log.log_id) == (contents(fresh), fresh.next_offset, fresh.log_id)
        assert log.start_offset == fresh.start_offset
        assert log.epoch == fresh.epoch
        assert log.high_watermark == log.synced == log.next_offset
        assert {
            offset: raw for offset, raw in self.acknowledged.items() if offset >= log.start_offset
        }.items() <= now.items()
        self.writer.appended = {
            offset: raw for offset, raw in self.writer.appended.items() if offset < log.next_offset
        }
        self.writer.counter = 1000 * (1 + self.recovery_count) + log.next_offset
        self.recovery_count += 1


@LEVELS
@pytest.mark.parametrize("kind", KINDS)
def test_log_recovers_in_place_from_a_failure_of_any_call(logged: bool, kind: str, full: bool) -> None:
    probe = SimDisk()
    probe_session = Session(probe, logged=logged)
    first = probe.calls
    probe_session.run()
    recovery_count = fault_count = 0
    for number in range(first + 1, probe.calls - 6, 1 if full else 9):
        disk = SimDisk(number)
        session = Session(disk, logged=logged)
        for times in (1, 3):
            if kind == "short":
                disk.shorten(number + times)
            else:
                disk.fail(session.fails_from(number), getattr(errno, kind), times=times)
        with suppress(OSError):  # the last close may fail
            session.run()
        fault_count += sum(
            count for name, count in disk.fault_counts.items() if name.endswith(("failed", "writes"))
        )
        recovery_count += session.recovery_count
        after = disk.crash(number)
        log, _ = open_log(after)
        frames = contents(log)
        assert {
            offset: raw for offset, raw in session.acknowledged.items() if offset >= log.start_offset
        }.items() <= frames.items()
    assert fault_count > 3
    assert recovery_count > 8 or kind == "short"


def failed_log(disk: SimDisk) -> tuple[DurableLog, Writer]:
    log, _ = open_log(disk)
    writer = Writer(log)
    writer.append()
    commit(log)
    writer.append()
    disk.fail(lambda call: call.name == "sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        commit(log)
    return log, writer


def test_loss_of_synced_rows_fails_the_log_for_good() -> None:
    disk = SimDisk(3)
    log, _ = open_log(disk)
    writer = Writer(log)
    writer.append()
    commit(log)
    disk.fail(lambda call: call.name == "write", errno.EIO)
    writer.append()
    with pytest.raises(OSError, match="Input/output"):
        commit(log)
    name = next(path for path in disk.paths() if path.endswith(".log"))
    disk.flip(name, 90, 1)
    disk.open(name).truncate(100)
    disk.put(f"{SEGMENTS}/mark", b"")  # no file shows that the rows were synced
    with pytest.raises(LogCorrupted) as caught:
        log.recover_in_place()
    log.fail(caught.value)
    refusal = log.capacity_refusal(1, 100)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.LOG_FAILED, None)
    assert "log verify" in refusal.message
    assert log.take_commit() is None


def test_recovery_in_place_keeps_holders_and_the_lock() -> None:
    disk = SimDisk(3)
    log, writer = failed_log(disk)
    log.hold("sink", lambda: 0)
    log.resume(log.recover_in_place())
    with pytest.raises(BlockingIOError):
        disk.lock("lock")
    assert log.statistics().held_by == "sink"
    assert log.statistics().reopened == 1
    writer.counter = 100
    writer.append()
    commit(log)
    assert log.synced == log.next_offset
    log.close()
    disk.lock("lock")


# --- the reserve


def test_log_on_a_full_disk_can_be_opened_and_shortened_by_retention() -> None:
    """A crash at any call leaves a full disk; the log can be opened, shortened by retention and closed."""
    settings = replace(SCENARIO_DURABLE, reserve_bytes=3_000)
    probe = SimDisk()
    session = Session(probe, logged=False)
    first = probe.calls
    session.run()
    reserve_releases = 0
    for number in range(first, probe.calls, 7):
        disk = SimDisk(number)
        session = Session(disk, logged=False)
        assert Reserve(disk, 3_000).allocate(0)
        disk.crash_at(number + 5)
        with suppress(BaseException):
            session.run()
        disk = disk.crash(number)
        disk.capacity_bytes = disk.used_bytes
        clock = Clock()
        log, _ = open_log(disk, settings, clock=clock)
        reserve_releases += log.reserve.releases
        acknowledged = {
            offset: raw for offset, raw in session.acknowledged.items() if offset >= log.start_offset
        }
        assert acknowledged.items() <= contents(log).items()
        clock.wait(settings.retention_s)
        log.retain()
        commit(log)
        log.close()
        reopened, _ = open_log(disk, settings)
        assert reopened.next_offset == log.next_offset
    assert reserve_releases > 4


def test_appends_never_use_the_reserve_and_resume_with_space() -> None:
    disk = SimDisk(capacity_bytes=40_000)
    log, _ = open_log(disk, replace(SMALL, reserve_bytes=10_000))
    assert log.reserve.allocate(0)
    assert log.statistics().reserve_bytes == 10_000
    assert disk.free_bytes() < 30_000
    disk.put("others", bytes(disk.free_bytes() - 100))
    sizes: list[int] = []

    def write_small() -> None:
        file = disk.open("small", create=True)
        file.write(0, [bytes(4_000)])
        sizes.append(file.size())
        if sizes[-1] < 4_000:
            raise OSError(errno.ENOSPC, "no room")

    log.reserve.use(write_small)
    assert sizes == [100, 4_000]
    assert (log.reserve.bytes, log.reserve.releases) == (0, 1)
    writer = Writer(log)
    with pytest.raises(Refused, match="stay free") as caught:
        writer.append()
    assert caught.value.code is ErrorCode.LOG_FULL
    assert not log.reserve.allocate(0)
    disk.remove("others")
    writer.append()  # there is space for the batch and the reserve
    assert log.reserve.allocate(0)
    assert log.reserve.missing == 0


@pytest.mark.parametrize("reserve_bytes", [0, 10])
@pytest.mark.parametrize("is_new", [False, True])
def test_open_on_a_full_disk_reports_free_bytes_and_advice(is_new: bool, reserve_bytes: int) -> None:
    disk = SimDisk()
    if not is_new:
        session = Session(disk, logged=False)
        session.run()
        before = contents(session.log)
    disk.put("reserve", bytes(reserve_bytes))  # the reserve was released before, or is too small
    disk.capacity_bytes = disk.used_bytes + 7
    for _ in range(2):
        with pytest.raises(DiskFull, match=r"disk is full: .*; \d+ bytes are free.*free a few MB") as caught:
            open_log(disk, replace(SCENARIO_DURABLE, reserve_bytes=3_000))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.free_bytes in range(18)
        assert not disk.peek("reserve")
    disk.capacity_bytes = None
    log, _ = open_log(disk, SCENARIO_DURABLE)  # the lock is free
    if not is_new:
        assert contents(log) == before


def test_partial_reserve_is_removed() -> None:
    disk = SimDisk(capacity_bytes=5_000)
    disk.fail(lambda call: call.name == "sync")
    reserve = Reserve(disk, 4_000)
    with pytest.raises(OSError, match="Input/output"):
        reserve.allocate(0)
    assert disk.used_bytes == 0
    assert not Reserve(disk, 0).allocate(0)
    assert reserve.allocate(0)
    assert disk.paths() == [RESERVE_PATH]
    for bad in ({"reserve_bytes": -1}, {"free_bytes_min": -1}):
        with pytest.raises(UsageError, match="at least 0"):
            replace(SMALL, **bad)  # type: ignore[arg-type]


# --- a segment without appends


@LEVELS
def test_old_segment_is_sealed_without_appends(logged: bool) -> None:
    disk, clock = SimDisk(), Clock(step_us=1)
    level = AckLevel.LOGGED if logged else AckLevel.DURABLE
    settings = replace(SMALL, segment_s_max=60, retention_s=120, read_level=level)
    log, _ = open_log(disk, settings, clock=clock)
    clock.wait(1_000)
    assert not log.roll(), "an empty log has nothing to seal"
    writer = Writer(log)
    writer.append(level=level)
    commit(log)
    clock.wait(59)
    assert not log.roll()
    clock.wait(2)
    assert log.roll()
    commit(log)
    clock.wait(39)
    assert log.retain() == 0
    clock.wait(30)
    assert log.retain() == 1
    clock.wait(999)
    assert not log.roll(), "the next segment is empty"
    commit(log)
    assert (log.start_offset, log.next_offset) == (2, 2)
    writer.append(level=level)
    commit(log)
    disk = disk.crash(1) if not logged else disk.kill()
    reopened, _ = open_log(disk, settings)
    assert sorted(contents(reopened)) == [2]
