"""Batches of mixed rows are decoded at once: as column by column, or not at all."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, create, delete, dense, metadata_only, offset, opaque, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, PeerError
from delta_prop_wire.mixed import is_simple
from delta_prop_wire.soundness import check_body, check_columns, mixed_is_whole
from delta_prop_wire.validate import simple_is_sound, validate_batch

OPERATIONS = [
    create([1, 2]),
    dense([1, 2, 3]),
    create([float("nan"), 0]),
    sparse([0, 5], [1, 2]),
    sparse([], []),
    offset(1.0),
    delete(),
    opaque(b"xyz"),
    opaque(b""),
    metadata_only(),
]
DELTAS = st.lists(
    st.builds(
        Delta,
        st.sampled_from(["a", "bcd", "é", "x\n", "", "k" * 300]),
        st.sampled_from(OPERATIONS),
        st.sampled_from(["default", "other", "ö", "n" * 300, ""]),
    ),
    min_size=1,
    max_size=5,
)
COLUMNS = (
    *("keys", "namespace_names", "namespace", "namespaces", "kinds", "values", "indices", "index_highest"),
    *("row_values", "value_bounds", "index_bounds", "blob_bounds"),
)


def broken(raw: bytes, changes: list[tuple[float, int]]) -> bytes:
    """The body with bytes of it changed, signed as if it were meant so."""
    body = bytearray(raw)
    for share, byte in changes:
        body[int(share * (len(body) - 4))] ^= byte
    body[-4:] = struct.pack("<I", crc32c(body[:-4]))
    return bytes(body)


@given(DELTAS, st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=3))
def test_what_is_decoded_at_once_is_sound_and_the_same_as_column_by_column(
    deltas: list[Delta], changes: list[tuple[float, int]]
) -> None:
    whole = encode_batch(deltas, origin=16, base=1)
    raw = broken(bytes(whole.body), changes)
    short, long = Batch(raw), Batch(raw)
    try:
        check_body(long.body)
        check_columns(long)
    except PeerError:
        assert not mixed_is_whole(short)
        return
    if not mixed_is_whole(short):
        return
    assert is_simple(short)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(short, column), getattr(long, column), column)
    for row in range(long.count):
        assert short.operation(row).kind == long.operation(row).kind
    try:
        validate_batch(long)
    except InvalidDelta:
        assert not simple_is_sound(short)


def test_rows_that_differ_and_say_nothing_rare_are_decoded_at_once() -> None:
    rows = [Delta("a", create([1, 2])), Delta("b", opaque(b"x"), namespace="other")]
    assert mixed_is_whole(Batch(encode_batch(rows, origin=16, base=1).raw))
    assert simple_is_sound(Batch(encode_batch(rows, origin=16, base=1).raw))
    tagged = [*rows, Delta("c", delete(), topics=("t",))]
    assert not mixed_is_whole(Batch(encode_batch(tagged, origin=16, base=1).raw))
