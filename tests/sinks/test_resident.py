"""ResidentVectors against the algebra's fold: redelivered and late rows, fast and slow path, two sinks.

A late delta is a forwarded one that sorts before a delta of its vector that is folded already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_sinks import Delivery, RejectDelta, ResidentVectors, StopSink
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import (
    Delta,
    Kind,
    Operation,
    Source,
    create,
    delete,
    offset,
    scale,
    sparse,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.state_rows import encode_states
from tests.sinks.strategies import logs
from tests.sinks.support import LOG_ID, FakeLog, apply_all, check_state, oracle, states_at

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_resident(log: FakeLog, **settings: Any) -> ResidentVectors:
    resident = ResidentVectors(**settings)
    resident.enter(log)
    return resident


def check(resident: ResidentVectors, batches: Sequence[LoggedBatch]) -> None:
    expected = oracle(batches)
    actual = {(namespace, vector_id): state for namespace, vector_id, state in resident.rows()}
    assert actual.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(actual[ref], state, context=ref)


@given(log=logs(), data=st.data())
def test_any_history_with_duplicates_equals_the_fold(log: FakeLog, data: st.DataObject) -> None:
    resident = make_resident(log)
    end = 0
    while end < len(log.batches):
        start = data.draw(st.integers(0, end))
        end = data.draw(st.integers(end + 1, len(log.batches)))
        apply_all(resident, [Delivery(logged) for logged in log.batches[start:end]], log)
    check(resident, log.batches)
    assert resident.lamport == log.lamport


@given(log=logs(), data=st.data())
def test_any_selection_of_rows_equals_the_fold(log: FakeLog, data: st.DataObject) -> None:
    resident = make_resident(log)
    for logged in log.batches:
        rows_drawn = data.draw(st.sets(st.integers(0, logged.count - 1)))
        # Rows that a sink with other topics applied are duplicates for the next sink; no vector is split.
        names = {logged.batch.keys[row] for row in rows_drawn}
        for in_first_part in (True, False):
            rows = [row for row, key in enumerate(logged.batch.keys) if (key in names) is in_first_part]
            if not rows:  # a delivery without rows does not exist
                continue
            apply_all(resident, [Delivery(logged, np.array(rows, np.intp))], log)
    check(resident, log.batches)


@given(log=logs(with_forwarded=False))
def test_batches_at_once_equal_the_fold(log: FakeLog) -> None:
    resident = make_resident(log)
    apply_all(resident, log.deliveries(), log)
    check(resident, log.batches)


@pytest.mark.parametrize("operation", [scale(-7), offset(3e38), sparse_add([0, 0], [2e38, 1])])
def test_blocks_stay_within_float32_like_rows(operation: Operation) -> None:
    log = FakeLog()
    resident = make_resident(log)
    log.append(*(Delta(f"v{i}", create([3e38 if i % 2 else 1, -3e38, i])) for i in range(20)))
    log.append(*(Delta(f"v{i}", operation) for i in range(20)))
    apply_all(resident, log.deliveries(), log)
    check(resident, log.batches)


@given(log=logs(), paces=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=12))
def test_two_sinks_at_different_paces_fold_once(log: FakeLog, paces: list[tuple[bool, int]]) -> None:
    resident = make_resident(log)
    positions = {True: 0, False: 0}
    for sink, step in [*paces, (True, 99), (False, 99)]:
        batches = log.batches[positions[sink] : positions[sink] + step]
        apply_all(resident, [Delivery(logged) for logged in batches], log)
        positions[sink] += len(batches)
    check(resident, log.batches)
    statistics = resident.statistics()
    assert statistics.folded == log.next_offset
    assert statistics.duplicates == log.next_offset


@given(log=logs(), order=st.randoms(use_true_random=False))
def test_services_with_same_deltas_have_same_state(log: FakeLog, order: Any) -> None:
    resident = make_resident(log)
    apply_all(resident, log.deliveries(), log)
    other = FakeLog(b"other".ljust(16))
    shuffled = list(log.batches)
    order.shuffle(shuffled)
    for logged in shuffled:
        other.forward(logged.batch, logged.lamport)
    other_resident = make_resident(other, chain_bytes_max=order.choice([0, 5_000, 1 << 20]))
    apply_all(other_resident, other.deliveries(), other)
    check(resident, log.batches)
    check(other_resident, log.batches)


def forward_deltas(log: FakeLog, lamport: int, *deltas: Delta, counter: int | None = None) -> LoggedBatch:
    base = log.counters.get(0x30, 0) + 1 if counter is None else counter
    log.counters[0x30] = base + len(deltas) - 1
    return log.forward(encode_batch(deltas, origin=0x30, base=base), lamport)


def test_late_delta_is_folded_from_chain_without_the_log() -> None:
    log = FakeLog()
    resident = make_resident(log)
    forward_deltas(log, 1, Delta("a", create([1, 1])))
    log.append(Delta("a", sparse([0], [5])))
    forward_deltas(log, 1, Delta("a", sparse([0], [7])))
    log.history = None  # type: ignore[assignment,method-assign]
    apply_all(resident, log.deliveries(), log)
    check(resident, log.batches)
    assert resident.statistics().out_of_order == 1
    assert resident.statistics().refolded_from_log == 0


def test_first_late_delta_is_folded_from_the_log() -> None:
    log = FakeLog()
    resident = make_resident(log)
    log.append(Delta("a", create([1, 1])), Delta("a", sparse([0], [5])))
    forward_deltas(log, 1, Delta("a", sparse_add([0], [7])))
    apply_all(resident, log.deliveries(), log)
    check(resident, log.batches)
    assert resident.statistics().refolded_from_log == 1
    forward_deltas(log, 1, Delta("a", sparse_add([1], [7])))
    apply_all(resident, log.deliveries(), log)
    check(resident, log.batches)
    assert resident.statistics().refolded_from_log == 1


def test_late_delta_below_log_start_stops_unless_reset_later() -> None:
    log = FakeLog()
    resident = make_resident(log)
    log.append(Delta("a", create([1, 1])), Delta("b", create([1, 1])))
    log.append(Delta("b", create([2, 2])))
    log.append(Delta("a", sparse([0], [5])), Delta("b", sparse_add([1], [1])))
    apply_all(resident, log.deliveries(), log)
    log.log_start = 2
    late = forward_deltas(log, 3, Delta("b", sparse_add([0], [7])))
    apply_all(resident, [Delivery(late)], log)
    check(resident, log.batches)
    too_late = forward_deltas(log, 3, Delta("a", sparse([0], [7])))
    with pytest.raises(StopSink, match=r"needs snapshot: the delta at offset 6 .* vector 'a'"):
        apply_all(resident, [Delivery(too_late)], log)


def replace_prefix_by_states(log: FakeLog, end: int) -> None:
    """Replace the log's history before `end` by a snapshot, as if the rows before it were removed."""
    batch = encode_states(states_at(log, end))
    states = LoggedBatch(batch, 0, 0, Source.LOCAL)
    full_history, log.log_start = log.history, end

    async def history(vectors: Any) -> Any:
        for row, ref in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            if ref in vectors:
                yield states, row
        async for item in full_history(vectors):
            yield item

    log.history = history  # type: ignore[method-assign]


def test_late_delta_is_folded_onto_initial_state_of_log() -> None:
    log = FakeLog()
    resident = make_resident(log)
    log.append(Delta("a", create([1, 1])), Delta("a", sparse_add([0], [1])))
    middle = log.next_offset
    log.append(Delta("other", create([1, 1])), Delta("a", scale(3)))
    forward_deltas(log, 3, Delta("a", sparse_add([0], [7])))  # after the state, before the last delta
    apply_all(resident, log.deliveries()[:2], log)
    replace_prefix_by_states(log, middle)
    apply_all(resident, log.deliveries()[2:], log)
    check(resident, log.batches)
    assert resident.statistics().below_snapshot == 0
    before = resident.state("default", "a")
    for counter in (20, 21):  # the state before these deltas is no longer stored
        late = forward_deltas(log, 1, Delta("a", sparse_add([0], [100])), counter=counter)
        apply_all(resident, [Delivery(late)], log)
        apply_all(resident, [Delivery(late)], log)
    state = resident.state("default", "a")
    assert state is not None
    assert before is not None
    assert (state.content, state.key, state.ignored) == (before.content, before.key, 2)
    assert resident.statistics().below_snapshot == 2
    apply_all(resident, [Delivery(log.append(Delta("a", sparse_add([1], [1]))))], log)
    state = resident.state("default", "a")
    assert state is not None
    assert state.vector is not None
    assert state.vector.tolist() == [27.0, 4.0]  # (2 + 7) * 3, 1 * 3 + 1


def test_state_ahead_of_sink_makes_its_rows_duplicates() -> None:
    log = FakeLog()
    resident = make_resident(log)
    log.append(Delta("a", create([1, 1])))
    log.append(Delta("b", create([1, 1])), Delta("a", sparse_add([0], [1])))
    forward_deltas(log, 2, Delta("a", sparse_add([1], [5])))
    log.append(Delta("a", scale(2)))
    end = log.next_offset
    log.append(Delta("a", sparse_add([0], [1])))
    apply_all(resident, log.deliveries()[:2], log)
    replace_prefix_by_states(log, end)
    apply_all(resident, log.deliveries()[2:3], log)
    check(resident, [logged for logged in log.batches if logged.next_offset <= end])
    apply_all(resident, log.deliveries()[3:], log)
    check(resident, log.batches)


def test_new_log_needs_snapshot_for_late_but_not_duplicate() -> None:
    old = FakeLog()
    resident = make_resident(old)
    first = forward_deltas(old, 5, Delta("a", create([1, 1])))
    apply_all(resident, old.deliveries(), old)
    new = FakeLog(b"n" * 16, lamport=old.lamport)
    resident.enter(new)
    duplicate = new.forward(first.batch, first.lamport)
    apply_all(resident, [Delivery(duplicate)], new)
    check(resident, old.batches)
    new.append(Delta("a", sparse([0], [3])))
    late = forward_deltas(new, 1, Delta("a", sparse([0], [2])), counter=9)
    with pytest.raises(StopSink, match="needs snapshot"):
        apply_all(resident, [Delivery(new.batches[1]), Delivery(late)], new)


def test_chains_are_bounded_in_bytes_and_idle_time() -> None:
    log = FakeLog()
    resident = make_resident(log, chain_bytes_max=200_000)
    forward_deltas(log, 1, Delta("z", create([0])))
    log.append(*(Delta(f"v{i}", create([i])) for i in range(200)))
    for delivery in log.deliveries():
        apply_all(resident, [delivery], log)
    assert resident.statistics().chains == 201
    log.clock.time = 40.0
    for _ in range(100):
        log.append(Delta("z", sparse([0], [1])))
    apply_all(resident, log.deliveries(201), log)
    statistics = resident.statistics()
    assert 50 < statistics.chains < 201, "too few or too many chains were dropped at the bound"
    assert statistics.chain_bytes <= 200_000
    assert resident.chains.get(("default", "z")) is not None
    log.clock.time = 61.0
    apply_all(resident, [], log)
    assert resident.statistics().chains == 1, (
        "the chain of a vector with new deltas was dropped, or an idle one stayed"
    )
    log.clock.time = 101.0
    apply_all(resident, [], log)
    assert resident.statistics().chains == 0
    assert resident.statistics().chain_bytes == 0


def test_too_long_chain_loses_its_oldest_deltas() -> None:
    log = FakeLog()
    resident = make_resident(log, chain_bytes_max=100_000)
    forward_deltas(log, 1, Delta("z", create([0])))
    for number in range(500):
        log.append(Delta("z", sparse_add([0], [number])))
        apply_all(resident, log.deliveries(number), log)
        statistics = resident.statistics()
        assert statistics.chains == 1
        assert statistics.chain_bytes <= 100_000
    log.history = None  # type: ignore[assignment,method-assign]
    forward_deltas(log, 480, Delta("z", scale(3)))
    apply_all(resident, log.deliveries(501), log)
    check(resident, log.batches)


def test_only_unfoldable_delta_is_rejected() -> None:
    log = FakeLog()
    resident = make_resident(log)
    unknown = Operation(40, data=b"new")
    log.append(Delta("a", create([1, 2])), Delta("b", unknown), Delta("c", create([3, 4])))
    with pytest.raises(RejectDelta, match="'b': operation kind 40 is unknown here") as caught:
        apply_all(resident, log.deliveries(), log)
    assert caught.value.offset == 1
    rest = np.array([2], np.intp)
    apply_all(resident, [Delivery(log.batches[0], rest)], log)
    assert {vector_id for _, vector_id, _ in resident.rows()} == {"a", "c"}


def test_memory_bound_stops_sink_that_cannot_evict() -> None:
    log = FakeLog()
    resident = make_resident(log, resident_bytes_max=5_000)
    log.append(*(Delta(f"v{i}", create([1, 2, 3, 4])) for i in range(40)))
    apply_all(resident, log.deliveries(), log)
    log.append(Delta("more", create([1, 2, 3, 4])))
    with pytest.raises(StopSink, match="the bound is 5000: raise resident_bytes_max"):
        apply_all(resident, log.deliveries(40), log)


def test_size_follows_content_of_slots() -> None:
    log = FakeLog()
    resident = make_resident(log)
    empty = resident.size
    log.append(
        Delta("a", create([1]), metadata={"k": "v" * 1000}),
        Delta("b", Operation(Kind.OPAQUE, data=b"x" * 5000)),
    )
    apply_all(resident, log.deliveries(), log)
    assert resident.size > empty + 6000
    log.append(Delta("a", create([1])), Delta("b", delete()))
    apply_all(resident, log.deliveries(), log)
    assert resident.size < empty + 3000
    assert resident.tables["default"].extra_bytes == 0


def test_log_of_the_same_id_keeps_offsets() -> None:
    log = FakeLog()
    resident = make_resident(log)
    log.append(Delta("a", create([1])), Delta("a", sparse_add([0], [1])))
    apply_all(resident, log.deliveries(), log)
    resident.enter(FakeLog(LOG_ID))
    apply_all(resident, log.deliveries(), log)
    check(resident, log.batches)
    assert resident.statistics().duplicates == 2
