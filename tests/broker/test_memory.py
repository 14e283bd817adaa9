"""MemoryLog keeps its bounds exactly, drops only rows that no holder needs, and never reuses an offset."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.log.memory import MemoryLog
from delta_prop_broker.log.stored_batches import weight
from delta_prop_wire.delta import AckLevel, Delta, Source, create
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch, LoggedBatch

LOG_ID = bytes(range(16))
EVERYTHING = {"rows_max": 1_000_000, "bytes_max": 1 << 40}


def test_offsets_and_lamport_numbers_are_consecutive() -> None:
    log = MemoryLog(LOG_ID)
    first = log.append(_batch(3), lamport=7, source=Source.REPLICA)
    second = log.append(_batch(2), lamport=10, source=Source.LOCAL)
    assert (first.offset, first.next_offset, first.lamport, first.source) == (0, 3, 7, Source.REPLICA)
    assert (second.offset, second.next_offset) == (3, 5)
    assert log.high_watermark == log.next_offset == 5
    assert log.start_offset == 0
    assert (log.log_id, log.epoch, log.ack_level) == (LOG_ID, 1, AckLevel.MEMORY)


def test_log_holds_at_most_deltas_max() -> None:
    log = MemoryLog(LOG_ID, deltas_max=10)
    for _ in range(5):
        _append(log, 2)
    assert (log.start_offset, log.next_offset) == (0, 10)
    _append(log, 1)
    assert (log.start_offset, log.next_offset) == (2, 11)
    _append(log, 1)
    assert (log.start_offset, log.next_offset) == (2, 12)
    _append(log, 10)
    assert (log.start_offset, log.next_offset) == (12, 22)
    statistics = log.statistics()
    assert (statistics.deltas, statistics.deltas_max, statistics.dropped) == (10, 10, 12)


def test_log_holds_at_most_bytes_max() -> None:
    size = weight(_batch(1))
    log = MemoryLog(LOG_ID, bytes_max=4 * size)
    for _ in range(4):
        _append(log, 1)
    assert log.start_offset == 0
    assert log.statistics().bytes == 4 * size
    _append(log, 1)
    assert log.start_offset == 1
    smaller = MemoryLog(LOG_ID, bytes_max=4 * size - 1)
    for _ in range(4):
        _append(smaller, 1)
    assert smaller.start_offset == 1


def test_batch_larger_than_the_log_is_refused_and_drops_nothing() -> None:
    log = MemoryLog(LOG_ID, deltas_max=10, bytes_max=6000)
    _append(log, 3)
    for batch in (_batch(11), _batch(1, dimension=1000)):
        refusal = log.refusal(batch)
        assert refusal is not None
        assert (refusal.code, refusal.retryable) == (ErrorCode.TOO_LARGE, False)
        assert "send smaller batches" in refusal.message
    assert log.statistics().deltas == 3


@pytest.mark.parametrize("level", [AckLevel.LOGGED, AckLevel.DURABLE, AckLevel.QUORUM])
def test_ack_level_above_memory_is_refused(level: AckLevel) -> None:
    log = MemoryLog(LOG_ID)
    batch = encode_batch([Delta("v", create([1.0]))], origin=16, base=1, ack_level=level)
    with pytest.raises(Refused, match=f"{level.name.lower()} requested.*data directory") as caught:
        log.append(batch, lamport=1, source=Source.LOCAL)
    assert caught.value.code == ErrorCode.LEVEL_UNAVAILABLE
    assert (log.next_offset, log.statistics().refused) == (0, 1)


# --- holders


def test_held_rows_stay_and_refusal_names_holder_and_usage() -> None:
    log = MemoryLog(LOG_ID, deltas_max=10)
    needed = {"index": 4, "store": 9}
    log.hold("index", lambda: needed["index"])
    log.hold("store", lambda: needed["store"])
    for _ in range(10):
        _append(log, 1)
    for _ in range(4):
        _append(log, 1)
    assert log.start_offset == 4

    with pytest.raises(Refused) as caught:
        _append(log, 1)
    refusal = caught.value
    assert refusal.code == ErrorCode.LOG_FULL
    assert refusal.retryable
    assert refusal.retry_after_ms
    assert "10 of 10 deltas" in refusal.message
    assert "'index'" in refusal.message
    assert refusal.details == {
        "depth": 10,
        "capacity": 10,
        "depth_bytes": log.statistics().bytes,
        "capacity_bytes": log.statistics().bytes_max,
        "blocked_by": "index",
        "full": "log",
    }
    assert (log.next_offset, log.statistics().held_by, log.statistics().refused) == (14, "index", 1)

    needed["index"] = 6  # the holder advanced by two offsets
    _append(log, 2)
    assert log.refusal(_batch(1)) is not None
    log.release("index")
    log.release("index")
    _append(log, 3)
    assert log.start_offset == 9
    assert log.refusal(_batch(1)) is not None
    needed["store"] = 19
    assert log.refusal(_batch(10)) is None


def test_batch_is_dropped_when_its_last_row_is_not_needed() -> None:
    log = MemoryLog(LOG_ID, deltas_max=4)
    needed = 3
    log.hold("sink", lambda: needed)
    _append(log, 4)
    assert log.refusal(_batch(1)) is not None
    needed = 4
    assert log.refusal(_batch(1)) is None


def test_refused_append_drops_no_held_row() -> None:
    log = MemoryLog(LOG_ID, deltas_max=4)
    log.hold("sink", lambda: 2)
    _append(log, 2)
    _append(log, 2)
    before = log.statistics()
    for _ in range(3):
        assert log.refusal(_batch(3)) is not None
    with pytest.raises(Refused):
        _append(log, 3)
    assert log.next_offset == before.next_offset
    assert _stored_offsets(log) == [2, 3]  # rows that no holder needs may be dropped, held rows stay
    _append(log, 2)
    assert _stored_offsets(log) == [2, 3, 4, 5]


# --- reading


def test_read_stops_at_either_bound_but_returns_at_least_one_batch() -> None:
    log = MemoryLog(LOG_ID)
    for _ in range(5):
        _append(log, 10)
    size = _batch(10).size
    assert _read(log, 0, **EVERYTHING) == [0, 10, 20, 30, 40]
    assert _read(log, 0, rows_max=30, bytes_max=1 << 20) == [0, 10, 20]
    assert _read(log, 0, rows_max=29, bytes_max=1 << 20) == [0, 10]
    assert _read(log, 0, rows_max=100, bytes_max=3 * size) == [0, 10, 20]
    assert _read(log, 0, rows_max=100, bytes_max=3 * size - 1) == [0, 10]
    assert _read(log, 10, rows_max=1, bytes_max=1) == [10]
    assert _read(log, 50, **EVERYTHING) == []
    assert _read(log, 99, **EVERYTHING) == []


def test_read_inside_a_batch_returns_the_containing_batch() -> None:
    log = MemoryLog(LOG_ID, deltas_max=20)
    for _ in range(3):
        _append(log, 10)
    assert log.start_offset == 10
    assert _read(log, 15, **EVERYTHING) == [10, 20]
    assert _read(log, 29, **EVERYTHING) == [20]


def test_reading_dropped_rows_names_the_log_start_offset() -> None:
    log = MemoryLog(LOG_ID, deltas_max=10)
    for _ in range(3):
        _append(log, 5)
    with pytest.raises(Refused, match=r"offset 4 .* starts at 5") as caught:
        log.read(4, **EVERYTHING)
    assert caught.value.code == ErrorCode.CURSOR_TOO_OLD
    assert caught.value.details == {"offset": 4, "start_offset": 5}


# --- model


@given(
    deltas_max=st.integers(1, 30),
    batches_of_four_max=st.integers(1, 12),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 8)),
            st.tuples(st.just("advance"), st.integers(0, 20)),
            st.tuples(st.sampled_from(["hold", "release"]), st.integers(0, 2)),
        ),
        max_size=80,
    ),
)
def test_log_behaves_like_a_bounded_list(
    deltas_max: int, batches_of_four_max: int, steps: list[tuple[str, int]]
) -> None:
    bytes_max = batches_of_four_max * weight(_batch(4))
    log = MemoryLog(LOG_ID, deltas_max=deltas_max, bytes_max=bytes_max)
    appended: list[LoggedBatch] = []
    holders: dict[str, int] = {}
    for step, amount in steps:
        name = f"sink-{amount % 3}"
        if step == "append":
            batch, stored_before = _batch(amount), _stored_offsets(log)
            refusal = log.refusal(batch)
            if refusal is None:
                appended.append(log.append(batch, lamport=1, source=Source.LOCAL))
            floor = min(holders.values(), default=log.next_offset)
            assert {offset for offset in stored_before if offset >= floor} <= set(_stored_offsets(log))
            if refusal and refusal.code is ErrorCode.LOG_FULL:
                oldest = _batch_at(appended, log.start_offset)
                assert oldest.next_offset > floor
            elif refusal:
                assert amount > deltas_max or weight(batch) > bytes_max
        elif step == "advance":
            holders.update({name: min(offset + amount, log.next_offset) for name, offset in holders.items()})
        elif step == "hold":
            holders[name] = log.start_offset
            log.hold(name, lambda name=name: holders[name])
        else:
            holders.pop(name, None)
            log.release(name)
        statistics = log.statistics()
        assert statistics.deltas == len(_stored_offsets(log)) <= deltas_max
        assert statistics.bytes <= bytes_max
        assert statistics.deltas + statistics.dropped == statistics.next_offset
        for offset in range(log.start_offset, log.next_offset, 3):
            batches = log.read(offset, **EVERYTHING)
            assert batches == appended[appended.index(_batch_at(appended, offset)) :]


@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_counted_bytes_match_the_memory_used(rows: int, full: bool) -> None:
    """The memory of batches that sinks have read matches the counted bytes, also after many appends."""
    log = MemoryLog(LOG_ID, bytes_max=20_000_000 if full else 2_000_000)
    bound = log.statistics().bytes_max
    tracemalloc.start()
    try:
        peak = before = tracemalloc.get_traced_memory()[0]
        for _ in range(3 * bound // weight(_batch(rows))):
            _read_as_sinks_do(_append(log, rows).batch)
            peak = max(peak, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    used = peak - before
    print(f"batches of {rows}: {used / 1e6:.2f} MB used of {bound / 1e6:.0f} MB")
    assert log.statistics().dropped > 0
    assert 0.5 * bound < used < 1.1 * bound


def _read_as_sinks_do(batch: Batch) -> None:
    for name in ("is_control", "namespace_names", "custom_topics", "kind", "kinds", "namespaces", "values"):
        getattr(batch, name)
    assert len(batch.keys) == batch.count


def _batch(rows: int, dimension: int = 1) -> Batch:
    return encode_vectors(
        [f"v-{row}" for row in range(rows)],
        np.zeros((rows, dimension), np.float32),
        namespace="n",
        origin=16,
        base=1,
    )


def _append(log: MemoryLog, rows: int) -> LoggedBatch:
    return log.append(_batch(rows), lamport=1, source=Source.LOCAL)


def _read(log: MemoryLog, offset: int, *, rows_max: int, bytes_max: int) -> list[int]:
    return [logged.offset for logged in log.read(offset, rows_max=rows_max, bytes_max=bytes_max)]


def _stored_offsets(log: MemoryLog) -> list[int]:
    batches = log.read(log.start_offset, **EVERYTHING)
    return [logged.offset + row for logged in batches for row in range(logged.count)]


def _batch_at(appended: list[LoggedBatch], offset: int) -> LoggedBatch:
    return next(logged for logged in appended if logged.offset <= offset < logged.next_offset)
