"""A block of columns encodes to the same bytes as a batch of its deltas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.block import Block
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.delta import AckLevel, Delta, Priority, create, opaque, sparse
from delta_prop_wire.encode import columns_of, encode_batch
from delta_prop_wire.errors import InvalidDelta

if TYPE_CHECKING:
    pass

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


def test_block_check_names_the_first_invalid_row() -> None:
    rows = [Delta("a", create([1.0, 2.0])), Delta("b", create([float("nan"), 2.0]))]
    block_of(rows[:1]).check()
    with pytest.raises(InvalidDelta) as caught:
        block_of(rows).check()
    assert caught.value.row == 1


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
