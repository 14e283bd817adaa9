"""murmur2: the golden values of other implementations, and the same partition for a key by both functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.murmur import murmur2, partition_of, partitions_of


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 275646681), ("hello", 2132663229), ("21", -973932308), ("foobar", -790332482)],
)
def test_golden_values_match(text: str, value: int) -> None:
    assert murmur2(text.encode()) == value


def test_unsigned_golden_value_matches() -> None:
    assert murmur2(b"kafka") & 0xFFFFFFFF == 3496464228


@pytest.mark.parametrize(
    ("namespace", "vector_id", "partitions"),
    [
        ("docs", "doc-1", (1, 7, 567)),
        ("default", "b", (0, 6, 734)),
        ("n", "é", (2, 1, 201)),  # the highest bit of this hash is set, and of the next one
        ("docs", "d" * 33, (2, 7, 703)),
    ],
)
def test_partition_is_the_masked_hash_modulo_the_count(
    namespace: str, vector_id: str, partitions: tuple[int, ...]
) -> None:
    counts = (3, 8, 1_000)
    assert tuple(partition_of(namespace, vector_id, count) for count in counts) == partitions
    together = [partitions_of(namespace, [vector_id] * 40, count) for count in counts]
    assert tuple(int(one[39]) for one in together) == partitions


@given(st.text(max_size=9), st.lists(st.text(max_size=30), min_size=1, max_size=40), st.integers(1, 1 << 16))
def test_partitions_of_many_keys_equal_those_of_each(
    namespace: str, ids: list[str], partition_count: int
) -> None:
    partitions = partitions_of(namespace, ids * 2, partition_count).tolist()
    assert partitions == [partition_of(namespace, vector_id, partition_count) for vector_id in ids * 2]
    assert all(0 <= partition < partition_count for partition in partitions)


def test_keys_are_divided_evenly() -> None:
    partitions = partitions_of("docs", [f"key-{number}" for number in range(10_000)], 4)
    assert all(2_300 < (partitions == partition).sum() < 2_700 for partition in range(4))
