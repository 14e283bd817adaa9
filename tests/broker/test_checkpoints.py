"""Checkpoints beside the log: they shorten an opening, and nothing wrong is ever taken for one."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.log.corruption import LogCorrupted
from delta_prop_broker.log.files.checkpoints import CheckpointCorrupted, Position, file_name
from delta_prop_broker.log.files.segment import index_frame
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from tests.broker.durable import SEGMENTS, SMALL, Writer, commit, contents, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.engine.recovery_result import RecoveryReport

LARGE = LogSettings(segment_bytes_max=1 << 20, bytes_max=1 << 22, retention_bytes=1 << 22, free_bytes_min=0)


def write_checkpoint(log: DurableLog, position: Position | None = None, **sections: bytes) -> int:
    """A checkpoint of the log's end with one part of its own."""
    position = position or log.position()
    part = log.checkpoints.write_file(file_name(position.offset, "p"), [b"part of ", b"%d" % position.offset])
    kept = [one for known in log.checkpoints.stored[:1] for one in known.files.values()][-1:]
    log.checkpoints.write(
        position, log.synced, sections or {"told": b"%d" % position.offset}, [*kept, part]
    )  # fmt: skip
    return position.offset


def grown(disk: SimDisk, settings: LogSettings = SMALL, batches: int = 12) -> tuple[DurableLog, Writer]:
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    more(writer, batches)
    return log, writer


def more(writer: Writer, batches: int) -> None:
    for _ in range(batches):
        writer.append(dimension=8)
        commit(writer.log)


def checkpoints(disk: SimDisk, suffix: str = ".checkpoint") -> list[str]:
    return sorted(path for path in disk.paths() if path.endswith(suffix))


def found(log: DurableLog) -> list[int]:
    return [one.offset for one in log.checkpoints.stored]


def test_a_checkpoint_comes_back_with_its_sections_and_parts() -> None:
    disk = SimDisk()
    log, writer = grown(disk)
    large = bytes(range(256)) * 5_000
    at = write_checkpoint(log, large=large, empty=b"")
    more(writer, 3)
    log.close()
    log, report = open_log(disk)
    assert report.checkpoint == at
    assert f"checkpoint at offset {at}" in str(report)
    (checkpoint,) = log.checkpoints.stored
    assert (checkpoint.offset, checkpoint.section("large"), checkpoint.section("empty")) == (at, large, b"")
    assert [checkpoint.read_file(name) for name in checkpoint.files] == [b"part of %d" % at]


@pytest.mark.parametrize("unclean", [False, True])
def test_only_what_lies_behind_the_checkpoint_is_read_at_opening(unclean: bool) -> None:
    disk = SimDisk()
    log, writer = grown(disk, LARGE, 300)
    more(writer, 1)
    size = log.position().size
    write_checkpoint(log)
    more(writer, 4)
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
    more(writer, 200)  # past the end of the segment: the index of both its parts is stored
    log.close()
    log, report = open_log(disk, LARGE)
    assert contents(log) == writer.appended
    assert report.indexes_rebuilt == 0


def test_an_index_up_to_an_offset_is_what_the_frames_up_to_it_give() -> None:
    disk = SimDisk()
    log, writer = grown(disk, LARGE, 50)
    position = log.position()
    assert position.index is not None
    more(writer, 70)
    made = SparseIndex(0)
    for place in log.frames():
        if place.logged.offset < position.offset:
            index_frame(made, place)
    copy = position.index.copy_until(position.offset, position.size, position.crc, position.latest_time)
    assert (copy.end, copy.size, copy.last_crc) == (made.end, made.size, made.last_crc)
    assert copy.last_entry() == made.last_entry()
    assert copy.find_run(16, 100) == made.find_run(16, 100)
    for place in log.frames(position.offset):
        index_frame(copy, place)
        index_frame(made, place)
    assert copy.pack()[:88] == made.pack()[:88]
    assert copy.find_run(16, 180) == (0, 179) or copy.find_run(16, 180) is not None


def test_two_are_kept_with_the_parts_that_they_name() -> None:
    disk = SimDisk()
    log, writer = grown(disk)
    written = []
    for _ in range(4):
        written.append(write_checkpoint(log))
        more(writer, 2)
    assert found(log) == [written[3], written[2]]
    assert len(checkpoints(disk)) == 2
    assert len(checkpoints(disk, ".part")) == 3  # each names the one before too
    disk.put(f"{SEGMENTS}/{file_name(7, 'x')}", b"of a checkpoint that never came to be")
    log.close()
    log, _ = open_log(disk)
    assert found(log) == [written[3], written[2]]
    assert len(checkpoints(disk, ".part")) == 3


def test_a_flipped_bit_anywhere_is_told_and_the_older_one_is_used() -> None:
    disk = SimDisk()
    log, writer = grown(disk)
    older = write_checkpoint(log)
    more(writer, 2)
    newer = write_checkpoint(log)
    log.close()
    path = checkpoints(disk)[-1]
    noticed = 0
    for at in range(0, len(disk.peek(path)), 3):
        flipped = disk.kill()
        flipped.flip(path, at, at % 8)
        log, report = open_log(flipped, read_only=True)
        if newer not in found(log):
            assert report.checkpoint == older
            assert any("not used" in note for note in report.notes)
            noticed += 1
            continue
        checkpoint = log.checkpoints.stored[0]
        whole = 0
        for read in (lambda one=checkpoint: one.section("told"), checkpoint.index):
            with suppress(CheckpointCorrupted):
                read()
                whole += 1
        assert whole == 1
        noticed += 1
    assert noticed == len(range(0, len(disk.peek(path)), 3))


def test_a_damaged_or_missing_part_is_told_by_its_reader() -> None:
    for damage in ("flip", "remove", "cut"):
        disk = SimDisk()
        log, _ = grown(disk)
        write_checkpoint(log)
        (path,) = checkpoints(disk, ".part")
        if damage == "flip":
            disk.flip(path, 3)
        elif damage == "remove":
            disk.remove(path)
        else:
            disk.put(path, disk.peek(path)[:-1])
        (checkpoint,) = log.checkpoints.stored
        with pytest.raises(CheckpointCorrupted, match="not used"):
            checkpoint.read_file(next(iter(checkpoint.files)))


def test_one_of_another_log_or_version_or_name_is_not_used() -> None:
    disk = SimDisk()
    log, _ = grown(disk)
    write_checkpoint(log)
    log.close()
    (path,) = checkpoints(disk)
    raw = disk.peek(path)
    for content, told in (
        (raw[:16] + bytes([raw[16] ^ 1]) + raw[17:], "checksum"),
        (raw[:8] + b"\x02" + raw[9:], "version 2"),
        (b"something else" + raw, "not a checkpoint"),
        (raw[:40], "ends after"),
        (b"", "ends after 0 bytes"),
    ):
        other = disk.kill()
        other.put(path, content)
        log, report = open_log(other, read_only=True)
        assert found(log) == []
        assert told in report.notes[0]
        assert contents(log)
    renamed = disk.kill()
    renamed.rename(path, path.replace("024", "023"))
    assert "under another name" in open_log(renamed, read_only=True)[1].notes[0]


def test_one_of_another_history_of_the_same_log_is_not_used() -> None:
    disk = SimDisk()
    log, _ = grown(disk, batches=3)
    write_checkpoint(log)
    log.close()
    other = SimDisk()
    log, writer = grown(other, batches=1)
    writer.append(4, dimension=8)
    commit(log)
    log.close()
    (path,) = checkpoints(disk)
    other.put(path, disk.peek(path))
    log, report = open_log(other)
    assert found(log) == []
    assert "does not fit the frames" in report.notes[-1]
    assert contents(log) == writer.appended
    assert checkpoints(other) == []


def test_frames_that_a_checkpoint_speaks_of_are_missed_when_they_are_gone() -> None:
    disk = SimDisk()
    log, _ = grown(disk, LARGE)
    write_checkpoint(log)
    log.close()
    disk.remove(f"{SEGMENTS}/mark")
    path = next(path for path in disk.paths() if path.endswith(".log"))
    disk.put(path, disk.peek(path)[:-300])
    with pytest.raises(LogCorrupted, match="damage"):
        open_log(disk, LARGE)


def test_one_whose_name_was_not_synced_is_not_there_for_the_next_process() -> None:
    disk = SimDisk(1)
    log, writer = grown(disk)
    write_checkpoint(log)
    more(writer, 4)
    disk.fail(lambda call: call.name == "sync_directory", errno.EIO)
    before = checkpoints(disk)
    with pytest.raises(OSError, match="Input/output"):
        write_checkpoint(log)
    assert checkpoints(disk) == before


def test_a_crash_at_any_call_of_writing_leaves_one_that_is_whole() -> None:
    def life(disk: SimDisk) -> list[int]:
        log, writer = grown(disk, batches=2)
        told: list[int] = []
        try:
            for _ in range(4):
                told.append(write_checkpoint(log))
                more(writer, 2)
        except SimCrash:
            return told
        return [*told, -1]

    whole = SimDisk()
    assert life(whole)[-1] == -1
    first = next(call.number for call in whole.trace if call.path.endswith(".part"))
    numbers = [call.number for call in whole.trace if call.name in CHANGING and call.number > first]
    for number in numbers:
        disk = SimDisk(number)
        disk.crash_at(number)
        told = life(disk)
        for seed in range(2):
            check_after(disk.crash(seed), told)
        check_after(disk.kill(), told)
    assert len(numbers) > 40


def check_after(disk: SimDisk, told: list[int]) -> RecoveryReport:
    log, report = open_log(disk)
    if told:
        assert found(log)
        assert found(log)[0] >= told[-1]
    for checkpoint in log.checkpoints.stored:
        assert checkpoint.offset <= log.next_offset
        assert checkpoint.section("told") == b"%d" % checkpoint.offset
        for name in checkpoint.files:
            assert checkpoint.read_file(name).startswith(b"part of ")
    assert not [path for path in disk.paths() if path.endswith(".new")]
    log.close()
    return report
