"""A Follower reads each synced frame once, in order, while the log grows, begins segments and is reopened."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.readonly.follow import Follower
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import SMALL, Clock, Writer, commit, frame, open_log

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_broker.disk import Disk


def read(follower: Follower) -> dict[int, bytes]:
    frames: dict[int, bytes] = {}
    for location in follower.read():
        assert location.logged.offset not in frames
        frames[location.logged.offset] = frame(location.logged)
    return frames


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return LocalDisk(tmp_path / "data")


@pytest.mark.parametrize("level", [AckLevel.LOGGED, AckLevel.DURABLE])
@pytest.mark.parametrize("seed", range(3))
def test_follower_reads_each_synced_frame_once(seed: int, level: AckLevel, disk: Disk) -> None:
    rng = Random(seed)
    settings = replace(SMALL, read_level=level)
    log, _ = open_log(disk, settings)
    writer, follower = Writer(log), Follower(disk, 0)
    seen: dict[int, bytes] = {}
    reads = reads_with_unsynced_rows = 0
    for _ in range(300):
        action = rng.random()
        if action < 0.6:
            writer.append(rng.randrange(1, 4), level=level)
        elif action < 0.85:
            commit(log, sync=rng.random() < 0.3)
        elif action < 0.87:
            log.close()
            log, _ = open_log(disk, settings)
            writer.log = log
        else:
            reads_with_unsynced_rows += log.written > log.synced
            new = read(follower)
            reads += bool(new)
            seen |= new
            assert seen == {offset: raw for offset, raw in writer.appended.items() if offset < log.synced}
            assert follower.offset == log.synced
    log.close()
    seen |= read(follower)
    assert seen == writer.appended
    assert reads > 5
    assert bool(reads_with_unsynced_rows) is (level is AckLevel.LOGGED)
    assert len([name for name in disk.list(DIRECTORY) if name.endswith(".log")]) > 1
    follower.close()


def test_start_within_a_batch_reads_that_batch(disk: Disk) -> None:
    log, _ = open_log(disk)
    writer = Writer(log)
    for _ in range(3):
        writer.append(4)
    log.close()
    follower = Follower(disk, 6)
    assert list(read(follower)) == [4, 8]
    follower.close()


def test_follower_below_the_log_start_is_refused(disk: Disk) -> None:
    clock = Clock()
    log, _ = open_log(disk, clock=clock)
    writer = Writer(log)
    follower = Follower(disk, 0)
    while not log.start_offset:
        writer.append(4)
        commit(log)
        clock.wait(log.settings.retention_s)
        log.retain()
    commit(log)
    with pytest.raises(Refused, match="start at earliest") as refused:
        read(follower)
    assert refused.value.code is ErrorCode.CURSOR_TOO_OLD
    log.close()


def test_corruption_is_reported_with_its_position(disk: Disk) -> None:
    log, _ = open_log(disk)
    writer = Writer(log)
    for _ in range(3):
        writer.append(2)
        commit(log)
    (name,) = [file_name for file_name in disk.list(DIRECTORY) if file_name.endswith(".log")]
    file = disk.open(f"{DIRECTORY}/{name}")
    size = log.statistics().bytes // 3
    file.write(size + 70, [b"\xff"])
    file.close()
    follower = Follower(disk, 0)
    with pytest.raises(LogCorrupted) as corruption:
        read(follower)
    assert (corruption.value.position, corruption.value.offset) == (size, 2)
    follower.close()
    log.close()


def test_missing_segment_is_reported(disk: Disk) -> None:
    log, _ = open_log(disk)
    writer = Writer(log)
    while len(disk.list(DIRECTORY)) < 6:
        writer.append(4)
        commit(log)
    second = sorted(file_name for file_name in disk.list(DIRECTORY) if file_name.endswith(".log"))[1]
    disk.remove(f"{DIRECTORY}/{second}")
    follower = Follower(disk, 0)
    with pytest.raises(LogCorrupted, match="frames are missing"):
        read(follower)
    log.close()
