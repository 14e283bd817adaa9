"""Rows are sliced into blocks by their content, independent of the batches in which they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from delta_prop.spark.data_source import slices  # noqa: E402
from delta_prop.spark.data_source.slices import slice_blocks  # noqa: E402

ROWS = [{"vector_id": f"doc-{number}", "vector": [float(number)] * (number % 7)} for number in range(200)]


def batches(cuts: list[int]) -> list[pa.RecordBatch]:
    bounds = sorted({0, len(ROWS), *cuts})
    all_rows = pa.RecordBatch.from_pylist(
        ROWS,
        schema=pa.schema([("vector_id", pa.string()), ("vector", pa.list_(pa.float32()))]),
    )
    return [all_rows.slice(start, end - start) for start, end in pairwise(bounds)]


@given(st.lists(st.integers(0, 200), max_size=8))
def test_ends_of_blocks_depend_only_on_the_rows(cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "BLOCK_ROWS", 30)
        patch.setattr(slices, "BLOCK_BYTES", 400)
        blocks = list(slice_blocks(batches(cuts)))
    assert [row for block in blocks for row in block.to_pylist()] == ROWS
    sizes = [block.num_rows for block in blocks]
    assert sizes == [15] * 12 + [20]
    assert max(sizes) <= 30


def test_row_larger_than_a_block_gets_its_own_block() -> None:
    rows = pa.record_batch({"data": pa.array([b"x", b"y" * 5_000_000, b"z"], pa.binary())})
    assert [block.num_rows for block in slice_blocks([rows])] == [1, 1, 1]


def test_batches_of_the_usual_size_are_not_copied() -> None:
    rows = pa.record_batch({"vector": pa.array([[1.0]] * 10_000, pa.list_(pa.float32()))})
    blocks = list(slice_blocks([rows, rows.slice(0, 7)]))
    assert [block.num_rows for block in blocks] == [5_000, 5_000, 7]
    address = rows.column(0).buffers()[3].address
    assert {block.column(0).buffers()[3].address for block in blocks} == {address}


def test_empty_batches_make_no_block() -> None:
    assert list(slice_blocks([])) == []
    assert list(slice_blocks(batches([])[0].slice(0, 0) for _ in range(2))) == []
