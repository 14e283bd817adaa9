"""A block of columns encodes to the same bytes as a batch of its deltas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.block import Block
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.delta import AckLevel, Delta, Operation, Priority, create, dense, opaque, sparse
from delta_prop_wire.encode import columns_of, encode_batch
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = st.sampled_from([create([1.0, 2.0]), sparse([1], [0.5]), opaque(b"x"), opaque(b"")])
DELTAS = st.lists(st.builds(Delta, st.sampled_from(["a", "é", "b:1"]), OPERATIONS), min_size=1, max_size=5)


def block_of(deltas: list[Delta]) -> Block:
    columns, mask, dimension = columns_of(deltas)
    return Block(len(deltas), columns, mask, dimension)


@given(DELTAS, st.sampled_from(AckLevel), st.sampled_from(Priority))
def test_block_encodes_to_the_bytes_of_its_deltas(
    deltas: list[Delta], level: AckLevel, priority: Priority
) -> None:
    block = block_of(deltas)
    block.check()
    batch = block.encode(origin=7, base=5, epoch=2, previous=4, ack_level=level, priority=priority)
    expected = encode_batch(deltas, origin=7, base=5, epoch=2, ack_level=level, priority=priority)
    assert bytes(batch.raw) == bytes(expected.raw)


@given(DELTAS, st.integers(0, 9), st.integers(1, 9))
def test_batch_records_a_gap_before_its_counters(deltas: list[Delta], previous: int, step: int) -> None:
    base = previous + step
    batch = block_of(deltas).encode(origin=7, base=base, previous=previous)
    decoded: Batch = parse_batch(batch.raw)
    assert decoded.has_gaps == (step > 1)
    assert [decoded.counter(row) for row in range(decoded.count)] == list(range(base, base + len(deltas)))
    assert decoded.previous == (previous if step > 1 else 0)


NAMES = st.sampled_from(["a", "b" * 300, "long" * 500, "é", "", "tab\t", "nul\0"])
NUMBERS = st.sampled_from([0.0, -1.5, 3e38, float("nan"), float("-inf")])
VECTORS = st.lists(NUMBERS, min_size=2, max_size=2)


@given(
    st.lists(st.tuples(NAMES, VECTORS), min_size=1, max_size=4),
    st.sampled_from(["docs", "é", "bad\n", "", "n" * 300]),
    st.sampled_from([create, dense]),
    st.booleans(),
)
def test_homogeneous_block_check_agrees_with_validation(
    rows: list[tuple[str, list[float]]],
    namespace: str,
    make_operation: Callable[[Any], Operation],
    with_views: bool,
) -> None:
    block = block_of([Delta(name, make_operation(vector), namespace) for name, vector in rows])
    if with_views:
        block = replace(
            block, columns={column: memoryview(content) for column, content in block.columns.items()}
        )
    expected_error: InvalidDelta | None = None
    try:
        validate_batch(block.encode(origin=0, base=1))
    except InvalidDelta as error:
        expected_error = error
    # The quick check accepts no invalid row; it accepts every valid one whose names are ASCII.
    assert block._is_homogeneous_and_valid() <= (expected_error is None)
    assert (
        block._is_homogeneous_and_valid() or expected_error or "é" in {namespace, *(name for name, _ in rows)}
    )
    if expected_error is None:
        block.check()
    else:
        with pytest.raises(InvalidDelta) as caught:
            block.check()
        assert str(caught.value) == str(expected_error)


@pytest.mark.parametrize("row_count", [1, 3_000])
def test_block_of_views_encodes_to_the_same_bytes(row_count: int) -> None:
    deltas = [Delta(f"v{row}", create(np.arange(8) + row)) for row in range(row_count)]
    block = block_of(deltas)
    block_of_views = replace(
        block, columns={column: memoryview(content) for column, content in block.columns.items()}
    )
    expected = encode_batch(deltas, origin=7, base=5)
    assert bytes(block_of_views.encode(origin=7, base=5).raw) == bytes(expected.raw)
    assert parse_batch(block_of_views.encode(origin=7, base=5).raw).keys == expected.keys


def test_invalid_row_is_named() -> None:
    block = block_of([Delta("a", create([1.0])), Delta("b", create([float("inf")]))])
    with pytest.raises(InvalidDelta) as caught:
        block.check()
    assert (caught.value.row, caught.value.field) == (1, "vector")


@pytest.mark.parametrize("count", [0, 65_537])
def test_block_row_count_is_bounded_as_for_a_batch(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 65536"):
        Block(count, {}, 1)
