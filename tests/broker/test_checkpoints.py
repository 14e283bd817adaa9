"""Checkpoints shorten the opening of a log; an invalid checkpoint is never used."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.recovery.checkpoints import CheckpointCorrupted, Position, file_name
from delta_prop_broker.segments.segment import index_frame
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from tests.broker.durable import SEGMENTS, SMALL, Writer, commit, contents, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.recovery.recovery import RecoveryReport

LARGE = LogSettings(segment_bytes_max=1 << 20, bytes_max=1 << 22, retention_bytes=1 << 22, free_bytes_min=0)


def write_checkpoint(log: DurableLog, position: Position | None = None, **sections: bytes) -> int:
    """Write a checkpoint of the log's end, or of `position`, with its own part file; return its offset."""
    position = position or log.position()
    part = log.checkpoints.write_file(file_name(position.offset, "p"), [b"part of ", b"%d" % position.offset])
    files_of_newest = [file for newest in log.checkpoints.stored[:1] for file in newest.files.values()]
    log.checkpoints.write(
        position, log.synced, sections or {"state": b"%d" % position.offset}, [*files_of_newest[-1:], part]
    )  # fmt: skip
    return position.offset


def make_log(disk: SimDisk, settings: LogSettings = SMALL, batches: int = 12) -> tuple[DurableLog, Writer]:
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    append_batches(writer, batches)
    return log, writer


def append_batches(writer: Writer, batches: int) -> None:
    for _ in range(batches):
        writer.append(dimension=8)
        commit(writer.log)


def checkpoint_paths(disk: SimDisk) -> list[str]:
    return sorted(path for path in disk.paths() if path.endswith(".checkpoint"))


def part_paths(disk: SimDisk) -> list[str]:
    return sorted(path for path in disk.paths() if path.endswith(".part"))


def checkpoint_offsets(log: DurableLog) -> list[int]:
    return [checkpoint.offset for checkpoint in log.checkpoints.stored]


def test_checkpoint_is_read_back_with_its_sections_and_files() -> None:
    disk = SimDisk()
    log, writer = make_log(disk)
    large = bytes(range(256)) * 5_000
    offset = write_checkpoint(log, large=large, empty=b"")
    append_batches(writer, 3)
    log.close()
    log, report = open_log(disk)
    assert report.checkpoint == offset
    assert f"checkpoint at offset {offset}" in str(report)
    (checkpoint,) = log.checkpoints.stored
    assert (checkpoint.offset, checkpoint.section("large"), checkpoint.section("empty")) == (
        offset,
        large,
        b"",
    )
    assert [checkpoint.read_file(name) for name in checkpoint.files] == [b"part of %d" % offset]


@pytest.mark.parametrize("unclean", [False, True])
def test_open_scans_only_frames_after_the_checkpoint(unclean: bool) -> None:
    disk = SimDisk()
    log, writer = make_log(disk, LARGE, 300)
    append_batches(writer, 1)
    size = log.position().size
    write_checkpoint(log)
    append_batches(writer, 4)
    if unclean:
        disk = disk.kill()
    else:
        log.close()
    log, report = open_log(disk, LARGE)
    assert 0 < report.scanned_bytes <= (log.position().size - size) + 1
    assert report.scanned_bytes < report.bytes / 20
    assert contents(log) == writer.appended
    for offset, counter in ((0, 1), (299, 300), (606, 607), (609, 610)):
        assert log.find(16, counter) == offset
    assert log.find(16, 611) is None
    writer.log = log
    append_batches(writer, 200)  # rolls the segment: the index covers rows before and after the checkpoint
    log.close()
    log, report = open_log(disk, LARGE)
    assert contents(log) == writer.appended
    assert report.indexes_rebuilt == 0


def test_index_copied_until_an_offset_equals_index_of_frames_below_it() -> None:
    disk = SimDisk()
    log, writer = make_log(disk, LARGE, 50)
    position = log.position()
    assert position.index is not None
    append_batches(writer, 70)
    expected = SparseIndex(0)
    for location in log.frames():
        if location.logged.offset < position.offset:
            index_frame(expected, location)
    copy = position.index.copy_until(position.offset, position.size, position.crc, position.latest_time)
    assert (copy.end, copy.size, copy.last_crc) == (expected.end, expected.size, expected.last_crc)
    assert copy.last_entry() == expected.last_entry()
    assert copy.find_run(16, 100) == expected.find_run(16, 100)
    for location in log.frames(position.offset):
        index_frame(copy, location)
        index_frame(expected, location)
    assert copy.pack()[:88] == expected.pack()[:88]  # the headers
    assert copy.find_run(16, 180) == (position.offset, 179), "a new run starts where the copied index ends"
    assert expected.find_run(16, 180) == (0, 179)


def test_two_checkpoints_are_retained_with_their_files() -> None:
    disk = SimDisk()
    log, writer = make_log(disk)
    written = []
    for _ in range(4):
        written.append(write_checkpoint(log))
        append_batches(writer, 2)
    assert checkpoint_offsets(log) == [written[3], written[2]]
    assert len(checkpoint_paths(disk)) == 2
    assert len(part_paths(disk)) == 3  # each checkpoint also names the previous file
    disk.put(f"{SEGMENTS}/{file_name(7, 'x')}", b"of a checkpoint that was never completed")
    log.close()
    log, _ = open_log(disk)
    assert checkpoint_offsets(log) == [written[3], written[2]]
    assert len(part_paths(disk)) == 3


def test_flipped_bit_in_a_checkpoint_is_detected() -> None:
    disk = SimDisk()
    log, writer = make_log(disk)
    older = write_checkpoint(log)
    append_batches(writer, 2)
    newer = write_checkpoint(log)
    log.close()
    path = checkpoint_paths(disk)[-1]
    detected = 0
    for position in range(0, len(disk.peek(path)), 3):
        flipped = disk.kill()
        flipped.flip(path, position, position % 8)
        log, report = open_log(flipped, read_only=True)
        if newer not in checkpoint_offsets(log):
            assert report.checkpoint == older
            assert any("not used" in note for note in report.notes)
            detected += 1
            continue
        checkpoint = log.checkpoints.stored[0]
        readable = 0
        for read in (lambda checkpoint=checkpoint: checkpoint.section("state"), checkpoint.index):
            with suppress(CheckpointCorrupted):
                read()
                readable += 1
        assert readable == 1, "the bit is in one of the two sections"
        detected += 1
    assert detected == len(range(0, len(disk.peek(path)), 3))


def test_corrupted_or_missing_checkpoint_file_is_reported_on_read() -> None:
    for corruption in ("flip", "remove", "truncate"):
        disk = SimDisk()
        log, _ = make_log(disk)
        write_checkpoint(log)
        (path,) = part_paths(disk)
        if corruption == "flip":
            disk.flip(path, 3)
        elif corruption == "remove":
            disk.remove(path)
        else:
            disk.put(path, disk.peek(path)[:-1])
        (checkpoint,) = log.checkpoints.stored
        with pytest.raises(CheckpointCorrupted, match="not used"):
            checkpoint.read_file(next(iter(checkpoint.files)))


def test_corrupted_foreign_or_renamed_checkpoint_is_not_used() -> None:
    disk = SimDisk()
    log, _ = make_log(disk)
    write_checkpoint(log)
    log.close()
    (path,) = checkpoint_paths(disk)
    raw = disk.peek(path)
    for content, reason in (
        (raw[:16] + bytes([raw[16] ^ 1]) + raw[17:], "checksum"),
        (raw[:8] + b"\x02" + raw[9:], "version 2"),
        (b"something else" + raw, "not a checkpoint"),
        (raw[:40], "ends after"),
        (b"", "ends after 0 bytes"),
    ):
        other = disk.kill()
        other.put(path, content)
        log, report = open_log(other, read_only=True)
        assert checkpoint_offsets(log) == []
        assert reason in report.notes[0]
        assert contents(log)
    renamed = disk.kill()
    renamed.rename(path, path.replace("024", "023"))
    assert "under another name" in open_log(renamed, read_only=True)[1].notes[0]


def test_checkpoint_of_another_history_is_not_used() -> None:
    disk = SimDisk()
    log, _ = make_log(disk, batches=3)
    write_checkpoint(log)
    log.close()
    other = SimDisk()
    log, writer = make_log(other, batches=1)
    writer.append(4, dimension=8)
    commit(log)
    log.close()
    (path,) = checkpoint_paths(disk)
    other.put(path, disk.peek(path))
    log, report = open_log(other)
    assert checkpoint_offsets(log) == []
    assert "does not fit the frames" in report.notes[-1]
    assert contents(log) == writer.appended
    assert checkpoint_paths(other) == []


def test_missing_frames_below_a_checkpoint_are_corruption() -> None:
    disk = SimDisk()
    log, _ = make_log(disk, LARGE)
    write_checkpoint(log)
    log.close()
    disk.remove(f"{SEGMENTS}/mark")
    path = next(path for path in disk.paths() if path.endswith(".log"))
    disk.put(path, disk.peek(path)[:-300])
    with pytest.raises(LogCorrupted, match="corruption"):
        open_log(disk, LARGE)


def test_checkpoint_with_unsynced_name_is_discarded() -> None:
    disk = SimDisk(1)
    log, writer = make_log(disk)
    write_checkpoint(log)
    append_batches(writer, 4)
    disk.fail(lambda call: call.name == "sync_directory", errno.EIO)
    before = checkpoint_paths(disk)
    with pytest.raises(OSError, match="Input/output"):
        write_checkpoint(log)
    assert checkpoint_paths(disk) == before


def test_crash_at_any_call_leaves_a_valid_checkpoint() -> None:
    def write_checkpoints(disk: SimDisk) -> list[int]:
        log, writer = make_log(disk, batches=2)
        written: list[int] = []
        try:
            for _ in range(4):
                written.append(write_checkpoint(log))
                append_batches(writer, 2)
        except SimCrash:
            return written
        return [*written, -1]

    fault_free = SimDisk()
    assert write_checkpoints(fault_free)[-1] == -1
    first = next(call.number for call in fault_free.trace if call.path.endswith(".part"))
    numbers = [call.number for call in fault_free.trace if call.name in CHANGING and call.number > first]
    for number in numbers:
        disk = SimDisk(number)
        disk.crash_at(number)
        written = write_checkpoints(disk)
        for seed in range(2):
            check_reopened(disk.crash(seed), written)
        check_reopened(disk.kill(), written)
    assert len(numbers) > 40


def check_reopened(disk: SimDisk, written: list[int]) -> RecoveryReport:
    log, report = open_log(disk)
    if written:
        assert checkpoint_offsets(log)
        assert checkpoint_offsets(log)[0] >= written[-1]
    for checkpoint in log.checkpoints.stored:
        assert checkpoint.offset <= log.next_offset
        assert checkpoint.section("state") == b"%d" % checkpoint.offset
        for name in checkpoint.files:
            assert checkpoint.read_file(name).startswith(b"part of ")
    assert not [path for path in disk.paths() if path.endswith(".new")]
    log.close()
    return report
