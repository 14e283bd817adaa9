"""The age of a log's rows: from timestamps in a log on disk, from time marks in a log in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_broker.log.memory import TIME_MARKS_MAX, MemoryLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Source
from tests.broker.compressed import compress_next_segment
from tests.broker.durable import LOG_ID, SMALL, START_US, Clock, Writer, batch_of, commit, open_log

ROWS = 3
PAUSE_S = 30.0
BATCHES = 60


@pytest.mark.parametrize("tail_bytes_max", [1, 1 << 30])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_disk_log_row_is_as_old_as_its_batch(tail_bytes_max: int, codec: str) -> None:
    disk, clock = SimDisk(1), Clock(step_us=0)
    settings = replace(SMALL, tail_bytes_max=tail_bytes_max, segment_bytes_max=6_000, compress=codec)
    log, _ = open_log(disk, settings, clock=clock)
    writer, appended = Writer(log), list[int]()
    for _ in range(BATCHES):
        clock.wait(PAUSE_S)
        writer.append(ROWS)
        appended += [clock.us] * ROWS
        commit(log)
    while compress_next_segment(log) is not None:
        pass
    clock.wait(7.0)
    assert log.age_s(log.high_watermark) == log.age_s(log.high_watermark + 5) == 0.0
    for offset, time_us in enumerate(appended):
        assert log.append_time(offset) == time_us
        assert log.age_s(offset) == pytest.approx((clock.us - time_us) / 1e6)
    log.close()
    reopened, _ = open_log(disk, settings, read_only=True)
    assert [reopened.append_time(offset) for offset in range(len(appended))] == appended


def test_removed_offset_is_as_old_as_the_oldest_stored_row() -> None:
    clock = Clock(step_us=0)
    log, _ = open_log(SimDisk(1), replace(SMALL, retention_bytes=4_000), clock=clock)
    writer = Writer(log)
    for _ in range(BATCHES):
        clock.wait(PAUSE_S)
        writer.append(ROWS)
        commit(log)
        log.retain()
    commit(log)
    assert log.start_offset > 0
    assert log.age_s(0) == log.age_s(log.start_offset)


def test_unreadable_disk_gives_no_age() -> None:
    disk, clock = SimDisk(1), Clock(step_us=0)
    log, _ = open_log(disk, clock=clock)
    writer = Writer(log)
    for _ in range(BATCHES):
        writer.append(ROWS)
        commit(log)
    disk.fail(lambda call: call.name == "read", times=None)
    assert log.age_s(0) is None


def test_memory_log_row_is_as_old_as_the_next_time_mark() -> None:
    clock = Clock(us=START_US, step_us=0)
    log = MemoryLog(LOG_ID, clock=clock)
    appended = list[float]()
    for number in range(3 * TIME_MARKS_MAX):
        clock.us = START_US + number * 100_000
        if number % 3:
            log.append(_batch(number), lamport=1, source=Source.LOCAL)
            appended.append(clock.now())
        log.mark_time()
    clock.wait(60)
    assert log.age_s(log.next_offset) == 0.0
    for offset, appended_s in enumerate(appended):
        age_s = log.age_s(offset)
        assert age_s is not None
        # A mark comes every 0.1 s; older marks are thinned out.
        is_recent = offset > len(appended) - TIME_MARKS_MAX // 4
        assert 0 <= clock.now() - appended_s - age_s <= (0.11 if is_recent else 120.0)
    assert len(log._time_marks) <= TIME_MARKS_MAX


def test_row_after_the_last_time_mark_has_age_zero() -> None:
    log = MemoryLog(LOG_ID, clock=Clock())
    log.mark_time()
    log.append(_batch(1), lamport=1, source=Source.LOCAL)
    assert log.age_s(0) == 0.0


def _batch(number: int):  # type: ignore[no-untyped-def]
    return batch_of(1, base=number + 1, level=AckLevel.MEMORY)


def test_peek_leaves_log_time_unchanged() -> None:
    clock = Clock(step_us=0)
    log, _ = open_log(SimDisk(1), clock=clock)
    before = (log.clock.read(), log.clock.seen_us)
    clock.wait(12.0)
    assert log.clock.peek() == before[0] + 12_000_000
    assert (log.clock.time_us, log.clock.seen_us) == before
    assert log.clock.read() == log.clock.peek() >= START_US
