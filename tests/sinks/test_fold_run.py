"""Small batches folded together are what they are one by one: to the bit, repeats and rejections included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks import CacheSink, Delivery, ResidentVectors, StopSink
from delta_prop_sinks import fold_run as module
from delta_prop_sinks import vector_table as table_module
from delta_prop_sinks.fold_run import ROWS_MAX
from delta_prop_sinks.vector_table import VectorTable, heads_of
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Dot, KnownIds, Source, create, delete, dense, scale, sparse
from delta_prop_wire.encode import encode_batch
from tests.sinks.strategies import logs
from tests.sinks.support import FakeLog, applied, check_state, oracle

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


def filled(parts: list[tuple[str, list[int], str]]) -> FakeLog:
    log, forwarded = FakeLog(), 0
    for number, (kind, keys, how) in enumerate(parts, 1):
        operation = OPERATIONS[kind](float(number))
        deltas = [
            Delta(
                f"v{key}",
                operation,
                namespace="other" if how == "other" else "default",
                metadata={"n": number} if how == "metadata" else None,
            )
            for key in keys
        ]
        if how == "replica":
            log.forward(encode_batch(deltas, origin=99, base=forwarded + 1), lamport=max(log.lamport - 3, 1))
            forwarded += len(deltas)
        else:
            log.append(*deltas)
    return log


@given(PARTS, st.integers(0, 10))
def test_runs_are_the_fold(parts: list[tuple[str, list[int], str]], again: int) -> None:
    log = filled(parts)
    resident = ResidentVectors()
    resident.enter(log)
    deliveries = log.deliveries()
    applied(resident, deliveries[: again + 1], log)
    applied(resident, deliveries, log)  # partly repeats
    expected = oracle(log.batches)
    for (namespace, vector_id), state in expected.items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)
    assert resident.lamport == log.lamport
    assert resident.next_offset == log.next_offset


@given(PARTS)
def test_rows_of_runs_are_those_that_are_meant(parts: list[tuple[str, list[int], str]]) -> None:
    log = filled(parts)
    some = [Delivery(one.logged, np.arange(one.count)[one.first_offset % 2 :: 2]) for one in log.deliveries()]
    some = [one for one in some if one.count]
    together, alone = ResidentVectors(), ResidentVectors()
    for resident in (together, alone):
        resident.enter(log)
    applied(together, some, log)
    for one in some:
        applied(alone, [one], log)
    expected = {(namespace, vector_id): state for namespace, vector_id, state in alone.rows()}
    found = {(namespace, vector_id): state for namespace, vector_id, state in together.rows()}
    assert found.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(found[ref], state, context=ref)


def made(**settings: int) -> tuple[FakeLog, ResidentVectors]:
    log = filled([("create", list(range(20)), "")])
    resident = ResidentVectors(**settings)
    resident.enter(log)
    applied(resident, log.deliveries(), log)
    return log, resident


def waiting(resident: ResidentVectors) -> int:
    return resident._fold_buffer.rows


def numbers(log: FakeLog, key: int, number: float) -> list[Delivery]:
    return [Delivery(log.append(Delta(f"v{key}", sparse([0], [number]))))]


def test_rows_wait_for_others_until_so_many_do_and_whoever_reads_has_them_folded() -> None:
    log, resident = made()
    for number in range(1, ROWS_MAX + 10):
        applied(resident, numbers(log, number % 20, float(number)), log)
        assert waiting(resident) == number % ROWS_MAX
        assert resident.next_offset == log.next_offset
        assert resident.lamport == log.lamport
    applied(resident, numbers(log, 3, 4321.0), log)
    state = resident.state("default", "v3")
    assert state is not None
    assert state.vector is not None
    assert state.vector[0] == 4321.0
    assert waiting(resident) == 0


ORDINARY = encode_batch([Delta("v1", sparse([0], [1.0]))], origin=7, base=1)
STRANGE: dict[str, Delivery] = {
    "late": Delivery(LoggedBatch(ORDINARY, 0, 1, Source.LOCAL), redelivered=True),
    "forwarded": Delivery(LoggedBatch(ORDINARY, 0, 1, Source.REPLICA)),
    "a twin": Delivery(LoggedBatch(ORDINARY, 0, 1, Source.LOCAL, known_ids=KnownIds.ALL)),
    "with metadata": Delivery(
        LoggedBatch(
            encode_batch([Delta("v1", sparse([0], [1.0]), metadata={"a": 1})], origin=7, base=1),
            0,
            1,
            Source.LOCAL,
        )
    ),
    "of two namespaces": Delivery(
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
    "no mere numbers": Delivery(
        LoggedBatch(encode_batch([Delta("v1", delete())], origin=7, base=1), 0, 1, Source.LOCAL)
    ),
}


@pytest.mark.parametrize("what", sorted(STRANGE))
def test_what_may_wait(what: str) -> None:
    unfolded = module.FoldBuffer(module.SETTING_KINDS)
    ordinary = Delivery(LoggedBatch(ORDINARY, 0, 1, Source.LOCAL))
    assert unfolded.can_hold(ordinary)
    assert not unfolded.can_hold(STRANGE[what])
    assert not unfolded.extend(ordinary)  # there is nothing yet that it could be like
    assert unfolded.add(ordinary, VectorTable("default"), 1)
    assert unfolded.extend(ordinary)
    assert not unfolded.extend(STRANGE[what])


def test_what_is_of_another_namespace_is_not_like_it() -> None:
    unfolded = module.FoldBuffer(module.SETTING_KINDS)
    here, there = (
        Delivery(
            LoggedBatch(
                encode_batch([Delta("v", sparse([0], [1.0]), name)], origin=7, base=1), 0, 1, Source.LOCAL
            )
        )
        for name in ("default", "other")
    )
    assert unfolded.add(here, VectorTable("default"), 1)
    assert not unfolded.extend(there)


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
def test_heads_are_those_of_each_row(rows: list[tuple[int, int, int, int]]) -> None:
    """Origin, counter, offset, Lamport number: side by side, or apart in one of them."""
    run = module.FoldRun(VectorTable("default"), ORDINARY.kind or 0, ORDINARY.row_values or 0)
    for origin, base, offset, lamport in rows:
        batch = encode_batch([Delta("v", sparse([0], [1.0]))], origin=origin, base=base)
        run.deliveries.append(Delivery(LoggedBatch(batch, offset, lamport, Source.LOCAL)))
        run.count += 1
    assert run.heads.tolist() == [
        row for one in run.deliveries for row in heads_of(one.logged, None).tolist()
    ]


SINGLES = st.lists(
    st.tuples(
        st.sampled_from([5, 5, 5, 1 << 63]),  # the origin
        st.sampled_from([0, 0, 0, 3]),  # offsets left out before it
        st.sampled_from([False, False, False, True]),  # whether it has a part that plain ones have not
        st.sampled_from([1, 1, 1, 2]),  # rows
    ),
    min_size=1,
    max_size=9,
)


@given(SINGLES, st.integers(0, 5), st.sampled_from([sparse, dense]), st.sampled_from([9, 3]))
def test_a_run_is_its_batches_end_to_end(
    parts: list[tuple[int, int, bool, int]], width: int, make: Callable[..., Operation], steps_max: int
) -> None:
    width = max(width, 1) if make is dense else width
    table, unfolded = VectorTable("default"), module.FoldBuffer(module.SETTING_KINDS)
    offset, bases = 0, {5: 1, 1 << 63: 1}
    for number, (origin, gap, rich, rows) in enumerate(parts):
        values = [number + 0.5] * width
        operation = sparse(range(number, number + width), values) if make is sparse else dense(values)
        delta = Delta("v", operation, expect=Dot(5, 1) if rich else None)
        batch = encode_batch([delta] * rows, origin=origin, base=bases[origin])
        offset, bases[origin] = offset + gap, bases[origin] + rows
        delivery = Delivery(LoggedBatch(batch, offset, offset + 1, Source.LOCAL))
        offset += rows
        if not unfolded.extend(delivery):
            assert unfolded.add(delivery, table, rows)
    (run,) = unfolded._runs.values()
    batches = [one.logged for one in run.deliveries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "_STEPS_MAX", steps_max)
        assert run.heads.tolist() == [row for one in batches for row in heads_of(one, None).tolist()]
    assert run.values.reshape(-1).tolist() == [n for one in batches for n in one.batch.values.tolist()]
    indices = [n for one in batches for n in one.batch.indices.tolist()]
    if make is sparse:
        assert run.indices.reshape(-1).tolist() == indices
        assert run.index_highest == max(indices, default=0 if len(batches) > 1 else -1)
    assert run.keys == ["v"] * run.count


def test_bytes_that_wait_are_bounded() -> None:
    log, resident = made()
    size = numbers(log, 1, 1.0)[0].batch.size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BYTES_MAX", 3 * size)
        log, resident = made()
        found = []
        for key in range(6):
            applied(resident, numbers(log, key, 1.0), log)
            found.append(waiting(resident))
    assert found == [1, 2, 0, 1, 2, 0]


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
def test_all_that_reads_sees_what_waited(reader: str) -> None:
    log, resident = made()
    applied(resident, numbers(log, 1, 7.0), log)
    assert waiting(resident) == 1
    READERS[reader](resident)
    assert waiting(resident) == 0
    state = resident.state("default", "v1")
    assert state is not None
    assert state.vector is not None
    assert state.vector[0] == 7.0


def test_what_cannot_wait_is_folded_behind_what_does() -> None:
    log, resident = made()
    for delta in (
        Delta("v1", sparse([0], [7.0])),
        Delta("v1", scale(2.0)),  # no mere numbers
        Delta("v1", sparse([1], [3.0])),
        Delta("v1", dense([1, 1, 1])),  # of another kind, in the same table
        Delta("v1", sparse([0, 2], [5.0, 5.0])),  # of another width
        Delta("v2", delete()),
        Delta("v2", sparse([0], [9.0])),  # on what is no vector
        Delta("v1", sparse([1], [8.0])),
        Delta("new", sparse([0], [9.0])),
    ):
        applied(resident, [Delivery(log.append(delta))], log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)


def test_nothing_waits_beside_what_may_be_late_or_is_there_already() -> None:
    log, resident = made()
    applied(resident, numbers(log, 1, 1.0), log)
    assert applied(resident, log.deliveries(), log) == 0  # repeats
    log.forward(encode_batch([Delta("v1", sparse([0], [2.0]))], origin=99, base=1), lamport=log.lamport + 5)
    applied(resident, log.deliveries(log.next_offset - 1), log)
    applied(resident, numbers(log, 1, 3.0), log)
    assert waiting(resident) == 0  # chains are kept from here on
    assert resident.statistics().folded == log.next_offset


def test_what_waits_fits_into_the_bound() -> None:
    _, resident = made()
    room = resident.size + 1
    log, resident = made(resident_bytes_max=room)
    for key in range(20, 30):
        deliveries = [Delivery(log.append(Delta(f"v{key}", create([1, 2, 3]))))]
        if resident.size > room:
            with pytest.raises(StopSink, match="resident_bytes_max"):
                applied(resident, deliveries, log)
            break
        applied(resident, deliveries, log)
        assert waiting(resident) == 0  # there is no room for a row to wait for
    assert key == 21


def test_a_fold_that_fails_is_made_again() -> None:
    log, resident = made()
    applied(resident, numbers(log, 1, 7.0), log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorTable, "fold_block", failing)
        with pytest.raises(MemoryError):
            resident.state("default", "v1")
    state = resident.state("default", "v1")
    assert state is not None
    assert state.vector is not None
    assert state.vector[0] == 7.0


def failing(*_: object) -> bool:
    raise MemoryError


@settings(max_examples=50, deadline=None)
@given(log=logs(), reads=st.lists(st.booleans(), min_size=40, max_size=40), bound=st.integers(1, 9))
def test_read_at_any_time_and_folded_at_any_time_it_is_the_fold(
    log: FakeLog, reads: list[bool], bound: int
) -> None:
    resident, cache = ResidentVectors(), CacheSink()
    resident.enter(log)
    anyio.run(cache.open, log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS_MAX", bound)
        for place, delivery in enumerate(log.deliveries()):
            applied(resident, [delivery], log)
            cache.apply_now([delivery])
            if not reads[place % 40]:
                continue
            for ref, state in oracle(log.batches[: place + 1]).items():
                check_state(resident.state(*ref), state, context=ref)
                cached = cache.peek(*ref)
                if cached is not None:
                    check_state(cached, state, counts=False, context=ref)


def test_vectors_of_another_dimension_than_their_namespace_are_folded_one_by_one() -> None:
    log = FakeLog()
    log.append(Delta("a", create([1, 2])), Delta("b", create([3, 4])))
    log.append(Delta("a", dense([5, 6])), Delta("c", create([7, 8])))
    log.append(Delta("b", dense([1, 2, 3])))
    log.append(Delta("b", dense([2, 3, 4])))
    resident = ResidentVectors()
    resident.enter(log)
    applied(resident, log.deliveries(), log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)


@pytest.mark.parametrize("kinds", [("create", "dense"), ("dense", "create")])
def test_a_dense_keeps_metadata_and_a_create_clears_it_whatever_came_just_before(
    kinds: tuple[str, str],
) -> None:
    before = [("create", [0, 1], "metadata")]
    log = filled([*before, *((kind, [key], "") for key, kind in enumerate(kinds))])
    resident = ResidentVectors()
    resident.enter(log)
    applied(resident, log.deliveries(), log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)
