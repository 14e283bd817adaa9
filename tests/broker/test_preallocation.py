"""Preallocated zeros after the last frame: commits overwrite them, rolls remove them, readers stop there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.readonly.follow import Follower
from delta_prop_broker.readonly.inspect import inspect
from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.preallocation import AHEAD_BYTES_MIN, LARGE_BYTES, content_end
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from tests.broker.durable import SEGMENTS, SMALL, Writer, commit, contents, open_log

MIB = 1024 * 1024
ROOMY = replace(SMALL, segment_bytes_max=8 * MIB, bytes_max=64 * MIB, retention_bytes=48 * MIB)
ROOMY = replace(ROOMY, unwritten_bytes_max=4 * MIB)


def sizes(disk: SimDisk) -> list[int]:
    return [len(disk.peek(path)) for path in disk.paths() if path.endswith(".log")]


def log_with_three_commits() -> tuple[SimDisk, Writer]:
    disk = SimDisk()
    log, _ = open_log(disk, ROOMY)
    writer = Writer(log)
    for _ in range(3):
        writer.append(2)
        commit(log)
    return disk, writer


def test_durable_commit_preallocates_zeros_for_later_commits() -> None:
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
    assert sizes(disk) == [first + AHEAD_BYTES_MIN], "later commits must write into the zeros"
    writer.append(8, dimension=10_000)
    commit(log)
    written_bytes = log.statistics().bytes
    assert written_bytes > first + AHEAD_BYTES_MIN
    assert 4 * AHEAD_BYTES_MIN < sizes(disk)[0] - written_bytes <= 16 * (written_bytes - first), (
        "the zeros must grow with the size of commits"
    )
    assert contents(log) == writer.appended
    log.close()
    assert sizes(disk) == [written_bytes], "a closed log must hold only frames"


def test_sealed_segment_holds_only_frames() -> None:
    disk = SimDisk()
    log, _ = open_log(disk)
    writer = Writer(log)
    while log.statistics().segments < 4:
        writer.append(4)
        commit(log)
    *sealed, last = sizes(disk)
    assert last == SMALL.segment_bytes_max, "zeros must not exceed the segment bound"
    assert sum(sealed) < log.statistics().bytes
    log, report = open_log(disk.kill())
    assert report.truncated_tail is None
    assert contents(log) == writer.appended


@pytest.mark.parametrize("case", ["large", "logged", "full"])
def test_zeros_are_omitted_where_they_cost_more_than_they_save(case: str) -> None:
    disk = SimDisk()
    settings = {
        "large": ROOMY,
        "logged": replace(ROOMY, read_level=AckLevel.LOGGED),
        "full": replace(ROOMY, free_bytes_min=disk.free_bytes() - 9 * MIB),
    }[case]
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    if case == "large":
        writer.append(1, dimension=LARGE_BYTES // 4)
    else:
        writer.append(1, level=AckLevel.LOGGED if case == "logged" else AckLevel.DURABLE)
    commit(log)
    assert sizes(disk) == [log.statistics().bytes]


def test_zeros_are_truncated_silently_after_a_crash() -> None:
    disk, writer = log_with_three_commits()
    size = writer.log.statistics().bytes
    after = disk.kill()
    assert sizes(after)[0] > size
    assert not [entry for entry in inspect(after) if isinstance(entry, LogCorrupted)]
    assert len(list(Follower(after, 0).read())) == 3
    reader, report = open_log(after, ROOMY, read_only=True)
    assert (contents(reader), report.truncated_tail) == (writer.appended, None)
    log, report = open_log(after, ROOMY)
    assert report.truncated_tail is None
    assert contents(log) == writer.appended
    assert sizes(after) == [size]


def test_zeros_in_place_of_a_synced_frame_are_corruption() -> None:
    disk, writer = log_with_three_commits()
    size = len(writer.appended[0])
    after = disk.kill()
    (path,) = [path for path in after.paths() if path.endswith(".log")]
    after.put(path, after.peek(path)[: 2 * size] + bytes(8192))
    with pytest.raises(LogCorrupted):
        open_log(after, ROOMY)
    assert any(isinstance(entry, LogCorrupted) for entry in inspect(after))


@pytest.mark.parametrize(
    ("content_bytes", "zero_bytes"), [(0, 0), (0, 5), (7, 0), (7, 3), (3_000_000, 2_500_000)]
)
def test_content_end_excludes_trailing_zeros(
    content_bytes: int, zero_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()
    disk.make_directory(SEGMENTS)
    disk.put("file", b"x" * content_bytes + bytes(zero_bytes))
    file = disk.open("file")
    assert content_end(file, 0, file.size()) == content_bytes
    monkeypatch.setattr(preallocation, "CHUNK_BYTES", 1_000)
    assert content_end(file, content_bytes // 2, file.size()) == content_bytes


@pytest.mark.parametrize("access", ["opened", "inspected", "followed"])
@pytest.mark.parametrize("append_at_read", range(1, 7))
def test_zeros_filled_during_a_read_are_not_corruption(
    access: str, append_at_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process reads the log, the writing process appends after one of the reads."""
    disk, writer = log_with_three_commits()
    (path,) = [path for path in disk.paths() if path.endswith(".log")]
    file_type = type(disk.open(path))
    real_read, reads = file_type.read, 0

    def read_then_append(self: Any, at: int, size: int) -> bytes:
        nonlocal reads
        content = real_read(self, at, size)
        if self._path == path:
            reads += 1
            if reads == append_at_read:
                for _ in range(3):
                    writer.append(2)
                    commit(writer.log)
        return content

    monkeypatch.setattr(file_type, "read", read_then_append)
    if access == "opened":
        reader, report = open_log(disk, ROOMY, read_only=True)
        assert report.truncated_tail is None
        assert len(contents(reader)) >= 3
    elif access == "inspected":
        assert not [entry for entry in inspect(disk) if isinstance(entry, LogCorrupted)]
    else:
        assert len(list(Follower(disk, 0).read())) >= 3
