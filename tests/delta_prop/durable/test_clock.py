"""A service whose wall clock is wrong keeps rows for their retention time, and reports clock jumps."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop.testing.world import EPOCH_US
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.directory import read_times, write_times
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log_clock import ClockJump
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import SimDisk
from delta_prop_simulations.machine import ClockFaults, FaultyClock
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.support import Command, create_lines

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_broker.log.statistics import DurableLogStatistics

DAY_S = 86_400.0
RETENTION_S = 300.0
JUMP_MESSAGE = "the clock"


def service(disk: SimDisk, *jumps: tuple[float, float], compact: bool = True) -> Propagator:
    """Return a service that retains rows for `RETENTION_S`; each jump is (time, amount), in seconds."""
    log = LogSettings(
        segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=1 << 20, retention_s=RETENTION_S,
        segment_s_max=60.0,
        free_bytes_min=0, reserve_bytes=0, compact=compact,
    )  # fmt: skip
    world = virtual_world(1, disk=disk)
    clock = FaultyClock(world.clock, ClockFaults(jumps=jumps), Counter())
    return Propagator(Settings(close_timeout_s=5), data="x", log=log, world=replace(world, clock=clock))


async def publish(p: Propagator, first: int, count: int) -> None:
    for number in range(first, first + count):
        await p.publish(Delta(f"v{number}", create([float(number)])))


def log_statistics(p: Propagator) -> DurableLogStatistics:
    return p.statistics().log  # type: ignore[return-value]


def append_times_of(p: Propagator) -> list[int]:
    assert isinstance(p.internals().partition.log, DurableLog)
    return [location.stamp.append_time for location in p.internals().partition.log.frames()]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("jump_s", [20 * DAY_S, -20 * DAY_S])
def test_restart_with_a_clock_days_off_retains_recent_rows(jump_s: float, compact: bool) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, compact=compact) as p:
            await publish(p, 0, 10)
            await anyio.sleep(60)
        async with service(disk, (0.0, jump_s), compact=compact) as p:
            await publish(p, 10, 10)
            await anyio.sleep(RETENTION_S - 65)
            assert (log_statistics(p).start_offset, log_statistics(p).snapshots_made) == (0, 0)
            await anyio.sleep(RETENTION_S)
            assert log_statistics(p).start_offset == log_statistics(p).next_offset == 20

    run_virtual(main)


@pytest.mark.parametrize("jump_s", [20 * DAY_S, -20 * DAY_S])
def test_clock_jump_and_return_changes_no_age(jump_s: float) -> None:
    async def main() -> None:
        async with service(SimDisk(1), (20.0, jump_s), (40.0, -jump_s)) as p:
            for minute in range(6):
                await publish(p, minute * 10, 10)
                assert log_statistics(p).start_offset == 0
                await anyio.sleep(10)
            await anyio.sleep(RETENTION_S - 61)
            assert log_statistics(p).start_offset == 0
            await anyio.sleep(RETENTION_S)
            assert log_statistics(p).start_offset == log_statistics(p).next_offset == 60

    run_virtual(main)


@pytest.mark.parametrize("jump_s", [20 * DAY_S, -20 * DAY_S])
def test_jump_is_logged_counted_and_stored_for_status(
    jump_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, (20.5, jump_s)) as p:
            await publish(p, 0, 1)
            await anyio.sleep(20)
            assert (log_statistics(p).clock_jumps, log_statistics(p).clock_ahead_s) == (0, 0)
            await anyio.sleep(3)
            assert log_statistics(p).clock_jumps == 1
            assert log_statistics(p).clock_ahead_s == pytest.approx(jump_s, abs=5)
        async with service(disk, (0.0, jump_s)) as p:
            await anyio.sleep(3)
            assert log_statistics(p).clock_jumps == 1, "a start far from the last stamp is a jump"

        times = read_times(disk, DIRECTORY, [])
        assert times.jump is not None
        assert times.jump.found_us - times.jump.expected_us == pytest.approx(jump_s * 1e6, abs=5e6)

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_virtual(main)
    lines = [record.message for record in caplog.records if record.message.startswith(JUMP_MESSAGE)]
    assert len(lines) == 2
    assert "but 2020-09-13T12:27:0" in lines[0]
    assert f"the clock shows {'2020-10-03' if jump_s > 0 else '2020-08-24'}T12:27:0" in lines[0]


def test_long_stop_ages_no_row_and_later_rows_have_current_times() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            await publish(p, 0, 10)
            await anyio.sleep(100)
        await anyio.sleep(20 * DAY_S)
        async with service(disk) as p:
            await publish(p, 10, 10)
            log = p.internals().partition.log
            assert isinstance(log, DurableLog)
            now_us = log.clock.time_us
            assert now_us == EPOCH_US + round(anyio.current_time() * 1e6)
            assert log.offset_at(now_us - round(DAY_S * 1e6)) == 10
            assert log.offset_at(EPOCH_US) == 0
            await anyio.sleep(RETENTION_S - 110)
            assert log.start_offset == 0
            await anyio.sleep(RETENTION_S)
            assert log.start_offset == log.next_offset == 20

    run_virtual(main, horizon_s=30 * DAY_S)


def test_log_time_never_falls_when_the_clock_jumps() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        append_times = []
        for number in range(4):
            jumps = ((0.0, (number % 2) * 20 * DAY_S), (anyio.current_time() + 3, -5 * DAY_S))
            async with service(disk, *jumps) as p:
                for second in range(6):
                    await publish(p, second, 1)
                    await anyio.sleep(1)
                append_times = append_times_of(p)
        assert len(append_times) == 24
        assert all(earlier < later for earlier, later in pairwise(append_times))

    run_virtual(main)


def test_status_reports_the_last_jump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(tmp_path, capsys)
    command.publish(create_lines(1))
    assert command("status", "--json").lines[0]["clock_jump"] is None
    disk = LocalDisk(command.data)
    jump = ClockJump(EPOCH_US, EPOCH_US + 20 * 86_400_000_000)
    write_times(disk, DIRECTORY, replace(read_times(disk, DIRECTORY, []), jump=jump))
    reported = command("status", "--json").lines[0]["clock_jump"]
    assert reported == {"expected": "2020-09-13T12:26:40.000Z", "found": "2020-10-03T12:26:40.000Z"}
    assert "expected 2020-09-13T12:26:40.000Z, found 2020-10-03T12:26:40.000Z" in command("status").out
