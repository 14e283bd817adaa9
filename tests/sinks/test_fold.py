"""Folds at once: resident vectors and cache have each delta as soon as it is applied, with either core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks import CacheSink, Delivery, ResidentVectors, StopSink
from delta_prop_sinks.vector_table import VectorTable, fold_leading
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import (
    Delta,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch
from tests.native_core import needs_native_core
from tests.sinks.strategies import batches, logs
from tests.sinks.support import FakeLog, apply_all, check_state, oracle

if TYPE_CHECKING:
    from delta_prop_wire.delta import Operation

MODES = [pytest.param("native", marks=needs_native_core), "python"]


def content_of(table: VectorTable) -> object:
    """Return all that a table holds, in a form that can be compared to the bit."""
    used = table.used
    return (
        table.slots.ids(0, used),
        len(table.slots),
        table.dimension,
        table.heads[:used].tolist(),
        table.forms[:used].tolist(),
        table.flags[:used].tolist(),
        None if table.matrix is None else table.matrix[:used].tobytes(),
        (table.data, table.metadata, table.ignored, table.extra_bytes_by_slot, table.size),
    )


def contents_of(tables: dict[str, VectorTable]) -> object:
    return {name: content_of(table) for name, table in tables.items()}


class Sinks:
    """Resident vectors and a cache of one core, and what each call of them left behind."""

    def __init__(self, mode: str, log: FakeLog, loaded: list[tuple[str, str]]) -> None:
        self.mode, self.log = mode, log
        with core_mode.switched(mode):
            self.resident, self.cache = ResidentVectors(), CacheSink(entries_max=4)
            self.resident.enter(log)
            anyio.run(self.cache.open, log)
            states = oracle(log.batches)
            for ref in loaded:
                if ref in states:
                    self.cache._put(ref, states[ref])

    def apply(self, delivery: Delivery) -> object:
        resident, cache = self.resident, self.cache
        with core_mode.switched(self.mode):
            folded = apply_all(resident, [delivery], self.log)
            assert cache.apply_now([delivery])
        cached = {ref: cache.peek(*ref) for ref in list(cache._entries.order)}
        statistics = resident.statistics()
        return (
            folded,
            contents_of(resident.tables),
            (statistics.folded, statistics.duplicates, statistics.ignored, statistics.bytes),
            (resident.lamport, resident.next_offset),
            {ref: state and (state.content, state.key, state.ignored) for ref, state in cached.items()},
            cache.statistics(),
        )


@needs_native_core
@settings(max_examples=150, deadline=None)
@given(data=st.data(), log=logs(), early=st.integers(0, 2))
def test_both_cores_fold_equally(data: st.DataObject, log: FakeLog, early: int) -> None:
    """Each core gets the same deliveries: selections of rows, duplicates, batches out of order."""
    refs = [("default", "a"), ("default", "b"), ("other", "c")]
    before = FakeLog()
    for namespace, name in refs[:early]:
        before.append(Delta(name, create([1, 2, 3]), namespace))
    native, twin = (Sinks(mode, before, refs) for mode in ("native", "python"))
    for sinks in (native, twin):
        sinks.log = log
    for logged in log.batches:
        assert native.apply(Delivery(logged)) == twin.apply(Delivery(logged))
        older = data.draw(st.sampled_from([None, *log.batches]))
        if older is not None and older.offset <= logged.offset:
            # Of a batch that is applied, any rows may be delivered again.
            rows = sorted(data.draw(st.sets(st.integers(0, older.count - 1), min_size=1)))
            delivery = Delivery(older, np.array(rows, np.intp), redelivered=True)
            assert native.apply(delivery) == twin.apply(delivery)
        if data.draw(st.booleans()) and (tables := native.resident.tables):
            namespace = data.draw(st.sampled_from(sorted(tables)))
            slots = [slot for _, slot in tables[namespace].vectors()]
            for slot in data.draw(st.sets(st.sampled_from(slots))) if slots else ():
                for sinks in (native, twin):  # as an eviction does; a later delta creates the vector anew
                    sinks.resident.tables[namespace].release(slot)


TAKEN: dict[str, tuple[list[Delta], int]] = {
    "creates": ([Delta("v1", create([1, 2, 3])), Delta("v2", create([4, 5, 6]))], 2),
    "one new vector twice": ([Delta("v1", create([1, 2, 3])), Delta("v1", dense([4, 5, 6]))], 2),
    "all that changes numbers": (
        [
            Delta("a", sparse([2, 0, 2], [7, 8, 9])),
            Delta("a", sparse([], [])),
            Delta("a", sparse_add([1, 1], [2.5, -1])),
            Delta("a", scale(-2)),
            Delta("a", offset(0.5)),
            Delta("a", dense([3, 2, 1])),
        ],
        6,
    ),
    "sums that saturate": (
        [
            Delta("a", dense([3e38, -3e38, 1])),
            Delta("a", sparse_add([0, 1, 0], [3e38, -3e38, -1e38])),
            Delta("a", scale(3e38)),
            Delta("a", offset(3e38)),
        ],
        4,
    ),
    "deleted and created": ([Delta("a", delete()), Delta("a", create([1, 2, 3])), Delta("new", delete())], 3),
    "two namespaces": ([Delta("a", scale(2)), Delta("b", scale(3), "other"), Delta("a", offset(1))], 3),
    "index out of range": ([Delta("a", sparse([0], [1])), Delta("a", sparse([3], [1]))], 1),
    "sum out of range": ([Delta("a", sparse_add([0, 3], [1, 1]))], 0),
    "unknown vector": ([Delta("a", scale(2)), Delta("nobody", scale(2)), Delta("a", scale(2))], 1),
    "deleted vector": ([Delta("a", delete()), Delta("a", sparse([0], [1]))], 1),
    "other dimension": ([Delta("a", dense([1, 2]))], 0),
    "new vector of other dimension": ([Delta("v1", create([1, 2]))], 0),
    "opaque": ([Delta("v1", opaque(b"x"))], 0),
    "metadata": ([Delta("a", scale(2), metadata={"a": 1})], 0),
    "only metadata": ([Delta("a", metadata_only(), metadata={"a": 1})], 0),
    "change of bytes": ([Delta("bytes", dense([1, 2, 3]))], 0),
    "create over metadata": ([Delta("titled", create([1, 2, 3]))], 0),
    "delete of metadata": ([Delta("titled", delete())], 0),
    "dense over metadata": ([Delta("titled", dense([1, 2, 3])), Delta("titled", sparse([0], [1]))], 2),
}


@needs_native_core
@pytest.mark.parametrize("case", sorted(TAKEN))
def test_native_core_takes_leading_rows(case: str) -> None:
    deltas, expected = TAKEN[case]
    log = FakeLog()
    log.append(
        Delta("a", create([1, 2, 3])),
        Delta("b", create([1, 2, 3]), "other"),
        Delta("bytes", opaque(b"x")),
        Delta("titled", create([1, 2, 3]), metadata={"title": "t"}),
    )
    with core_mode.switched("native"):
        resident = ResidentVectors()
        resident.enter(log)
        apply_all(resident, log.deliveries(), log)
        logged = log.append(*deltas)
        tables = [resident.tables[name] for name in logged.batch.namespace_names]
        assert fold_leading(tables, logged, None, adds=True) == (expected, expected)
        # What was taken is newer than the batch now, so nothing is taken again.
        assert fold_leading(tables, logged, None, adds=True) == (0, 0)
        apply_all(resident, log.deliveries(), log)
    for ref, state in oracle(log.batches).items():
        check_state(resident.state(*ref), state, context=ref)


@needs_native_core
def test_without_adding_vectors_partial_changes_are_skipped() -> None:
    with core_mode.switched("native"):
        table, log = VectorTable("default"), FakeLog()
        table.fix_dimension(2)
        table.set_vector(table.slot_of("a"), np.ones(2, np.float32))
        deltas = [
            Delta("b", sparse([0], [1])),
            Delta("a", sparse([0], [7])),
            Delta("c", scale(2), "nowhere"),
            Delta("b", create([1, 2])),
            Delta("a", scale(2)),
        ]
        logged = log.append(*deltas)
        assert fold_leading([table, None], logged, None, adds=False) == (3, 1)
        assert fold_leading([table, None], logged, np.array([4]), adds=False) == (1, 1)
    assert table.matrix is not None
    assert table.matrix[0].tolist() == [14, 2]
    assert len(table.slots) == 1


@needs_native_core
def test_columns_that_are_too_small_are_left() -> None:
    with core_mode.switched("native"):
        table, log = VectorTable("default"), FakeLog()
        table.fix_dimension(1)
        logged = log.append(*(Delta(f"v{number}", create([number])) for number in range(20)))
        assert fold_leading([table], logged, None, adds=True) == (len(table.heads), len(table.heads))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(log=logs(), reads=st.lists(st.booleans(), min_size=40, max_size=40))
def test_reads_between_folds_see_the_folded_state(mode: str, log: FakeLog, reads: list[bool]) -> None:
    with core_mode.switched(mode):
        resident, cache = ResidentVectors(), CacheSink()
        resident.enter(log)
        anyio.run(cache.open, log)
        for position, delivery in enumerate(log.deliveries()):
            apply_all(resident, [delivery], log)
            cache.apply_now([delivery])
            if not reads[position % 40]:
                continue
            for ref, state in oracle(log.batches[: position + 1]).items():
                check_state(resident.state(*ref), state, context=ref)
                cached = cache.peek(*ref)
                if cached is not None:
                    check_state(cached, state, compare_ignored=False, context=ref)


@pytest.mark.parametrize("mode", MODES)
@given(contents=st.lists(batches, min_size=1, max_size=6), data=st.data())
def test_only_selected_rows_are_folded(mode: str, contents: list[list[Delta]], data: st.DataObject) -> None:
    log = FakeLog()
    for content in contents:
        log.append(*content)
    names = sorted({key for logged in log.batches for key in logged.batch.keys})
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    with core_mode.switched(mode):
        resident = ResidentVectors()
        resident.enter(log)
        for logged in log.batches:
            rows = [row for row, key in enumerate(logged.batch.keys) if key in chosen]
            if rows:
                apply_all(resident, [Delivery(logged, np.array(rows, np.intp))], log)
    states = {ref: state for ref, state in oracle(log.batches).items() if ref[1] in chosen}
    assert {ref[:2] for ref in resident.rows()} == states.keys()
    for ref, state in states.items():
        check_state(resident.state(*ref), state, context=ref)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", [dense([5, 6]), create([7, 8])])
def test_vectors_that_change_dimension_are_folded_like_the_oracle(mode: str, operation: Operation) -> None:
    log = FakeLog()
    log.append(Delta("a", create([1, 2])), Delta("b", create([3, 4]), metadata={"n": 1}))
    log.append(Delta("a", dense([5, 6])), Delta("c", create([7, 8])))
    log.append(Delta("b", dense([1, 2, 3])))
    log.append(Delta("b", operation), Delta("a", operation))
    with core_mode.switched(mode):
        resident = ResidentVectors()
        resident.enter(log)
        apply_all(resident, log.deliveries(), log)
    for ref, state in oracle(log.batches).items():
        check_state(resident.state(*ref), state, context=ref)


@pytest.mark.parametrize("mode", MODES)
def test_exceeding_the_bound_stops_the_next_call(mode: str) -> None:
    with core_mode.switched(mode):
        log, resident = FakeLog(), ResidentVectors()
        resident.enter(log)
        apply_all(resident, [Delivery(log.append(Delta("v", create([1, 2, 3]))))], log)
        resident.resident_bytes_max = resident.size
        apply_all(resident, [Delivery(log.append(Delta("v", scale(2))))], log)
        assert not resident.is_full
        apply_all(resident, [Delivery(log.append(Delta("w", create([1, 2, 3]))))], log)
        assert resident.is_full
        with pytest.raises(StopSink, match="resident_bytes_max"):
            apply_all(resident, [Delivery(log.append(Delta("w", scale(2))))], log)


def test_forwarded_rows_and_all_later_ones_are_in_chains() -> None:
    log = FakeLog()
    resident = ResidentVectors()
    resident.enter(log)
    log.append(Delta("v1", create([1, 2])))
    log.forward(encode_batch([Delta("v1", sparse([0], [2.0]))], origin=99, base=1), lamport=log.lamport + 5)
    log.append(Delta("v1", sparse([0], [3.0])))
    apply_all(resident, log.deliveries(), log)
    chain: Any = resident.chains.get(("default", "v1"))
    assert len(chain.entries) == 2
    assert resident.statistics().folded == log.next_offset


@needs_native_core
@pytest.mark.parametrize(("lamport", "offset", "taken"), [(1, 0, 1), (2, 0, 0), (1, 1, 0), (9, -1, 0)])
def test_rows_not_newer_than_the_head_are_left(lamport: int, offset: int, taken: int) -> None:
    """The row has offset 1 and Lamport number 2; another log may have had lower offsets."""
    with core_mode.switched("native"):
        table, log = VectorTable("default"), FakeLog()
        table.set_vector(table.slot_of("a"), np.ones(2, np.float32))
        table.set_head(0, lamport, 7, 1, offset)
        log.append(Delta("b", create([1, 2])))
        logged = log.append(Delta("a", scale(2)))
        assert fold_leading([table], logged, None, adds=True) == (taken, taken)
