"""The contract between a log and the pipeline, checked for the logs in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import EVERYTHING, LOG_ID, SMALL, batch_of, commit, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.contract import Log

SHORT = replace(SMALL, segment_bytes_max=1_500, bytes_max=20_000, retention_bytes=20_000)
MakeLog = Callable[[], "Log"]


def _on_disk() -> Log:
    return open_log(SimDisk(), SHORT)[0]


def _in_memory() -> Log:
    return MemoryLog(LOG_ID, bytes_max=SHORT.bytes_max * 5)


LOGS = pytest.mark.parametrize("make_log", [_in_memory, _on_disk], ids=["in memory", "on disk"])


def make_visible(log: Log) -> None:
    """MakeLog all appended rows visible."""
    if isinstance(log, DurableLog):
        commit(log)
    assert log.high_watermark == log.next_offset


def append(log: Log, rows: int = 2) -> int:
    batch = batch_of(rows, log.next_offset + 1, level=AckLevel.MEMORY)
    return log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL).offset


def read_offsets(log: Log, offset: int, rows_max: int = 1 << 20, bytes_max: int = 1 << 30) -> list[int]:
    return [logged.offset for logged in log.read(offset, rows_max=rows_max, bytes_max=bytes_max)]


@LOGS
def test_offsets_are_consecutive_and_batches_are_read_back(make_log: MakeLog) -> None:
    log = make_log()
    batches = [
        log.append(batch_of(rows, 1, level=AckLevel.MEMORY), lamport=7 * rows, source=Source.REPLICA)
        for rows in (3, 1, 4)
    ]
    make_visible(log)
    assert [logged.offset for logged in batches] == [0, 3, 4]
    assert (log.start_offset, log.next_offset, log.epoch, len(log.log_id)) == (0, 8, 1, 16)
    for logged, read_back in zip(batches, log.read(0, **EVERYTHING), strict=True):
        assert (read_back.offset, read_back.lamport, read_back.source) == (
            logged.offset,
            logged.lamport,
            logged.source,
        )
        assert bytes(read_back.batch.body) == bytes(logged.batch.body)


@LOGS
def test_read_starts_at_the_containing_batch_and_stops_at_bounds(make_log: MakeLog) -> None:
    log = make_log()
    for _ in range(4):
        append(log, 10)
    make_visible(log)
    size = batch_of(10).size
    assert read_offsets(log, 0) == [0, 10, 20, 30]
    assert read_offsets(log, 15) == [10, 20, 30]
    assert read_offsets(log, 0, rows_max=29) == [0, 10]
    assert read_offsets(log, 0, bytes_max=2 * size) == [0, 10]
    assert read_offsets(log, 39, rows_max=1, bytes_max=1) == [30]
    assert read_offsets(log, 40) == read_offsets(log, 99) == []


@LOGS
def test_appended_rows_are_read_back_before_they_are_visible(make_log: MakeLog) -> None:
    log = make_log()
    for rows in (10, 10):
        append(log, rows)
    make_visible(log)
    batches = [(append(log, rows), rows) for rows in (3, 1, 4)]

    def read_back(offset: int, rows_max: int = 1) -> list[tuple[int, int]]:
        found_batches = log.read_appended(offset, rows_max=rows_max, bytes_max=1 << 20)
        return [(logged.offset, logged.count) for logged in found_batches]

    assert batches == [(20, 3), (23, 1), (24, 4)]
    assert [read_back(offset) for offset in (0, 9, 19, 22, 27)] == [
        [(0, 10)],
        [(0, 10)],
        [(10, 10)],
        [batches[0]],
        [batches[2]],
    ]
    assert read_back(log.next_offset) == read_back(log.next_offset + 5) == []
    assert read_back(20, rows_max=99) == batches
    make_visible(log)
    assert read_back(20, rows_max=99) == batches
    body = log.read_appended(23, rows_max=1, bytes_max=1)[0].batch.body
    assert bytes(body) == bytes(log.read(23, rows_max=1, bytes_max=1)[0].batch.body)


@LOGS
def test_reading_back_dropped_rows_is_refused(make_log: MakeLog) -> None:
    log = make_log()
    while log.start_offset == 0:
        append(log, 10)
        make_visible(log)
    end = append(log, 10)
    with pytest.raises(Refused) as caught:
        log.read_appended(log.start_offset - 1, rows_max=1, bytes_max=1)
    assert caught.value.code is ErrorCode.CURSOR_TOO_OLD
    assert [logged.offset for logged in log.read_appended(end + 9, rows_max=1, bytes_max=1)] == [end]


@LOGS
def test_ack_level_above_the_logs_own_is_refused(make_log: MakeLog) -> None:
    log = make_log()
    batch = batch_of(1, level=AckLevel(log.ack_level + 1))
    with pytest.raises(Refused, match="requested, but") as caught:
        log.append(batch, lamport=1, source=Source.LOCAL)
    assert caught.value.code is ErrorCode.LEVEL_UNAVAILABLE
    assert log.next_offset == 0
    assert log.append(batch, lamport=1, source=Source.REPLICA).offset == 0


@LOGS
def test_refusal_of_several_batches_judges_them_together(make_log: MakeLog) -> None:
    log = make_log()
    log.hold("sink", lambda: 0)
    assert log.refusal(batch_of(2, level=AckLevel.MEMORY), batch_of(3, level=AckLevel.MEMORY)) is None
    refusal = log.refusal(batch_of(2, level=AckLevel.MEMORY), batch_of(1, level=AckLevel(log.ack_level + 1)))
    assert isinstance(refusal, Refused)
    assert refusal.code is ErrorCode.LEVEL_UNAVAILABLE
    batches = [batch_of(2, level=AckLevel.MEMORY)]
    while log.refusal(*batches) is None:
        batches.append(batch_of(2, level=AckLevel.MEMORY))
    assert log.refusal(*batches[:-1]) is None
    assert not log.make_capacity_for(batches)
    assert log.make_capacity_for(batches[:-1])
    assert log.next_offset == 0


@LOGS
def test_full_log_names_its_holder_and_evicts_evictable_ones(make_log: MakeLog) -> None:
    log = make_log()
    evicted: list[str] = []
    log.hold("sink", lambda: 0)
    with pytest.raises(Refused) as caught:
        _fill(log)
    assert caught.value.code is ErrorCode.LOG_FULL
    assert caught.value.retry_after_ms
    assert caught.value.details["blocked_by"] == "sink"
    assert "'sink'" in caught.value.message
    assert log.used_share(0) > 0.9
    assert 0 < log.used_share(log.next_offset - 1) < 0.1
    assert log.used_share(log.next_offset) == 0
    assert log.capacity_refusal(2, batch_of(2).size) is not None
    log.release("sink")
    log.hold("subscriber", lambda: 0, lambda: evicted.append("subscriber"))
    end = log.next_offset
    append(log)
    assert (log.next_offset, evicted) == (end + 2, ["subscriber"])
    make_visible(log)
    with pytest.raises(Refused) as caught:
        log.read(0, **EVERYTHING)
    assert caught.value.code is ErrorCode.CURSOR_TOO_OLD
    assert caught.value.details == {"offset": 0, "start_offset": log.start_offset}


def _fill(log: Log) -> None:
    while True:
        append(log)
        make_visible(log)


@LOGS
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(50, 150)),
            st.tuples(st.sampled_from(["hold", "hold, evictable", "release", "advance"]), st.integers(0, 2)),
        ),
        max_size=60,
    )
)
def test_held_rows_stay_and_the_bounds_hold(make_log: MakeLog, steps: list[tuple[str, int]]) -> None:
    log = make_log()
    holders: dict[str, int] = {}
    evictable: set[str] = set()
    refusals: list[ErrorCode] = []
    for step, amount in steps:
        name = f"sink-{amount % 3}"
        if step == "append":
            try:
                append(log, amount)
            except Refused as refusal:
                refusals.append(refusal.code)
                assert holders.keys() - evictable, "only a holder that cannot be evicted may cause a refusal"
            make_visible(log)
        elif step in ("hold", "hold, evictable") and name not in holders:
            holders[name] = log.start_offset
            if step == "hold, evictable":
                evictable.add(name)
                log.hold(name, lambda name=name: holders[name], lambda name=name: _forget(holders, name))
            else:
                evictable.discard(name)  # an earlier holder of this name may have been evictable
                log.hold(name, lambda name=name: holders[name])
        elif step == "release":
            _forget(holders, name)
            evictable.discard(name)
            log.release(name)
        elif name in holders:
            holders[name] = min(holders[name] + 500, log.next_offset)
        assert all(offset >= log.start_offset for offset in holders.values())
        assert log.used_share(log.start_offset) <= 1
        offsets = read_offsets(log, log.start_offset)
        assert not offsets or offsets[0] == log.start_offset
    assert set(refusals) <= {ErrorCode.LOG_FULL}
    assert isinstance(log, MemoryLog | DurableLog)
    assert log.statistics().bytes <= log.statistics().bytes_max


def _forget(holders: dict[str, int], name: str) -> None:
    holders.pop(name, None)


@LOGS
def test_log_without_a_snapshot_says_so(make_log: MakeLog) -> None:
    log = make_log()
    append(log)
    assert log.snapshot() is None
    if isinstance(log, MemoryLog):
        assert not log.may_have_snapshot()
