"""A body with a known template is accepted or refused exactly as by the general parser."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import SPARSE_KINDS, Batch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.buffer import ReceiveBuffer
from delta_prop_wire.codec import encode_head
from delta_prop_wire.crc import crc32c
from delta_prop_wire.credit_window import CreditWindow
from delta_prop_wire.delta import AckLevel, Delta, Kind, Operation, Priority, create, delete, opaque, sparse
from delta_prop_wire.encode import encode_batch, encode_columns
from delta_prop_wire.errors import InvalidDelta, ProtocolError
from delta_prop_wire.fast import fast_core, row_templates
from delta_prop_wire.fast.frame_runs import take_run
from delta_prop_wire.fast.homogeneous import homogeneous_is_valid
from delta_prop_wire.fast.row_templates import encode_row, parse_with_template
from delta_prop_wire.spec import COUNTER_MAX, DIMENSION_MAX
from delta_prop_wire.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NUMBERS = st.lists(FINITE, min_size=1, max_size=6)
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    NUMBERS.map(create),
    st.lists(st.tuples(st.integers(0, 300), FINITE), max_size=6, unique_by=lambda pair: pair[0]).map(
        lambda pairs: sparse([index for index, _ in pairs], [number for _, number in pairs])
    ),
    st.binary(max_size=20).map(opaque),
    st.just(delete()),
)
IDS = st.text("ab -~é", min_size=1, max_size=9)
ROWS = st.builds(Delta, IDS, OPERATIONS, st.sampled_from(["n", "default", "ä"]))
HEADER_FIELDS = st.fixed_dictionaries(
    {
        "origin": st.integers(0, (1 << 64) - 1),
        "base": st.integers(1, COUNTER_MAX - 2) | st.just(COUNTER_MAX - 2),
        "epoch": st.integers(1, 9),
        "ack_level": st.sampled_from(list(AckLevel)),
        "priority": st.sampled_from(list(Priority)),
        "hybrid_time": st.integers(0, 9),
    }
)
FIELDS = (
    *("attributes", "count", "origin", "epoch", "base", "hybrid_time", "kinds_mask", "dimension", "length"),
    *(
        "previous",
        "columns_mask",
        "size",
        "kind",
        "ack_level",
        "priority",
        "is_control",
        "has_gaps",
        "homogeneous",
    ),
    *("crc", "last", "keys", "namespace", "namespaces", "namespace_names", "values_per_row", "highest_index"),
    *("kinds", "clock", "ids", "parents", "row_topics", "decoded", "_column_bounds"),
)


ENCODED_FIELDS = tuple(field for field in FIELDS if field != "decoded")


@pytest.fixture(autouse=True)
def _clear_templates() -> Iterator[None]:
    for table in (row_templates._templates, row_templates._encode_templates):
        table.clear()
    yield
    for table in (row_templates._templates, row_templates._encode_templates):
        table.clear()


def encode_deltas(*deltas: Delta, **header_fields: Any) -> bytes:
    return bytes(encode_batch(deltas, **{"origin": 7, "base": 1, **header_fields}).raw)


def read_outcome(body: bytes) -> tuple[object, ...]:
    """Return a reader's view of a body, or its error."""
    try:
        batch = parse_batch(body)
        validate_batch(batch)
    except (ProtocolError, InvalidDelta) as error:
        return type(error), getattr(error, "code", None), str(error)
    numbers = (batch.values.tobytes(), batch.indices.tobytes(), batch.blob(0), bytes(batch.raw))
    return (*(getattr(batch, field) for field in FIELDS), *numbers)


def read_without_template(body: bytes) -> tuple[object, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_core, "parse_with_template", lambda _: None)
        return read_outcome(body)


def with_checksum(raw: bytes | bytearray) -> bytes:
    return bytes(raw) + crc32c(raw).to_bytes(4, "little")


def learn_templates(*bodies: bytes) -> None:
    """Parse each body twice, which learns its template."""
    for body in (*bodies, *bodies):
        parse_batch(body)


@given(st.lists(st.tuples(ROWS, HEADER_FIELDS), min_size=1, max_size=5))
def test_body_with_a_template_is_read_like_any_other(cases: list[tuple[Delta, Any]]) -> None:
    bodies = [encode_deltas(delta, **header_fields) for delta, header_fields in cases]
    learn_templates(*bodies)
    for body, (delta, _) in zip(bodies, cases, strict=True):
        batch = parse_with_template(body)
        is_ascii = delta.vector_id.isascii()
        is_large = (
            delta.operation.values is not None
            and float(np.abs(delta.operation.values).max(initial=0)) >= 2.0**127
        )
        assert (batch is not None) == (is_ascii and not is_large)
        assert read_outcome(body) == read_without_template(body)
        assert batch is None or (batch.validated and homogeneous_is_valid(batch))


@given(
    st.lists(st.tuples(ROWS, HEADER_FIELDS), min_size=1, max_size=3),
    st.integers(0, 1 << 32),
    st.integers(1, 4),
)
def test_changed_body_gives_the_same_result_with_a_template(
    cases: list[tuple[Delta, Any]], seed: int, changes_max: int
) -> None:
    bodies = [encode_deltas(delta, **header_fields) for delta, header_fields in cases]
    learn_templates(*bodies)
    rng = random.Random(seed)
    for body in bodies:
        for _ in range(20):
            raw = bytearray(body[:-4])
            for _ in range(rng.randint(1, changes_max)):
                raw[rng.randrange(len(raw))] = rng.choice([0, 1, 0x20, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            changed = with_checksum(raw)
            assert read_outcome(changed) == read_without_template(changed)
        flipped = bytearray(body)
        flipped[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        assert read_outcome(bytes(flipped)) == read_without_template(bytes(flipped))
        assert read_outcome(body[:-8]) == read_without_template(body[:-8])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "key"]),
            st.sampled_from([Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD]),
            st.integers(0, 3),
            st.floats(width=32) | st.just(1.0),
            st.sampled_from([0, 0, 7, 300, DIMENSION_MAX - 9, DIMENSION_MAX]),
            st.sampled_from(["n", "default", "ä"]),
            st.sampled_from(list(AckLevel)),
            st.sampled_from(list(Priority)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_row_encoder_equals_the_column_encoder(rows: list[tuple[Any, ...]]) -> None:
    for name, kind, width, number, index, namespace, level, priority in rows * 3:
        values = np.full(width, number, np.float32)
        indices = np.arange(index, index + width, dtype=np.uint32) if kind in SPARSE_KINDS else None
        header_fields = {
            "origin": 1 << 63,
            "base": 9,
            "hybrid_time": 5,
            "ack_level": level,
            "priority": priority,
        }
        header_fields |= {"width": width, "namespace": namespace, "kind": kind}
        index_data = None if indices is None else indices.data
        row = encode_row(name.encode(), values.data, index_data, **header_fields)
        columns = encode_columns(
            [name], [values.data], None if index_data is None else [index_data], **header_fields
        )
        assert row.raw == columns.raw
        is_valid = homogeneous_is_valid(Batch(row.raw))
        assert not row.validated or is_valid
        assert {field: getattr(row, field) for field in ENCODED_FIELDS} == {
            field: getattr(columns, field) for field in ENCODED_FIELDS
        }
        for array in ("values", "indices"):
            assert getattr(row, array).tobytes() == getattr(columns, array).tobytes()
    if is_valid and abs(number) < 2.0**127:
        assert row.validated  # by the third encoding at the latest, the template is in use


@pytest.mark.parametrize(
    ("number", "index"), [(np.inf, 1), (-np.inf, 1), (np.nan, 1), (1.0, DIMENSION_MAX), (1.0, (1 << 32) - 1)]
)
def test_row_with_an_invalid_number_is_not_marked_validated(number: float, index: int) -> None:
    header_fields: Any = {
        "width": 1,
        "namespace": "n",
        "kind": Kind.SPARSE,
        "origin": 1,
        "base": 1,
        "hybrid_time": 1,
    }
    header_fields |= {"ack_level": AckLevel.MEMORY, "priority": Priority.NORMAL}
    for value, row_index, is_validated in ((1.0, 1, False), (1.0, 1, True), (number, index, False)):
        values, index_array = np.array([value], np.float32), np.array([row_index], np.uint32)
        assert encode_row(b"k", values.data, index_array.data, **header_fields).validated == is_validated


def test_encode_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_templates, "TEMPLATES_MAX", 5)
    for size in range(1, 50):
        header_fields: Any = {
            "width": 0,
            "namespace": "n",
            "kind": Kind.SPARSE,
            "origin": 1,
            "base": 1,
            "hybrid_time": 1,
        }
        header_fields |= {"ack_level": AckLevel.MEMORY, "priority": Priority.NORMAL}
        for is_validated in (False, True):
            assert encode_row(b"k" * size, b"", b"", **header_fields).validated == is_validated
        assert len(row_templates._encode_templates) <= 5


SPARSE = encode_deltas(Delta("key", sparse([1, 2], [0.5, 1.0])))
BLOB = encode_deltas(Delta("key", opaque(b"bytes")))


def column_offsets(body: bytes) -> dict[str, int]:
    """Return the position of each column in a body."""
    batch = Batch(body)
    return {
        column.name: bounds[0]
        for column in row_templates.Column
        if (bounds := batch._bounds_of_column(column))
    }


@pytest.mark.parametrize(
    ("body", "column", "offset", "number", "message"),
    [
        (SPARSE, "KEY_ENDS", 0, 2, "KEY_ENDS does not rise to 3"),
        (SPARSE, "INDICES", 4, DIMENSION_MAX, "index 65536 at position 1"),
        (SPARSE, "VALUES", 4, 0x7F800000, "number 1 is inf"),
        (SPARSE, "VALUES", 0, 0xFFC00000, "number 0 is nan"),
        (SPARSE, "VALUES", 8, 1, "zero padding"),
        (SPARSE, "KEYS", 0, 0x6B650A6B, "U\\+000A"),
        (SPARSE, "NAMESPACES", 0, 0x09090007, "U\\+0009"),
        (BLOB, "BLOB_ENDS", 0, 4, "BLOB_ENDS does not rise to 5"),
    ],
)
def test_invalid_change_to_a_templated_body_is_refused(
    body: bytes, column: str, offset: int, number: int, message: str
) -> None:
    learn_templates(body)
    assert parse_with_template(body) is not None
    raw = bytearray(body[:-4])
    struct.pack_into("<I", raw, column_offsets(body)[column] + offset, number)
    changed = with_checksum(raw)
    assert parse_with_template(changed) is None
    with pytest.raises((ProtocolError, InvalidDelta), match=message):
        validate_batch(parse_batch(changed))


@pytest.mark.parametrize("base", [0, COUNTER_MAX + 1])
def test_counter_out_of_bounds_is_refused(base: int) -> None:
    learn_templates(SPARSE)
    raw = bytearray(SPARSE[:-4])
    struct.pack_into("<Q", raw, 24, base)
    with pytest.raises(ProtocolError, match="base counter"):
        parse_batch(with_checksum(raw))


def test_template_is_learned_from_the_second_parse() -> None:
    assert parse_with_template(SPARSE) is None
    for is_validated in (False, False, True):
        assert parse_batch(SPARSE).validated == is_validated


def test_invalid_body_makes_no_template() -> None:
    body = encode_deltas(
        Delta("k", Operation(Kind.SPARSE, np.array([np.nan], np.float32), np.array([1], np.uint32)))
    )
    learn_templates(body)
    assert not any(row_templates._templates.values())
    assert not parse_batch(body).validated


def test_large_or_multi_row_body_makes_no_template() -> None:
    several = encode_deltas(*[Delta("k", delete())] * 2)
    long = encode_deltas(Delta("k", opaque(bytes(row_templates.BODY_BYTES_MAX))))
    wide = encode_deltas(
        Delta("k", sparse(range(row_templates.INDICES_MAX + 1), [1.0] * (row_templates.INDICES_MAX + 1)))
    )
    learn_templates(several, long, wide)
    assert not row_templates._templates
    learn_templates(SPARSE)
    assert parse_with_template(memoryview(SPARSE)) is None
    assert parse_batch(memoryview(SPARSE)).keys == ["key"]


def test_read_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_templates, "TEMPLATES_MAX", 5)
    for size in range(1, 50):
        learn_templates(encode_deltas(Delta("k" * size, delete())))
        assert len(row_templates._templates) <= 5
        assert parse_with_template(encode_deltas(Delta("l" * size, delete()))) is not None


def test_dropped_keys_are_decoded_on_demand() -> None:
    learn_templates(SPARSE)
    batch = parse_batch(SPARSE)
    batch.drop_decoded_keys()
    assert batch.keys == ["key"]
    assert homogeneous_is_valid(batch)


@given(
    st.lists(st.sampled_from([["a"], ["b"], ["", "x"], ["é"], ["c", "d"], ["long"]]), min_size=1, max_size=8)
)
def test_run_is_the_same_with_and_without_templates(ids_by_batch: list[list[str]]) -> None:
    learn_templates(encode_deltas(Delta("z", delete())))
    bodies, base = [], 1
    for batch_ids in ids_by_batch:
        bodies.append(encode_deltas(*[Delta(name, delete()) for name in batch_ids], base=base))
        base += len(batch_ids)
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for without_templates in (False, True):
            if without_templates:
                patch.setattr("delta_prop_wire.fast.frame_runs.parse_with_template", lambda _: None)
            buffer, sequence = ReceiveBuffer(1 << 20), 1
            for body in bodies:
                batch = Batch(body)
                buffer.feed(encode_head(batch, sequence, None, ack_wanted=False) + body)
                sequence += batch.count
            run = take_run(buffer, CreditWindow(None), 1 << 20, 1)
            runs.append(None if run is None else (run.rows, run.size, [batch.keys for batch in run.batches]))
    assert runs[0] == runs[1]
