"""State rows: a fold resumed from them equals the full fold, and only a log may write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire import delta as d
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.delta import Dot, Kind, Source
from delta_prop_wire.encode import assemble, encode_vectors
from delta_prop_wire.errors import InvalidDelta, ProtocolError
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import Attribute
from delta_prop_wire.state_rows import StateRow, encode_states, state_of
from delta_prop_wire.validate import validate_batch

VECTOR = np.array([1.0, 2.0], np.float32)
ROWS = [
    StateRow("n", "a", VectorState(True, VECTOR, None, {"k": 1}, 2, (7, 1, 3)), 11),
    StateRow("n", "b", VectorState(True, None, b"", {}, 0, (9, 2, 1)), 12),
    StateRow("é", "c", VectorState(False, None, None, {}, 5, (1 << 62, (1 << 64) - 1, 1)), 0),
]

operations = st.one_of(
    st.builds(d.create, st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=2)),
    st.builds(d.dense, st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=2)),
    st.builds(d.scale, st.floats(-4, 4, width=32)),
    st.builds(lambda index: d.sparse_add([index], [1.0]), st.integers(0, 3)),
    st.builds(d.opaque, st.binary(max_size=3)),
    st.just(d.delete()),
    st.just(d.metadata_only()),
    st.just(d.Operation(40, data=b"?")),
)
patches = st.none() | st.dictionaries(st.sampled_from("ab"), st.none() | st.integers(0, 3), max_size=2)


def columns_of(batch: Batch) -> dict[Column, bytes]:
    return {c: bytes(raw) for c in Column if (raw := batch.column(c)) is not None}


def assemble_states(columns: dict[Column, bytes], **changes: Any) -> bytes:
    header: dict[str, Any] = {"attributes": Attribute.STATE_ROWS, "kinds_mask": 0b101000001, "dimension": 2}
    header |= {"count": 3, "origin": 0, "epoch": 0, "base": 1, "hybrid_time": 0}
    return bytes(assemble(columns, **header | changes).body)


def test_state_rows_round_trip() -> None:
    batch = parse_batch(encode_states(ROWS).body)
    assert batch.is_state
    assert bytes(batch.body) == assemble_states(columns_of(batch))
    logged = LoggedBatch(batch, 0, 0, Source.LOCAL)
    for row, expected in enumerate(ROWS):
        state = state_of(batch, row)
        assert (state.content, state.ignored, state.key) == (
            expected.state.content, expected.state.ignored, expected.state.key,
        )  # fmt: skip
        assert (batch.namespaces[row], batch.keys[row]) == (expected.namespace, expected.vector_id)
        assert logged.row_offset(row) == expected.offset
        assert logged.key(row) == expected.state.key
        assert batch.dot(row) == Dot(*expected.state.key[1:]) if expected.state.key else False


@given(st.lists(st.tuples(operations, patches), min_size=1, max_size=12), st.data())
def test_fold_resumed_from_a_state_row_equals_the_full_fold(
    changes: list[tuple[d.Operation, Any]], data: st.DataObject
) -> None:
    rows = [
        ((lamport, 1, lamport), operation, patch)
        for lamport, (operation, patch) in enumerate(changes, start=1)
    ]
    cut = data.draw(st.integers(1, len(rows)))
    batch = parse_batch(encode_states([StateRow("n", "k", fold(rows[:cut]), 3)]).body)
    resumed, full = fold(rows[cut:], state_of(batch, 0)), fold(rows)
    assert (resumed.content, resumed.ignored, resumed.key) == (full.content, full.ignored, full.key)


def test_producer_cannot_send_state_rows() -> None:
    with pytest.raises(InvalidDelta, match="state rows, which only a snapshot holds: send changes"):
        validate_batch(encode_states(ROWS))


def test_metadata_of_a_state_may_be_larger_than_a_change() -> None:
    large = {str(number): "x" * 60_000 for number in range(3)}
    row = StateRow("n", "a", VectorState(True, VECTOR, None, large, 0, (1, 1, 1)), 0)
    assert state_of(parse_batch(encode_states([row]).body), 0).metadata == large


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({Column.STATE_LAMPORTS: None}, {}, "not those of state rows"),
        ({Column.STATE_ORIGINS: None}, {}, "STATE_ROWS and column STATE_ORIGINS do not agree"),
        ({Column.ROW_OFFSETS: None}, {}, "not those of state rows"),
        ({Column.IDS: bytes(48)}, {}, "not those of state rows"),
        ({Column.STATE_LAMPORTS: b"\xff" * 24}, {}, "above"),
        ({Column.STATE_IGNORED: b"\xff" * 24}, {}, "above"),
        ({Column.STATE_COUNTERS: bytes(24)}, {}, "counter 0"),
        ({Column.STATE_COUNTERS: bytes(16)}, {}, "16 bytes for 3 rows"),
        ({Column.KINDS: bytes([Kind.DENSE, Kind.OPAQUE, Kind.DELETE])}, {"kinds_mask": 0b101000100}, "kinds"),
        ({}, {"attributes": Attribute.STATE_ROWS | Attribute.CONTROL}, "kinds"),
    ],
)
def test_invalid_state_rows_are_refused(
    columns: dict[Column, Any], changes: dict[str, Any], message: str
) -> None:
    columns_or_none = {**columns_of(encode_states(ROWS)), **columns}
    with pytest.raises(ProtocolError, match=message):
        parse_batch(
            assemble_states({c: raw for c, raw in columns_or_none.items() if raw is not None}, **changes)
        )


def test_state_columns_in_a_batch_of_changes_are_refused() -> None:
    changes = encode_vectors(["a"], VECTOR.reshape(1, 2), namespace="n", origin=1, base=1)
    columns = columns_of(changes) | {Column.STATE_COUNTERS: b"\1" + bytes(7)}
    with pytest.raises(ProtocolError, match="state rows in a batch of changes"):
        parse_batch(assemble_states(columns, attributes=0, count=1, kinds_mask=1))
