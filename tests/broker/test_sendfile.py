"""Stretches of a log's files: whole frames, visible, none of control rows, and there as long as needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_broker.disk import FileRange
from delta_prop_broker.log.files import sendfile as module
from delta_prop_broker.log.files.sendfile import RangeBounds, SendfileRange
from delta_prop_broker.log.files.sparse_index import SparseIndex
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.codec import decode
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.spec import ErrorCode
from tests.broker.compressed import COMPRESSED, compressed_log, shrinking
from tests.broker.durable import SMALL, Writer, commit, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.files.sendfile import SendfileReader
    from delta_prop_broker.log.settings import LogSettings

SPACIOUS = replace(SMALL, segment_bytes_max=12_000, bytes_max=200_000, retention_bytes=200_000)
SMALL_STRETCH = RangeBounds(deltas_max=1 << 40, bytes_max=1 << 40, bytes_min=1)


@dataclass
class Lane:
    """A log that batches and control rows are written to."""

    writer: Writer
    controls: list[LoggedBatch] = field(default_factory=list)

    @property
    def log(self) -> DurableLog:
        return self.writer.log

    def void(self, rows: int = 2) -> None:
        batch = encode_noop(code=ErrorCode.INVALID_DELTA, origin=16, base=self.writer.counter + 1, count=rows)
        self.controls.append(self.writer.append_batch(batch))


def lane(disk: SimDisk | None = None, settings_: LogSettings = SPACIOUS) -> Lane:
    return Lane(Writer(open_log(disk or SimDisk(), settings_)[0]))


def bytes_of(found: SendfileRange) -> bytes:
    if isinstance(found.content, FileRange):
        return found.content.file.read(found.content.at, found.content.size)
    return b"".join(found.content)


def frames_between(writer: Writer, first: int, end: int) -> list[bytes]:
    return [frame for offset, frame in sorted(writer.appended.items()) if first <= offset < end]


def next_of(reader: SendfileReader, offset: int, bounds: RangeBounds = SMALL_STRETCH) -> SendfileRange:
    found = reader.next(offset, bounds)
    assert found is not None
    return found


# --- what a stretch is


def test_stretches_follow_each_other_to_the_end_of_what_is_visible() -> None:
    lane_ = lane()
    for _ in range(90):
        lane_.writer.append()
        commit(lane_.log)
    lane_.writer.append()  # not visible
    reader, at, count = lane_.log.sendfile_pool.reader(), 0, 0
    while (found := reader.next(at, SMALL_STRETCH)) is not None:
        expected = frames_between(lane_.writer, at, found.next_offset)
        assert bytes_of(found) == b"".join(expected)
        assert (found.deltas, found.bytes) == (found.next_offset - at, sum(map(len, expected)))
        at, count = found.next_offset, count + 1
    assert len(lane_.log.frames.__self__._segments.all) == count > 1  # type: ignore[attr-defined]
    assert lane_.log.high_watermark - at <= 30, "but for the frames behind the index's last entry"


def test_bounds_hold_and_what_is_too_little_is_left_to_reading() -> None:
    lane_ = lane()
    for _ in range(60):
        lane_.writer.append()
        commit(lane_.log)
    reader = lane_.log.sendfile_pool.reader()
    few = next_of(reader, 0, RangeBounds(deltas_max=50, bytes_max=1 << 40, bytes_min=1))
    assert 0 < few.deltas <= 50
    small = next_of(reader, 0, RangeBounds(deltas_max=1 << 40, bytes_max=9_000, bytes_min=1))
    assert 0 < small.bytes <= 9_000
    assert reader.next(0, RangeBounds(deltas_max=1 << 40, bytes_max=9_000, bytes_min=9_000)) is None
    assert reader.next(0, RangeBounds(deltas_max=3, bytes_max=1 << 40, bytes_min=1)) is None
    assert reader.next(lane_.log.high_watermark, SMALL_STRETCH) is None


def test_a_stretch_begins_with_a_frame_wherever_that_lies_and_never_within_one() -> None:
    lane_ = lane()
    for _ in range(60):
        lane_.writer.append(3)
        commit(lane_.log)
    reader = lane_.log.sendfile_pool.reader()
    for offset in range(90):
        found = reader.next(offset, SMALL_STRETCH)
        assert (found is not None) == (offset in lane_.writer.appended)
        if found is not None:
            first = decode(bytes_of(found)[: len(lane_.writer.appended[offset])])
            assert isinstance(first, BatchFrame)
            assert first.sequence == offset


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_lies_in_a_log_a_stretch_has_all_of_it_but_control_rows(data: st.DataObject) -> None:
    lane_ = lane(settings_=replace(SPACIOUS, retention_bytes=60_000))
    for kind in data.draw(st.lists(st.sampled_from("bbbbbbvcr"), min_size=30, max_size=90)):
        if kind == "b":
            lane_.writer.append(data.draw(st.integers(1, 9)))
        elif kind == "v":
            lane_.void(data.draw(st.integers(1, 3)))
        elif kind == "c":
            commit(lane_.log)
        else:
            lane_.log.retain()
    voids = {offset for one in lane_.controls for offset in range(one.offset, one.next_offset)}
    reader = lane_.log.sendfile_pool.reader()
    for offset in data.draw(st.lists(st.integers(0, lane_.log.next_offset), min_size=10, max_size=30)):
        bounds = RangeBounds(data.draw(st.integers(1, 400)), data.draw(st.integers(1_000, 20_000)), 1)
        found = reader.next(offset, bounds)
        if found is None:
            continue
        assert lane_.log.start_offset <= offset < found.next_offset <= lane_.log.high_watermark
        assert voids.isdisjoint(range(offset, found.next_offset))
        assert bytes_of(found) == b"".join(frames_between(lane_.writer, offset, found.next_offset))
        assert found.deltas <= bounds.deltas_max
        assert found.bytes <= bounds.bytes_max


# --- what becomes of the file meanwhile


def test_a_stretch_can_be_sent_though_the_log_let_its_segment_go() -> None:
    disk = SimDisk()
    lane_ = lane(disk, replace(SMALL, segment_bytes_max=9_000, bytes_max=40_000, retention_bytes=10_000))
    while len(lane_.log._segments.all) < 4:
        lane_.writer.append()
        commit(lane_.log)
    reader, other = lane_.log.sendfile_pool.reader(), lane_.log.sendfile_pool.reader()
    found, again = next_of(reader, 0), next_of(other, 0)
    assert lane_.log.retain()
    commit(lane_.log)
    assert lane_.log.start_offset > 0
    assert not [path for path in disk.paths() if path.endswith(f"{0:020d}.log")]
    expected = b"".join(frames_between(lane_.writer, 0, found.next_offset))
    assert bytes_of(found) == bytes_of(again) == expected
    assert reader.next(0, SMALL_STRETCH) is None
    assert bytes_of(again) == expected, "whoever needs it longer has it"
    other.close()
    with pytest.raises(OSError, match="file descriptor"):
        bytes_of(again)


def test_files_are_opened_once_for_all_and_closed_when_nobody_sends() -> None:
    lane_ = lane()
    for _ in range(60):
        lane_.writer.append()
        commit(lane_.log)
    readers = [lane_.log.sendfile_pool.reader() for _ in range(20)]
    files = {id(next_of(reader, 0).content[0]) for reader in readers}
    assert len(files) == 1
    for reader in readers:
        reader.close()
    assert not lane_.log.sendfile_pool._open_files


def test_so_many_files_are_open_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_MAX", 2)
    lane_ = lane()
    while len(lane_.log._segments.all) < 4:
        lane_.writer.append()
        commit(lane_.log)
    bases = [segment.base for segment in lane_.log._segments.all[:3]]
    readers = [lane_.log.sendfile_pool.reader() for _ in bases]
    found = [reader.next(base, SMALL_STRETCH) for reader, base in zip(readers, bases, strict=True)]
    assert [one is not None for one in found] == [True, True, False]
    readers[0].close()
    assert readers[2].next(bases[2], SMALL_STRETCH) is not None


def test_a_recovery_in_place_gives_other_files() -> None:
    disk = SimDisk()
    lane_ = lane(disk)
    for _ in range(40):
        lane_.writer.append()
        commit(lane_.log)
    reader, other = lane_.log.sendfile_pool.reader(), lane_.log.sendfile_pool.reader()
    before = next_of(reader, 0)
    lane_.log.fail(OSError("the disk"))
    lane_.log.resume(lane_.log.recover_in_place())
    after = next_of(other, 0)
    assert bytes_of(after) == bytes_of(before)
    assert isinstance(before.content, FileRange)
    assert isinstance(after.content, FileRange)
    assert after.content.file is not before.content.file


# --- where there is doubt


def test_control_rows_are_known_after_the_log_was_opened_again() -> None:
    disk = SimDisk()
    lane_ = lane(disk)
    while len(lane_.log._segments.all) < 3:
        lane_.writer.append()
        if lane_.writer.counter % 40 == 0:
            lane_.void()
        commit(lane_.log)
    for log in (lane_.log, open_log(disk.kill(), SPACIOUS)[0], open_log(disk.crash(3), SPACIOUS)[0]):
        reader, at, sent = log.sendfile_pool.reader(), 0, 0
        while at < log.high_watermark:
            found = reader.next(at, SMALL_STRETCH)
            if found is None:
                at = log.read(at, rows_max=1, bytes_max=1)[0].next_offset
                continue
            sent += found.bytes
            assert not any(at <= one.offset < found.next_offset for one in lane_.controls)
            at = found.next_offset
        assert sent > 5_000


def test_an_index_that_does_not_tell_of_control_rows_gives_no_stretch() -> None:
    disk = SimDisk()
    lane_ = lane(disk)
    while len(lane_.log._segments.all) < 2:
        lane_.writer.append()
        commit(lane_.log)
    path = lane_.log._segments.all[0].index_path
    lane_.log.close()
    index = SparseIndex.unpack(disk.peek(path), 0)
    assert index is not None
    assert index.controls is not None
    index.controls = None
    disk.put(path, index.pack())
    again = SparseIndex.unpack(disk.peek(path), 0)
    assert again is not None
    assert again.controls is None
    log, report = open_log(disk, SPACIOUS)
    assert report.indexes_rebuilt == 0
    assert log.sendfile_pool.reader().next(0, SMALL_STRETCH) is None
    assert log.read(0, rows_max=1, bytes_max=1)


@pytest.mark.parametrize("place", ["begin", "end"])
def test_what_the_file_does_not_confirm_is_no_stretch(place: str) -> None:
    disk = SimDisk()
    lane_ = lane(disk)
    for _ in range(40):
        lane_.writer.append()
        commit(lane_.log)
    reader = lane_.log.sendfile_pool.reader()
    bounds = RangeBounds(deltas_max=1 << 40, bytes_max=6_000, bytes_min=1)
    found = next_of(reader, 0, bounds)
    assert isinstance(found.content, FileRange)
    reader.close()
    disk.flip(lane_.log._segments.all[0].path, at=(0 if place == "begin" else found.content.size) + 20)
    assert reader.next(0, bounds) is None
    assert not lane_.log.sendfile_pool._open_files


def test_a_sealed_segment_cut_short_gives_no_stretch_to_its_end() -> None:
    disk = SimDisk()
    lane_ = lane(disk)
    while len(lane_.log._segments.all) < 2:
        lane_.writer.append()
        commit(lane_.log)
    segment = lane_.log._segments.all[0]
    reader = lane_.log.sendfile_pool.reader()
    assert next_of(reader, 0).next_offset == segment.end
    reader.close()
    file = disk.open(segment.path)
    file.truncate(segment.size - 8)
    file.close()
    assert reader.next(0, SMALL_STRETCH) is None


# --- compressed segments


def test_frames_of_a_compressed_segment_are_sent_as_they_travel_to_who_reads_the_codec() -> None:
    _, writer, _ = compressed_log("lz4")
    reader = writer.log.sendfile_pool.reader()
    assert reader.next(0, SMALL_STRETCH) is None
    assert reader.next(0, SMALL_STRETCH, codecs=frozenset({2})) is None
    found = reader.next(0, SMALL_STRETCH, codecs=frozenset({1, 2}))
    assert found is not None
    assert isinstance(found.content, list)
    plain = frames_between(writer, 0, found.next_offset)
    assert len(found.content) == len(plain) > 1
    assert found.bytes == sum(map(len, found.content)) < sum(map(len, plain)) / 2
    for part, told in zip(found.content, plain, strict=True):
        frame, expected = decode(part), decode(told)
        assert isinstance(frame, BatchFrame)
        assert isinstance(expected, BatchFrame)
        assert frame == expected


def test_what_must_be_read_into_memory_has_a_bound_of_its_own() -> None:
    _, writer, _ = compressed_log("lz4")
    whole = writer.log.sendfile_pool.reader().next(0, SMALL_STRETCH, codecs=frozenset({1}))
    assert whole is not None
    bounds = SMALL_STRETCH._replace(read_bytes_max=whole.bytes - 1)
    found = writer.log.sendfile_pool.reader().next(0, bounds, codecs=frozenset({1}))
    assert found is None or found.bytes < whole.bytes
    lane_ = lane(SimDisk())
    for _ in range(40):
        lane_.writer.append()
        commit(lane_.log)
    plain = next_of(lane_.log.sendfile_pool.reader(), 0, bounds)
    assert plain == next_of(lane_.log.sendfile_pool.reader(), 0, SMALL_STRETCH)


def test_compressed_stretch_ends_at_any_frame_within_its_bounds() -> None:
    _, writer, _ = compressed_log("lz4", settings=replace(COMPRESSED, segment_bytes_max=9_000))
    reader = writer.log.sendfile_pool.reader()
    whole = reader.next(0, SMALL_STRETCH, codecs=frozenset({1}))
    assert whole is not None
    sizes = [len(memoryview(part)) for part in whole.content]  # type: ignore[arg-type]
    for deltas_max, deltas in ((5, None), (6, 6), (17, 12), (18, 18)):
        found = reader.next(0, SMALL_STRETCH._replace(deltas_max=deltas_max), codecs=frozenset({1}))
        assert (None if found is None else found.deltas) == deltas
    few = reader.next(0, RangeBounds(1 << 40, 3 * sizes[0], bytes_min=1 << 20), codecs=frozenset({1}))
    assert few is not None
    assert 0 < few.bytes <= 3 * sizes[0], "in any number, within what may be sent"
    one = reader.next(0, SMALL_STRETCH._replace(read_bytes_max=sizes[0] // 2), codecs=frozenset({1}))
    assert one is not None
    assert one.deltas == 6, "one that is larger than what is read at a time goes by itself"
    assert reader.next(0, RangeBounds(1 << 40, sizes[0] // 2, 1), codecs=frozenset({1})) is None


def test_unread_place_gives_a_stretch_of_verified_frames_alone() -> None:
    _, writer, _ = compressed_log("lz4")
    reader, verified = writer.log.sendfile_pool.reader(), SMALL_STRETCH._replace(verified=True)
    assert reader.next(0, verified, codecs=frozenset({1})) is not None
    last = writer.log._segments.all[-1].base
    assert reader.next(last, SMALL_STRETCH, codecs=frozenset({1})) is not None
    assert reader.next(last, verified, codecs=frozenset({1})) is None


def test_damage_in_a_compressed_segment_ends_the_stretch_before_it() -> None:
    disk, writer, _ = compressed_log("lz4")
    segment = writer.log._segments.all[0]
    whole = writer.log.sendfile_pool.reader().next(0, SMALL_STRETCH, codecs=frozenset({1}))
    assert whole is not None
    assert whole.deltas > 6
    size = writer.log.sendfile_pool.reader().next(
        0, SMALL_STRETCH._replace(deltas_max=6), codecs=frozenset({1})
    )
    assert size is not None
    disk.flip(segment.path, at=size.bytes + 8 + 64 + 40)  # in the second frame's compressed bytes
    before = writer.log.sendfile_pool.reader().next(0, SMALL_STRETCH, codecs=frozenset({1}))
    assert before is not None
    assert before.deltas == 6
    assert writer.log.sendfile_pool.reader().next(6, SMALL_STRETCH, codecs=frozenset({1})) is None


def test_damage_in_a_compressed_segment_gives_no_stretch() -> None:
    disk, writer, _ = compressed_log("lz4")
    segment = writer.log._segments.all[0]
    disk.flip(segment.path, at=64 + 40)  # in the first frame's compressed bytes
    assert writer.log.sendfile_pool.reader().next(0, SMALL_STRETCH, codecs=frozenset({1})) is None


@pytest.mark.parametrize("held", [True, False])
def test_a_file_that_a_rewriting_has_exchanged_is_not_sent_by_the_old_index(held: bool) -> None:
    disk = SimDisk()
    log = open_log(disk, COMPRESSED)[0]
    writer = Writer(log)
    while len(log._segments.all) < 3:
        writer.append_batch(shrinking(6, writer.counter + 1))
        commit(log)
    reader, fresh = log.sendfile_pool.reader(), log.sendfile_pool.reader()
    before = next_of(reader, 0)
    expected = b"".join(frames_between(writer, 0, before.next_offset))
    rewriting = log.take_compression()
    assert rewriting is not None
    while not rewriting.step():
        pass  # at its end the new file has the old one's name, and the log does not know yet
    if not held:
        reader.close()
        assert fresh.next(0, SMALL_STRETCH) is None, "the new one does not lie as the old index says"
    rewriting.close()
    log.finish_compression(rewriting)
    assert fresh.next(0, SMALL_STRETCH) is None
    compressed = fresh.next(0, SMALL_STRETCH, codecs=frozenset({1}))
    assert compressed is not None
    assert compressed.bytes < before.bytes
    if held:
        assert bytes_of(before) == expected, "who has the old file reads on in it"
