"""Small batches folded together are what they are one by one: to the bit, repeats and rejections included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_sinks import Delivery, Resident
from delta_prop_sinks.runs import ROWS_MAX, Run, runs
from delta_prop_wire.delta import Delta, create, delete, dense, scale, sparse
from delta_prop_wire.encode import encode_batch
from tests.sinks.support import FakeLog, check_state, oracle

OPERATIONS = {
    "create": lambda number: create([number, 1, 2]),
    "dense": lambda number: dense([number, 3, 4]),
    "sparse": lambda number: sparse([0, 2], [number, 0.5]),
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
    resident = Resident()
    resident.enter(log)
    deliveries = log.deliveries()
    resident.apply(deliveries[: again + 1], log)
    resident.apply(deliveries, log)  # partly repeats
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
    together, alone = Resident(), Resident()
    for resident in (together, alone):
        resident.enter(log)
    together.apply(some, log)
    for one in some:
        alone.apply([one], log)
    expected = {(namespace, vector_id): state for namespace, vector_id, state in alone.rows()}
    found = {(namespace, vector_id): state for namespace, vector_id, state in together.rows()}
    assert found.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(found[ref], state, context=ref)


def test_neighbours_of_one_kind_are_put_together_within_the_bound() -> None:
    rows = 100
    log = filled([("create", list(range(rows)), "")] * 12 + [("sparse", [1, 2], "")] * 2)
    found = list(runs(log.deliveries()))
    assert [one.count for one in found] == [500, 500, 200, 4]
    assert all(isinstance(one, Run) for one in found)
    assert found[0].count <= ROWS_MAX
    whole = filled([("create", list(range(ROWS_MAX)), ""), ("create", [1], ""), ("delete", [1], "")])
    assert next(iter(runs(whole.deliveries()))).count == ROWS_MAX
    assert not any(isinstance(one, Run) for one in runs(whole.deliveries()))


def test_vectors_of_another_dimension_than_their_namespace_are_folded_one_by_one() -> None:
    log = FakeLog()
    log.append(Delta("a", create([1, 2])), Delta("b", create([3, 4])))
    log.append(Delta("a", dense([5, 6])), Delta("c", create([7, 8])))
    log.append(Delta("b", dense([1, 2, 3])))
    log.append(Delta("b", dense([2, 3, 4])))
    resident = Resident()
    resident.enter(log)
    resident.apply(log.deliveries(), log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)


@pytest.mark.parametrize("kinds", [("create", "dense"), ("dense", "create")])
def test_a_dense_keeps_metadata_and_a_create_clears_it_whatever_came_just_before(
    kinds: tuple[str, str],
) -> None:
    before = [("create", [0, 1], "metadata")]
    log = filled([*before, *((kind, [key], "") for key, kind in enumerate(kinds))])
    resident = Resident()
    resident.enter(log)
    resident.apply(log.deliveries(), log)
    for (namespace, vector_id), state in oracle(log.batches).items():
        check_state(resident.state(namespace, vector_id), state, context=vector_id)
