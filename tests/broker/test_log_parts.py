"""The parts of the logs, each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.log.capacity import Capacity
from delta_prop_broker.log.disk_space import POLL_INTERVAL_S, DiskSpace
from delta_prop_broker.log.memory import TimeMarks
from delta_prop_broker.log.stored_batches import StoredBatches, weight
from delta_prop_broker.log.writing import ActiveSegment, CommitQueue, LogMarks
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_broker.segments.reserve import Reserve
from delta_prop_broker.segments.segment import Segment, Segments
from delta_prop_broker.segments.sparse_index import STEP_BYTES, SparseIndex
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import SMALL, Clock, Writer, batch_of, commit, open_log
from tests.native_core import needs_native_core

if TYPE_CHECKING:
    from delta_prop_broker.log.retention import Retention
    from delta_prop_wire.errors import Refused


@pytest.mark.parametrize(("read_level", "high_watermark"), [(AckLevel.DURABLE, 5), (AckLevel.LOGGED, 8)])
def test_high_watermark_follows_the_read_level(read_level: AckLevel, high_watermark: int) -> None:
    marks = LogMarks(read_level)
    marks.restart(2, 3, 3)
    assert (marks.start_offset, marks.synced, marks.high_watermark, marks.next_offset) == (2, 3, 3, 3)
    marks.next_offset = 9
    assert marks.high_watermark == 3
    marks.advance(8, 5)
    assert (marks.written, marks.synced, marks.high_watermark) == (8, 5, high_watermark)
    marks.fall_back()
    assert (marks.written, marks.synced, marks.high_watermark, marks.next_offset) == (5, 5, 5, 9)


@pytest.mark.parametrize(("written", "synced"), [(10, 4), (6, 7), (8, 2), (5, 5)])
def test_marks_out_of_order_are_rejected(written: int, synced: int) -> None:
    marks = LogMarks(AckLevel.LOGGED)
    marks.restart(0, 3, 3)
    marks.next_offset = 9
    marks.advance(6, 4)
    with pytest.raises(AssertionError):
        marks.advance(written, synced)


def test_rows_that_a_start_replays_are_not_removable() -> None:
    marks = LogMarks(AckLevel.DURABLE)
    marks.restart(0, 9, 9)
    assert marks.removable_end == 9
    marks.needed_from = 4
    marks.restart(0, 7, 7)
    assert marks.removable_end == 4
    marks.needed_from = 12
    assert marks.removable_end == 7


def make_queue() -> CommitQueue:
    disk = SimDisk()
    return CommitQueue(DiskSpace(disk, Reserve(disk, 0), Clock()))


def test_commit_queue_has_one_write_per_segment() -> None:
    queue, first, second = make_queue(), Segment(DIRECTORY, 0), Segment(DIRECTORY, 5)
    first.size = 10
    write = queue.write_of(first)
    assert (write.start, write.end) == (10, 10)
    assert queue.write_of(first) is write
    assert queue.write_of(second) is not write
    assert [one.segment for one in queue.writes] == [first, second]


def test_cleared_commit_queue_keeps_its_counts() -> None:
    queue = make_queue()
    queue.note_appended(30)
    queue.wants_sync = True
    queue.write_of(Segment(DIRECTORY, 0))
    queue.removed_segments.append(Segment(DIRECTORY, 0))
    queue.note_written(2, 20, None)
    counts = queue.commits, queue.committed_frames, queue.committed_bytes
    assert (*counts, queue.unwritten_bytes) == (1, 2, 20, 10)
    queue.clear()
    assert (queue.writes, queue.removed_segments) == ([], [])
    assert (queue.unwritten_bytes, queue.wants_sync) == (0, False)
    assert (queue.commits, queue.committed_frames, queue.committed_bytes) == counts


def test_full_or_old_segment_is_sealed_and_another_one_begins() -> None:
    segments, queue = Segments(SimDisk(), DIRECTORY), make_queue()
    settings = replace(SMALL, segment_bytes_max=100, segment_s_max=2.0)
    active = ActiveSegment(segments, queue, settings)
    first = active.write_for(60, offset=0, seen_us=0).segment
    first.size = first.end = 60
    assert active.write_for(40, offset=60, seen_us=1_999_999).segment is first
    assert active.write_for(41, offset=60, seen_us=0).segment is not first
    assert [write.seals_segment for write in queue.writes] == [True, False]
    second = queue.writes[-1].segment
    second.size = 1
    assert active.write_for(1, offset=61, seen_us=2_000_000).segment.base == 61


def test_disk_is_polled_when_its_space_seems_short_or_a_poll_is_due() -> None:
    disk, clock = SimDisk(), Clock(step_us=0)
    disk.capacity_bytes = 1_000
    space = DiskSpace(disk, Reserve(disk, 0), clock)
    assert space.refusal(900, 100) is None
    queue = CommitQueue(space)
    queue.note_appended(900)
    queue.note_written(1, 900, None)
    assert space.bytes == 100
    assert space.refusal(1, 100) is None, "the disk has more space than estimated"
    disk.capacity_bytes = 150
    assert space.refusal(51, 100) is None, "an estimate that suffices is used"
    space.forget()
    refusal = space.refusal(51, 100)
    assert refusal is not None
    assert refusal.details["free_bytes"] == 150
    assert not space.claim_poll()
    clock.wait(POLL_INTERVAL_S)
    assert space.claim_poll()


class EmptyRetention:
    """The retention of a log without rows."""

    bytes = 0

    def refusal(self, size: int) -> Refused | None:
        return None


def test_capacity_names_the_first_bound_that_a_batch_exceeds() -> None:
    disk = SimDisk()
    disk.capacity_bytes = 30_000
    space = DiskSpace(disk, Reserve(disk, 0), Clock())
    space.poll()
    queue, other = CommitQueue(space), CommitQueue(space)
    retention: Retention = EmptyRetention()  # type: ignore[assignment]
    capacity = Capacity(SMALL, space, queue, retention)
    largest = SMALL.bytes_max - SMALL.segment_bytes_max
    assert capacity.has(20_000)
    assert not capacity.has(20_001), "more may not wait to be written"
    too_large = capacity.refusal(largest + 1)
    assert too_large is not None
    assert too_large.code is ErrorCode.TOO_LARGE
    assert capacity.shortage(None) is None, "no capacity helps a batch that is too large"
    queue.note_appended(1)
    assert not capacity.has(20_000)
    too_slow = capacity.refusal(20_000)
    assert too_slow is not None
    assert "wait to be written" in too_slow.message
    assert capacity.shortage(None) is not None
    queue.clear()
    assert capacity.shortage(None) is None
    other.note_appended(20_000)
    assert capacity.refusal(10) is None, "a log of which nothing waits may append a batch"
    queue.note_appended(1)
    assert capacity.refusal(10) is not None, "the logs of a directory share what may wait"
    for each in (queue, other):
        each.clear()
    assert space.unwritten_bytes == 0
    disk.capacity_bytes = space.bytes = 10
    full = capacity.refusal(11)
    assert full is not None
    assert full.details["free_bytes"] == 10
    disk.capacity_bytes = 100
    assert capacity.refusal(11) is None


def test_recovered_log_continues_with_all_its_parts() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, replace(SMALL, segment_bytes_max=600))
    writer = Writer(log)
    log.hold("sink", lambda: 0)
    log.needed_from = 1
    while len(log.segments.all) < 3:
        writer.append()
        commit(log)
    before, stored = log.statistics(), log.next_offset
    writer.append()
    log.request_sync()
    log.fail(OSError("broken"))
    log.resume(log.recover_in_place())
    assert (log.next_offset, log.synced, log.high_watermark) == (stored, stored, stored)
    assert (log.unwritten_bytes, log.failure, log.recoveries, log.needed_from) == (0, None, 1, 1)
    after = log.statistics()
    assert (after.commits, after.bytes, after.held_by) == (before.commits, before.bytes, "sink")
    writer.counter = stored
    logged = writer.append()
    assert commit(log)
    assert log.read(0, rows_max=1 << 20, bytes_max=1 << 30)[-1].offset == logged.offset
    assert log.statistics().bytes == before.bytes + logged.batch.size


def stored_batches(*counts: int) -> tuple[StoredBatches, list[LoggedBatch]]:
    """Return the batches of a log in memory, with these numbers of rows."""
    stored, appended, offset = StoredBatches(), [], 0
    for count in counts:
        batch = batch_of(count, offset + 1)
        logged = LoggedBatch(batch, offset, offset + 1, Source.LOCAL)
        stored.append(logged, weight(batch))
        appended.append(logged)
        offset += count
    return stored, appended


def test_stored_batches_are_read_within_the_bounds_after_drops() -> None:
    stored, appended = stored_batches(2, 3, 1, 4)
    for oldest in appended[:2]:
        assert stored.oldest() is oldest
        stored.drop(oldest)
        stored.trim()
    assert (stored.start_offset, list(stored)) == (5, appended[2:])
    assert stored.bytes == sum(weight(logged.batch) for logged in appended[2:])
    large = 1 << 30
    assert stored.read(5, 100, large) == appended[2:]
    assert stored.read(5, 4, large) == appended[2:3]
    assert stored.read(7, 1, 1) == appended[3:], "one batch may exceed the bounds"
    assert stored.read(5, 100, appended[2].batch.size + 1) == appended[2:3]
    assert stored.held_from(4) is None
    assert stored.held_from(7) == (6, weight(appended[3].batch))


def test_ages_are_derived_from_the_marks_after_a_row() -> None:
    clock = Clock(step_us=0)
    marks = TimeMarks(clock)
    for end in (3, 3, 5):
        clock.wait(1)
        marks.note(0, end)
    clock.wait(10)
    assert [marks.age_s(offset) for offset in (0, 2, 3, 4, 5)] == [12, 12, 10, 10, 0]
    assert len(marks) == 2, "a log that has not grown needs no other mark"
    assert TimeMarks(None).age_s(0) == 0


def test_index_leads_to_the_entry_before_an_offset_or_a_time() -> None:
    index, step = SparseIndex(10), STEP_BYTES
    for number in range(4):
        index.add(
            batch_of(2, 1 + 2 * number), offset=10 + 2 * number, size=step, time=100 * number,
            previous_crc=number, crc=number + 1,
        )  # fmt: skip
    assert [index.entry_before(offset).offset for offset in (10, 11, 12, 17)] == [10, 10, 12, 16]
    assert [index.entry_before_time(time).offset for time in (0, 100, 101, 999)] == [10, 10, 12, 16]
    assert index.entry_before_both(17, step) == (12, step, 1)
    assert index.last_entry() == (16, 3 * step, 3)
    copy = index.copy_until(14, 2 * step, 2, 100)
    assert copy.last_entry() == (12, step, 1)
    unpacked = SparseIndex.unpack(index.pack(), 10)
    assert unpacked is not None
    assert unpacked.pack() == index.pack()
    assert unpacked.find_run(16, 3) == (10, 12)


@needs_native_core
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), max_size=6),
    st.sampled_from([2_000, 9_000]),
)
def test_runs_are_written_as_single_batches_are(runs: list[list[int]], segment_bytes_max: int) -> None:
    written: list[object] = []
    for core in ("native", "python"):
        with core_mode.switched(core):
            disk = SimDisk()
            log, _ = open_log(
                disk, replace(SMALL, segment_bytes_max=segment_bytes_max), clock=Clock(step_us=0)
            )
            base, marks = 1, []
            for number, rows in enumerate(runs):
                batches = []
                for count in rows:
                    batches.append(batch_of(count, base, level=AckLevel(number % 3)))
                    base += count
                if not log.make_capacity_for(batches):
                    continue
                logged = log.append_run(batches, lamport=log.next_offset + 1, source=Source.LOCAL)
                marks += [
                    (each.offset, each.lamport, each.head, each.next_offset, each.count) for each in logged
                ]
                marks.append(log.statistics())
                commit(log)
            log.close()
            written.append((marks, {path: disk.peek(path) for path in disk.paths()}))
    assert written[0] == written[1]


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 2])), min_size=1, max_size=8))
def test_commit_in_three_steps_leaves_the_same_files(appends: list[tuple[int, int]]) -> None:
    left = []
    for in_steps in (True, False):
        disk = SimDisk()
        log, _ = open_log(disk, clock=Clock(step_us=0))
        writer, stepped = Writer(log), 0
        for rows, level in appends:
            writer.append(rows, level=AckLevel(level))
            taken = log.take_commit()
            assert taken is not None
            if in_steps and taken.cacheable_bytes is not None:
                taken.write_to_cache()
                taken.sync()
                taken.conclude()
                stepped += 1
            else:
                taken.run()
            log.finish_commit(taken)
        left.append(({path: disk.peek(path) for path in disk.paths()}, log.statistics()))
        log.close()
    assert left[0] == left[1]


def test_commit_that_creates_or_seals_a_file_has_no_steps() -> None:
    log, _ = open_log(SimDisk())
    writer = Writer(log)
    writer.append()
    created = log.take_commit()
    assert created is not None
    assert created.cacheable_bytes is None
    created.run()
    log.finish_commit(created)
    writer.append()
    plain = log.take_commit()
    assert plain is not None
    assert plain.cacheable_bytes == len(writer.appended[2])
    plain.run()
    log.finish_commit(plain)
    writer.append(40)
    writer.append(40)
    sealing = log.take_commit()
    assert sealing is not None
    assert sealing.cacheable_bytes is None
