"""The capacity of a MemoryLog: the share of it that rows use, and the holders that a full log evicts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.log.memory import MemoryLog
from delta_prop_broker.log.stored_batches import weight
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_vectors
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

LOG_ID = bytes(range(16))
DELTAS_MAX = 10
BATCHES = {
    count: encode_vectors(
        [f"v{row}" for row in range(count)],
        np.ones((count, 1), np.float32),
        namespace="default",
        origin=1 << 20,
        base=1,
    )
    for count in range(1, 8)
}


def append(log: MemoryLog, count: int) -> None:
    log.append(BATCHES[count], lamport=log.next_offset + 1, source=Source.LOCAL)


# --- used share


def test_used_share_is_the_larger_of_deltas_and_bytes() -> None:
    size = weight(BATCHES[2])
    by_deltas = MemoryLog(LOG_ID, deltas_max=10, bytes_max=100 * size)
    by_bytes = MemoryLog(LOG_ID, deltas_max=1_000, bytes_max=4 * size)
    for log in (by_deltas, by_bytes):
        append(log, 2)
        append(log, 2)
    assert [by_deltas.used_share(offset) for offset in (0, 1, 2, 3, 4, 9)] == [0.4, 0.3, 0.2, 0.1, 0, 0]
    # Bytes are counted by complete batches.
    assert [by_bytes.used_share(offset) for offset in (0, 1, 2, 3, 4)] == [0.5, 0.5, 0.25, 0.25, 0]


def test_dropped_rows_take_no_share() -> None:
    log = MemoryLog(LOG_ID, deltas_max=4)
    for _ in range(10):
        append(log, 1)
    assert log.start_offset == 6
    assert log.used_share(0) == log.used_share(6) == 1
    assert log.used_share(8) == 0.5


# --- evicted holders


def test_evictable_holder_is_evicted_before_an_append_is_refused() -> None:
    log, evicted = MemoryLog(LOG_ID, deltas_max=4), []
    log.hold("snapshots", lambda: 0, lambda: evicted.append(log.next_offset))
    log.hold("quick", lambda: log.next_offset)
    for _ in range(4):
        append(log, 1)
    assert evicted == []
    append(log, 1)
    assert evicted == [4]  # before the append, once
    append(log, 1)
    assert evicted == [4]
    assert (log.start_offset, log.next_offset) == (2, 6)
    assert log.statistics().refused == 0


@pytest.mark.parametrize("first", ["evictable", "required"])
def test_no_holder_is_evicted_if_the_log_stays_full(first: str) -> None:
    log, evicted = MemoryLog(LOG_ID, deltas_max=4), []
    holders = {"evictable": lambda: evicted.append(1), "required": None}
    for name in (first, *(name for name in holders if name != first)):
        log.hold(name, lambda: 0, holders[name])
    for _ in range(4):
        append(log, 1)
    assert isinstance(log.capacity_refusal(1, 0), Refused)
    with pytest.raises(Refused) as caught:
        append(log, 1)
    assert caught.value.code is ErrorCode.LOG_FULL
    assert evicted == []
    log.release("required")
    append(log, 1)
    assert evicted == [1]


def test_only_as_many_holders_are_evicted_as_needed() -> None:
    log, evicted = MemoryLog(LOG_ID, deltas_max=6), []
    for name, offset in (("far", 0), ("middle", 2), ("near", 4)):
        log.hold(name, lambda offset=offset: offset, lambda name=name: evicted.append(name))  # type: ignore[misc]
    for _ in range(3):
        append(log, 2)
    append(log, 1)
    assert evicted == ["far"]
    append(log, 1)
    assert evicted == ["far"]
    append(log, 2)
    assert evicted == ["far", "middle"]


# --- against a model


@dataclass
class Model:
    """The rules of a log's capacity over lists: when it is short, rows that no holder needs are dropped."""

    batches: list[tuple[int, int]] = field(default_factory=list)  # offset and count of each stored batch
    end: int = 0
    holders: dict[str, tuple[int, bool]] = field(default_factory=dict)  # oldest needed offset, is evictable
    evicted: list[str] = field(default_factory=list)

    def stored_count(self) -> int:
        return sum(count for _, count in self.batches)

    def count_above(self, floor: int) -> int:
        """Return the number of rows in batches that do not end at or below `floor`."""
        return sum(count for start, count in self.batches if start + count > floor)

    def append(self, count: int) -> bool:
        while self.stored_count() + count > DELTAS_MAX:
            floor = min((offset for offset, _ in self.holders.values()), default=self.end)
            if self.batches[0][0] + self.batches[0][1] <= floor:
                self.batches.pop(0)
                continue
            required_floor = min(
                (offset for offset, is_evictable in self.holders.values() if not is_evictable),
                default=self.end,
            )
            if self.count_above(required_floor) + count > DELTAS_MAX:
                return False
            name = min(self.holders, key=lambda name: self.holders[name][0])
            del self.holders[name]
            self.evicted.append(name)
        self.batches.append((self.end, count))
        self.end += count
        return True


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 7), st.booleans()),
        st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans()),
        st.tuples(st.just("release"), st.integers(0, 2), st.booleans()),
    ),
    max_size=60,
)


@given(STEPS)
def test_capacity_is_freed_as_in_the_model(steps: list[tuple[str, int, bool]]) -> None:
    log, model, evicted = MemoryLog(LOG_ID, deltas_max=DELTAS_MAX), Model(), []
    for step, amount, is_evictable in steps:
        if step == "append":
            has_capacity = log.capacity_refusal(amount, BATCHES[amount].size) is None
            with nullcontext() if has_capacity else pytest.raises(Refused, match="LOG_FULL"):
                append(log, amount)
            assert model.append(amount) == has_capacity
        elif step == "release":
            log.release("abc"[amount])
            model.holders.pop("abc"[amount], None)
        else:  # hold, or hold from a later offset
            offset = min(log.start_offset + amount, log.next_offset)
            log.release(step)
            model.holders.pop(step, None)
            log.hold(
                step,
                lambda offset=offset: offset,  # type: ignore[misc]
                (lambda step=step: evicted.append(step)) if is_evictable else None,  # type: ignore[misc]
            )
            model.holders[step] = (offset, is_evictable)
        assert evicted == model.evicted
        assert log.next_offset == model.end
        assert log.start_offset == (model.batches[0][0] if model.batches else model.end)
        for offset in range(log.start_offset, log.next_offset):
            assert log.used_share(offset) == (log.next_offset - offset) / DELTAS_MAX
