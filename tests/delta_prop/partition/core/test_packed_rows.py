"""`PackedRows`: the core packs what is valid and has only names, numbers and bytes, and copies it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import Delta, Kind, Operation
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import DELTA_BYTES_MAX
from delta_prop_wire.validate import validate_delta
from tests.delta_prop.partition.core.drawn import deltas
from tests.native_core import needs_native_core

pytestmark = needs_native_core


@given(deltas(rare=1) | deltas(rare=0))
def test_core_packs_the_valid_deltas_without_rare_fields(delta: Delta) -> None:
    is_plain = delta == Delta(delta.vector_id, delta.operation, delta.namespace, priority=delta.priority)
    is_general = delta.operation.kind in (Kind.TRANSFORM, Kind.METADATA)
    try:
        validate_delta(delta)
        is_valid = True
    except Refused:
        is_valid = False
    assert (core_mode.core.pack_delta(delta) is not None) is (is_plain and is_valid and not is_general)


@pytest.mark.parametrize(
    "changed",
    [
        {"vector_id": 7},
        {"namespace": None},
        {"operation": "create"},
        {"operation": Operation(Kind.CREATE, np.ones(2))},
        {"operation": Operation(Kind.CREATE, np.ones((1, 2), np.float32))},
        {"operation": Operation(Kind.CREATE, [1.0])},
        {"operation": Operation(Kind.CREATE, np.ones(2, ">f4"))},
        {"operation": Operation(Kind.SPARSE, np.ones(1, np.float32), np.ones(1, np.int32))},
        {"operation": Operation(Kind.SPARSE, np.ones(2, np.float32), np.ones(1, np.uint32))},
        {"operation": Operation(Kind.CREATE, np.ones(1, np.float32), np.ones(1, np.uint32))},
        {"operation": Operation("create", np.ones(2, np.float32))},
        {"operation": Operation(300, None)},
        {"operation": Operation(Kind.OPAQUE, data=bytearray(b"x"))},
        {"operation": Operation(Kind.OPAQUE, data=bytes(DELTA_BYTES_MAX + 1))},
        {"priority": 2},
        {"parents": []},
    ],
)
def test_core_leaves_fields_of_other_types_to_python(changed: dict[str, Any]) -> None:
    plain = {"vector_id": "a", "operation": Operation(Kind.CREATE, np.ones(2, np.float32))}
    assert core_mode.core.pack_delta(Delta(**plain)) is not None  # type: ignore[arg-type]
    assert core_mode.core.pack_delta(Delta(**{**plain, **changed})) is None
    assert core_mode.core.pack_delta("a") is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "packs"),
    [
        ({}, True),
        ({"matrix": np.ones((4, 2), np.float32)[::2]}, True),
        ({"keys": ("a", "b")}, False),
        ({"keys": ["a"]}, False),
        ({"keys": ["a", 7]}, False),
        ({"matrix": np.ones(2, np.float32)}, False),
        ({"matrix": [[1.0], [2.0]]}, False),
        ({"matrix": np.array([[1, math.inf], [1, 1]], np.float32)}, False),
        ({"kind": Kind.SPARSE}, False),
        ({"kind": Kind.SCALE, "matrix": np.ones((2, 1), np.float32)}, False),
        ({"kind": Kind.SPARSE, "indices": np.ones((2, 2), np.uint32)}, True),
        ({"kind": Kind.SPARSE, "indices": np.ones((1, 4), np.uint32)}, False),
        ({"kind": Kind.SPARSE, "indices": np.full((2, 2), 65536, np.uint32)}, False),
        ({"kind": Kind.SPARSE, "indices": np.ones((2, 2), np.int64)}, False),
        ({"indices": np.ones((2, 2), np.uint32)}, False),
        ({"namespace": "n\n"}, False),
        ({"namespace": 7}, False),
    ],
)
def test_core_packs_only_arrays_of_the_right_types(changed: dict[str, Any], packs: bool) -> None:
    columns: dict[str, Any] = {
        "keys": ["a", "b"], "matrix": np.ones((2, 2), np.float32), "indices": None,
        "namespace": "n", "kind": Kind.CREATE,
    }  # fmt: skip
    assert (core_mode.core.pack_columns(*{**columns, **changed}.values()) is not None) is packs


def test_packed_rows_keep_the_numbers_of_the_call() -> None:
    matrix, keys = np.ones((2, 2), np.float32), ["a", "b"]
    packed = core_mode.core.pack_columns(keys, matrix, None, "n", Kind.CREATE)
    assert packed is not None
    matrix[:], keys[0] = 7, "c"
    batch = core_mode.core.encode_rows([packed], (0, 16, 1, 1, 0), b"")
    assert batch is not None
    assert (batch.keys, batch.values.tolist()) == (["a", "b"], [1.0] * 4)


def test_rows_beyond_the_bounds_of_a_batch_are_not_encoded() -> None:
    wide = core_mode.core.pack_columns(["a"] * 60, np.ones((60, 65536), np.float32), None, "n", Kind.CREATE)
    many = core_mode.core.pack_columns(
        ["a"] * 40_000, np.ones((40_000, 1), np.float32), None, "n", Kind.CREATE
    )
    assert wide is not None
    assert many is not None
    header = 0, 16, 1, 1, 0
    encode_rows = core_mode.core.encode_rows
    assert encode_rows([wide], header, b"") is not None
    assert encode_rows([wide, wide], header, b"") is None
    assert encode_rows([many], header, b"") is not None
    assert encode_rows([many, many], header, b"") is None
    assert encode_rows([], header, b"") is None
    assert encode_rows([many], (0, 16, 1, (1 << 63) - 40_000, 0), b"") is not None
    assert encode_rows([many], (0, 16, 1, (1 << 63) - 39_999, 0), b"") is None
    assert encode_rows([many], (0, 16, 1, 0, 0), b"") is None
