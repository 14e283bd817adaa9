"""Segments are compressed in place: readers get the same rows; a crash leaves the old or the new file."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop_broker.corruption import CodecMissing, LogCorrupted
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.readonly.follow import Follower
from delta_prop_broker.readonly.inspect import inspect
from delta_prop_broker.retention import segment_compression
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire import compression
from delta_prop_wire.compression import Compression
from delta_prop_wire.encode import encode_vectors
from delta_prop_wire.errors import UsageError
from tests.broker.compressed import COMPRESSED, compress_next_segment, compressed_log, compressible_batch
from tests.broker.durable import SEGMENTS, SMALL, Clock, Writer, commit, contents, frame, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.settings import Compress

CODECS = pytest.mark.parametrize("codec", ["lz4", "zstd"])


def segments_of(disk: SimDisk) -> list[str]:
    return [path for path in disk.paths() if path.endswith(".log")]


def bytes_of(disk: SimDisk) -> int:
    """Return the bytes of all frames; each ends at a multiple of 8, and zeros may follow the last one."""
    return sum(-(-len(disk.peek(path).rstrip(b"\0")) // 8) * 8 for path in segments_of(disk))


# --- readers


@CODECS
def test_compressed_log_is_smaller_and_reads_the_same(codec: Compress) -> None:
    disk, writer, uncompressed_bytes = compressed_log(codec)
    log = writer.log
    statistics = log.statistics()
    assert (statistics.segments, statistics.compressed_segments) == (5, 4)
    assert statistics.bytes == bytes_of(disk) < uncompressed_bytes / 2
    for opened in (log, open_log(disk.kill(), COMPRESSED)[0], open_log(disk, COMPRESSED, read_only=True)[0]):
        assert contents(opened) == writer.appended
        assert contents(opened, rows_max=1, bytes_max=1) == writer.appended
        assert [opened.find(16, counter + 1) for counter in range(54)] == list(range(54))
        assert [frame(location.logged) for location in opened.frames(13)] == list(writer.appended.values())[
            2:
        ]
        times = [location.stamp.append_time for location in opened.frames()]
        assert [opened.offset_at(time) for time in times] == list(writer.appended)
    entries = list(inspect(disk))
    assert not [entry for entry in entries if isinstance(entry, LogCorrupted)]
    assert sum(entry.size for entry in entries if not isinstance(entry, LogCorrupted)) == bytes_of(disk)
    follower = Follower(disk, 0)
    assert {location.logged.offset: frame(location.logged) for location in follower.read()} == writer.appended


def test_compressed_log_is_opened_by_its_indexes() -> None:
    disk, writer, _ = compressed_log()
    writer.log.close()
    log, report = open_log(disk, COMPRESSED)
    assert (report.clean, report.indexes_rebuilt, log.epoch) == (True, 0, 1)
    assert log.take_compression() is None, "each segment must be compressed once"
    second_writer = Writer(log, counter=writer.counter, appended=writer.appended)
    for _ in range(4):
        second_writer.append_batch(compressible_batch(6, second_writer.counter + 1))
        commit(log)
    while compress_next_segment(log) is not None:
        pass
    assert contents(log) == writer.appended
    log.close()
    for path in disk.paths():
        if path.endswith(".index"):
            disk.remove(path)
    log, report = open_log(disk, COMPRESSED)
    assert report.indexes_rebuilt == 6
    assert contents(log) == writer.appended
    assert log.take_compression() is None, "frames must show that they are compressed"


def test_active_readers_continue_while_segments_are_replaced() -> None:
    """A follower and a reader are within a segment; another reader has read only the indexes."""
    disk, writer, _ = compressed_log(settings=replace(COMPRESSED, compress="none"), codec="none")
    writer.log.close()
    log, _ = open_log(disk, COMPRESSED)
    follower = Follower(disk, 0)
    following = follower.read()
    seen = [frame(next(following).logged)]
    early, _ = open_log(disk, COMPRESSED, read_only=True)
    remaining_frames = early.frames()
    read_frames = [frame(next(remaining_frames).logged)]
    late, _ = open_log(disk, COMPRESSED, read_only=True)
    offsets = [late.find(16, counter) for counter in (1, 13, 30)]
    while compress_next_segment(log) is not None:
        pass
    assert seen + [frame(location.logged) for location in following] == list(writer.appended.values())
    assert read_frames + [frame(location.logged) for location in remaining_frames] == list(
        writer.appended.values()
    )
    assert contents(late) == writer.appended
    assert offsets == [0, 12, 29]


def test_log_reads_and_writes_between_compression_steps() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, COMPRESSED)
    writer = Writer(log)
    for _ in range(4):
        writer.append_batch(compressible_batch(6, writer.counter + 1))
        commit(log)
    assert contents(log) == writer.appended  # the read leaves its files open
    compression_run = log.take_compression()
    assert compression_run is not None
    assert log.take_compression() is None, "one compression at a time"
    assert compression_run.step()  # the file is replaced on disk, the log does not use it yet
    compression_run.close()
    assert contents(log) == writer.appended
    writer.append_batch(compressible_batch(6, writer.counter + 1))
    commit(log)
    log.finish_compression(compression_run)
    assert contents(log) == writer.appended
    assert log.statistics().compressed_segments == 1
    assert log.statistics().bytes == bytes_of(disk)


# --- segments that are not compressed


def test_incompressible_segment_is_left_as_is_and_not_retried() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, COMPRESSED)
    writer = Writer(log)
    noise = np.random.default_rng(1).standard_normal((8, 6, 64), dtype=np.float32)
    for values in noise:
        keys = [f"v-{writer.counter + row}" for row in range(6)]
        writer.append_batch(encode_vectors(keys, values, namespace="n", origin=16, base=writer.counter + 1))
        commit(log)
    before = {path: disk.peek(path).rstrip(b"\0") for path in segments_of(disk)}
    for _ in range(3):
        useless = compress_next_segment(log)
        assert useless is not None
        assert useless.is_useless
    assert compress_next_segment(log) is None
    log.close()
    assert {path: disk.peek(path).rstrip(b"\0") for path in segments_of(disk)} == before
    assert not [path for path in disk.paths() if path.endswith(".new")]
    log, report = open_log(disk, COMPRESSED)
    assert (report.indexes_rebuilt, compress_next_segment(log)) == (0, None)
    assert contents(log) == writer.appended


def test_active_or_unsynced_segment_is_not_compressed() -> None:
    log, _ = open_log(SimDisk(), COMPRESSED)
    writer = Writer(log)
    for _ in range(3):
        writer.append_batch(compressible_batch(6, writer.counter + 1))
    assert log.statistics().segments == 2
    assert log.take_compression() is None
    commit(log)
    assert compress_next_segment(log) is not None
    assert log.take_compression() is None


def test_corrupted_segment_is_reported_and_not_rewritten() -> None:
    disk, writer, _ = compressed_log("none")
    writer.log.close()
    log, _ = open_log(disk, COMPRESSED)
    path = segments_of(disk)[0]
    disk.flip(path, 700)
    before = disk.peek(path)
    with pytest.raises(LogCorrupted) as caught:
        compress_next_segment(log)
    assert (caught.value.path, caught.value.offset) == (path, 0)
    assert disk.peek(path) == before
    next_compression = compress_next_segment(log)
    assert next_compression is not None
    assert next_compression.segment.base == 12, "the other segments must be compressed"
    assert not [path for path in disk.paths() if path.endswith(".new")]


# --- retention, failures, missing codecs


def test_segment_removed_during_compression_is_deleted_afterwards() -> None:
    for steps in (0, 1):
        disk, writer, _ = compressed_log("none")
        writer.log.close()
        log, _ = open_log(disk, replace(COMPRESSED, retention_bytes=8_000))
        compression_run = log.take_compression()
        assert compression_run is not None
        for _ in range(steps):
            compression_run.step()
        assert log.retain() > 0
        commit(log)
        assert log.start_offset > 0
        first = f"{SEGMENTS}/{0:020}.log"
        assert disk.paths().count(first) == 1, "the file must stay while its compression runs"
        if not steps:
            while not compression_run.step():
                pass
        crashed, report = open_log(disk.crash(1), COMPRESSED)
        assert report.start_offset == crashed.start_offset == log.start_offset
        compression_run.close()
        log.finish_compression(compression_run)
        assert commit(log)
        assert first not in disk.paths()
        assert log.statistics().bytes == bytes_of(disk)
        assert contents(log) == {
            offset: raw for offset, raw in writer.appended.items() if offset >= log.start_offset
        }


def test_no_segment_is_compressed_without_disk_space() -> None:
    disk, writer, _ = compressed_log("none")
    writer.log.close()
    log, _ = open_log(disk, replace(COMPRESSED, free_bytes_min=1_000))
    disk.capacity_bytes = disk.used_bytes + 4_000
    with pytest.raises(OSError, match="too few to write a segment") as caught:
        compress_next_segment(log)
    assert caught.value.errno == errno.ENOSPC
    disk.capacity_bytes = None
    assert compress_next_segment(log) is not None, "the compression must be retried"
    assert contents(log) == writer.appended


@CODECS
def test_missing_codec_is_reported_when_the_log_opens(
    codec: Compress, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, writer, _ = compressed_log(codec)
    writer.log.close()
    before = {path: disk.peek(path) for path in disk.paths()}
    module_name = {"lz4": "lz4", "zstd": "zstandard"}[codec]
    monkeypatch.setattr(compression, "find_spec", lambda name: None if name == module_name else object())
    with pytest.raises(UsageError, match=rf"compress = '{codec}'.*install delta-prop\[compress\]"):
        LogSettings(compress=codec)
    for read_only in (False, True):
        with pytest.raises(CodecMissing, match=rf"compressed with {codec}.*install delta-prop\[compress\]"):
            open_log(disk, SMALL, read_only=read_only)
    assert {path: disk.peek(path) for path in disk.paths() if path in before} == before
    assert is_unavailable(Compression[codec.upper()])


def is_unavailable(codec: Compression) -> bool:
    return codec not in compression.available_codecs()


def test_settings_parse_the_codec() -> None:
    assert LogSettings().codec is None
    assert LogSettings(compress="zstd").codec is Compression.ZSTD
    with pytest.raises(UsageError, match="compress = 'gzip': give one of none, lz4, zstd"):
        LogSettings(compress="gzip")  # type: ignore[arg-type]


# --- crashes and failures


def run_log(disk: SimDisk, written: dict[int, bytes], start_and_synced: list[int]) -> None:
    """Commit, remove segments and compress; a compression makes one step after each commit.

    `start_and_synced`: a list for the start offset and the synced offset of the log, updated as they grow.
    """
    clock = Clock()
    log, report = open_log(disk, replace(COMPRESSED, retention_bytes=20_000), clock=clock)
    start_and_synced[:] = [report.start_offset, log.synced]
    writer = Writer(log, appended=written, counter=log.next_offset)
    compression_run = None
    for step in range(24):
        writer.append_batch(compressible_batch(5 + step % 3, writer.counter + 1))
        commit(log)
        start_and_synced[1] = log.synced
        compression_run = compression_run or log.take_compression()
        if step % 8 == 5:
            start_and_synced[0] = max(start_and_synced[0], log.start_offset)
            log.retain()
            start_and_synced[0] = max(start_and_synced[0], log.start_offset)
        try:
            if compression_run is not None and compression_run.step():
                compression_run.close()
                log.finish_compression(compression_run)
                compression_run = None
        except OSError:  # the log stays usable
            assert compression_run is not None
            compression_run.close()
            log.finish_compression(compression_run, retry=step % 2 == 0)
            compression_run = None
    if compression_run is not None:
        compression_run.close()
        log.finish_compression(compression_run, retry=True)
    log.close()


def check_log(disk: SimDisk, written: dict[int, bytes], start_and_synced: list[int]) -> None:
    """Check that all synced rows are in the log, and that it accepts appends."""
    log, _ = open_log(disk, COMPRESSED)
    frames = contents(log)
    assert frames == {offset: written[offset] for offset in frames}
    assert log.next_offset >= start_and_synced[1]
    assert log.start_offset <= start_and_synced[0]
    assert not [path for path in disk.paths() if path.endswith(".new")], "leftovers must be removed"
    assert log.statistics().bytes == bytes_of(disk)
    writer = Writer(log, counter=log.next_offset)
    writer.append(2)
    commit(log)
    while compress_next_segment(log) is not None:
        pass
    log.close()
    log, _ = open_log(disk, COMPRESSED)
    assert contents(log) == frames | writer.appended


def test_crash_at_any_call_of_a_compressed_log_keeps_synced_rows(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_compression, "STEP_BYTES", 2_000)
    seeds = 20 if full else 1
    fault_free = SimDisk()
    run_log(fault_free, {}, [0, 0])
    renamed = [call for call in fault_free.trace if call.name == "rename" and call.path.endswith(".log.new")]
    calls = [call.number for call in fault_free.trace if call.name in CHANGING]
    crashes = 0
    for number in calls if full else calls[::6]:
        disk, written, start_and_synced = SimDisk(number), dict[int, bytes](), [0, 0]
        disk.crash_at(number)
        with pytest.raises(SimCrash):
            run_log(disk, written, start_and_synced)
        for seed in range(seeds):
            check_log(disk.crash(1_000 * number + seed), written, start_and_synced)
        check_log(disk.kill(), written, start_and_synced)
        crashes += 1
    print(f"{crashes} of {len(calls)} calls, {seeds} seeds each; {len(renamed)} segments replaced")
    assert fault_free.calls >= 200
    assert len(renamed) >= 5


def test_log_continues_after_a_failure_of_any_compression_call(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_compression, "STEP_BYTES", 2_000)
    fault_free = SimDisk()
    run_log(fault_free, {}, [0, 0])
    failed = 0
    calls = [call for call in fault_free.trace if call.path.endswith(".log.new")]
    for call in calls if full else calls[::3]:
        disk, written, start_and_synced = SimDisk(call.number), dict[int, bytes](), [0, 0]
        disk.fail(call.number, (errno.EIO, errno.ENOSPC)[call.number % 2])
        run_log(disk, written, start_and_synced)
        disk.heal()
        failed += 1
        check_log(disk.crash(call.number), written, start_and_synced)
        check_log(disk.kill(), written, start_and_synced)
    print(f"{failed} of {len(calls)} calls failed")
    assert len(calls) > 50


def test_flipped_bit_in_a_compressed_log_is_never_delivered(full: bool) -> None:
    flips = refused = harmless = 0
    for codec in ("lz4", "zstd") if full else ("lz4",):
        intact, writer, _ = compressed_log(codec, batches=5)  # type: ignore[arg-type]
        writer.log.close()
        last = segments_of(intact)[-1]
        for path in intact.paths():
            if path == last or not path.endswith((".log", ".index")):
                continue  # other tests flip bits of other files
            for position in range(0, len(intact.peek(path)), 1 if full else 2):
                for bit in range(8) if full else (position // 2 % 8,):
                    disk = intact.kill()
                    disk.flip(path, position, bit)
                    flips += 1
                    corruption = _find_corruption(disk, writer.appended)
                    assert (corruption is None) is path.endswith(".index")
                    assert corruption in (None, path)
                    refused += corruption is not None
                    harmless += corruption is None
    print(f"{flips} flipped bits: {refused} refused, {harmless} in indexes, which are rebuilt")
    assert refused > 300
    assert harmless > 100


def _find_corruption(disk: SimDisk, appended: dict[int, bytes]) -> str | None:
    """Return the file that is reported as corrupted; None if every row is read as it was appended."""
    inspected = [entry.path for entry in inspect(disk) if isinstance(entry, LogCorrupted)]
    corrupted_path: str | None = None
    try:
        assert contents(open_log(disk, COMPRESSED)[0]) == appended
    except LogCorrupted as corruption:
        corrupted_path = corruption.path
    assert inspected == ([] if corrupted_path is None else [corrupted_path])
    return corrupted_path


def test_stepwise_reader_continues_in_the_replaced_segment() -> None:
    disk, writer, _ = compressed_log(settings=replace(COMPRESSED, compress="none"), codec="none")
    writer.log.close()
    log, _ = open_log(disk, COMPRESSED)
    step = {"rows_max": 1, "bytes_max": 1}
    seen, offset = {}, 0
    while batches := log.read(offset, **step):
        seen[offset], offset = frame(batches[0]), batches[-1].next_offset
        if len(seen) % 2:
            compress_next_segment(log)
    assert seen == writer.appended
