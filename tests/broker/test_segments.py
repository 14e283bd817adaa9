"""Segments: which segment holds an offset, and which segments follow it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_broker.segments.segment import Segment, Segments
from delta_prop_simulations.disk import SimDisk, SimFile
from tests.broker.durable import SMALL, Writer, commit, contents, frame, open_log

if TYPE_CHECKING:
    import pytest

BASES = (5, 9, 14, 40)


def make_segments() -> Segments:
    segments = Segments(SimDisk(), "d")
    for base in BASES:
        segments.add(Segment("d", base))
    return segments


def test_offset_is_in_the_last_segment_starting_at_or_before_it() -> None:
    segments = make_segments()
    bases = {offset: segments.segment_at(offset).base for offset in (0, 5, 8, 9, 13, 14, 39, 40, 1 << 60)}
    assert bases == {0: 5, 5: 5, 8: 5, 9: 9, 13: 9, 14: 14, 39: 14, 40: 40, 1 << 60: 40}
    assert [segment.base for segment in segments.segments_from(13)] == [9, 14, 40]
    assert [segment.base for segment in segments.segments_from(0)] == list(BASES)


def test_all_is_a_live_view_of_the_segments() -> None:
    segments = make_segments()
    seen = segments.all
    assert segments.last is seen[-1]
    assert [segments.drop_first().base for _ in range(3)] == [5, 9, 14]
    assert [segment.base for segment in seen] == [40]
    assert segments.segment_at(7).base == 40
    assert segments.drop_first().base == 40
    assert (segments.last, len(seen)) == (None, 0)
    segments.add(Segment("d", 41))
    assert segments.last is seen[0]


def test_sequential_small_reads_read_the_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    writer = Writer(open_log(disk, replace(SMALL, retention_bytes=40_000))[0])
    for _ in range(60):
        writer.append()
        commit(writer.log)
    log, _ = open_log(disk.kill())
    read_sizes, real_read = [], SimFile.read
    monkeypatch.setattr(
        SimFile, "read", lambda file, at, size: read_sizes.append(size) or real_read(file, at, size)
    )
    assert contents(log, rows_max=2, bytes_max=1) == writer.appended
    bytes_in_small_reads = sum(read_sizes)
    read_sizes.clear()
    assert contents(log) == writer.appended
    print(f"{bytes_in_small_reads} bytes were read batch by batch, {sum(read_sizes)} in large reads")
    assert bytes_in_small_reads <= 1.5 * sum(read_sizes)


def test_interleaved_readers_each_resume_at_their_position() -> None:
    writer = Writer(open_log(SimDisk(), replace(SMALL, retention_bytes=40_000))[0])
    for _ in range(60):
        writer.append()
        commit(writer.log)
    offsets = sorted(writer.appended)
    seen: list[dict[int, bytes]] = [{} for _ in range(7)]  # more readers than cached scanners
    for step in range(len(offsets)):
        for reader, frames in enumerate(seen):
            (logged, *_) = writer.log.read(
                offsets[(step + 9 * reader) % len(offsets)], rows_max=2, bytes_max=1
            )
            frames[logged.offset] = frame(logged)
    assert seen == [writer.appended] * 7
