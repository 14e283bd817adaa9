"""Corruption is detected before it is delivered, and reported with its offset; other rows stay readable."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.corruption import BadFrame, FormatUnknown, LogBusy, LogCorrupted
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.readonly.inspect import inspect
from delta_prop_broker.segments.frames import FrameScanner
from delta_prop_simulations.disk import SimDisk, nth
from delta_prop_wire.delta import AckLevel
from tests.broker.durable import EVERYTHING, SEGMENTS, SMALL, Writer, commit, contents, frame, open_log

if TYPE_CHECKING:
    from pathlib import Path

TINY = replace(SMALL, segment_bytes_max=400)


def small_log(batches: int = 5) -> tuple[SimDisk, dict[int, bytes]]:
    """Return the disk of a closed log of a few segments with two frames each, and the appended frames."""
    disk = SimDisk()
    log, _ = open_log(disk, TINY)
    writer = Writer(log)
    for _ in range(batches):
        writer.append(1)
        commit(log)
    log.close()
    return disk, writer.appended


def segments_of(disk: SimDisk) -> list[str]:
    return [path for path in disk.paths() if path.endswith(".log")]


def file_contents(disk: SimDisk) -> dict[str, bytes]:
    return {path: disk.peek(path) for path in disk.paths() if path != "lock"}


def try_open(disk: SimDisk) -> DurableLog | Exception:
    try:
        return open_log(disk, TINY)[0]
    except (LogCorrupted, FormatUnknown) as corruption:
        return corruption


def read_each(log: DurableLog, appended: dict[int, bytes]) -> list[LogCorrupted]:
    """Read each offset by itself: it must give the appended bytes or a LogCorrupted; return these errors."""
    corruptions, are_wrong = [], []
    for offset, raw in appended.items():
        try:
            batches = log.read(offset, rows_max=1, bytes_max=1)
        except LogCorrupted as corruption:
            corruptions.append(corruption)
            are_wrong.append(corruption.offset != offset)
        else:
            are_wrong.append([frame(logged) for logged in batches] != [raw])
    assert not any(are_wrong), "corruption must be reported at its offset, and all other rows must be read"
    return corruptions


# --- every bit


def test_frame_with_a_flipped_bit_is_never_accepted() -> None:
    disk, appended = small_log()
    bits = 0
    for path in segments_of(disk):
        base, size = int(path[-24:-4]), len(disk.peek(path))
        starts = sorted(offset for offset in appended if base <= offset)
        for position in range(size):
            for bit in range(8):
                disk.flip(path, position, bit)
                scanner = FrameScanner(
                    disk.open(path, read_only=True), position=0, offset=base, end=size, previous_crc=None
                )
                intact = []
                with pytest.raises(BadFrame) as caught:
                    intact.extend(scanner)
                assert caught.value.position <= position
                assert [frame(location.logged) for location in intact] == [
                    appended[offset] for offset in starts[: len(intact)]
                ]
                disk.flip(path, position, bit)
                bits += 1
    print(f"{bits} flipped bits in {len(segments_of(disk))} segments")


def test_flipped_bit_in_any_file_is_reported_and_never_delivered(full: bool) -> None:
    intact, appended = small_log()
    times = [
        location.stamp.append_time for location in inspect(intact) if not isinstance(location, LogCorrupted)
    ]
    refused = harmless = 0
    for path in intact.paths():
        if path == "lock":
            continue
        for position in range(len(intact.peek(path))):
            if not any(intact.peek(path)[position - 64 : position + 64]):
                continue  # the gap between the slots of the recovery point
            for bit in range(8) if full else (position % 8,):
                disk = intact.kill()
                disk.flip(path, position, bit)
                before = file_contents(disk)
                log = try_open(disk)
                if not isinstance(log, DurableLog):
                    refused += 1
                    assert path in str(log)
                    assert path.endswith((".log", "log", "format"))
                    assert file_contents(disk) == before, "a refused open changes no file"
                    assert any(
                        path in str(entry) for entry in _try_inspect(disk) if isinstance(entry, Exception)
                    )
                    continue
                assert log.next_offset == 5, "the log must not get shorter without a report"
                assert log.epoch == 1
                assert not path.endswith((".log", "log", "format")), (
                    "corruption of a needed file is not ignored"
                )
                assert read_each(log, appended) == []
                assert [log.find(16, counter + 1) for counter in range(5)] == list(range(5))
                assert [log.offset_at(time) for time in times] == list(range(5))
                harmless += 1
                log.close()
    print(f"{refused} flips refused at opening, {harmless} in files that are rebuilt")
    assert min(refused, harmless) > 300


def test_corruption_in_a_sealed_segment_is_found_on_read() -> None:
    """Opening trusts the index of a sealed segment, so it does not read all frames."""
    intact = SimDisk()
    settings = replace(SMALL, segment_bytes_max=30_000, bytes_max=200_000)
    log, _ = open_log(intact, settings)
    writer = Writer(log)
    for rows in range(200):
        writer.append(1 + rows % 3, dimension=10)
        commit(log)
    log.close()
    path = segments_of(intact)[0]
    size, flip_count = len(intact.peek(path)), 0
    for position in range(1_000, size - 10_000, 997):
        disk = intact.kill()
        disk.flip(path, position)
        log, report = open_log(disk, settings)
        assert (report.clean, report.indexes_rebuilt) == (True, 0)
        corruptions = read_each(log, writer.appended)
        assert [corruption.path for corruption in corruptions] == [path]
        flip_count += 1
    print(f"{flip_count} flips in {size} bytes")
    assert flip_count > 10


def _try_inspect(disk: SimDisk) -> list[object]:
    try:
        return list(inspect(disk))
    except FormatUnknown as unknown:
        return [unknown]


def test_bit_flipped_while_the_log_is_open_is_found_on_read() -> None:
    intact, appended = small_log()
    for path in segments_of(intact):
        for position in range(0, len(intact.peek(path)), 7):
            disk = intact.kill()
            log, _ = open_log(disk, TINY)
            disk.flip(path, position)
            corruptions = read_each(log, appended)
            assert [corruption.path for corruption in corruptions] == [path]
            corruption = corruptions[0]
            assert corruption.position is not None
            assert corruption.position <= position
            assert corruption.end == corruption.offset + 1  # type: ignore[operator]
            for text in (path, "offset", "delta-prop log verify", "delta-prop log export"):
                assert text in str(corruption)
            # A sequential reader gets the rows before the corruption, then the error.
            offsets_before = (
                [logged.offset for logged in log.read(0, **EVERYTHING)] if corruption.offset else []
            )
            assert offsets_before == list(range(corruption.offset or 0))
            log.close()


def test_inspect_returns_every_frame_but_corrupted_ones() -> None:
    disk, appended = small_log(7)
    assert {location.logged.offset: frame(location.logged) for location in inspect(disk)} == appended  # type: ignore[union-attr]
    first, second = segments_of(disk)[:2]
    disk.flip(first, 20)
    disk.flip(second, 250)
    entries = list(inspect(disk))
    corruptions = [entry for entry in entries if isinstance(entry, LogCorrupted)]
    assert [(corruption.path, corruption.offset, corruption.end) for corruption in corruptions] == [
        (first, 0, 1),
        (second, 3, 4),
    ]
    offsets = [entry.logged.offset for entry in entries if not isinstance(entry, LogCorrupted)]
    assert offsets == [1, 2, 4, 5, 6]
    disk.remove(segments_of(disk)[2])
    corruptions = [entry for entry in inspect(disk) if isinstance(entry, LogCorrupted)]
    assert (corruptions[-1].offset, corruptions[-1].end) == (3, 6)


# --- missing or wrong files


def test_missing_or_wrong_index_is_rebuilt() -> None:
    intact, appended = small_log(9)
    paths = [path for path in intact.paths() if path.endswith(".index")]
    assert len(paths) == 4
    index_bytes = [intact.peek(path) for path in paths]
    corruptions = [
        b"",
        bytes(len(index_bytes[0])),
        b"\xff" * 1000,
        index_bytes[0][:-1],
        index_bytes[1],
        index_bytes[0] * 2,
    ]
    for content in [None, *corruptions]:
        for changed_paths in (paths[:1], paths):
            disk = intact.kill()
            for path in changed_paths:
                if content is None:
                    disk.remove(path)
                else:
                    disk.put(path, content)
            log, report = open_log(disk, TINY)
            assert report.indexes_rebuilt >= len(changed_paths) - 1
            assert contents(log) == appended
            assert [log.find(16, counter + 1) for counter in range(9)] == list(range(9))
            log.close()
            log, report = open_log(disk, TINY)
            assert report.indexes_rebuilt == 0, "the rebuilt index is stored"
            for path in changed_paths:  # the index is also rebuilt while the log is open
                disk.put(path, b"\x00" * 300)
            assert contents(log) == appended
            log.close()


def test_index_that_points_to_wrong_frames_is_rebuilt() -> None:
    """The index has a valid checksum, but its positions and offsets are those of other frames."""
    disk, appended = small_log(9)
    log, _ = open_log(disk, TINY)
    segment = log.segments.all[1]
    index = log.segments.index_of(segment)
    index._entries.positions[0] += 8
    index._runs[16].offsets[0] += 1
    assert contents(log) == appended
    assert log.statistics().indexes_rebuilt == 1
    assert log.find(16, 3) == 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_missing_segment_is_reported_with_its_offset_range(index: int) -> None:
    disk, _ = small_log()
    path = segments_of(disk)[index]
    disk.remove(path)
    before = file_contents(disk)
    with pytest.raises(LogCorrupted) as caught:
        open_log(disk, TINY)
    first_offset = 2 * index
    assert (caught.value.offset, caught.value.end) == (first_offset, min(first_offset + 2, 5))
    assert file_contents(disk) == before


def test_log_without_any_segment_is_corruption() -> None:
    disk, _ = small_log()
    for path in segments_of(disk):
        disk.remove(path)
    with pytest.raises(LogCorrupted, match="no segment is left") as caught:
        open_log(disk, TINY)
    assert (caught.value.offset, caught.value.end) == (0, 5)


@pytest.mark.parametrize("name", ["format", f"{SEGMENTS}/log"])
def test_log_without_its_metadata_files_is_not_taken_as_new(name: str) -> None:
    disk, _ = small_log()
    disk.remove(name)
    before = file_contents(disk)
    with pytest.raises(LogCorrupted, match="missing"):
        open_log(disk, TINY)
    assert file_contents(disk) == before
    assert any(isinstance(entry, LogCorrupted) and entry.path == name for entry in inspect(disk))


def test_log_without_recovery_point_opens_and_reports_it() -> None:
    disk, appended = small_log()
    disk.remove(f"{SEGMENTS}/mark")
    log, report = open_log(disk, TINY)
    assert contents(log) == appended
    assert "mark is missing or corrupted" in str(report)
    assert log.epoch == 2, "a missing tail cannot be ruled out"


def test_newer_format_is_refused_with_its_number() -> None:
    disk, _ = small_log()
    disk.put("format", json.dumps({"format": 7, "made_by": "9.0", "more": []}).encode())
    before = file_contents(disk)
    for read_only in (False, True):
        with pytest.raises(FormatUnknown, match=r"format 7 \(made by 9.0\).*reads up to 2") as caught:
            open_log(disk, TINY, read_only=read_only)
        assert caught.value.format == 7
    assert file_contents(disk) == before


# --- the tail


@pytest.mark.parametrize("zeros", [0, 8192], ids=["", "followed by zeros"])
@pytest.mark.parametrize("kind", ["torn", "garbage", "flipped", "half a head"])
def test_torn_tail_above_the_recovery_point_is_truncated(kind: str, zeros: int) -> None:
    disk = SimDisk()
    log, _ = open_log(disk, replace(SMALL, read_level=AckLevel.LOGGED))
    writer = Writer(log)
    for _ in range(3):
        writer.append(1)
    commit(log)  # synced: offsets 0 to 2
    writer.append(1, level=AckLevel.LOGGED)
    commit(log)
    path = segments_of(disk)[0]
    size = len(writer.appended[0])
    raw = disk.peek(path)[: 4 * size]
    assert (log.synced, log.written, log.statistics().bytes) == (3, 4, 4 * size)
    synced_bytes = raw[: 3 * size]
    corrupted = {
        "torn": raw[:-5],
        "garbage": raw + b"\xd3\x01\x01\x08" + bytes(range(256)),
        "flipped": raw[:-30] + b"\xff" + raw[-29:],
        "half a head": synced_bytes + raw[:40],
    }[kind]
    after = disk.kill()
    after.put(path, corrupted + bytes(zeros))
    reader, read_only_report = open_log(after, read_only=True)
    assert reader.high_watermark == 3
    assert read_only_report.truncated_tail is not None
    assert after.peek(path) == corrupted + bytes(zeros)
    assert any(isinstance(entry, LogCorrupted) and "a torn tail" in entry.reason for entry in inspect(after))
    log, report = open_log(after)
    offset = 4 if kind == "garbage" else 3
    assert report.truncated_tail is not None
    assert report.truncated_tail == read_only_report.truncated_tail
    assert (report.truncated_tail.offset, report.truncated_tail.position) == (offset, offset * size)
    assert report.truncated_tail.bytes == len(corrupted.rstrip(b"\0")) - offset * size
    assert "never synced and are left out" in str(report)
    assert contents(log) == {
        row_offset: raw for row_offset, raw in writer.appended.items() if row_offset < offset
    }
    assert (log.epoch, log.next_offset, log.epoch_end(1)) == (2, offset, offset)
    assert after.peek(path) == raw[: offset * size]


def test_torn_frame_below_the_recovery_point_is_corruption() -> None:
    """The last synced frame is torn; the recovery point proves that it was synced."""
    disk, _ = small_log()
    path = segments_of(disk)[-1]
    raw = disk.peek(path)
    for corrupted in (raw[:-1], raw[:-70], b"", bytes(len(raw)), raw[: len(raw) // 2] + bytes(len(raw) // 2)):
        after = disk.kill()
        after.put(path, corrupted)
        before = file_contents(after)
        with pytest.raises(LogCorrupted) as caught:
            open_log(after, TINY)
        assert (caught.value.path, caught.value.offset, caught.value.end) == (path, 4, 5)
        assert file_contents(after) == before


def test_frames_after_corruption_prove_sync_without_recovery_point() -> None:
    disk = SimDisk()
    log, _ = open_log(disk)
    writer = Writer(log)
    for _ in range(4):
        writer.append(1)
        commit(log)
    after = disk.kill()
    after.remove(f"{SEGMENTS}/mark")
    path, size = segments_of(after)[0], len(writer.appended[0])
    for position in (size + 20, 2 * size + 100):
        corrupted = after.kill()
        corrupted.flip(path, position)
        with pytest.raises(LogCorrupted) as caught:
            open_log(corrupted)
        offset = position // size
        assert (caught.value.offset, caught.value.end) == (offset, offset + 1)
    after.flip(path, 3 * size + 20)  # the last frame: no later frame proves that it was synced
    log, report = open_log(after)
    assert (log.next_offset, report.truncated_tail is not None) == (3, True)


@pytest.mark.parametrize("kind", ["lose", "misdirect"])
def test_lost_or_misdirected_write_is_detected(kind: str) -> None:
    detected = harmless = 0
    for sync_number in range(1, 30):
        disk = SimDisk(sync_number)
        matching_sync = nth("sync", sync_number, ".log")
        disk.lose(matching_sync) if kind == "lose" else disk.misdirect(matching_sync)
        log, _ = open_log(disk)
        writer = Writer(log)
        for _ in range(20):
            writer.append(2, dimension=30)
            commit(log)
        log.close()
        fault_count = disk.fault_counts["writes lost"] + disk.fault_counts["writes misdirected"]
        after = disk.crash(sync_number)
        try:
            log, _ = open_log(after)
            corruptions = read_each(log, writer.appended)
        except LogCorrupted as corruption:
            corruptions = [corruption]
        assert fault_count or not corruptions
        detected += bool(corruptions)
        harmless += not corruptions
        assert log.next_offset == 40
    print(f"{detected} detected, {harmless} had no effect")
    assert detected > 5


def test_frame_of_another_history_is_corruption() -> None:
    """The stored frame has the same offset and a valid stamp and body, but is not the one appended there."""
    disk, appended = small_log(2)
    disk.put(segments_of(disk)[0], appended[0] + _frame_of_another_log(appended))
    with pytest.raises(LogCorrupted, match="follows stamp"):
        open_log(disk, TINY)


def test_renamed_segment_is_not_taken_as_a_torn_tail() -> None:
    """Valid frames with other offsets than the file name says are not truncated as a torn tail.

    Without a recovery point, nothing shows that they were synced.
    """
    disk, _ = small_log(2)
    disk.remove(f"{SEGMENTS}/mark")
    disk.rename(segments_of(disk)[0], f"{SEGMENTS}/{7:020}.log")
    before = file_contents(disk)
    with pytest.raises(LogCorrupted, match="offset 0 is where the frame of offset 7 belongs"):
        open_log(disk, TINY)
    assert file_contents(disk) == before


def test_valid_body_with_a_foreign_stamp_is_corruption() -> None:
    disk, appended = small_log(2)
    disk.put(segments_of(disk)[0], appended[0] + appended[1][:64] + appended[0][64:])
    with pytest.raises(LogCorrupted, match="the stamp names body"):
        open_log(disk, TINY)


def _frame_of_another_log(appended: dict[int, bytes]) -> bytes:
    """Return a frame at offset 1, as large as the one in `appended`, after another frame at offset 0."""
    disk = SimDisk()
    log, _ = open_log(disk, TINY)
    writer = Writer(log, counter=7)
    writer.append(1)
    raw = frame(writer.append(1))
    assert len(raw) == len(appended[1])
    return raw


# --- two processes

HOLDER_SCRIPT = """
import sys
from delta_prop_broker.local_disk import LocalDisk
from tests.broker.durable import open_log
log, _ = open_log(LocalDisk(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_second_process_is_refused_until_the_holder_exits(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER_SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(LogBusy, match=f"process {holder.pid}"):
            open_log(LocalDisk(tmp_path))
    finally:
        holder.kill()
        holder.communicate()
    log, report = open_log(LocalDisk(tmp_path))
    assert (report.clean, log.epoch) == (False, 2)
    log.close()
