"""murmur2: golden values that others have too, and one answer for one key however it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.murmur import murmur2, partition_of, partitions_of


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 275646681), ("hello", 2132663229), ("21", -973932308), ("foobar", -790332482)],
)
def test_golden_values(text: str, value: int) -> None:
    assert murmur2(text.encode()) == value


def test_a_golden_value_is_unsigned_where_it_is_told_so() -> None:
    assert murmur2(b"kafka") & 0xFFFFFFFF == 3496464228


@given(st.text(max_size=9), st.lists(st.text(max_size=30), min_size=1, max_size=40), st.integers(1, 64))
def test_many_keys_at_once_go_where_each_goes_alone(namespace: str, ids: list[str], places: int) -> None:
    many = partitions_of(namespace, ids * 2, places).tolist()
    assert many == [partition_of(namespace, one, places) for one in ids * 2]
    assert all(0 <= one < places for one in many)


def test_keys_spread_evenly() -> None:
    places = partitions_of("docs", [f"key-{at}" for at in range(10_000)], 4)
    assert all(2_300 < (places == one).sum() < 2_700 for one in range(4))
