"""Compare-and-set is judged row by row, within a batch too; ABSENT creates what is not there."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.ingest.vector_heads import VectorHeads
from delta_prop_wire.delta import (
    ABSENT,
    Delta,
    Dot,
    Head,
    Operation,
    Source,
    create,
    delete,
    metadata_only,
    offset,
    opaque,
    sparse,
)
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.chains import batch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ORIGIN = 16
ONE = create([1.0, 2.0])
UNKNOWN = Operation(12, data=b"later")


def nothing(_namespace: str, _vector_id: str) -> Head | None:
    return None


class Edge:
    """Vectors to which one origin's batches come; a batch that is refused has no effect."""

    def __init__(self) -> None:
        self.vectors = VectorHeads()
        self.counter = 1

    def send(self, *deltas: Delta) -> Refused | None:
        batch = batch_of(ORIGIN, self.counter, *deltas)
        try:
            self.vectors.check(batch, nothing)
        except Refused as refusal:
            return refusal
        self.vectors.note_appended(batch, Source.LOCAL)
        self.counter += len(deltas)
        return None


def conflict(refusal: Refused | None) -> tuple[int | None, Dot | None]:
    """The row that is in conflict, and what its vector was last changed by."""
    assert refusal is not None
    assert (refusal.code, refusal.field) == (ErrorCode.CONFLICT, "expect")
    return refusal.row, refusal.details["current"]


def test_two_rows_that_expect_the_same_dot() -> None:
    edge = Edge()
    edge.send(Delta("v", ONE))
    first = Dot(ORIGIN, 1)
    refusal = edge.send(*[Delta("v", offset(1.0), expect=first)] * 2)
    assert conflict(refusal) == (1, Dot(ORIGIN, 2))
    assert edge.vectors.head("default", "v") == first


def test_a_row_that_expects_the_row_before_it() -> None:
    edge = Edge()
    rows = [Delta("v", ONE), *(Delta("v", offset(1.0), expect=Dot(ORIGIN, at)) for at in range(1, 5))]
    assert edge.send(*rows) is None
    assert edge.vectors.head("default", "v") == Dot(ORIGIN, 5)


def test_rows_between_that_expect_nothing_move_the_head() -> None:
    edge = Edge()
    edge.send(Delta("v", ONE), Delta("w", ONE))
    first = Dot(ORIGIN, 1)
    rows = Delta("w", offset(1.0)), Delta("v", offset(1.0)), Delta("v", offset(1.0), expect=first)
    assert conflict(edge.send(*rows)) == (2, Dot(ORIGIN, 4))
    other = Delta("v", ONE, "other"), Delta("v", offset(1.0), expect=first)
    assert edge.send(*other) is None


@pytest.mark.parametrize("whole", [ONE, opaque(b"it"), metadata_only()])
def test_absent_of_a_vector_that_was_never_made(whole: object) -> None:
    edge = Edge()
    refusal = edge.send(Delta("v", whole, expect=ABSENT))  # type: ignore[arg-type]
    if whole == metadata_only():
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_DELTA
    else:
        assert refusal is None
    assert conflict(edge.send(Delta("w", ONE), Delta("w", ONE, expect=ABSENT))) == (
        1,
        Dot(ORIGIN, edge.counter),
    )


def test_absent_of_a_vector_that_was_deleted() -> None:
    edge = Edge()
    edge.send(Delta("v", ONE), Delta("v", delete()))
    assert edge.send(Delta("v", ONE, expect=ABSENT)) is None
    assert conflict(edge.send(Delta("v", ONE, expect=ABSENT))) == (0, Dot(ORIGIN, 3))
    assert edge.send(Delta("v", delete()), Delta("v", ONE, expect=ABSENT)) is None


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in one batch"])
def test_fact_of_unknown_operation_is_known_to_rows_behind_it(apart: bool) -> None:
    edge = Edge()

    def send(*deltas: Delta) -> Refused | None:
        told = [edge.send(delta) for delta in deltas] if apart else [edge.send(*deltas)]
        assert told[:-1] == [None] * (len(told) - 1)
        return told[-1]

    for operation in (offset(1.0), sparse([0], [1.0]), metadata_only()):
        edge = Edge()
        assert send(Delta("v", UNKNOWN), Delta("v", operation)) is None
    edge = Edge()
    refusal = send(Delta("v", UNKNOWN), Delta("v", ONE, expect=ABSENT))
    assert conflict(refusal) == (0 if apart else 1, Dot(ORIGIN, 1))
    edge = Edge()
    assert (
        send(Delta("v", ONE), Delta("v", delete()), Delta("v", UNKNOWN), Delta("v", ONE, expect=ABSENT))
        is None
    )
    assert send(Delta("v", delete()), Delta("v", UNKNOWN)) is None
    refusal = send(Delta("w", UNKNOWN), Delta("v", UNKNOWN), Delta("v", offset(1.0)))
    assert refusal is not None
    assert (refusal.code, refusal.field) == (ErrorCode.INVALID_DELTA, "vector_id")


def test_a_row_that_cannot_apply_is_told_before_an_expectation_behind_it() -> None:
    edge = Edge()
    refusal = edge.send(Delta("nobody", offset(1.0)), Delta("v", ONE, expect=Dot(ORIGIN, 9)))
    assert refusal is not None
    assert (refusal.code, refusal.row) == (ErrorCode.INVALID_DELTA, 0)
    assert conflict(edge.send(Delta("v", ONE, expect=Dot(ORIGIN, 9)), Delta("nobody", offset(1.0)))) == (
        0,
        None,
    )


ROWS = st.tuples(
    st.sampled_from("vw"),
    st.sampled_from([ONE, ONE, delete(), offset(1.0), sparse([0], [1.0]), UNKNOWN]),
    st.none() | st.just(ABSENT) | st.integers(-3, 3),
)


@given(st.lists(st.lists(ROWS, min_size=1, max_size=6), max_size=8))
def test_as_if_the_rows_had_come_one_by_one(batches: Sequence[Sequence[tuple[str, object, object]]]) -> None:
    """A batch is taken if and only if all of its rows would be, each sent alone behind the one before."""
    edge = Edge()
    for drawn in batches:
        deltas = [
            Delta(
                key,
                operation,  # type: ignore[arg-type]
                expect=Dot(ORIGIN, max(1, edge.counter + at + expect)) if isinstance(expect, int) else expect,  # type: ignore[arg-type]
            )
            for at, (key, operation, expect) in enumerate(drawn)
        ]
        alone = _copy(edge)
        told = next((refusal for one in deltas if (refusal := alone.send(one)) is not None), None)
        refusal = edge.send(*deltas)
        if told is None or refusal is None:
            assert told == refusal
            assert edge.counter == alone.counter
        else:
            assert (refusal.code, refusal.row) == (told.code, alone.counter - edge.counter)
            assert refusal.details.get("current") == told.details.get("current")


def _copy(edge: Edge) -> Edge:
    """One to which the same has come: all that was taken, in one batch each."""
    made = Edge()
    made.vectors, made.counter = deepcopy(edge.vectors), edge.counter
    return made
