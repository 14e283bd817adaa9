"""Power cuts, kills and failures at every disk call of a log: acknowledged rows survive."""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.broker.crash_scenario import (
    Ledger,
    close,
    commit_and_record,
    continue_after_fault,
    open_session,
    record_acknowledged,
    run_scenario,
)
from tests.broker.durable import SEGMENTS, Clock, Writer, batch_of, contents

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog

LEVELS = pytest.mark.parametrize("logged", [False, True], ids=["durable", "logged"])


@LEVELS
def test_power_cut_or_kill_at_any_call_keeps_acknowledged_rows(logged: bool, full: bool) -> None:
    seeds = 20 if full else 1
    fault_free = SimDisk()
    run_scenario(fault_free, Ledger(), logged=logged)
    faults: Counter[str] = Counter()
    calls = [call.number for call in fault_free.trace if call.name in CHANGING]
    if not full:  # a random half of each level: every second call may be of the same kind
        calls = sorted(Random(1 + logged).sample(calls, len(calls) // 2))
    assert len(calls) >= (200 if full else 100)
    for number in calls:
        disk, ledger = SimDisk(number), Ledger()
        disk.crash_at(number)
        with pytest.raises(SimCrash):
            run_scenario(disk, ledger, logged=logged)
        for seed in range(seeds):
            continue_after_fault(disk.crash(1_000 * number + seed), ledger.copy(), logged=logged)
        killed = ledger.copy()
        killed.acknowledged = killed.written  # a kill loses nothing of the page cache
        continue_after_fault(disk.kill(), killed, logged=logged)
        faults += disk.fault_counts
    print(f"{len(calls)} calls of {fault_free.calls}, {seeds} seeds each: {dict(faults)}")
    assert faults["crash"] == seeds * len(calls)
    assert faults["kill"] == len(calls)
    assert min(faults["off before"], faults["off within"], faults["off after"]) > (10 if full else 5)
    assert faults["names lost"] > 2
    assert faults["sectors lost"] > 200
    assert faults["torn"] > 0


@LEVELS
def test_failure_of_any_call_keeps_acknowledged_rows(logged: bool, full: bool) -> None:
    seeds = 5 if full else 1
    fault_free = SimDisk()
    run_scenario(fault_free, Ledger(), logged=logged)
    stopped = harmless = 0
    faults: Counter[str] = Counter()
    # If the sync of a new directory's name fails, the name cannot be synced later: no call creates it again.
    directory_syncs = [
        call.number for call in fault_free.trace if call.name == "sync_directory" and call.path != SEGMENTS
    ][1:4]
    numbers = range(1, fault_free.calls + 1, 1 if full else 3 if logged else 2)
    for number in numbers:
        disk, ledger = SimDisk(number), Ledger()
        disk.fail(number, (errno.EIO, errno.ENOSPC)[number % 2])
        try:
            run_scenario(disk, ledger, logged=logged)
            harmless += 1
        except OSError:
            stopped += 1
        disk.heal()
        faults += disk.fault_counts
        # The process ends and another one starts, or the machine loses power at once.
        for seed in range(seeds if full or number % 3 == 0 else 0):
            continue_after_fault(disk.crash(1_000 * number + seed), ledger.copy(), logged=logged)
        restarted = disk.kill()
        continue_after_fault(restarted, ledger, logged=logged)
        # Rows that the second process made visible stay, even if the first sync lost them.
        for seed in range(0 if number in directory_syncs else seeds):
            continue_after_fault(restarted.crash(1_000 * number + seed), ledger.copy(), logged=logged)
    total = fault_free.calls
    print(f"{len(numbers)} of {total} calls: {stopped} stopped the log, {harmless} did not: {dict(faults)}")
    assert stopped > 0.6 * len(numbers)
    assert faults["sync failed"] > len(numbers) // 20
    assert faults["write failed"] > len(numbers) // 20
    assert faults["sectors lost by sync"] > len(numbers) // 20
    assert faults["rename failed"] + faults["remove failed"] > 0


@LEVELS
def test_short_writes_are_continued(logged: bool) -> None:
    disk, ledger = SimDisk(3), Ledger()
    disk.shorten(lambda call: call.name == "write", times=None)
    run_scenario(disk, ledger, logged=logged)
    assert disk.fault_counts["short writes"] > 50
    for seed in range(5):
        continue_after_fault(disk.crash(seed), ledger.copy(), logged=logged)


def test_full_disk_acknowledges_only_stored_rows_and_recovers() -> None:
    stopped = 0
    for capacity in range(1_000, 16_000, 250):
        disk, ledger = SimDisk(capacity, capacity_bytes=capacity), Ledger()
        disk.free_bytes = lambda: 1 << 40  # type: ignore[method-assign]  # the log cannot see that others fill the disk
        with suppress(OSError):
            run_scenario(disk, ledger)
        stopped += disk.fault_counts["no room"] > 0
        crashed = disk.crash(0)
        for after in (crashed, disk.kill()):
            after.capacity_bytes = None
            continue_after_fault(after, ledger.copy())
    assert stopped > 10


@LEVELS
def test_failed_log_acknowledges_nothing_but_can_be_read(logged: bool) -> None:
    for name in ("write", "sync"):
        disk, ledger = SimDisk(), Ledger()
        log = open_session(disk, ledger, logged=logged)
        writer = Writer(log, appended=ledger.appended)
        for _ in range(5):
            writer.append(dimension=20)
            commit_and_record(log, ledger)
        visible = contents(log)
        disk.fail(lambda call, name=name: call.name == name, errno.EIO)
        writer.append()
        with pytest.raises(OSError, match="Input/output error"):
            commit_and_record(log, ledger)
        assert disk.fault_counts[f"{name} failed"] == 1
        assert log.high_watermark == 10
        assert contents(log) == visible
        assert log.take_commit(sync=True) is None
        assert log.is_accepting, "an append must be refused at once, not queued forever"
        for refusal in (log.capacity_refusal(1, 100), log.refusal(batch_of(1))):
            assert refusal is not None
            assert (refusal.code, refusal.retryable) == (ErrorCode.LOG_FAILED, True)
        with pytest.raises(Refused, match="recovered when"):
            log.append(batch_of(1), lamport=1, source=Source.LOCAL)
        calls = [call.name for call in disk.trace]
        log.close()
        assert [call.name for call in disk.trace] == calls, "no call may be retried, not even at the close"
        continue_after_fault(disk, ledger, logged=logged)


# --- any sequence

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5), st.booleans()),
        st.tuples(st.just("append"), st.integers(1, 5), st.booleans()),
        st.tuples(st.sampled_from(["commit", "commit", "retain"]), st.just(0), st.just(False)),
        st.tuples(st.sampled_from(["crash", "kill", "reopen"]), st.integers(0, 1 << 16), st.just(False)),
    ),
    max_size=60,
)


@LEVELS
@given(steps=STEPS, seed=st.integers(0, 1 << 16))
def test_random_run_keeps_the_acknowledged_prefix(
    logged: bool, steps: list[tuple[str, int, bool]], seed: int
) -> None:
    disk, ledger, clock = SimDisk(seed), Ledger(), Clock()
    log = open_session(disk, ledger, clock, logged=logged)
    for step, amount, large in steps:
        if step == "append":
            writer = Writer(log, appended=ledger.appended, counter=log.next_offset)
            level = AckLevel.LOGGED if amount % 2 else AckLevel.DURABLE
            writer.append(amount, level=level, dimension=60 if large else 1)
        elif step == "commit":
            commit_and_record(log, ledger)
        elif step == "retain":
            clock.wait(log.settings.retention_s)
            log.retain()
            record_acknowledged(log, ledger)
        else:
            disk = end_session(disk, log, ledger, step, amount)
            log = open_session(disk, ledger, clock, logged=logged)
    close(log, ledger)
    open_session(disk, ledger, logged=logged).close()


def end_session(disk: SimDisk, log: DurableLog, ledger: Ledger, how: str, seed: int) -> SimDisk:
    if how == "crash":
        return disk.crash(seed)
    if how == "kill":
        ledger.acknowledged = ledger.written
        return disk.kill()
    close(log, ledger)
    return disk
