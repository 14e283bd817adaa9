"""Homogeneous bodies are decoded at once, unless a vector id is empty or not printable ASCII.

Vector ids of many batches, decoded together, equal those of each batch decoded by itself.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.fast import homogeneous
from delta_prop_wire.fast.homogeneous import (
    decode_columns,
    decode_homogeneous,
    decode_keys,
    homogeneous_is_valid,
)
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

IDS = st.text("abc -~!", min_size=0, max_size=5) | st.just("x" * (VECTOR_ID_BYTES_MAX + 1))


def batches_of(*ids_by_batch: Sequence[str]) -> list[Batch]:
    return [
        Batch(encode_batch([Delta(vector_id, opaque(b"x")) for vector_id in batch_ids], origin=7, base=1).raw)
        for batch_ids in ids_by_batch
    ]


@given(
    st.lists(st.lists(IDS.filter(bool), min_size=1, max_size=6), min_size=1, max_size=6),
    st.sampled_from([0, 500]),
)
def test_ids_decoded_together_equal_ids_of_each_batch(ids: list[list[str]], loop_rows_max: int) -> None:
    batches = batches_of(*ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homogeneous, "_LOOP_ROWS_MAX", loop_rows_max)
        key_columns = [decode_columns(batch) for batch in batches]
        assert decode_keys(batches, [columns for columns in key_columns if columns is not None]) == len(
            batches
        )
    for batch, expected in zip(batches, ids, strict=True):
        assert batch.keys == expected == Batch(batch.raw).keys
        assert batch.decoded
        assert batch.key_bytes_bound >= max(map(len, expected))
        assert homogeneous_is_valid(batch) == all(len(name) <= VECTOR_ID_BYTES_MAX for name in expected)


@given(st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=6), st.sampled_from([0, 500]))
def test_decoding_stops_at_the_first_batch_with_an_empty_id(ids: list[list[str]], loop_rows_max: int) -> None:
    batches = batches_of(*ids)
    decoded_count = next((position for position, batch_ids in enumerate(ids) if not all(batch_ids)), len(ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homogeneous, "_LOOP_ROWS_MAX", loop_rows_max)
        key_columns = [decode_columns(batch) for batch in batches]
        assert (
            decode_keys(batches, [columns for columns in key_columns if columns is not None]) == decoded_count
        )
    assert [batch.decoded for batch in batches] == [position < decoded_count for position in range(len(ids))]


@given(st.lists(IDS, min_size=1, max_size=6))
def test_ids_are_decoded_unless_one_is_empty(ids: list[str]) -> None:
    (batch,) = batches_of(ids)
    assert decode_homogeneous(batch) == batch.decoded == all(ids)
    assert batch.keys == ids == Batch(batch.raw).keys
    if batch.decoded:
        assert batch.key_bytes_bound >= max(map(len, ids))
        assert homogeneous_is_valid(batch) == all(len(name) <= VECTOR_ID_BYTES_MAX for name in ids)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_key_ends_that_do_not_rise_are_not_decoded(ends: list[int]) -> None:
    (batch,) = batches_of(["xx" for _ in ends])
    raw = bytearray(batch.raw)
    start, stop = batch._bounds_of_column(homogeneous.Column.KEY_ENDS) or (0, 0)
    raw[start:stop] = b"".join(end.to_bytes(4, "little") for end in ends)
    is_rising = all(a < b for a, b in zip([0, *ends], ends, strict=False)) and ends[-1] == 2 * len(ends)
    assert decode_homogeneous(Batch(bytes(raw))) == is_rising


@pytest.mark.parametrize("name", ["é", "x\n", "x\x7f", "x\0"])
def test_unprintable_or_non_ascii_ids_are_not_decoded_fast(name: str) -> None:
    (batch,) = batches_of(["a", name])
    assert decode_columns(batch) is None
    assert not decode_homogeneous(batch)


def test_dropped_ids_are_decoded_on_demand() -> None:
    (batch,) = batches_of(["a", "bc"])
    assert decode_homogeneous(batch)
    batch.drop_decoded_keys()
    batch.drop_decoded_keys()
    assert not batch.decoded
    assert batch.keys == ["a", "bc"]
    assert decode_homogeneous(batch)


def test_each_id_ends_where_the_next_begins() -> None:
    ids = [[f"key-{row}" for row in range(first, first + 200)] for first in (0, 5_000, 100)]
    batches = batches_of(*ids)
    key_columns = [columns for columns in map(decode_columns, batches) if columns is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(homogeneous, "_decode_batch_keys")  # all batches must be decoded together
        assert decode_keys(batches, key_columns) == 3
    ends = [list(accumulate(map(len, batch.keys))) for batch in batches]
    assert [batch.keys for batch in batches] == ids
    assert all(Batch(batch.raw).keys == batch.keys for batch in batches)
    assert all(end[-1] == len(columns.text) for end, columns in zip(ends, key_columns, strict=True))
