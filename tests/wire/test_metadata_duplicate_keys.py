"""Metadata with a duplicate key: refused from producers, readable where a log holds them."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.algebra import VectorState, apply, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.delta import Delta, Source, create, metadata_only, scale
from delta_prop_wire.delta_map import unpack_delta
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.packing import pack
from delta_prop_wire.slicing import slice_rows
from delta_prop_wire.validate import validate_batch, validate_delta
from tests.wire.duplicate_keys import DEEP, FLAT, IN_LIST, NULLED, packed_map, with_metadata

DUPLICATE_KEYS = {
    "flat": (FLAT, "a", {"a": 2, "b": 3}),
    "deep": (DEEP, "x", {"a": {"b": {"x": 2}}}),
    "in a list": (IN_LIST, "x", {"a": [0, {"x": 2}]}),
    "removed": (NULLED, "a", {"a": None}),
}
"""By name: a packed map, its duplicate key, and the map as it is read."""


@pytest.mark.parametrize("packed_and_key", [case[:2] for case in DUPLICATE_KEYS.values()], ids=DUPLICATE_KEYS)
@pytest.mark.parametrize("row_count", [1, 3, 400])
def test_batch_with_a_duplicate_key_is_refused_with_its_row(
    packed_and_key: tuple[bytes, str], row_count: int
) -> None:
    packed, key = packed_and_key
    batch = parse_batch(bytes(with_metadata({row_count - 1: packed}, row_count).body))
    with pytest.raises(InvalidDelta, match=f"metadata: the key '{key}' occurs twice: name each") as refused:
        validate_batch(batch)
    assert (refused.value.field, refused.value.row) == ("metadata", row_count - 1)


@pytest.mark.parametrize("packed", [case[0] for case in DUPLICATE_KEYS.values()], ids=DUPLICATE_KEYS)
def test_no_fast_check_accepts_a_duplicate_key(packed: bytes) -> None:
    deltas = [Delta("a", create([1.0, 2.0])), Delta("b", scale(2.0)), Delta("c", metadata_only())]
    for batch_deltas in (deltas[:1], deltas[:2], deltas[2:]):
        for _ in range(3):  # the second and third body use the template
            batch = parse_batch(bytes(with_metadata({0: packed}, deltas=batch_deltas).body))
            with pytest.raises(InvalidDelta, match="occurs twice"):
                validate_batch(batch)


@pytest.mark.parametrize(
    ("packed", "patch"), [(case[0], case[2]) for case in DUPLICATE_KEYS.values()], ids=DUPLICATE_KEYS
)
def test_reader_takes_the_last_value_of_a_duplicate_key(packed: bytes, patch: dict[str, Any]) -> None:
    batch = parse_batch(bytes(with_metadata({1: packed}, 3).body))
    assert [batch.metadata(row) for row in range(3)] == [None, patch, None]
    assert batch.delta(1).metadata == patch
    frame = decode(encode(BatchFrame(1, batch)))
    assert isinstance(frame, BatchFrame)
    assert frame.batch.metadata(1) == patch
    logged = LoggedBatch(batch, 10, 1, Source.LOCAL)
    sliced = decode(b"".join(slice_rows(logged, np.array([1]))))
    assert isinstance(sliced, BatchFrame)
    assert sliced.batch.metadata(0) == patch


@pytest.mark.parametrize(
    ("packed", "patch"), [(case[0], case[2]) for case in DUPLICATE_KEYS.values()], ids=DUPLICATE_KEYS
)
def test_fold_uses_the_last_value_of_a_duplicate_key(packed: bytes, patch: dict[str, Any]) -> None:
    batch = with_metadata({0: packed}, 1)
    state = fold([((1, 1, 1), batch.operation(0), batch.metadata(0))])
    assert state.content == apply(VectorState(), create([0.0]), patch, (1, 1, 1)).content


def test_delta_map_with_a_duplicate_metadata_key_is_invalid() -> None:
    packed_delta = packed_map(("vector_id", pack("a")), ("op", b"\x09"), ("metadata", FLAT))
    with pytest.raises(InvalidDelta, match="occurs twice"):
        validate_delta(unpack_delta(packed_delta).delta)


def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    return st.lists(st.tuples(st.text("ab", max_size=2), values), max_size=4)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=3)
    | st.sampled_from([0.5, 2.0, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | pairs(inner),
    max_leaves=8,
)  # fmt: skip


def pack_pairs(value: Any) -> bytes:
    """Pack lists of pairs as maps, including duplicate keys."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return packed_map(*((key, pack_pairs(inner)) for key, inner in value))
    if isinstance(value, list):
        head = msgpack.Packer().pack_array_header(len(value))
        return bytes(head) + b"".join(map(pack_pairs, value))
    return bytes(msgpack.packb(value, use_single_float=value in (0.5, 2.0)))


def has_duplicate_key(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if value and isinstance(value[0], tuple):
        keys = [key for key, _ in value]
        return len({*keys}) < len(keys) or any(has_duplicate_key(inner) for _, inner in value)
    return any(map(has_duplicate_key, value))


@given(pairs(VALUES))
def test_random_map_with_a_duplicate_key_is_refused(drawn: list[tuple[str, Any]]) -> None:
    packed = packed_map(*((key, pack_pairs(value)) for key, value in drawn))
    batch = parse_batch(bytes(with_metadata({0: packed}, 1).body))
    if has_duplicate_key(drawn):
        with pytest.raises(InvalidDelta, match="occurs twice"):
            validate_batch(batch)
    else:
        validate_batch(batch)
