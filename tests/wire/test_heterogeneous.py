"""Heterogeneous batches decoded together equal those decoded by columns; others are not decoded."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import DIRECTORY_AT, Batch, directory_layout
from delta_prop_wire.body_checks import check_body, check_columns
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, Kind, create, delete, dense, metadata_only, offset, opaque, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.fast.fast_core import FastCore
from delta_prop_wire.fast.heterogeneous import (
    decode_columns,
    decode_heterogeneous,
    heterogeneous_is_intact,
    rows_are_valid,
)
from delta_prop_wire.fast.homogeneous import body_is_valid
from delta_prop_wire.layout import ROW_WIDTHS, Column
from delta_prop_wire.spec import ALIGNMENT, DIMENSION_MAX
from delta_prop_wire.validate import common_columns_only, validate_batch

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
    *("keys", "namespace_names", "namespace", "namespaces", "kinds", "values", "indices", "highest_index"),
    *("values_per_row", "value_bounds", "index_bounds", "blob_bounds"),
)


def with_changed_bytes(raw: bytes, changes: list[tuple[float, int]]) -> bytes:
    """Return the body with some bytes changed and a valid checksum."""
    body = bytearray(raw)
    for share, byte in changes:
        body[int(share * (len(body) - 4))] ^= byte
    body[-4:] = struct.pack("<I", crc32c(body[:-4]))
    return bytes(body)


@given(DELTAS, st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=3))
def test_fast_decoding_is_valid_and_equals_column_decoding(
    deltas: list[Delta], changes: list[tuple[float, int]]
) -> None:
    intact = encode_batch(deltas, origin=16, base=1)
    raw = with_changed_bytes(bytes(intact.body), changes)
    fast, general = Batch(raw), Batch(raw)
    try:
        check_body(general.body)
        check_columns(general)
    except ProtocolError:
        assert not heterogeneous_is_intact(fast)
        return
    if not heterogeneous_is_intact(fast):
        return
    assert common_columns_only(fast)
    assert FastCore().batch_is_valid(fast)
    validate_batch(general)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(fast, column), getattr(general, column), column)
    for row in range(general.count):
        assert fast.operation(row).kind == general.operation(row).kind


COMMON_ROWS = st.lists(
    st.builds(
        Delta,
        st.sampled_from(["a", "bcd", "k" * 300]),
        st.sampled_from(
            [create([1, 2]), dense([3, 4]), sparse([0, 5], [1, 2]), sparse([], []), opaque(b"xyz"), delete()]
        ),
        st.sampled_from(["default", "other", "ö"]),
    ),
    min_size=2,
    max_size=5,
).filter(lambda rows: len({(row.namespace, row.operation.kind) for row in rows}) > 1)


@given(st.lists(COMMON_ROWS, min_size=1, max_size=6))
def test_valid_rows_are_accepted(batches: list[list[Delta]]) -> None:
    together = [Batch(encode_batch(rows, origin=16, base=1).raw) for rows in batches]
    assert None not in [decode_columns(batch) for batch in together]
    assert rows_are_valid(together)
    for batch in together:
        single = Batch(batch.raw)
        assert decode_heterogeneous(single)
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(batch, column), getattr(single, column), column)


@given(
    st.lists(
        st.tuples(DELTAS, st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=2)),
        min_size=1,
        max_size=6,
    )
)
def test_rows_of_many_batches_are_valid_if_each_batch_is(pieces: list[Any]) -> None:
    decoded_batches = []
    for deltas, changes in pieces:
        batch = Batch(with_changed_bytes(bytes(encode_batch(deltas, origin=16, base=1).body), changes))
        if body_is_valid(batch) and decode_columns(batch) is not None:
            decoded_batches.append(batch)
    each_is_valid = [rows_are_valid([batch]) for batch in decoded_batches]
    assert rows_are_valid(decoded_batches) == all(each_is_valid)


VECTOR, FACT = Delta("a", create([1, 2])), Delta("b", opaque(b"xyz"), "other")
SPARSE, DELETED = Delta("c", sparse([0, 5], [1, 2])), Delta("d", delete())
KINDS_MASK_AT, DIMENSION_AT, LENGTH_AT = 40, 48, 52
"""Positions in a body of the mask of kinds, the dimension and the length."""


@pytest.mark.parametrize(
    ("rows", "column", "offset", "replacement"),
    [
        ([VECTOR, FACT], None, DIMENSION_AT, struct.pack("<I", 3)),  # the vector has fewer numbers
        ([VECTOR, FACT], None, DIMENSION_AT, struct.pack("<I", 1)),  # it has more
        ([VECTOR, FACT], None, DIMENSION_AT, struct.pack("<I", 0)),
        ([DELETED, FACT], None, DIMENSION_AT, struct.pack("<I", 3)),  # a dimension without a vector
        ([DELETED, FACT], None, DIMENSION_AT, struct.pack("<I", DIMENSION_MAX + 1)),
        ([VECTOR, FACT], None, DIMENSION_AT, struct.pack("<I", DIMENSION_MAX + 1)),
        (
            [VECTOR, FACT],
            Column.VALUE_ENDS,
            0,
            struct.pack("<II", 3, 2),
        ),  # a vector that ends before it begins
        ([DELETED, FACT], Column.BLOB_ENDS, 0, struct.pack("<II", 1, 3)),  # bytes for a kind without bytes
        ([DELETED, FACT], Column.BLOB_ENDS, 0, struct.pack("<II", 0, 2)),  # bytes that belong to no row
        ([SPARSE, FACT], Column.VALUE_ENDS, 0, struct.pack("<II", 1, 1)),  # numbers that belong to no row
        ([SPARSE, FACT], Column.INDICES, 4, struct.pack("<I", DIMENSION_MAX)),
        ([VECTOR, FACT], Column.NAMESPACE_INDEX, 0, struct.pack("<HH", 0, 2)),
        ([VECTOR, FACT, FACT], Column.KINDS, 2, bytes((40,))),  # not in the mask
        ([VECTOR, FACT], None, KINDS_MASK_AT + 5, b"\1"),  # in the mask, but of no row
        ([VECTOR, FACT], None, LENGTH_AT, struct.pack("<I", 8)),
        ([VECTOR, FACT], None, LENGTH_AT, struct.pack("<I", 4_096)),
        ([VECTOR, FACT], Column.KEY_ENDS, 4, struct.pack("<I", 3)),
    ],
)
def test_invalid_body_is_not_decoded(
    rows: list[Delta], column: Column | None, offset: int, replacement: bytes
) -> None:
    intact = encode_batch(rows, origin=16, base=1)
    assert decode_heterogeneous(Batch(intact.raw))
    bounds = (0, 0) if column is None else intact._bounds_of_column(column)
    assert bounds is not None
    body = bytearray(intact.raw)
    body[bounds[0] + offset : bounds[0] + offset + len(replacement)] = replacement
    assert body != intact.raw
    assert not decode_heterogeneous(Batch(bytes(body)))


def test_indices_without_sparse_rows_are_not_decoded() -> None:
    intact = encode_batch([SPARSE, VECTOR], origin=16, base=1)
    body, bounds = bytearray(intact.raw), intact._bounds_of_column(Column.KINDS)
    assert bounds is not None
    body[bounds[0]] = Kind.DENSE
    struct.pack_into("<Q", body, KINDS_MASK_AT, 1 << Kind.CREATE | 1 << Kind.DENSE)
    assert not decode_heterogeneous(Batch(bytes(body)))


def test_row_column_of_wrong_length_is_not_decoded() -> None:
    intact = encode_batch([VECTOR, FACT], origin=16, base=1)
    column_numbers, _, _ = directory_layout(intact.columns_mask)
    for position, column in enumerate(column_numbers):
        if (
            column in ROW_WIDTHS and ROW_WIDTHS[Column(column)] < ALIGNMENT // 2
        ):  # one more value fits the padding of other columns
            body = bytearray(intact.raw)
            body[DIRECTORY_AT + 4 * position] += ROW_WIDTHS[Column(column)]
            assert not decode_heterogeneous(Batch(bytes(body)))


def test_only_rows_with_common_columns_are_decoded_fast() -> None:
    rows = [Delta("a", create([1, 2])), Delta("b", opaque(b"x"), namespace="other")]
    assert heterogeneous_is_intact(Batch(encode_batch(rows, origin=16, base=1).raw))
    assert FastCore().batch_is_valid(Batch(encode_batch(rows, origin=16, base=1).raw))
    tagged = [*rows, Delta("c", delete(), topics=("t",))]
    assert not heterogeneous_is_intact(Batch(encode_batch(tagged, origin=16, base=1).raw))
