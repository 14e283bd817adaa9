"""Zeros ahead of the last frame: for the next commits, gone where a segment ends, no damage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delta_prop_broker.log.corruption import LogCorrupted
from delta_prop_broker.log.files import preallocation
from delta_prop_broker.log.files.preallocation import AHEAD_BYTES_MIN, LARGE_BYTES, content_end
from delta_prop_broker.log.readonly.follow import Follower
from delta_prop_broker.log.readonly.inspect import inspect
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from tests.broker.durable import SEGMENTS, SMALL, Writer, commit, contents, open_log

MIB = 1024 * 1024
ROOMY = replace(SMALL, segment_bytes_max=8 * MIB, bytes_max=64 * MIB, retention_bytes=48 * MIB)
ROOMY = replace(ROOMY, unwritten_bytes_max=4 * MIB)


def sizes(disk: SimDisk) -> list[int]:
    return [len(disk.peek(path)) for path in disk.paths() if path.endswith(".log")]


def three_commits() -> tuple[SimDisk, Writer]:
    disk = SimDisk()
    log, _ = open_log(disk, ROOMY)
    writer = Writer(log)
    for _ in range(3):
        writer.append(2)
        commit(log)
    return disk, writer


def test_a_durable_commit_finds_zeros_and_leaves_some_for_those_that_follow() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, ROOMY)
    writer = Writer(log)
    writer.append(1)
    commit(log)
    first = log.statistics().bytes
    assert sizes(disk) == [first + AHEAD_BYTES_MIN]
    for _ in range(5):
        writer.append(1)
        commit(log)
    assert sizes(disk) == [first + AHEAD_BYTES_MIN], "what they wrote lies in the zeros"
    writer.append(8, dimension=10_000)
    commit(log)
    behind = log.statistics().bytes
    assert behind > first + AHEAD_BYTES_MIN
    assert 4 * AHEAD_BYTES_MIN < sizes(disk)[0] - behind <= 16 * (behind - first), "as large as commits are"
    assert contents(log) == writer.appended
    log.close()
    assert sizes(disk) == [behind], "closed, it holds frames alone"


def test_a_sealed_segment_holds_frames_alone() -> None:
    disk = SimDisk()
    log, _ = open_log(disk)
    writer = Writer(log)
    while log.statistics().segments < 4:
        writer.append(4)
        commit(log)
    *sealed, last = sizes(disk)
    assert last == SMALL.segment_bytes_max, "no longer than a segment becomes"
    assert sum(sealed) < log.statistics().bytes
    log, report = open_log(disk.kill())
    assert report.truncated_tail is None
    assert contents(log) == writer.appended


@pytest.mark.parametrize("how", ["large", "logged", "full"])
def test_zeros_are_left_out_where_they_cost_more_than_they_save(how: str) -> None:
    disk = SimDisk()
    settings = {
        "large": ROOMY,
        "logged": replace(ROOMY, read_level=AckLevel.LOGGED),
        "full": replace(ROOMY, free_bytes_min=disk.free_bytes() - 9 * MIB),
    }[how]
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    if how == "large":
        writer.append(1, dimension=LARGE_BYTES // 4)
    else:
        writer.append(1, level=AckLevel.LOGGED if how == "logged" else AckLevel.DURABLE)
    commit(log)
    assert sizes(disk) == [log.statistics().bytes]


def test_after_a_crash_zeros_are_cut_off_and_nothing_is_told_of_them() -> None:
    disk, writer = three_commits()
    size = writer.log.statistics().bytes
    after = disk.kill()
    assert sizes(after)[0] > size
    assert not [one for one in inspect(after) if isinstance(one, LogCorrupted)]
    assert len(list(Follower(after, 0).read())) == 3
    looker, report = open_log(after, ROOMY, read_only=True)
    assert (contents(looker), report.truncated_tail) == (writer.appended, None)
    log, report = open_log(after, ROOMY)
    assert report.truncated_tail is None
    assert contents(log) == writer.appended
    assert sizes(after) == [size]


def test_zeros_where_a_synced_frame_belongs_are_damage() -> None:
    disk, writer = three_commits()
    size = len(writer.appended[0])
    after = disk.kill()
    (path,) = [path for path in after.paths() if path.endswith(".log")]
    after.put(path, after.peek(path)[: 2 * size] + bytes(8192))
    with pytest.raises(LogCorrupted):
        open_log(after, ROOMY)
    assert any(isinstance(one, LogCorrupted) for one in inspect(after))


@pytest.mark.parametrize(("content", "zeros"), [(0, 0), (0, 5), (7, 0), (7, 3), (3_000_000, 2_500_000)])
def test_where_content_ends(content: int, zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    disk.make_directory(SEGMENTS)
    disk.put("file", b"x" * content + bytes(zeros))
    file = disk.open("file")
    assert content_end(file, 0, file.size()) == content
    monkeypatch.setattr(preallocation, "CHUNK_BYTES", 1_000)
    assert content_end(file, content // 2, file.size()) == content


@pytest.mark.parametrize("look", ["opened", "inspected", "followed"])
@pytest.mark.parametrize("strikes", range(1, 7))
def test_zeros_that_are_filled_while_somebody_reads_are_no_damage(
    look: str, strikes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that writes appends behind one of the reads of another one."""
    disk, writer = three_commits()
    (path,) = [path for path in disk.paths() if path.endswith(".log")]
    with_reads = type(disk.open(path))
    read, reads = with_reads.read, 0

    def read_and_written(self: Any, at: int, size: int) -> bytes:
        nonlocal reads
        found = read(self, at, size)
        if self._path == path:
            reads += 1
            if reads == strikes:
                for _ in range(3):
                    writer.append(2)
                    commit(writer.log)
        return found

    monkeypatch.setattr(with_reads, "read", read_and_written)
    if look == "opened":
        looker, report = open_log(disk, ROOMY, read_only=True)
        assert report.truncated_tail is None
        assert len(contents(looker)) >= 3
    elif look == "inspected":
        assert not [one for one in inspect(disk) if isinstance(one, LogCorrupted)]
    else:
        assert len(list(Follower(disk, 0).read())) >= 3
