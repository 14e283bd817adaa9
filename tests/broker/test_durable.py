"""The log on disk without faults: appends, commits, segments, reads, retention and lookups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.disk_space import POLL_INTERVAL_S
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Delta, Source, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import (
    EVERYTHING,
    LOG_ID,
    SEGMENTS,
    SMALL,
    Clock,
    Writer,
    append_until_refused,
    batch_of,
    commit,
    contents,
    frame,
    open_log,
)

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_broker.disk import Disk

LOGGED = replace(SMALL, read_level=AckLevel.LOGGED)


@pytest.fixture(params=["simulated disk", "real disk"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return SimDisk() if request.param == "simulated disk" else LocalDisk(tmp_path / "data")


def test_append_assigns_offsets_and_sync_makes_rows_visible(disk: Disk) -> None:
    log, report = open_log(disk)
    assert (report.created, log.log_id, log.epoch, log.ack_level) == (True, LOG_ID, 1, AckLevel.DURABLE)
    writer = Writer(log)
    first, second = writer.append(3), writer.append(2)
    assert (first.offset, second.offset, log.next_offset) == (0, 3, 5)
    assert (log.written, log.synced, log.high_watermark) == (0, 0, 0)
    assert log.read(0, **EVERYTHING) == []
    taken = log.take_commit()
    assert taken is not None
    assert log.take_commit() is None, "one commit at a time"
    third = writer.append(1)
    taken.run()
    assert log.high_watermark == 0
    log.finish_commit(taken)
    assert (log.written, log.synced, log.high_watermark, log.next_offset) == (5, 5, 5, 6)
    assert commit(log)
    assert not commit(log)
    assert contents(log) == {0: frame(first), 3: frame(second), 5: frame(third)}
    log.close()


def test_reopened_log_holds_the_same_bytes(disk: Disk) -> None:
    log, _ = open_log(disk)
    writer = Writer(log)
    for rows in range(1, 30):
        writer.append(rows)
        if rows % 3 == 0:
            commit(log)
    log.close()
    log, report = open_log(disk)
    assert (report.clean, report.truncated_tail, log.epoch, report.indexes_rebuilt) == (True, None, 1, 0)
    assert log.statistics().segments > 5
    assert contents(log) == writer.appended
    for bounds in ({"rows_max": 1, "bytes_max": 1}, {"rows_max": 50, "bytes_max": 3_000}):
        assert contents(log, **bounds) == writer.appended
    for offset in range(log.next_offset):
        (logged,) = log.read(offset, rows_max=1, bytes_max=1)
        assert logged.offset <= offset < logged.next_offset
    log.close()


def test_read_from_memory_or_disk_stops_at_either_bound(disk: Disk) -> None:
    for tail_bytes_max in (1, 1 << 20):
        log, _ = open_log(disk, replace(SMALL, tail_bytes_max=tail_bytes_max, segment_bytes_max=9_000))
        writer = Writer(log, counter=log.next_offset)
        base = log.next_offset
        for _ in range(5):
            writer.append(10)
        commit(log)
        size = len(writer.appended[base])

        def read(
            offset: int, rows_max: int, bytes_max: int, log: DurableLog = log, base: int = base
        ) -> list[int]:
            batches = log.read(base + offset, rows_max=rows_max, bytes_max=bytes_max)
            return [logged.offset - base for logged in batches]

        assert read(0, 1 << 20, 1 << 20) == [0, 10, 20, 30, 40]
        assert read(0, 30, 1 << 20) == [0, 10, 20]
        assert read(0, 29, 1 << 20) == [0, 10]
        assert read(0, 100, 3 * size) == [0, 10, 20]
        assert read(0, 100, 3 * size - 1) == [0, 10]
        assert read(10, 1, 1) == [10]
        assert read(15, 1 << 20, 1 << 20) == [10, 20, 30, 40]
        assert read(50, 1, 1) == []
        assert read(99, 1, 1) == []
        log.close()


def test_logged_read_level_syncs_only_on_request() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, LOGGED)
    writer = Writer(log)
    writer.append(level=AckLevel.LOGGED)
    commit(log)
    assert (log.written, log.synced, log.high_watermark) == (2, 0, 2)
    writer.append(level=AckLevel.MEMORY)
    writer.append(level=AckLevel.DURABLE)
    commit(log)
    assert (log.written, log.synced, log.high_watermark) == (6, 6, 6)
    writer.append(level=AckLevel.LOGGED)
    commit(log)
    assert commit(log, sync=True)
    assert (log.synced, log.written) == (8, 8)
    assert not commit(log, sync=True)
    assert log.statistics().syncs_skipped == 2


def test_quorum_append_is_refused_by_a_single_disk() -> None:
    log, _ = open_log(SimDisk())
    batch = encode_batch([Delta("v", create([1.0]))], origin=16, base=1, ack_level=AckLevel.QUORUM)
    with pytest.raises(Refused, match=r"quorum requested.*request durable") as caught:
        log.append(batch, lamport=1, source=Source.LOCAL)
    assert caught.value.code is ErrorCode.LEVEL_UNAVAILABLE
    assert log.next_offset == 0
    # The level of a forwarded batch counts only at the service where it entered.
    log.append(batch, lamport=1, source=Source.REPLICA)


def test_segments_roll_by_size_or_age_and_are_named_by_first_offset() -> None:
    disk, clock = SimDisk(), Clock()
    log, _ = open_log(disk, replace(SMALL, segment_bytes_max=1_000), clock=clock)
    writer = Writer(log)
    size = batch_of(2).size
    for _ in range(1_000 // size + 1):
        writer.append()
    second = list(writer.appended)[1_000 // size]
    commit(log)
    clock.us += int(SMALL.segment_s_max * 1e6)
    third = writer.append().offset
    large = writer.append(dimension=400).offset  # larger than a segment: the batch gets its own segment
    after = writer.append().offset
    commit(log)
    names = [name for name in disk.list(SEGMENTS) if name.endswith(".log")]
    assert names == [f"{offset:020}.log" for offset in (0, second, third, large, after)]
    for path in disk.paths():
        if path.endswith(".log"):
            base = int(path.split("/")[-1][:-4])
            assert disk.peek(path).startswith(writer.appended[base])
    assert contents(log) == writer.appended


def test_recent_batches_are_read_from_memory_and_older_from_disk() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, replace(SMALL, tail_bytes_max=20_000))
    writer = Writer(log)
    for _ in range(30):
        writer.append()
        commit(log)
    calls = disk.calls
    assert log.read(log.next_offset - 2, **EVERYTHING)
    assert disk.calls == calls, "rows in memory are read without a disk call"
    assert log.statistics().tail_bytes <= 20_000
    log.read(0, **EVERYTHING)
    assert disk.calls > calls
    assert contents(log) == writer.appended


# --- bounds


def test_segments_are_removed_by_size_and_age_unless_held(disk: Disk) -> None:
    clock = Clock()
    settings = replace(SMALL, retention_bytes=6_000, retention_s=3600.0)
    log, _ = open_log(disk, settings, clock=clock)
    writer = Writer(log)
    for _ in range(60):
        writer.append()
    commit(log)
    needed = 20
    log.hold("sink", lambda: needed)
    assert log.retain() > 0
    assert 0 < log.start_offset <= 20
    names = disk.list(SEGMENTS)
    assert commit(log)
    assert len(disk.list(SEGMENTS)) < len(names)
    log.release("sink")
    log.retain()
    assert log.statistics().bytes <= 6_000
    with pytest.raises(Refused, match=f"starts at {log.start_offset}") as caught:
        log.read(log.start_offset - 1, **EVERYTHING)
    assert caught.value.code is ErrorCode.CURSOR_TOO_OLD
    clock.wait(3600)
    log.retain()
    assert log.statistics().segments == 1, "the active segment stays"
    commit(log)
    start, end = log.start_offset, log.next_offset
    log.close()
    log, report = open_log(disk, settings)
    assert (log.start_offset, log.next_offset, report.clean) == (start, end, True)
    log.close()


def test_refusal_of_a_full_log_names_holder_and_usage() -> None:
    log, _ = open_log(SimDisk())
    writer = Writer(log)
    needed = {"slow": 0, "fast": 0}
    log.hold("fast", lambda: needed["fast"])
    log.hold("slow", lambda: needed["slow"])
    for _ in range(10):
        needed["fast"] = writer.append().offset
    refusal = append_until_refused(writer)
    needed["fast"] = log.next_offset - 2
    later_refusal = log.capacity_refusal(2, batch_of(2).size)
    assert refusal.code is ErrorCode.LOG_FULL
    assert refusal.retry_after_ms
    assert "'slow'" in refusal.message
    assert later_refusal is not None
    assert later_refusal.details == {
        "depth": log.next_offset,
        "depth_bytes": log.statistics().bytes,
        "capacity_bytes": 40_000,
        "blocked_by": "slow",
        "full": "log",
    }
    assert 40_000 - batch_of(2).size < log.statistics().bytes <= 40_000
    assert 0.95 < log.used_share(0) <= 1
    assert log.used_share(log.next_offset) == 0
    assert log.used_share(needed["fast"]) < 0.06
    needed["slow"] = log.next_offset
    writer.append()
    assert log.start_offset > 0
    assert log.statistics().bytes <= 40_000


def test_evictable_holder_is_evicted_only_if_that_frees_space() -> None:
    log, _ = open_log(SimDisk())
    writer = Writer(log)
    evicted: list[str] = []
    log.hold("subscriber", lambda: 0, lambda: evicted.append("subscriber"))
    log.hold("sink", lambda: 0)
    append_until_refused(writer)
    assert evicted == [], "the sink holds the same rows, so an eviction would free nothing"
    log.release("sink")
    writer.append()
    assert evicted == ["subscriber"]
    assert log.statistics().held_by is None


def test_unwritten_bytes_are_bounded() -> None:
    log, _ = open_log(SimDisk(), replace(SMALL, unwritten_bytes_max=5_000))
    writer = Writer(log)
    while log.is_accepting:
        writer.append()
    assert 2_500 <= log.unwritten_bytes < 2_500 + batch_of(2).size
    refusal = append_until_refused(writer, commits=False)
    assert refusal.code is ErrorCode.LOG_FULL
    assert "wait to be written" in refusal.message
    assert log.unwritten_bytes <= 5_000
    assert log.capacity_refusal(1, 1000) is not None
    commit(log)
    assert log.is_accepting
    assert log.capacity_refusal(1, 1000) is None


def test_batch_larger_than_the_log_is_refused_for_good() -> None:
    log, _ = open_log(SimDisk())
    with pytest.raises(Refused, match="send smaller batches") as caught:
        log.append(batch_of(2, dimension=9_000), lamport=1, source=Source.LOCAL)
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert log.capacity_refusal(2, 100_000) is None, (
        "the batch can never fit, so it does not wait for capacity"
    )


def test_low_disk_space_refuses_appends_until_space_is_freed() -> None:
    disk = SimDisk(capacity_bytes=40_000)
    log, _ = open_log(disk, replace(SMALL, free_bytes_min=20_000))
    writer = Writer(log)
    refusal = append_until_refused(writer)
    assert refusal.code is ErrorCode.LOG_FULL
    assert "20000 stay free: free " in refusal.message
    missing_bytes = int(refusal.message.partition("stay free: free ")[2].split()[0])
    assert 20_000 <= disk.free_bytes() < 22_000
    assert contents(log) == writer.appended
    disk.capacity_bytes = 40_000 + missing_bytes - 1
    with pytest.raises(Refused, match="stay free: free 1 bytes more"):
        writer.append()
    disk.capacity_bytes += 1
    writer.append()
    assert commit(log)
    assert log.failure is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"read_level": AckLevel.MEMORY}, "logged or durable"),
        ({"bytes_max": 4_000}, "at least 4 segments"),
        ({"retention_bytes": 50_000}, "at most bytes_max"),
        ({"tail_bytes_max": 0}, "give a number above 0"),
        ({"retention_s": float("nan")}, "retention_s = nan: give a number"),
        ({"min_compaction_lag_s": "5"}, "min_compaction_lag_s = '5': give a number"),
        ({"segment_s_max": True}, "segment_s_max = True: give a number"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LogSettings(**{"segment_bytes_max": 2_000, "bytes_max": 40_000, "retention_bytes": 30_000} | wrong)  # type: ignore[arg-type]


# --- lookup


def test_dot_is_found_in_any_segment() -> None:
    disk = SimDisk()
    log, _ = open_log(disk)
    writers = {origin: Writer(log) for origin in (16, 32, 48)}
    offsets: dict[tuple[int, int], int] = {}
    for step in range(60):
        origin = (16, 32, 48)[step * step % 3]
        logged = writers[origin].append(1 + step % 4, origin=origin)
        offsets |= {(origin, logged.batch.counter(row)): logged.offset + row for row in range(logged.count)}
        if step % 7 == 0:
            commit(log)
    batch_with_gaps = encode_batch(
        [Delta(f"v{n}", create([1.0])) for n in range(3)],
        origin=64,
        base=10,
        counters=[10, 20, 25],
        previous=4,
    )
    logged = log.append(batch_with_gaps, lamport=1, source=Source.LOCAL)
    offsets |= {(64, 10): logged.offset, (64, 20): logged.offset + 1, (64, 25): logged.offset + 2}
    missing = [(16, 1 << 40), (80, 1), (64, 11), (64, 24), (64, 9), (64, 26)]
    for _ in range(2):
        assert {dot: log.find(*dot) for dot in offsets} == offsets
        assert [log.find(*dot) for dot in missing] == [None] * 6
        log.close()
        log, _ = open_log(disk)


def test_dot_is_found_before_its_batch_is_written() -> None:
    log, _ = open_log(SimDisk())
    writer = Writer(log)
    writer.append()
    taken = log.take_commit()
    assert taken is not None
    later = writer.append()
    taken.run()
    log.finish_commit(taken)
    assert log.high_watermark == later.offset
    assert [log.find(16, counter) for counter in range(1, 6)] == [0, 1, 2, 3, None]


def test_offset_at_time_is_correct_although_the_clock_was_set_back() -> None:
    disk, clock = SimDisk(), Clock()
    log, _ = open_log(disk, clock=clock)
    writer = Writer(log)
    times: list[tuple[int, int]] = []
    for step in range(60):
        if step == 25:
            # as in a log whose append times fell with a wall clock that was set back
            log.clock.time_us -= 10_000_000
        offset = writer.append().offset
        times.append((log.clock.time_us, offset))
    assert log.offset_at(0) == 0 == log.high_watermark
    commit(log)
    for _ in range(2):
        for time, _ in times:
            for requested in (time, time - 1, time + 1):
                later_offsets = (offset for appended, offset in times if appended >= requested)
                expected = next(later_offsets, log.high_watermark)
                assert log.offset_at(requested) == expected
        log.close()
        log, _ = open_log(disk, clock=clock)


# --- one writer, several readers


def test_one_process_writes_while_others_open_read_only(disk: Disk) -> None:
    with pytest.raises(UsageError, match="no log"):
        open_log(disk, read_only=True)
    log, _ = open_log(disk)
    writer = Writer(log)
    for _ in range(20):
        writer.append()
    commit(log)
    with pytest.raises(LogBusy, match=r"locked by process \d+"):
        open_log(disk)
    writer.append()
    reader, report = open_log(disk, read_only=True)
    assert report.read_only
    assert contents(reader) == dict(list(writer.appended.items())[:-1])
    with pytest.raises(UsageError, match="read-only"):
        reader.append(batch_of(1), lamport=1, source=Source.LOCAL)
    assert reader.take_commit() is None
    reader.close()
    commit(log)
    log.close()
    reopened, _ = open_log(disk)
    assert contents(reopened) == writer.appended
    reopened.close()


def test_closed_log_refuses_appends_and_commits(disk: Disk) -> None:
    log, _ = open_log(disk)
    log.close()
    log.close()
    with pytest.raises(UsageError, match="closed"):
        log.append(batch_of(1), lamport=1, source=Source.LOCAL)
    assert log.take_commit(sync=True) is None


def test_commits_run_on_a_thread_during_appends_and_reads(tmp_path: Path) -> None:
    """One thread appends and reads while another runs the commits; segments roll and are removed."""
    disk = LocalDisk(tmp_path / "data")
    settings = replace(
        SMALL, segment_bytes_max=4_000, bytes_max=1 << 20, retention_bytes=20_000, unwritten_bytes_max=200_000
    )
    log, _ = open_log(disk, settings)
    writer = Writer(log)
    overlapped = 0
    with ThreadPoolExecutor(1) as thread:
        for _ in range(100):
            writer.append(dimension=20)
            taken = log.take_commit()
            assert taken is not None
            running = thread.submit(taken.run)
            for _ in range(5):
                if running.done():
                    break
                writer.append()
                for offset in {log.start_offset, max(log.start_offset, log.high_watermark - 20)}:
                    for logged in log.read(offset, rows_max=50, bytes_max=10_000):
                        assert frame(logged) == writer.appended[logged.offset]
                        overlapped += 1
            running.result()
            log.finish_commit(taken)
            log.retain()
    while commit(log):
        pass
    assert overlapped > 50
    assert log.statistics().removed_segments > 3
    print(f"{overlapped} batches read during commits, {log.next_offset} deltas")
    retained = {offset: raw for offset, raw in writer.appended.items() if offset >= log.start_offset}
    assert contents(log) == retained
    log.close()
    log, _ = open_log(disk, settings)
    assert contents(log) == retained
    log.close()


def test_free_bytes_are_polled_and_estimated_in_between() -> None:
    interval_us = round(POLL_INTERVAL_S * 1e6)
    disk, clock, polls = SimDisk(1), Clock(step_us=0), 0
    log, _ = open_log(disk, LOGGED, clock=clock)
    writer, real_free_bytes = Writer(log), disk.free_bytes
    writer.append(level=AckLevel.LOGGED)
    commit(log)

    def counted_free_bytes() -> int:
        nonlocal polls
        polls += 1
        return real_free_bytes() - 7  # marks the value as polled

    disk.free_bytes = counted_free_bytes  # type: ignore[method-assign]
    for wait_us, expected_polls in (
        (10, 0),
        (10, 0),
        (interval_us, 1),
        (10, 1),
        (2 * interval_us, 2),
    ):
        clock.us += wait_us
        writer.append(level=AckLevel.LOGGED)
        before, written = log.free_bytes, log.committed_bytes
        commit(log)
        estimated = before - (log.committed_bytes - written)
        assert log.free_bytes == (estimated if wait_us == 10 else real_free_bytes() - 7)
        assert polls == expected_polls
    for wait_us, expected_polls in ((10, 2), (interval_us, 3)):
        clock.us += wait_us
        writer.append()
        commit(log)
        assert polls == expected_polls, "a durable commit polls no more often"


_steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "commit", "sync"]), st.integers(1, 12), st.sampled_from(AckLevel)
    ),
    max_size=30,
)


@given(_steps)
def test_page_cache_write_equals_a_full_commit(
    steps: list[tuple[str, int, AckLevel]],
) -> None:
    cached, committed = (open_log(SimDisk(), replace(LOGGED, tail_bytes_max=1_500))[0] for _ in range(2))
    writers = Writer(cached), Writer(committed)
    for step, rows, level in steps:
        if step == "append":
            requested = min(level, AckLevel.LOGGED) if rows % 4 else level
            for writer in writers:
                if writer.log.refusal(batch_of(rows)) is None and requested <= AckLevel.DURABLE:
                    writer.append(rows, level=requested)
        elif not (step == "commit" and cached.write_to_cache(600)):
            assert commit(cached, sync=step == "sync") == commit(committed, sync=step == "sync")
        else:
            assert committed.cacheable_bytes is not None
            assert committed.cacheable_bytes <= 600
            assert commit(committed)
        assert cached.statistics() == committed.statistics()
        assert contents(cached) == contents(committed)
        assert cached.committed_frames == committed.committed_frames
    assert writers[0].appended == writers[1].appended
