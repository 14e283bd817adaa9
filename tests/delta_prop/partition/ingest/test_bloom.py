"""The Bloom filter over ids: no false negative, bounded error rate, equal results for one id and for many."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pybloom_live import BloomFilter

from delta_prop.partition.ingest.bloom import IdFilter, hash_id, hash_ids

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 20_000


def random_id(number: int) -> bytes:
    return blake2b(number.to_bytes(8), digest_size=16).digest()


def counter_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def dot_id(number: int) -> bytes:
    return b"\x00\x00\x12\x34\x56\x00\x00\x02" + number.to_bytes(8, "big")


def time_ordered_id(number: int) -> bytes:
    return (1_700_000_000_000 + number // 10).to_bytes(6, "big") + number.to_bytes(10, "big")


def padded_text_id(number: int) -> bytes:
    return f"row-{number:08}".encode().ljust(16, b"\x00")


def doubled_number_id(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


ID_MAKERS = [random_id, counter_id, dot_id, time_ordered_id, padded_text_id, doubled_number_id]


@pytest.mark.parametrize("make_id", ID_MAKERS)
def test_full_filter_misses_nothing_and_keeps_its_error_rate(make_id: Callable[[int], bytes]) -> None:
    filter_ = IdFilter(COUNT, 0.001)
    added, _ = hash_ids([make_id(number) for number in range(COUNT)])
    for part in np.array_split(added, 7):
        filter_.add(part)
    assert len(filter_) == COUNT
    assert filter_.candidates(added).tolist() == list(range(COUNT))
    others, _ = hash_ids([make_id(number) for number in range(COUNT, 6 * COUNT)])
    error_share = len(filter_.candidates(others)) / len(others)
    print(f"{make_id.__name__}: {error_share:.5f} false positives of 0.001 requested")
    assert error_share < 0.002


@given(st.binary(min_size=16, max_size=16))
def test_single_id_hash_equals_batch_hash(id_: bytes) -> None:
    hashes, second_halves = hash_ids([id_, id_])
    assert hash_id(id_) == (int(hashes[1]), int(second_halves[1]))


def test_different_ids_differ_in_hash_or_second_half() -> None:
    ids = [bytes([left] * 8 + [right] * 8) for left in range(100) for right in range(100)]
    hashes, second_halves = hash_ids(ids)
    assert len(set(zip(hashes.tolist(), second_halves.tolist(), strict=True))) == len(ids)


def test_id_of_another_length_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        hash_ids([b"short"])


def test_may_hold_agrees_with_candidates() -> None:
    filters = [IdFilter(1_000, 0.05) for _ in range(3)]
    hashes, _ = hash_ids([random_id(number) for number in range(6_000)])
    for index, filter_ in enumerate(filters):
        filter_.add(hashes[1_000 * index :][:1_000])
    expected_hits = [set(filter_.candidates(hashes).tolist()) for filter_ in filters]
    for row, hashed in enumerate(hashes.tolist()):
        expected = [index for index in range(3) if row in expected_hits[index]]
        assert [index for index in range(3) if filters[index].may_hold(hashed)] == expected


def test_filter_matches_pybloom_in_size_and_bits() -> None:
    original = BloomFilter(COUNT, 0.001)
    filter_ = IdFilter(COUNT, 0.001)
    assert filter_.nbytes == len(original.bitarray.tobytes()) == IdFilter.compute_size(COUNT, 0.001)
    filter_.add(hash_ids([counter_id(number) for number in range(100)])[0])
    assert 900 < filter_.bits.count() <= 100 * original.num_slices


@given(st.integers(1, 100_000), st.sampled_from([0.5, 0.3, 0.25, 0.125, 0.1, 0.01, 0.001, 0.0001]))
def test_compute_size_matches_the_filter(capacity: int, error_rate: float) -> None:
    assert IdFilter.compute_size(capacity, error_rate) == IdFilter(capacity, error_rate).nbytes


def test_filter_refuses_more_than_its_capacity() -> None:
    filter_ = IdFilter(10, 0.001)
    hashes, _ = hash_ids([counter_id(number) for number in range(11)])
    with pytest.raises(AssertionError):
        filter_.add(hashes)
    filter_.add(hashes[:10])
    assert filter_.candidates(hashes[:0]).tolist() == []
