"""`expect` (compare-and-set) is checked row by row, also within a batch; ABSENT matches a missing vector."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.partition.ingest.vector_heads import VectorHeads
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
from tests.delta_prop.partition.pipeline_bench import batch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ORIGIN = 16
CREATE = create([1.0, 2.0])
UNKNOWN = Operation(12, data=b"later")


def load_nothing(_namespace: str, _vector_id: str) -> Head | None:
    return None


class HeadsFixture:
    """`VectorHeads` that receives the batches of one origin; a refused batch changes nothing."""

    def __init__(self) -> None:
        self.vectors = VectorHeads()
        self.counter = 1

    def send(self, *deltas: Delta) -> Refused | None:
        batch = batch_of(ORIGIN, self.counter, *deltas)
        try:
            self.vectors.check(batch, load_nothing)
        except Refused as refusal:
            return refusal
        self.vectors.note_appended(batch, Source.LOCAL)
        self.counter += len(deltas)
        return None


def conflict(refusal: Refused | None) -> tuple[int | None, Dot | None]:
    """Return the row in conflict and the dot that last changed its vector."""
    assert refusal is not None
    assert (refusal.code, refusal.field) == (ErrorCode.CONFLICT, "expect")
    return refusal.row, refusal.details["current"]


def test_second_row_expecting_the_same_dot_conflicts() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("v", CREATE))
    first = Dot(ORIGIN, 1)
    refusal = fixture.send(*[Delta("v", offset(1.0), expect=first)] * 2)
    assert conflict(refusal) == (1, Dot(ORIGIN, 2))
    assert fixture.vectors.head("default", "v") == first


def test_row_may_expect_the_row_before_it() -> None:
    fixture = HeadsFixture()
    rows = [
        Delta("v", CREATE),
        *(Delta("v", offset(1.0), expect=Dot(ORIGIN, counter)) for counter in range(1, 5)),
    ]
    assert fixture.send(*rows) is None
    assert fixture.vectors.head("default", "v") == Dot(ORIGIN, 5)


def test_rows_without_expect_move_the_head() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("v", CREATE), Delta("w", CREATE))
    first = Dot(ORIGIN, 1)
    rows = Delta("w", offset(1.0)), Delta("v", offset(1.0)), Delta("v", offset(1.0), expect=first)
    assert conflict(fixture.send(*rows)) == (2, Dot(ORIGIN, 4))
    other = Delta("v", CREATE, "other"), Delta("v", offset(1.0), expect=first)
    assert fixture.send(*other) is None


@pytest.mark.parametrize("first_operation", [CREATE, opaque(b"it"), metadata_only()])
def test_expect_absent_accepts_an_unknown_vector_unless_the_operation_needs_one(
    first_operation: object,
) -> None:
    fixture = HeadsFixture()
    refusal = fixture.send(Delta("v", first_operation, expect=ABSENT))  # type: ignore[arg-type]
    if first_operation == metadata_only():
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_DELTA
    else:
        assert refusal is None
    assert conflict(fixture.send(Delta("w", CREATE), Delta("w", CREATE, expect=ABSENT))) == (
        1,
        Dot(ORIGIN, fixture.counter),
    )


def test_expect_absent_accepts_a_deleted_vector_until_it_is_created() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("v", CREATE), Delta("v", delete()))
    assert fixture.send(Delta("v", CREATE, expect=ABSENT)) is None
    assert conflict(fixture.send(Delta("v", CREATE, expect=ABSENT))) == (0, Dot(ORIGIN, 3))
    assert fixture.send(Delta("v", delete()), Delta("v", CREATE, expect=ABSENT)) is None


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one by one", "in one batch"])
def test_vector_of_unknown_operation_is_known_to_later_rows(one_by_one: bool) -> None:
    fixture = HeadsFixture()

    def send(*deltas: Delta) -> Refused | None:
        refusals = [fixture.send(delta) for delta in deltas] if one_by_one else [fixture.send(*deltas)]
        assert refusals[:-1] == [None] * (len(refusals) - 1)
        return refusals[-1]

    for operation in (offset(1.0), sparse([0], [1.0]), metadata_only()):
        fixture = HeadsFixture()
        assert send(Delta("v", UNKNOWN), Delta("v", operation)) is None
    fixture = HeadsFixture()
    refusal = send(Delta("v", UNKNOWN), Delta("v", CREATE, expect=ABSENT))
    assert conflict(refusal) == (0 if one_by_one else 1, Dot(ORIGIN, 1))
    fixture = HeadsFixture()
    assert (
        send(Delta("v", CREATE), Delta("v", delete()), Delta("v", UNKNOWN), Delta("v", CREATE, expect=ABSENT))
        is None
    )
    assert send(Delta("v", delete()), Delta("v", UNKNOWN)) is None
    refusal = send(Delta("w", UNKNOWN), Delta("v", UNKNOWN), Delta("v", offset(1.0)))
    assert refusal is not None
    assert (refusal.code, refusal.field) == (ErrorCode.INVALID_DELTA, "vector_id")


def test_inapplicable_row_is_reported_before_a_later_conflict() -> None:
    fixture = HeadsFixture()
    refusal = fixture.send(Delta("nobody", offset(1.0)), Delta("v", CREATE, expect=Dot(ORIGIN, 9)))
    assert refusal is not None
    assert (refusal.code, refusal.row) == (ErrorCode.INVALID_DELTA, 0)
    assert conflict(
        fixture.send(Delta("v", CREATE, expect=Dot(ORIGIN, 9)), Delta("nobody", offset(1.0)))
    ) == (
        0,
        None,
    )


ROWS = st.tuples(
    st.sampled_from("vw"),
    st.sampled_from([CREATE, CREATE, delete(), offset(1.0), sparse([0], [1.0]), UNKNOWN]),
    st.none() | st.just(ABSENT) | st.integers(-3, 3),
)


@given(st.lists(st.lists(ROWS, min_size=1, max_size=6), max_size=8))
def test_batch_is_checked_like_its_rows_one_by_one(
    batches: Sequence[Sequence[tuple[str, object, object]]],
) -> None:
    """A batch is accepted if and only if each of its rows would be, sent one after the other."""
    fixture = HeadsFixture()
    for rows in batches:
        deltas = [
            Delta(
                key,
                operation,  # type: ignore[arg-type]
                expect=Dot(ORIGIN, max(1, fixture.counter + index + expect))
                if isinstance(expect, int)
                else expect,  # type: ignore[arg-type]
            )
            for index, (key, operation, expect) in enumerate(rows)
        ]
        one_by_one = _copy(fixture)
        expected = next(
            (refusal for delta in deltas if (refusal := one_by_one.send(delta)) is not None), None
        )
        refusal = fixture.send(*deltas)
        if expected is None or refusal is None:
            assert expected == refusal
            assert fixture.counter == one_by_one.counter
        else:
            assert (refusal.code, refusal.row) == (expected.code, one_by_one.counter - fixture.counter)
            assert refusal.details.get("current") == expected.details.get("current")


def _copy(fixture: HeadsFixture) -> HeadsFixture:
    """Return a copy that can receive other batches."""
    copy = HeadsFixture()
    copy.vectors, copy.counter = deepcopy(fixture.vectors), fixture.counter
    return copy
