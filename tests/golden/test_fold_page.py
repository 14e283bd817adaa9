"""The fold on the protocol page agrees with the algebra and with a service's refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from delta_prop import Delta, Propagator
from delta_prop_wire.algebra import FLOAT32_MAX, VectorState, apply
from delta_prop_wire.bounds import METADATA_DEPTH_MAX
from delta_prop_wire.delta import (
    Kind,
    Operation,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
    transform,
)
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.spec import METADATA_BYTES_MAX
from delta_prop_wire.validate import validate_delta

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("\n## The fold\n") : PAGE.index("\n## What a small client leaves out\n")]
TABLE = {
    row[0]: row[1:]
    for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", SECTION, re.MULTILINE)
    if row[0] not in ("operation", "---")
}
"""Maps each operation in the page's table to three cells: its effect on an absent vector, on a vector of
numbers, on one of bytes."""
OPERATIONS = {
    "create": create([3.0, 4.0]),
    "dense": dense([3.0, 4.0]),
    "opaque": opaque(b"new"),
    "sparse": sparse([0], [5.0]),
    "sparse_add": sparse_add([0], [5.0]),
    "scale": scale(2),
    "offset": offset(2),
    "metadata": metadata_only(),
    "delete": delete(),
    "transform": transform("double"),
    "10–63": Operation(63, data=b"x"),
}
OLD, PATCH = {"old": 1}, {"new": 2}
STATES: list[tuple[int, list[Operation]]] = [
    (0, []),
    (0, [create([1.0, 2.0]), delete()]),
    (1, [create([1.0, 2.0])]),
    (2, [opaque(b"old")]),
]
"""Pairs of a column of `TABLE`, and operations that make a vector of the kind that the column is about."""


def test_fold_table_has_each_operation() -> None:
    assert list(TABLE) == list(OPERATIONS)
    assert {
        Kind(operation.kind).name.lower() for operation in OPERATIONS.values() if operation.kind < 10
    } == {kind.name.lower() for kind in Kind}


@pytest.mark.parametrize(("column", "before"), STATES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_fold_table_cell_agrees_with_algebra(name: str, column: int, before: list[Operation]) -> None:
    state = VectorState()
    for operation in before:
        state = apply(state, operation, OLD)
    cell, after = TABLE[name][column], apply(state, OPERATIONS[name], PATCH)
    assert after.ignored == (cell in ("refused", "no effect"))
    if after.ignored:
        assert after.content == state.content
        return
    metadata_by_phrase: dict[str, Any] = {
        "new metadata": PATCH,
        "patches": {**state.metadata, **PATCH},
        "absent": {},
    }
    (expected,) = (metadata for phrase, metadata in metadata_by_phrase.items() if phrase in cell)
    assert after.metadata == expected
    assert after.alive == ("absent" not in cell)
    assert (after.data is not None) == ("bytes" in cell or (cell == "patches" and column == 2))


@pytest.mark.parametrize(("column", "before"), STATES)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "transform"])
def test_fold_table_cell_agrees_with_service_refusal(name: str, column: int, before: list[Operation]) -> None:
    async def main() -> None:
        async with Propagator() as p:
            await p.publish(Delta("other", create([1.0, 2.0])))  # so that the namespace has a dimension
            for operation in before:
                await p.publish(Delta("v", operation, metadata=OLD))
            delta = Delta("v", OPERATIONS[name], metadata=PATCH)
            if TABLE[name][column] != "refused":
                await p.publish(delta)
                return
            with pytest.raises(InvalidDelta) as caught:
                await p.publish(delta)
            assert caught.value.field == "vector_id"

    anyio.run(main)


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (sparse([2], [1.0]), "indices"),
        (sparse_add([0, 2], [1.0, 1.0]), "indices"),
        (create([1.0]), "vector"),
        (dense([1.0, 2.0, 3.0]), "vector"),
    ],
)
def test_wrong_dimension_is_refused_with_field_on_page(operation: Operation, field: str) -> None:
    async def main() -> None:
        async with Propagator() as p:
            await p.publish(Delta("v", create([1.0, 2.0])))
            with pytest.raises(InvalidDelta) as caught:
                await p.publish(Delta("v", operation))
            assert caught.value.field == field

    anyio.run(main)
    assert f"(`{field}`)" in SECTION


def test_saturation_example_on_page_is_true() -> None:
    state = VectorState()
    for operation in (create([3e38, 0.0]), offset(3e38), offset(-3e38)):
        state = apply(state, operation)
    assert state.vector is not None
    assert state.vector[0] == np.float32(4.0282346e37)
    assert "3·10³⁸ + 3·10³⁸ − 3·10³⁸ is 4.0282346·10³⁷" in SECTION
    assert f"`{FLOAT32_MAX.view(np.uint32):#x}`" in SECTION


def nested_map(levels: int) -> dict[str, Any]:
    return {"x": nested_map(levels - 1)} if levels > 1 else {}


@pytest.mark.parametrize(
    "patch",
    [
        nested_map(METADATA_DEPTH_MAX + 1),
        {"x": 1 << 64},
        {"x": -(1 << 63) - 1},
        {"x": float("nan")},
        {"x": [float("-inf")]},
        {"x": b"bytes"},
        {1: 1},
        {"x": "x" * METADATA_BYTES_MAX},
    ],
)
def test_metadata_beyond_page_limits_is_refused(patch: Any) -> None:
    with pytest.raises(InvalidDelta) as caught:
        validate_delta(Delta("v", metadata_only(), metadata=patch))
    assert caught.value.field == "metadata"


def test_metadata_at_page_limits_is_accepted() -> None:
    for patch in (
        nested_map(METADATA_DEPTH_MAX),
        {"most": (1 << 64) - 1, "least": -(1 << 63)},
        {"x": "x" * (METADATA_BYTES_MAX - 6)},
    ):
        validate_delta(Delta("v", metadata_only(), metadata=patch))
    assert f"up to {METADATA_BYTES_MAX:,} bytes as it came and up to {METADATA_DEPTH_MAX} levels" in SECTION
