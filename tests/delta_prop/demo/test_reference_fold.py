"""The demo's reference fold of published lines, and its lines against the product's own format."""

from __future__ import annotations

import json

import numpy as np
import pytest

from delta_prop import Delta, create, delete, delta_from_line, dense, sparse, sparse_add
from delta_prop.demo.reference_fold import (
    ReferenceFold,
    create_line,
    fingerprint_of,
    line_of,
    parse_logged_line,
)

DELTAS = [
    Delta("a", create([0, 0.1, -2]), "n"),
    Delta("b", create([1, 2, 3]), "n"),
    Delta("a", sparse([1, 2], [7, 0]), "n"),
    Delta("b", delete(), "n"),
    Delta("c", dense([1e-30, 3.4e38, 0]), "n"),
    Delta("a", sparse_add([0, 1], [0.1, 1]), "n"),
]


def fold(deltas: list[Delta]) -> ReferenceFold:
    folded = ReferenceFold()
    for delta in deltas:
        folded.add(line_of(delta))
    return folded


@pytest.mark.parametrize("delta", DELTAS)
def test_line_round_trips_a_delta(delta: Delta) -> None:
    parsed = delta_from_line(line_of(delta))
    assert (parsed.vector_id, parsed.namespace, parsed.operation) == (
        delta.vector_id,
        delta.namespace,
        delta.operation,
    )


def test_create_line_equals_the_create_delta() -> None:
    vector = np.array([0, 0.1, -0.0, 1e-30], np.float32)
    line = create_line("n", 'quote " and \\', vector)
    assert line.endswith("}\n")
    assert json.loads(line)["vector"] == vector.tolist()
    assert delta_from_line(line).operation == create(vector)


def test_fold_of_lines_is_the_last_state_of_each_vector() -> None:
    folded = fold(DELTAS)
    tiny = np.float32(1e-30).item()
    assert folded.vectors == {
        ("n", "a"): [np.float32(0.1).item(), 8, 0],
        ("n", "c"): [tiny, np.float32(3.4e38).item(), 0],
    }


def test_sums_are_rounded_to_float32() -> None:
    rows = np.random.default_rng(1).normal(scale=[[1], [1e-6], [1e3]], size=(3, 500)).astype(np.float32)
    indices = list(range(500))
    deltas = [Delta("a", create(rows[0])), *(Delta("a", sparse_add(indices, row)) for row in rows[1:])]
    assert fold(deltas).vectors["default", "a"] == (rows[0] + rows[1] + rows[2]).tolist()


def test_logged_lines_have_offsets_and_equal_fingerprints() -> None:
    line = line_of(DELTAS[2]).replace("{", '{"offset": 7, ', 1)
    assert parse_logged_line(line) == (7, fingerprint_of(DELTAS[2]))


def test_fingerprints_of_lines_and_deltas_agree() -> None:
    assert fold(DELTAS).fingerprints == [fingerprint_of(delta) for delta in DELTAS]
    changed = Delta("a", sparse([1, 2], [7, 1]), "n")
    moved = Delta("a", sparse([0, 2], [7, 0]), "n")
    assert len({fingerprint_of(delta) for delta in (DELTAS[2], changed, moved)}) == 3
