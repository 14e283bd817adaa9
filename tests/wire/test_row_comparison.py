"""The contents of equal rows are equal in any batch; a difference in any field of a row is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire import delta as d
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, Source
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.row_comparison import first_difference, same_contents
from tests.wire.test_frames import DELTAS

ROWS = st.lists(DELTAS, min_size=1, max_size=5)


def batch_of(deltas: list[Delta], **options: object) -> Batch:
    header_fields = {"origin": 7, "base": 1, **options}
    return encode_batch([replace(delta, id=None) for delta in deltas], **header_fields)  # type: ignore[arg-type]


def other_frame(deltas: list[Delta], before: list[Delta], after: list[Delta]) -> Batch:
    """Return a batch with these contents between other rows, and all fields changed that do not count."""
    changed = [
        replace(delta, parents=(Dot(3, 4),), timestamp=77, priority=Priority.LOW, expect=Dot(1, 2))
        for delta in deltas
    ]
    return batch_of(
        [*before, *changed, *after],
        origin=9,
        base=40,
        epoch=5,
        clock=[Dot(2, 2)],
        ack_level=AckLevel.DURABLE,
        priority=Priority.LOW,
        hybrid_time=9,
    )


@given(deltas=ROWS, before=ROWS, after=ROWS)
def test_contents_are_equal_in_another_frame(
    deltas: list[Delta], before: list[Delta], after: list[Delta]
) -> None:
    batch, other = batch_of(deltas), other_frame(deltas, before, after)
    count = len(deltas)
    assert same_contents(batch, 0, other, len(before), count)
    assert first_difference(batch, 0, other, len(before), count) is None
    for row in range(count):
        assert same_contents(batch, row, other, len(before) + row)


@given(deltas=ROWS, others=ROWS, data=st.data())
def test_first_difference_is_the_first_unequal_row(
    deltas: list[Delta], others: list[Delta], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, min(len(deltas), len(others))))
    shared_rows = data.draw(st.integers(0, count))
    mixed = deltas[:shared_rows] + others[shared_rows:count]
    batch, other = batch_of(deltas), batch_of(mixed, origin=9)
    rows = [row for row in range(count) if not same_contents(batch, row, other, row)]
    assert first_difference(batch, 0, other, 0, count) == (rows[0] if rows else None)
    assert all(row >= shared_rows for row in rows)


FULL = Delta(
    "v", d.sparse([0, 3], [1.0, -0.5]), "n", metadata={"a": [1, {"b": None}], "c": True}, topics=("t", "u")
)


@pytest.mark.parametrize(
    "other",
    [
        replace(FULL, vector_id="w"),
        replace(FULL, namespace="m"),
        replace(FULL, operation=d.sparse_add([0, 3], [1.0, -0.5])),
        replace(FULL, operation=d.sparse([0, 3], [1.0, -0.25])),
        replace(FULL, operation=d.sparse([0, 2], [1.0, -0.5])),
        replace(FULL, operation=d.sparse([0], [1.0])),
        replace(FULL, operation=d.sparse([0, 3], [0.0, -0.5])),
        replace(FULL, operation=d.opaque(b"x")),
        replace(FULL, metadata=None),
        replace(FULL, metadata={"a": [1, {"b": None}], "c": 1}),
        replace(FULL, metadata={"a": [1.0, {"b": None}], "c": True}),
        replace(FULL, metadata={"a": [{"b": None}, 1], "c": True}),
        replace(FULL, metadata={"a": [1, {}], "c": True}),
        replace(FULL, topics=("t",)),
        replace(FULL, topics=()),
    ],
    ids=lambda delta: str(delta)[:1],
)
def test_rows_with_any_difference_are_unequal(other: Delta) -> None:
    for neighbours in ([], [Delta("x", d.create([1.0]))]):
        left, right = batch_of([FULL, *neighbours]), batch_of([*neighbours, other])
        assert not same_contents(left, 0, right, len(neighbours))
        assert not same_contents(right, len(neighbours), left, 0)


def test_contents_are_equal_with_members_and_topics_in_another_order() -> None:
    other = replace(
        FULL, metadata={"c": True, "a": [1, {"b": None}]}, topics=("u", "t"), source=Source.IMPORT
    )
    assert same_contents(batch_of([FULL]), 0, batch_of([other]), 0)


def test_operands_are_compared_by_their_bytes() -> None:
    first, second, third = (batch_of([Delta("v", d.opaque(bytes([n])))]) for n in (0, 1, 2))
    assert not same_contents(first, 0, second, 0)
    assert not same_contents(
        batch_of([Delta("v", d.create([0.0]))]), 0, batch_of([Delta("v", d.create([-0.0]))]), 0
    )
    assert same_contents(third, 0, third, 0)


def test_signed_zeros_differ_in_metadata() -> None:
    zero, other_zero, minus_zero = (
        batch_of([replace(FULL, metadata={"z": number})]) for number in (0.0, 0.0, -0.0)
    )
    assert same_contents(zero, 0, other_zero, 0)
    assert not same_contents(zero, 0, minus_zero, 0)


def test_operands_can_be_excluded_from_the_comparison() -> None:
    batch, other = batch_of([Delta("v", d.dense([1.0, 2.0]))]), batch_of([Delta("v", d.dense([3.0, 2.0]))])
    assert not same_contents(batch, 0, other, 0)
    assert same_contents(batch, 0, other, 0, compare_operands=False)
    assert not same_contents(
        batch, 0, batch_of([Delta("v", d.create([3.0, 2.0]))]), 0, compare_operands=False
    )
