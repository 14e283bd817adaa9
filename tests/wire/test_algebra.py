"""The operation algebra: each rule by example, then properties of the fold, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.algebra import (
    FLOAT32_MAX,
    VectorState,
    apply,
    apply_in_place,
    fold,
)
from delta_prop_wire.delta import (
    Kind,
    Operation,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
    transform,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.algebra import Patch

MAX = float(FLOAT32_MAX)
UNKNOWN = Operation(40, data=b"\x01")
DIMENSION = 4


def state_of(*changes: Operation | tuple[Operation, Patch]) -> VectorState:
    state = VectorState()
    for change in changes:
        state = apply(state, *change) if isinstance(change, tuple) else apply(state, change)
    return state


def vector_of(*changes: Operation) -> list[float]:
    vector = state_of(*changes).vector
    assert vector is not None
    assert vector.dtype == np.float32
    return [float(x) for x in vector]


# --- each rule


def test_arithmetic_and_writes_change_the_vector() -> None:
    start = create([1, 2, 3])
    assert vector_of(start, sparse([0, 2], [5, 6])) == [5, 2, 6]
    assert vector_of(start, sparse_add([0, 2], [5, 6])) == [6, 2, 9]
    assert vector_of(start, scale(2)) == [2, 4, 6]
    assert vector_of(start, offset(-1)) == [0, 1, 2]
    assert vector_of(start, dense([9, 9])) == [9, 9]


def test_duplicate_indices_add_up_or_the_last_one_wins() -> None:
    assert vector_of(create([1, 2]), sparse_add([1, 1, 1], [1, 2, 3])) == [1, 8]
    assert vector_of(create([1, 2]), sparse([1, 0, 1], [5, 7, 6])) == [7, 6]


def test_additions_to_one_index_run_in_order_and_in_float32() -> None:
    big = float(np.float32(2**24))
    assert vector_of(create([big]), sparse_add([0, 0], [1, 1])) == [big]  # 2**24 + 1 rounds back, twice
    assert vector_of(create([1]), sparse_add([0, 0], [1, big])) == [big + 2]


@pytest.mark.parametrize(
    "operation",
    [sparse([0], [1]), sparse_add([0], [1]), scale(2), offset(1), metadata_only(), sparse([], [])],
)
@pytest.mark.parametrize("before", [(), (create([1]), delete()), (opaque(b"x"), delete())])
def test_partial_kinds_have_no_effect_without_a_living_vector(
    operation: Operation, before: tuple[Operation, ...]
) -> None:
    state = apply(state_of(*before), operation, {"a": 1})
    assert state.content == VectorState().content
    assert state.ignored == 1


@pytest.mark.parametrize("operation", [sparse([0], [1]), sparse_add([], []), scale(2), offset(1)])
def test_arithmetic_has_no_effect_on_opaque_facts(operation: Operation) -> None:
    state = apply(state_of(opaque(b"row")), operation, {"a": 1})
    assert (state.data, state.vector, state.metadata, state.ignored) == (b"row", None, {}, 1)


@pytest.mark.parametrize("operation", [sparse([0, 2], [1, 1]), sparse_add([2], [1])])
def test_index_outside_the_dimension_has_no_effect(operation: Operation) -> None:
    state = apply(state_of(create([1, 2])), operation, {"a": 1})
    assert state.content == state_of(create([1, 2])).content
    assert state.ignored == 1


@pytest.mark.parametrize("operation", [transform("upper"), UNKNOWN, Operation(63)])
def test_transforms_and_unknown_kinds_leave_state_unchanged(operation: Operation) -> None:
    before = state_of((create([1, 2]), {"a": 1}))
    after = apply(before, operation, {"b": 1})
    assert after.content == before.content
    assert after.ignored == 1


def test_create_clears_metadata_while_dense_and_opaque_keep_it() -> None:
    before = state_of((create([1]), {"a": 1, "b": None}))
    assert before.metadata == {"a": 1}
    assert apply(before, create([2]), {"c": 3}).metadata == {"c": 3}
    assert apply(before, dense([2]), {"c": 3}).metadata == {"a": 1, "c": 3}
    assert apply(before, opaque(b"x")).metadata == {"a": 1}
    assert apply(before, metadata_only(), {"a": None, "d": {"e": 1}}).metadata == {"d": {"e": 1}}


def test_full_writes_replace_each_other() -> None:
    state = state_of(dense([1]), opaque(b""), dense([2, 3]), opaque(b"x"))
    assert (state.alive, state.vector, state.data) == (True, None, b"x")
    assert vector_of(opaque(b"x"), dense([2, 3])) == [2, 3]


@pytest.mark.parametrize("full_write", [create([7]), dense([7]), opaque(b"7")])
def test_full_write_after_a_delete_starts_from_empty(full_write: Operation) -> None:
    deleted = state_of((create([1]), {"a": 1}), (delete(), {"why": "old"}))
    assert (deleted.alive, deleted.vector, deleted.data, deleted.metadata) == (False, None, None, {})
    assert apply(deleted, full_write, {"b": 2}).content == apply(VectorState(), full_write, {"b": 2}).content


def test_sums_and_products_saturate() -> None:
    assert vector_of(create([MAX, -MAX, 1]), scale(2)) == [MAX, -MAX, 2]
    assert vector_of(create([MAX, -MAX]), scale(-3)) == [-MAX, MAX]
    assert vector_of(create([MAX, -1]), offset(MAX)) == [MAX, MAX]
    assert vector_of(create([MAX, 1]), sparse_add([0, 1], [MAX, 1])) == [MAX, 2]


def test_each_addition_saturates_by_itself() -> None:
    at_once = vector_of(create([MAX, 1]), sparse_add([0, 0, 1], [MAX, -MAX, 1]))
    one_by_one = vector_of(create([MAX, 1]), sparse_add([0], [MAX]), sparse_add([0, 1], [-MAX, 1]))
    assert at_once == one_by_one == [0, 2]


def test_apply_does_not_modify_its_input() -> None:
    values = np.array([1, 2], np.float32)
    before = state_of(Operation(Kind.CREATE, values))
    for operation in (sparse([0], [9]), sparse_add([0], [9]), scale(9), offset(9)):
        apply(before, operation)
    assert before.vector is not None
    assert before.vector.tolist() == [1, 2]
    values[0] = 5
    assert before.vector.tolist() == [1, 2], "the state shares memory with the batch it came from"


def test_apply_in_place_changes_a_row_of_a_matrix() -> None:
    matrix = np.zeros((2, 3), np.float32)
    assert apply_in_place(matrix[1], sparse([2], [5]))
    assert apply_in_place(matrix[1], offset(1))
    assert not apply_in_place(matrix[0], sparse([3], [5]))
    assert not apply_in_place(matrix[0], create([1, 1, 1]))
    assert matrix.tolist() == [[0, 0, 0], [1, 1, 6]]


# --- fold


def test_fold_sorts_rows_and_applies_duplicates_once() -> None:
    rows = [
        ((3, 1, 3), scale(2), None),
        ((1, 1, 1), create([1, 1]), {"a": 1}),
        ((2, 9, 1), sparse_add([0], [1]), None),
        ((2, 9, 1), sparse_add([0], [1]), None),
        ((2, 1, 2), sparse([0], [5]), None),  # same Lamport number: the smaller origin sorts first
    ]
    state = fold(rows)
    assert state.vector is not None
    assert state.vector.tolist() == [12, 2]
    assert (state.key, state.ignored) == ((3, 1, 3), 0)


def test_fold_resumes_from_a_state_and_rejects_an_older_row() -> None:
    rows = [((n, 1, n), sparse_add([0], [n]), None) for n in range(2, 6)]
    first = ((1, 1, 1), create([0]), None)
    earlier_state = fold([first, *rows[:2]])
    assert fold(rows[1:], earlier_state).content == fold([first, *rows]).content
    with pytest.raises(AssertionError, match="sorts before"):
        fold([((2, 0, 9), scale(1), None)], earlier_state)


def test_empty_fold_is_an_unknown_vector() -> None:
    assert fold([]).key is None
    assert fold([((1, 1, 1), delete(), None)]).key == (1, 1, 1)


# --- properties

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([MAX, -MAX, 0.0, -0.0])
VECTORS = st.lists(NUMBERS, min_size=1, max_size=DIMENSION)


def sparse_operations(make_operation: Callable[..., Operation]) -> st.SearchStrategy[Operation]:
    entries = st.lists(st.tuples(st.integers(0, DIMENSION), NUMBERS), max_size=5)
    return entries.map(lambda pairs: make_operation([i for i, _ in pairs], [x for _, x in pairs]))


OPERATIONS = st.one_of(
    VECTORS.map(create),
    VECTORS.map(dense),
    sparse_operations(sparse),
    sparse_operations(sparse_add),
    NUMBERS.map(scale),
    NUMBERS.map(offset),
    st.binary(max_size=3).map(opaque),
    st.just(delete()),
    st.just(metadata_only()),
    st.just(transform("t")),
    st.just(UNKNOWN),
)

SCALARS = st.none() | st.booleans() | st.integers(0, 2) | st.floats(0, 2)
PATCHES = st.none() | st.dictionaries(
    st.sampled_from("ab"), SCALARS | st.dictionaries(st.sampled_from("xy"), SCALARS, max_size=2), max_size=2
)
CHANGES = st.tuples(OPERATIONS, PATCHES)


@given(st.lists(CHANGES, max_size=8), st.randoms(use_true_random=False), st.data())
def test_fold_is_independent_of_order_and_duplicates(
    changes: list[tuple[Operation, Patch]], shuffler: Any, data: st.DataObject
) -> None:
    rows = [((n // 2, n % 3, n + 1), *change) for n, change in enumerate(changes)]
    in_order = fold(rows)
    shuffled = rows + data.draw(st.lists(st.sampled_from(rows), max_size=3)) if rows else []
    shuffler.shuffle(shuffled)
    reordered = fold(shuffled)
    assert (reordered.content, reordered.key, reordered.ignored) == (
        in_order.content,
        in_order.key,
        in_order.ignored,
    )
    split = shuffler.randrange(len(rows) + 1)
    ordered = sorted(rows, key=lambda row: row[0])
    assert fold(ordered[split:], fold(ordered[:split])).content == in_order.content


@given(st.lists(CHANGES, max_size=8))
def test_state_stays_finite(changes: list[tuple[Operation, Patch]]) -> None:
    vector = state_of(*changes).vector
    assert vector is None or np.isfinite(vector).all()
