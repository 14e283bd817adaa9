"""Sendfile ranges hold visible, complete frames without control rows, and stay readable while in use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_broker.disk import FileRange
from delta_prop_broker.segments import sendfile
from delta_prop_broker.segments.sendfile import RangeBounds, SendfileRange
from delta_prop_broker.segments.sparse_index import SparseIndex
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.codec import decode
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.spec import ErrorCode
from tests.broker.compressed import COMPRESSED, compressed_log, compressible_batch
from tests.broker.durable import SMALL, Writer, commit, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.segments.sendfile import SendfileReader

SPACIOUS = replace(SMALL, segment_bytes_max=12_000, bytes_max=200_000, retention_bytes=200_000)
LZ4, ZSTD = frozenset({1}), frozenset({2})
"""Codecs that a reader decompresses."""
SMALL_RANGES = RangeBounds(deltas_max=1 << 40, bytes_max=1 << 40, bytes_min=1)


@dataclass
class MixedLog:
    """A log with batches and control rows."""

    writer: Writer
    controls: list[LoggedBatch] = field(default_factory=list)

    @property
    def log(self) -> DurableLog:
        return self.writer.log

    def append_noop(self, rows: int = 2) -> None:
        batch = encode_noop(code=ErrorCode.INVALID_DELTA, origin=16, base=self.writer.counter + 1, count=rows)
        self.controls.append(self.writer.append_batch(batch))


def make_log(disk: SimDisk | None = None, settings_: LogSettings = SPACIOUS) -> MixedLog:
    return MixedLog(Writer(open_log(disk or SimDisk(), settings_)[0]))


def bytes_of(sendfile_range: SendfileRange) -> bytes:
    content = sendfile_range.content
    if isinstance(content, FileRange):
        return content.file.read(content.position, content.size)
    return b"".join(content)


def frames_between(writer: Writer, first: int, end: int) -> list[bytes]:
    return [frame for offset, frame in sorted(writer.appended.items()) if first <= offset < end]


def next_range(reader: SendfileReader, offset: int, bounds: RangeBounds = SMALL_RANGES) -> SendfileRange:
    found = reader.next(offset, bounds)
    assert found is not None
    return found


# --- rows of a range


def test_ranges_are_contiguous_up_to_the_high_watermark() -> None:
    mixed = make_log()
    for _ in range(90):
        mixed.writer.append()
        commit(mixed.log)
    mixed.writer.append()  # not visible
    reader, offset, count = mixed.log.sendfile_pool.reader(), 0, 0
    while (found := reader.next(offset, SMALL_RANGES)) is not None:
        expected = frames_between(mixed.writer, offset, found.next_offset)
        assert bytes_of(found) == b"".join(expected)
        assert (found.delta_count, found.bytes) == (found.next_offset - offset, sum(map(len, expected)))
        offset, count = found.next_offset, count + 1
    assert len(mixed.log.segments.all) == count > 1
    assert mixed.log.high_watermark - offset <= 30, (
        "only the frames after the last index entry may be missing"
    )


def test_range_bounds_hold_and_small_ranges_are_not_sent() -> None:
    mixed = make_log()
    for _ in range(60):
        mixed.writer.append()
        commit(mixed.log)
    reader = mixed.log.sendfile_pool.reader()
    limited_rows = next_range(reader, 0, RangeBounds(deltas_max=50, bytes_max=1 << 40, bytes_min=1))
    assert 0 < limited_rows.delta_count <= 50
    limited_bytes = next_range(reader, 0, RangeBounds(deltas_max=1 << 40, bytes_max=9_000, bytes_min=1))
    assert 0 < limited_bytes.bytes <= 9_000
    assert reader.next(0, RangeBounds(deltas_max=1 << 40, bytes_max=9_000, bytes_min=9_000)) is None
    assert reader.next(0, RangeBounds(deltas_max=3, bytes_max=1 << 40, bytes_min=1)) is None
    assert reader.next(mixed.log.high_watermark, SMALL_RANGES) is None


def test_range_starts_only_at_a_frame_boundary() -> None:
    mixed = make_log()
    for _ in range(60):
        mixed.writer.append(3)
        commit(mixed.log)
    reader = mixed.log.sendfile_pool.reader()
    for offset in range(90):
        found = reader.next(offset, SMALL_RANGES)
        assert (found is not None) == (offset in mixed.writer.appended)
        if found is not None:
            first = decode(bytes_of(found)[: len(mixed.writer.appended[offset])])
            assert isinstance(first, BatchFrame)
            assert first.sequence == offset


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_range_of_any_log_holds_all_rows_but_control_rows(data: st.DataObject) -> None:
    mixed = make_log(settings_=replace(SPACIOUS, retention_bytes=60_000))
    for kind in data.draw(st.lists(st.sampled_from("bbbbbbncr"), min_size=30, max_size=90)):
        if kind == "b":
            mixed.writer.append(data.draw(st.integers(1, 9)))
        elif kind == "n":
            mixed.append_noop(data.draw(st.integers(1, 3)))
        elif kind == "c":
            commit(mixed.log)
        else:
            mixed.log.retain()
    noops = {offset for control in mixed.controls for offset in range(control.offset, control.next_offset)}
    reader = mixed.log.sendfile_pool.reader()
    for offset in data.draw(st.lists(st.integers(0, mixed.log.next_offset), min_size=10, max_size=30)):
        bounds = RangeBounds(data.draw(st.integers(1, 400)), data.draw(st.integers(1_000, 20_000)), 1)
        found = reader.next(offset, bounds)
        if found is None:
            continue
        assert mixed.log.start_offset <= offset < found.next_offset <= mixed.log.high_watermark
        assert noops.isdisjoint(range(offset, found.next_offset))
        assert bytes_of(found) == b"".join(frames_between(mixed.writer, offset, found.next_offset))
        assert found.delta_count <= bounds.deltas_max
        assert found.bytes <= bounds.bytes_max


# --- files that are removed or replaced while a range is in use


def test_range_can_be_sent_after_its_segment_was_removed() -> None:
    disk = SimDisk()
    mixed = make_log(disk, replace(SMALL, segment_bytes_max=9_000, bytes_max=40_000, retention_bytes=10_000))
    while len(mixed.log.segments.all) < 4:
        mixed.writer.append()
        commit(mixed.log)
    reader, other = mixed.log.sendfile_pool.reader(), mixed.log.sendfile_pool.reader()
    found, other_range = next_range(reader, 0), next_range(other, 0)
    assert mixed.log.retain()
    commit(mixed.log)
    assert mixed.log.start_offset > 0
    assert not [path for path in disk.paths() if path.endswith(f"{0:020d}.log")]
    expected = b"".join(frames_between(mixed.writer, 0, found.next_offset))
    assert bytes_of(found) == bytes_of(other_range) == expected
    assert reader.next(0, SMALL_RANGES) is None
    assert bytes_of(other_range) == expected, "the other reader holds the file open"
    other.close()
    with pytest.raises(OSError, match="file descriptor"):
        bytes_of(other_range)


def test_file_is_opened_once_and_closed_after_the_last_reader() -> None:
    mixed = make_log()
    for _ in range(60):
        mixed.writer.append()
        commit(mixed.log)
    readers = [mixed.log.sendfile_pool.reader() for _ in range(20)]
    files = {id(next_range(reader, 0).content[0]) for reader in readers}
    assert len(files) == 1
    for reader in readers:
        reader.close()
    assert not mixed.log.sendfile_pool._open_files


def test_open_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sendfile, "FILES_MAX", 2)
    mixed = make_log()
    while len(mixed.log.segments.all) < 4:
        mixed.writer.append()
        commit(mixed.log)
    bases = [segment.base for segment in mixed.log.segments.all[:3]]
    readers = [mixed.log.sendfile_pool.reader() for _ in bases]
    ranges = [reader.next(base, SMALL_RANGES) for reader, base in zip(readers, bases, strict=True)]
    assert [found is not None for found in ranges] == [True, True, False]
    readers[0].close()
    assert readers[2].next(bases[2], SMALL_RANGES) is not None


def test_recovery_in_place_opens_other_files() -> None:
    disk = SimDisk()
    mixed = make_log(disk)
    for _ in range(40):
        mixed.writer.append()
        commit(mixed.log)
    reader, other = mixed.log.sendfile_pool.reader(), mixed.log.sendfile_pool.reader()
    before = next_range(reader, 0)
    mixed.log.fail(OSError("the disk"))
    mixed.log.resume(mixed.log.recover_in_place())
    after = next_range(other, 0)
    assert bytes_of(after) == bytes_of(before)
    assert isinstance(before.content, FileRange)
    assert isinstance(after.content, FileRange)
    assert after.content.file is not before.content.file


# --- uncertain indexes and files


def test_control_rows_are_known_after_reopening() -> None:
    disk = SimDisk()
    mixed = make_log(disk)
    while len(mixed.log.segments.all) < 3:
        mixed.writer.append()
        if mixed.writer.counter % 40 == 0:
            mixed.append_noop()
        commit(mixed.log)
    for log in (mixed.log, open_log(disk.kill(), SPACIOUS)[0], open_log(disk.crash(3), SPACIOUS)[0]):
        reader, offset, sent = log.sendfile_pool.reader(), 0, 0
        while offset < log.high_watermark:
            found = reader.next(offset, SMALL_RANGES)
            if found is None:
                offset = log.read(offset, rows_max=1, bytes_max=1)[0].next_offset
                continue
            sent += found.bytes
            assert not any(offset <= control.offset < found.next_offset for control in mixed.controls)
            offset = found.next_offset
        assert sent > 5_000


def test_index_without_control_rows_gives_no_range() -> None:
    disk = SimDisk()
    mixed = make_log(disk)
    while len(mixed.log.segments.all) < 2:
        mixed.writer.append()
        commit(mixed.log)
    path = mixed.log.segments.all[0].index_path
    mixed.log.close()
    index = SparseIndex.unpack(disk.peek(path), 0)
    assert index is not None
    assert index.controls is not None
    index.controls = None
    disk.put(path, index.pack())
    unpacked = SparseIndex.unpack(disk.peek(path), 0)
    assert unpacked is not None
    assert unpacked.controls is None
    log, report = open_log(disk, SPACIOUS)
    assert report.indexes_rebuilt == 0
    assert log.sendfile_pool.reader().next(0, SMALL_RANGES) is None
    assert log.read(0, rows_max=1, bytes_max=1)


@pytest.mark.parametrize("position", ["start", "end"])
def test_range_that_the_file_contradicts_is_not_sent(position: str) -> None:
    disk = SimDisk()
    mixed = make_log(disk)
    for _ in range(40):
        mixed.writer.append()
        commit(mixed.log)
    reader = mixed.log.sendfile_pool.reader()
    bounds = RangeBounds(deltas_max=1 << 40, bytes_max=6_000, bytes_min=1)
    found = next_range(reader, 0, bounds)
    assert isinstance(found.content, FileRange)
    reader.close()
    disk.flip(mixed.log.segments.all[0].path, at=(0 if position == "start" else found.content.size) + 20)
    assert reader.next(0, bounds) is None
    assert not mixed.log.sendfile_pool._open_files


def test_truncated_segment_gives_no_range_to_its_end() -> None:
    disk = SimDisk()
    mixed = make_log(disk)
    while len(mixed.log.segments.all) < 2:
        mixed.writer.append()
        commit(mixed.log)
    segment = mixed.log.segments.all[0]
    reader = mixed.log.sendfile_pool.reader()
    assert next_range(reader, 0).next_offset == segment.end
    reader.close()
    file = disk.open(segment.path)
    file.truncate(segment.size - 8)
    file.close()
    assert reader.next(0, SMALL_RANGES) is None


# --- compressed segments


def test_compressed_frames_are_sent_to_readers_of_the_codec() -> None:
    _, writer, _ = compressed_log("lz4")
    reader = writer.log.sendfile_pool.reader()
    assert reader.next(0, SMALL_RANGES) is None
    assert reader.next(0, SMALL_RANGES, codecs=ZSTD) is None
    found = reader.next(0, SMALL_RANGES, codecs=LZ4 | ZSTD)
    assert found is not None
    assert isinstance(found.content, list)
    uncompressed = frames_between(writer, 0, found.next_offset)
    assert len(found.content) == len(uncompressed) > 1
    assert found.bytes == sum(map(len, found.content)) < sum(map(len, uncompressed)) / 2
    for part, raw in zip(found.content, uncompressed, strict=True):
        frame, expected = decode(part), decode(raw)
        assert isinstance(frame, BatchFrame)
        assert isinstance(expected, BatchFrame)
        assert frame == expected


def test_frames_read_into_memory_have_their_own_bound() -> None:
    _, writer, _ = compressed_log("lz4")
    unbounded = writer.log.sendfile_pool.reader().next(0, SMALL_RANGES, codecs=LZ4)
    assert unbounded is not None
    bounds = SMALL_RANGES._replace(read_bytes_max=unbounded.bytes - 1)
    found = writer.log.sendfile_pool.reader().next(0, bounds, codecs=LZ4)
    assert found is None or found.bytes < unbounded.bytes
    mixed = make_log(SimDisk())
    for _ in range(40):
        mixed.writer.append()
        commit(mixed.log)
    uncompressed = next_range(mixed.log.sendfile_pool.reader(), 0, bounds)
    assert uncompressed == next_range(mixed.log.sendfile_pool.reader(), 0, SMALL_RANGES)


def test_compressed_range_ends_at_any_frame_within_bounds() -> None:
    _, writer, _ = compressed_log("lz4", settings=replace(COMPRESSED, segment_bytes_max=9_000))
    reader = writer.log.sendfile_pool.reader()
    unbounded = reader.next(0, SMALL_RANGES, codecs=LZ4)
    assert unbounded is not None
    sizes = [len(memoryview(part)) for part in unbounded.content]  # type: ignore[arg-type]
    for deltas_max, delta_count in ((5, None), (6, 6), (17, 12), (18, 18)):
        found = reader.next(0, SMALL_RANGES._replace(deltas_max=deltas_max), codecs=LZ4)
        assert (None if found is None else found.delta_count) == delta_count
    limited_bytes = reader.next(0, RangeBounds(1 << 40, 3 * sizes[0], bytes_min=1 << 20), codecs=LZ4)
    assert limited_bytes is not None
    assert 0 < limited_bytes.bytes <= 3 * sizes[0], "any number of frames within the bytes that may be sent"
    single_frame = reader.next(0, SMALL_RANGES._replace(read_bytes_max=sizes[0] // 2), codecs=LZ4)
    assert single_frame is not None
    assert single_frame.delta_count == 6, "a first frame above `read_bytes_max` is a range of its own"
    assert reader.next(0, RangeBounds(1 << 40, sizes[0] // 2, 1), codecs=LZ4) is None


def test_verified_bounds_give_only_frames_of_compressed_segments() -> None:
    _, writer, _ = compressed_log("lz4")
    reader, verified = writer.log.sendfile_pool.reader(), SMALL_RANGES._replace(verified=True)
    assert reader.next(0, verified, codecs=LZ4) is not None
    last = writer.log.segments.all[-1].base
    assert reader.next(last, SMALL_RANGES, codecs=LZ4) is not None
    assert reader.next(last, verified, codecs=LZ4) is None


def test_range_ends_before_corruption_in_a_compressed_segment() -> None:
    disk, writer, _ = compressed_log("lz4")
    segment = writer.log.segments.all[0]
    unbounded = writer.log.sendfile_pool.reader().next(0, SMALL_RANGES, codecs=LZ4)
    assert unbounded is not None
    assert unbounded.delta_count > 6
    first_frame = writer.log.sendfile_pool.reader().next(0, SMALL_RANGES._replace(deltas_max=6), codecs=LZ4)
    assert first_frame is not None
    disk.flip(segment.path, at=first_frame.bytes + 8 + 64 + 40)  # in the second frame's compressed bytes
    before = writer.log.sendfile_pool.reader().next(0, SMALL_RANGES, codecs=LZ4)
    assert before is not None
    assert before.delta_count == 6
    assert writer.log.sendfile_pool.reader().next(6, SMALL_RANGES, codecs=LZ4) is None


def test_corruption_in_the_first_compressed_frame_gives_no_range() -> None:
    disk, writer, _ = compressed_log("lz4")
    segment = writer.log.segments.all[0]
    disk.flip(segment.path, at=64 + 40)  # in the first frame's compressed bytes
    assert writer.log.sendfile_pool.reader().next(0, SMALL_RANGES, codecs=LZ4) is None


@pytest.mark.parametrize("is_old_file_open", [True, False])
def test_replaced_file_is_not_sent_by_its_old_index(is_old_file_open: bool) -> None:
    disk = SimDisk()
    log = open_log(disk, COMPRESSED)[0]
    writer = Writer(log)
    while len(log.segments.all) < 3:
        writer.append_batch(compressible_batch(6, writer.counter + 1))
        commit(log)
    reader, fresh = log.sendfile_pool.reader(), log.sendfile_pool.reader()
    before = next_range(reader, 0)
    expected = b"".join(frames_between(writer, 0, before.next_offset))
    compression_run = log.take_compression()
    assert compression_run is not None
    while not compression_run.step():
        pass  # after the last step the new file has the old name, and the log does not use it yet
    if not is_old_file_open:
        reader.close()
        assert fresh.next(0, SMALL_RANGES) is None, "the frames of the new file do not match the old index"
    compression_run.close()
    log.finish_compression(compression_run)
    assert fresh.next(0, SMALL_RANGES) is None
    compressed = fresh.next(0, SMALL_RANGES, codecs=LZ4)
    assert compressed is not None
    assert compressed.bytes < before.bytes
    if is_old_file_open:
        assert bytes_of(before) == expected, "a reader of the old file continues in it"
