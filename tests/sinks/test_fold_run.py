"""FoldRun: small batches folded together give the same as batches folded one by one, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks import CacheSink, Delivery, ResidentVectors, StopSink, fold_run
from delta_prop_sinks import vector_table as table_module
from delta_prop_sinks.fold_run import ROWS_MAX
from delta_prop_sinks.vector_table import VectorTable, heads_of
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Dot, KnownIds, Source, create, delete, dense, scale, sparse
from delta_prop_wire.encode import encode_batch
from tests.sinks.strategies import logs
from tests.sinks.support import FakeLog, apply_all, check_state, oracle

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.delta import Operation

OPERATIONS = {
    "create": lambda number: create([number, 1, 2]),
    "dense": lambda number: dense([number, 3, 4]),
    "sparse": lambda number: sparse([0, 2], [number, 0.5]),
    "nothing": lambda _: sparse([], []),
    "scale": scale,
    "delete": lambda _: delete(),
}
PARTS = st.lists(
    st.tuples(
        st.sampled_from(sorted(OPERATIONS)),
        st.lists(st.integers(0, 6), min_size=1, max_size=8),
        st.sampled_from(["", "", "", "other", "metadata", "replica"]),
    ),
    min_size=1,
    max_size=12,
)


def log_of(parts: list[tuple[str, list[int], str]]) -> FakeLog:
    """Return a log with a batch for each part: (operation, numbers of the vectors, variant)."""
    log, forwarded = FakeLog(), 0
    for number, (kind, keys, variant) in enumerate(parts, 1):
        operation = OPERATIONS[kind](float(number))
        deltas = [
            Delta(
                f"v{key}",
                operation,
                namespace="other" if variant == "other" else "default",
                metadata={"n": number} if variant == "metadata" else None,
            )
            for key in keys
        ]
        if variant == "replica":
            log.forward(encode_batch(deltas, origin=99, base=forwarded + 1), lamport=max(log.lamport - 3, 1))
            forwarded += len(deltas)
        else:
            log.append(*deltas)
    return log


@given(PARTS, st.integers(0, 10))
def test_folding_in_runs_equals_folding_one_by_one(
    parts: list[tuple[str, list[int], str]], redelivered: int
) -> None:
    log = log_of(parts)
    resident = ResidentVectors()
    resident.enter(log)
    deliveries = log.deliveries()
    apply_all(resident, deliveries[: redelivered + 1], log)
    apply_all(resident, deliveries, log)  # partly duplicates
    expected = oracle(log.batches)
    for (namespace, vector_id), state in expected.items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)
    assert resident.lamport == log.lamport
    assert resident.next_offset == log.next_offset


@given(PARTS)
def test_runs_fold_only_selected_rows(parts: list[tuple[str, list[int], str]]) -> None:
    """A selection holds all rows of a vector or none, as a late delta folds the vector's rows of the log."""
    log = log_of(parts)
    selected = [
        Delivery(
            delivery.logged,
            np.array(
                [row for row, key in enumerate(delivery.logged.batch.keys) if int(key[1:]) % 2], np.intp
            ),
        )
        for delivery in log.deliveries()
    ]
    selected = [delivery for delivery in selected if delivery.count]
    together, single = ResidentVectors(), ResidentVectors()
    for resident in (together, single):
        resident.enter(log)
    apply_all(together, selected, log)
    for delivery in selected:
        apply_all(single, [delivery], log)
    expected = {(namespace, vector_id): state for namespace, vector_id, state in single.rows()}
    actual = {(namespace, vector_id): state for namespace, vector_id, state in together.rows()}
    assert actual.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(actual[ref], state, context=ref)


def make_resident(**settings: int) -> tuple[FakeLog, ResidentVectors]:
    log = log_of([("create", list(range(20)), "")])
    resident = ResidentVectors(**settings)
    resident.enter(log)
    apply_all(resident, log.deliveries(), log)
    return log, resident


def buffered_rows(resident: ResidentVectors) -> int:
    return resident._fold_buffer.row_count


def append_number(log: FakeLog, key: int, number: float) -> list[Delivery]:
    return [Delivery(log.append(Delta(f"v{key}", sparse([0], [number]))))]


def test_rows_are_buffered_until_bound_or_read() -> None:
    log, resident = make_resident()
    for number in range(1, ROWS_MAX + 10):
        apply_all(resident, append_number(log, number % 20, float(number)), log)
        assert buffered_rows(resident) == number % ROWS_MAX
        assert resident.next_offset == log.next_offset
        assert resident.lamport == log.lamport
    apply_all(resident, append_number(log, 3, 4321.0), log)
    state = resident.state("default", "v3")
    assert state is not None
    assert state.vector is not None
    assert state.vector[0] == 4321.0
    assert buffered_rows(resident) == 0


ORDINARY = encode_batch([Delta("v1", sparse([0], [1.0]))], origin=7, base=1)
NOT_BUFFERABLE: dict[str, Delivery] = {
    "redelivered": Delivery(LoggedBatch(ORDINARY, 0, 1, Source.LOCAL), redelivered=True),
    "forwarded": Delivery(LoggedBatch(ORDINARY, 0, 1, Source.REPLICA)),
    "duplicate id": Delivery(LoggedBatch(ORDINARY, 0, 1, Source.LOCAL, known_ids=KnownIds.ALL)),
    "with metadata": Delivery(
        LoggedBatch(
            encode_batch([Delta("v1", sparse([0], [1.0]), metadata={"a": 1})], origin=7, base=1),
            0,
            1,
            Source.LOCAL,
        )
    ),
    "two namespaces": Delivery(
        LoggedBatch(
            encode_batch(
                [Delta("v1", sparse([0], [1.0])), Delta("v1", sparse([0], [1.0]), namespace="other")],
                origin=7,
                base=1,
            ),
            0,
            1,
            Source.LOCAL,
        )
    ),
    "not only numbers": Delivery(
        LoggedBatch(encode_batch([Delta("v1", delete())], origin=7, base=1), 0, 1, Source.LOCAL)
    ),
}


@pytest.mark.parametrize("case", sorted(NOT_BUFFERABLE))
def test_buffer_holds_only_ordinary_rows(case: str) -> None:
    buffer = fold_run.FoldBuffer(fold_run.SETTING_KINDS)
    ordinary = Delivery(LoggedBatch(ORDINARY, 0, 1, Source.LOCAL))
    assert buffer.can_hold(ordinary)
    assert not buffer.can_hold(NOT_BUFFERABLE[case])
    assert not buffer.extend(ordinary)  # there is no run yet that it could extend
    assert buffer.add(ordinary, VectorTable("default"), 1)
    assert buffer.extend(ordinary)
    assert not buffer.extend(NOT_BUFFERABLE[case])


def test_row_of_other_namespace_does_not_extend_run() -> None:
    buffer = fold_run.FoldBuffer(fold_run.SETTING_KINDS)
    first, second = (
        Delivery(
            LoggedBatch(
                encode_batch([Delta("v", sparse([0], [1.0]), name)], origin=7, base=1), 0, 1, Source.LOCAL
            )
        )
        for name in ("default", "other")
    )
    assert buffer.add(first, VectorTable("default"), 1)
    assert not buffer.extend(second)


@pytest.mark.parametrize(
    "rows",
    [
        [(5, 1, 0, 1), (5, 2, 1, 2), (5, 3, 2, 3)],
        [(5, 1, 0, 1), (5, 2, 1, 2), (5, 3, 4, 3)],
        [(5, 1, 0, 1), (5, 2, 1, 2), (5, 3, 2, 9)],
        [(5, 1, 0, 1), (5, 2, 1, 2), (5, 9, 2, 3)],
        [(5, 1, 0, 1), (1 << 63, 7, 1, 2), (5, 3, 2, 3)],
    ],
)
def test_heads_of_run_equal_those_of_its_rows(rows: list[tuple[int, int, int, int]]) -> None:
    """In each case, at most one of origin, counter, offset and Lamport number breaks the rows' sequence."""
    run = fold_run.FoldRun(VectorTable("default"), ORDINARY.kind or 0, ORDINARY.values_per_row or 0)
    for origin, base, offset, lamport in rows:
        batch = encode_batch([Delta("v", sparse([0], [1.0]))], origin=origin, base=base)
        run.deliveries.append(Delivery(LoggedBatch(batch, offset, lamport, Source.LOCAL)))
        run.count += 1
    assert run.heads.tolist() == [
        row for delivery in run.deliveries for row in heads_of(delivery.logged, None).tolist()
    ]


SINGLES = st.lists(
    st.tuples(
        st.sampled_from([5, 5, 5, 1 << 63]),  # the origin
        st.sampled_from([0, 0, 0, 3]),  # number of offsets skipped before it
        st.sampled_from([False, False, False, True]),  # True: with `expect`, a column that uniform rows lack
        st.sampled_from([1, 1, 1, 2]),  # number of rows
    ),
    min_size=1,
    max_size=9,
)


@given(SINGLES, st.integers(0, 5), st.sampled_from([sparse, dense]), st.sampled_from([9, 3]))
def test_run_equals_its_batches_concatenated(
    parts: list[tuple[int, int, bool, int]], width: int, make: Callable[..., Operation], steps_max: int
) -> None:
    width = max(width, 1) if make is dense else width
    table, buffer = VectorTable("default"), fold_run.FoldBuffer(fold_run.SETTING_KINDS)
    offset, bases = 0, {5: 1, 1 << 63: 1}
    for number, (origin, gap, has_expect, rows) in enumerate(parts):
        values = [number + 0.5] * width
        operation = sparse(range(number, number + width), values) if make is sparse else dense(values)
        delta = Delta("v", operation, expect=Dot(5, 1) if has_expect else None)
        batch = encode_batch([delta] * rows, origin=origin, base=bases[origin])
        offset, bases[origin] = offset + gap, bases[origin] + rows
        delivery = Delivery(LoggedBatch(batch, offset, offset + 1, Source.LOCAL))
        offset += rows
        if not buffer.extend(delivery):
            assert buffer.add(delivery, table, rows)
    (run,) = buffer._runs.values()
    batches = [delivery.logged for delivery in run.deliveries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "_STEPS_MAX", steps_max)
        assert run.heads.tolist() == [row for logged in batches for row in heads_of(logged, None).tolist()]
    assert run.values.reshape(-1).tolist() == [
        number for logged in batches for number in logged.batch.values.tolist()
    ]
    indices = [index for logged in batches for index in logged.batch.indices.tolist()]
    if make is sparse:
        assert run.indices.reshape(-1).tolist() == indices
        assert run.highest_index == max(indices, default=0 if len(batches) > 1 else -1)
    assert run.keys == ["v"] * run.count


def test_buffered_bytes_are_bounded() -> None:
    log, resident = make_resident()
    size = append_number(log, 1, 1.0)[0].batch.size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_run, "BYTES_MAX", 3 * size)
        log, resident = make_resident()
        row_counts = []
        for key in range(6):
            apply_all(resident, append_number(log, key, 1.0), log)
            row_counts.append(buffered_rows(resident))
    assert row_counts == [1, 2, 0, 1, 2, 0]


READERS: dict[str, Callable[[ResidentVectors], object]] = {
    "state": lambda resident: resident.state("default", "v1"),
    "head": lambda resident: resident.head("default", "v1"),
    "rows": lambda resident: list(resident.rows()),
    "tables": lambda resident: resident.tables,
    "size": lambda resident: resident.size,
    "touched": lambda resident: resident.take_touched(),
    "statistics": lambda resident: resident.statistics(),
    "rebuild": lambda resident: resident.begin_rebuild(FakeLog()),
}


@pytest.mark.parametrize("reader", sorted(READERS))
def test_every_reader_folds_buffered_rows(reader: str) -> None:
    log, resident = make_resident()
    apply_all(resident, append_number(log, 1, 7.0), log)
    assert buffered_rows(resident) == 1
    READERS[reader](resident)
    assert buffered_rows(resident) == 0
    state = resident.state("default", "v1")
    assert state is not None
    assert state.vector is not None
    assert state.vector[0] == 7.0


def test_unbufferable_row_is_folded_after_buffered_rows() -> None:
    log, resident = make_resident()
    for delta in (
        Delta("v1", sparse([0], [7.0])),
        Delta("v1", scale(2.0)),  # it sets no numbers: it changes the present ones
        Delta("v1", sparse([1], [3.0])),
        Delta("v1", dense([1, 1, 1])),  # of another kind, in the same table
        Delta("v1", sparse([0, 2], [5.0, 5.0])),  # of another width
        Delta("v2", delete()),
        Delta("v2", sparse([0], [9.0])),  # on a deleted vector
        Delta("v1", sparse([1], [8.0])),
        Delta("new", sparse([0], [9.0])),
    ):
        apply_all(resident, [Delivery(log.append(delta))], log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)


def test_no_row_is_buffered_after_forwarded_or_duplicate_rows() -> None:
    log, resident = make_resident()
    apply_all(resident, append_number(log, 1, 1.0), log)
    assert apply_all(resident, log.deliveries(), log) == 0  # only duplicates
    log.forward(encode_batch([Delta("v1", sparse([0], [2.0]))], origin=99, base=1), lamport=log.lamport + 5)
    apply_all(resident, log.deliveries(log.next_offset - 1), log)
    apply_all(resident, append_number(log, 1, 3.0), log)
    assert (
        buffered_rows(resident) == 0
    )  # each vector's deltas are kept one by one from here on, to be folded again
    assert resident.statistics().folded == log.next_offset


def test_no_row_is_buffered_when_capacity_is_used_up() -> None:
    _, resident = make_resident()
    capacity = resident.size + 1
    log, resident = make_resident(resident_bytes_max=capacity)
    for key in range(20, 30):
        deliveries = [Delivery(log.append(Delta(f"v{key}", create([1, 2, 3]))))]
        if resident.size > capacity:
            with pytest.raises(StopSink, match="resident_bytes_max"):
                apply_all(resident, deliveries, log)
            break
        apply_all(resident, deliveries, log)
        assert buffered_rows(resident) == 0  # no capacity is left for a buffered row
    assert key == 21


def test_failed_fold_is_retried() -> None:
    log, resident = make_resident()
    apply_all(resident, append_number(log, 1, 7.0), log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorTable, "fold_block", fail_with_memory_error)
        with pytest.raises(MemoryError):
            resident.state("default", "v1")
    state = resident.state("default", "v1")
    assert state is not None
    assert state.vector is not None
    assert state.vector[0] == 7.0


def fail_with_memory_error(*_: object) -> bool:
    raise MemoryError


@settings(max_examples=50, deadline=None)
@given(log=logs(), reads=st.lists(st.booleans(), min_size=40, max_size=40), bound=st.integers(1, 9))
def test_reads_between_folds_see_the_folded_state(log: FakeLog, reads: list[bool], bound: int) -> None:
    resident, cache = ResidentVectors(), CacheSink()
    resident.enter(log)
    anyio.run(cache.open, log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_run, "ROWS_MAX", bound)
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


def test_vectors_that_change_dimension_are_folded_like_the_oracle() -> None:
    log = FakeLog()
    log.append(Delta("a", create([1, 2])), Delta("b", create([3, 4])))
    log.append(Delta("a", dense([5, 6])), Delta("c", create([7, 8])))
    log.append(Delta("b", dense([1, 2, 3])))
    log.append(Delta("b", dense([2, 3, 4])))
    resident = ResidentVectors()
    resident.enter(log)
    apply_all(resident, log.deliveries(), log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)


@pytest.mark.parametrize("kinds", [("create", "dense"), ("dense", "create")])
def test_dense_keeps_and_create_clears_metadata(
    kinds: tuple[str, str],
) -> None:
    before = [("create", [0, 1], "metadata")]
    log = log_of([*before, *((kind, [key], "") for key, kind in enumerate(kinds))])
    resident = ResidentVectors()
    resident.enter(log)
    apply_all(resident, log.deliveries(), log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)
