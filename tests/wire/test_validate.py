"""Validation: each error names its field and the fix; a batch is valid if each of its deltas is."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.bounds import METADATA_DEPTH_MAX
from delta_prop_wire.delta import (
    ABSENT,
    Delta,
    Dot,
    Kind,
    Operation,
    Priority,
    Source,
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
from delta_prop_wire.encode import assemble, encode_batch, encode_noop, encode_vectors
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.layout import EXPECT, Column
from delta_prop_wire.spec import COUNTER_MAX, DELTA_BYTES_MAX, DIMENSION_MAX, METADATA_BYTES_MAX, ErrorCode
from delta_prop_wire.validate import (
    is_opaque_only,
    validate_batch,
    validate_delta,
)
from tests.native_core import NativeCore, needs_native_core

GOOD = Delta("doc-1", create([1, 2]))
NAN, INF = float("nan"), float("inf")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def deep_list(depth: int) -> dict[str, Any]:
    value: list[Any] = []
    for _ in range(depth - 2):
        value = [value]
    return {"a": value}


def floats(*numbers: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(numbers, np.float32)


ENCODABLE_FAULTS = [
    ("vector_id", "1 to 512", replace(GOOD, vector_id="")),
    ("vector_id", "513 bytes", replace(GOOD, vector_id="x" * 513)),
    ("vector_id", "514 bytes", replace(GOOD, vector_id="é" * 257)),
    ("vector_id", "U+0000", replace(GOOD, vector_id="a\0b")),
    ("vector_id", "U+000A", replace(GOOD, vector_id="a\n")),
    ("vector_id", "U+007F", replace(GOOD, vector_id="\x7f")),
    ("vector_id", "U+0085", replace(GOOD, vector_id="a\x85")),
    ("namespace", "1 to 255", replace(GOOD, namespace="")),
    ("namespace", "256 bytes", replace(GOOD, namespace="n" * 256)),
    ("namespace", "U+0009", replace(GOOD, namespace="\t")),
    ("vector", "number 1 is nan", replace(GOOD, operation=create([1, NAN]))),
    ("vector", "number 0 is -inf", replace(GOOD, operation=dense([-INF, 2]))),
    ("vector", "within ±3.4", replace(GOOD, operation=create([1e39]))),
    ("vector", "0 numbers; create has 1 to 65536: give more", replace(GOOD, operation=create([]))),
    ("vector", "65537 numbers", replace(GOOD, operation=dense(np.zeros(DIMENSION_MAX + 1)))),
    ("values", "number 50 is inf", replace(GOOD, operation=sparse(range(60), [0] * 50 + [INF] * 10))),
    ("indices", "index 65536 at position 1", replace(GOOD, operation=sparse_add([1, DIMENSION_MAX], [1, 1]))),
    ("indices", "highest is 65535", replace(GOOD, operation=sparse([*range(50), 4_000_000_000], [1] * 51))),
    ("factor", "2 numbers; scale has 1", replace(GOOD, operation=Operation(Kind.SCALE, floats(1, 2)))),
    ("factor", "number 0 is nan", replace(GOOD, operation=scale(NAN))),
    ("amount", "number 0 is inf", replace(GOOD, operation=offset(1e40))),
    ("values", "1 numbers; delete has 0", replace(GOOD, operation=Operation(Kind.DELETE, floats(1)))),
    ("values", "1 numbers; 12 has 0", replace(GOOD, operation=Operation(12, floats(1)))),
    ("data", "delete has up to 0", replace(GOOD, operation=Operation(Kind.DELETE, data=b"x"))),
    ("data", "create has up to 0", replace(GOOD, operation=Operation(Kind.CREATE, floats(1), data=b"x"))),
    ("data", "up to 1048576", replace(GOOD, operation=opaque(bytes(DELTA_BYTES_MAX + 1)))),
    ("name", "0 bytes of UTF-8", replace(GOOD, operation=transform(""))),
    ("name", "up to 255", replace(GOOD, operation=transform("t" * 256))),
    ("name", "not UTF-8", replace(GOOD, operation=Operation(Kind.TRANSFORM, data=b"a\xff"))),
    ("name", "U+001B", replace(GOOD, operation=transform("\x1b"))),
    ("metadata", "missing", replace(GOOD, operation=metadata_only())),
    ("metadata", "a: nan is not JSON", replace(GOOD, metadata={"a": NAN})),
    (
        "metadata",
        "a: [1]: b: a value of type bytes is not JSON",
        replace(GOOD, metadata={"a": [1, {"b": b"x"}]}),
    ),
    ("metadata", "deeper than 32", replace(GOOD, metadata=nested(METADATA_DEPTH_MAX + 1))),
    ("metadata", "deeper than 32", replace(GOOD, metadata=deep_list(METADATA_DEPTH_MAX + 1))),
    ("metadata", "the maximum is 65536", replace(GOOD, metadata={"a": "x" * METADATA_BYTES_MAX})),
    ("delta", "the maximum is 1048576", replace(GOOD, operation=opaque(bytes(DELTA_BYTES_MAX)), metadata={})),
    ("expect", "run from 1", replace(GOOD, expect=Dot(1, 0))),
    ("parents", "65 entries; the maximum is 64", replace(GOOD, parents=(Dot(1, 1),) * 65)),
    ("parents", "run from 1", replace(GOOD, parents=(Dot(1, COUNTER_MAX + 1),))),
    ("topics", "17 entries; the maximum is 16", replace(GOOD, topics=tuple(map(str, range(17))))),
    ("topics", "0 bytes", replace(GOOD, topics=("a", ""))),
    ("topics", "U+0001", replace(GOOD, topics=("a\x01",))),
]
OTHER_FAULTS = [
    ("vector_id", "U+D800", replace(GOOD, vector_id="a\ud800")),
    ("vector_id", "give text", replace(GOOD, vector_id=7)),  # type: ignore[arg-type]
    ("op", "give one of create, sparse", replace(GOOD, operation=Operation(64))),
    ("op", "is unknown: give one of", replace(GOOD, operation=Operation(-1))),
    ("op", "is unknown: give one of", replace(GOOD, operation=Operation("create"))),  # type: ignore[arg-type]
    ("vector", "flat array of f4", replace(GOOD, operation=Operation(0, np.array([1.0])))),
    ("vector", "flat array", replace(GOOD, operation=Operation(0, np.ones((2, 2), np.float32)))),
    ("indices", "1 indices for 2 values", replace(GOOD, operation=sparse([1], [1, 2]))),
    ("indices", "1 indices for 0 values", replace(GOOD, operation=sparse([1], []))),
    (
        "indices",
        "other operations none",
        replace(GOOD, operation=Operation(0, floats(1), np.ones(1, np.uint32))),
    ),
    ("data", "give bytes", replace(GOOD, operation=Operation(8, data="x"))),  # type: ignore[arg-type]
    ("metadata", "give a JSON object", replace(GOOD, metadata=[1])),  # type: ignore[arg-type]
    ("metadata", "the key 1 is of type int", replace(GOOD, metadata={"a": {1: 2}})),
    ("metadata", "lone surrogate", replace(GOOD, metadata={"a": "\ud800"})),
    ("metadata", "64 bits", replace(GOOD, metadata={"a": 1 << 64})),
    ("metadata", "a value of type float32 is not JSON", replace(GOOD, metadata={"a": np.float32(1)})),
    ("id", "not 16 bytes", replace(GOOD, id=b"short")),
    ("id", "not 16 bytes", replace(GOOD, id="0" * 16)),  # type: ignore[arg-type]
    ("dot", "not a dot", replace(GOOD, dot=(1, 2))),  # type: ignore[arg-type]
    ("dot", "origin has 64 bits", replace(GOOD, dot=Dot(1 << 64, 1))),
    ("dot", "not a dot", replace(GOOD, dot=Dot(1, True))),
    ("parents", "not a dot", replace(GOOD, parents=(b"short",))),
    ("clock", "1025 entries", replace(GOOD, clock=tuple(Dot(n, 1) for n in range(1025)))),
    ("clock", "2 entries: keep the highest", replace(GOOD, clock=(Dot(1, 1), Dot(1, 2)))),
    ("timestamp", "from 0 to 18446744073709551615", replace(GOOD, timestamp=1 << 64)),
    ("priority", "from 0 to 3", replace(GOOD, priority=4)),  # type: ignore[arg-type]
    ("source", "from 0 to 3", replace(GOOD, source=True)),  # type: ignore[arg-type]
]
VALID = [
    GOOD,
    Delta("x" * 512, create(np.zeros(DIMENSION_MAX)), namespace="é" * 127),
    Delta("naïve — 向量 \u200d", dense([3.4028234e38, -0.0])),
    Delta("d", sparse([], [])),
    Delta("d", sparse([3, 3], [1, 2])),
    Delta("d", sparse_add([DIMENSION_MAX - 1], [1])),
    Delta("d", sparse_add([0] * 131_072, [1] * 131_072)),
    Delta("d", scale(0)),
    Delta("d", offset(-1e-45)),
    Delta("d", transform("résumé")),
    Delta("d", delete(), metadata={}),
    Delta("d", opaque(b"")),
    Delta("d", opaque(bytes(DELTA_BYTES_MAX))),
    Delta("d", metadata_only(), metadata={}),
    Delta("d", Operation(10, data=b"\xff")),
    Delta("d", Operation(63)),
    Delta("d", create([1]), metadata=nested(METADATA_DEPTH_MAX)),
    Delta("d", create([1]), metadata=deep_list(METADATA_DEPTH_MAX)),
    Delta("d", create([1]), metadata={"a": [None, True, -(1 << 63), (1 << 64) - 1, 0.5, "\0", (1,)], "": {}}),
    Delta("d", create([1]), parents=(Dot(1, 1),) * 63 + (b"i" * 16,), topics=("t" * 255,) * 16),
    Delta("d", create([1]), expect=Dot(0, COUNTER_MAX), timestamp=(1 << 64) - 1),
    Delta("d", create([1]), expect=ABSENT),
]


def first_refusal(deltas: list[Delta]) -> tuple[int, str | None] | None:
    """Return row and field of the first refused delta, None if all are valid."""
    for row, delta in enumerate(deltas):
        try:
            validate_delta(delta)
        except InvalidDelta as error:
            return row, error.field
    return None


def batch_of(deltas: list[Delta]) -> Batch:
    return encode_batch(deltas, origin=1, base=1)


@pytest.mark.parametrize(("field", "fix", "delta"), [*ENCODABLE_FAULTS, *OTHER_FAULTS])
def test_refusal_names_field_bound_and_fix(field: str, fix: str, delta: Delta) -> None:
    with pytest.raises(InvalidDelta) as caught:
        validate_delta(delta)
    assert caught.value.field == field
    assert fix in caught.value.message
    assert len(caught.value.message) < 400
    assert (caught.value.code, caught.value.row) == (ErrorCode.INVALID_DELTA, None)


@pytest.mark.parametrize("row_count", [0, 1, 60])
@pytest.mark.parametrize(("field", "fix", "delta"), ENCODABLE_FAULTS)
def test_batch_refusal_names_the_row(field: str, fix: str, delta: Delta, row_count: int) -> None:
    rows = [replace(GOOD, vector_id=f"doc-{n}", operation=delta.operation) for n in range(row_count)]
    if first_refusal(rows) or len(delta.operation.data) > 1000:
        rows = [GOOD] * row_count
    with pytest.raises(InvalidDelta) as caught:
        validate_batch(batch_of([*rows, delta]))
    assert (caught.value.row, caught.value.field) == (row_count, field)
    assert fix in caught.value.message


@pytest.mark.parametrize("delta", VALID)
def test_delta_within_the_bounds_is_accepted(delta: Delta) -> None:
    validate_delta(delta)
    validate_batch(batch_of([delta]))
    validate_batch(parse_batch(bytes(batch_of([GOOD, delta, GOOD]).body)))


def test_batch_of_all_kinds_is_accepted() -> None:
    small_deltas = [
        delta for delta in VALID if delta.operation.values is None or len(delta.operation.values) < 100
    ]
    validate_batch(batch_of([delta for delta in small_deltas if len(delta.operation.data) < 100] * 20))
    validate_batch(
        encode_vectors(
            ["é", *map(str, range(999))], np.ones((1000, 384), np.float32), namespace="n", origin=1, base=1
        )
    )


@pytest.mark.parametrize("key", ["", "x" * 513, "a\0", "é\n", "é" * 257])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_invalid_key_in_a_vector_batch_is_refused(key: str, count: int) -> None:
    keys = [*map(str, range(count - 1)), key]
    with pytest.raises(InvalidDelta, match=f"row {count - 1}: vector_id") as caught:
        validate_batch(encode_vectors(keys, np.ones((count, 3), np.float32), namespace="n", origin=1, base=1))
    assert caught.value.row == count - 1


def test_control_rows_are_not_validated() -> None:
    validate_batch(encode_noop(origin=1, base=1, count=3, code=ErrorCode.INVALID_DELTA))


def test_invalid_clock_is_refused_without_a_row() -> None:
    with pytest.raises(InvalidDelta, match="clock: origin 9, counter 0") as caught:
        validate_batch(encode_batch([GOOD], origin=1, base=1, clock=[Dot(9, 0)]))
    assert caught.value.row is None
    with pytest.raises(InvalidDelta, match="1025 entries"):
        validate_batch(encode_batch([GOOD], origin=1, base=1, clock=[Dot(n, 1) for n in range(2, 1027)]))


@pytest.mark.parametrize("dimension", [0, 3])
@pytest.mark.parametrize("rows", [[GOOD], [GOOD, replace(GOOD, operation=delete())]])
def test_wrong_dimension_in_the_header_is_refused(rows: list[Delta], dimension: int) -> None:
    body = bytearray(batch_of(rows).body)
    assert body[48:52] == (2).to_bytes(4, "little")
    body[48:52] = dimension.to_bytes(4, "little")
    with pytest.raises(InvalidDelta, match=f"dimension: {dimension} in the header"):
        validate_batch(Batch(bytes(body)))


def test_metadata_size_is_that_of_the_received_bytes() -> None:
    text = b"x" * (METADATA_BYTES_MAX - 6)
    validate_delta(replace(GOOD, metadata={"a": text.decode()}))
    patch = b"\x81\xa1a\xdb" + len(text).to_bytes(4, "big") + text  # a longer encoding of the same value
    columns = {
        Column.KEY_ENDS: b"\x01\0\0\0",
        Column.KEYS: b"d",
        Column.NAMESPACES: b"\x01\0n",
        Column.METADATA_ENDS: len(patch).to_bytes(4, "little"),
        Column.METADATA: patch,
    }
    mask = 1 << Kind.METADATA
    batch = assemble(
        columns, attributes=0, count=1, origin=1, epoch=1, base=1, hybrid_time=0, kinds_mask=mask
    )
    with pytest.raises(InvalidDelta, match="row 0: metadata: 65538 bytes packed"):
        validate_batch(batch)


def test_metadata_that_is_msgpack_but_not_json_is_refused() -> None:
    batch = batch_of([replace(GOOD, metadata={"a": msgpack.Timestamp(1)})])
    with pytest.raises(InvalidDelta, match="a value of type Timestamp is not JSON"):
        validate_batch(batch)


# --- agreement

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(["a", "é", "x" * 256])
NUMBERS = st.floats(width=32) | st.floats(-2, 2, width=32)
PAIRS = st.lists(st.tuples(st.integers(0, DIMENSION_MAX) | st.integers(0, 5), NUMBERS), max_size=3)
OPERATIONS = st.one_of(
    st.lists(NUMBERS, max_size=3).map(create),
    st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=3).map(dense),
    PAIRS.map(lambda pairs: sparse([i for i, _ in pairs], [x for _, x in pairs])),
    PAIRS.map(lambda pairs: sparse_add([i for i, _ in pairs], [x for _, x in pairs])),
    NUMBERS.map(scale),
    st.binary(max_size=3).map(opaque),
    st.just(delete()),
    st.just(metadata_only()),
    NAMES.map(transform),
    st.integers(10, 63).map(lambda kind: Operation(kind, data=b"x")),
)
JSONS = st.recursive(
    st.none() | st.booleans() | st.floats() | NAMES, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
DELTAS = st.builds(
    Delta,
    NAMES,
    OPERATIONS,
    namespace=NAMES,
    parents=st.lists(
        st.builds(Dot, st.integers(0, 9), st.integers(0, 9)) | st.just(bytes(16)), max_size=2
    ).map(tuple),
    metadata=st.none() | st.dictionaries(NAMES, JSONS, max_size=2),
    topics=st.lists(NAMES, max_size=2).map(tuple),
    expect=st.none() | st.builds(Dot, st.integers(0, 9), st.integers(0, 9)),
)
VALID_DELTAS = st.builds(
    Delta, st.sampled_from("abc"), OPERATIONS.filter(lambda o: not first_refusal([Delta("a", o)]))
)


@given(st.lists(DELTAS, min_size=1, max_size=3), st.lists(VALID_DELTAS, max_size=4))
def test_batch_validation_agrees_with_delta_validation(deltas: list[Delta], before: list[Delta]) -> None:
    rows = [*before, *deltas]
    try:
        validate_batch(batch_of(rows))
        assert first_refusal(rows) is None
    except InvalidDelta as error:
        assert first_refusal(rows) == (error.row, error.field)  # noqa: PT017


ODD_VALUES = st.sampled_from(
    [None, "", (), [], 0, 2, True, 8.0, b"x", Priority.LOW, Source.IMPORT, Dot(1, 1), 1 << 64]
)


@given(
    DELTAS,
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Delta)]), ODD_VALUES, max_size=2
    ),
)
def test_short_check_accepts_no_invalid_delta(delta: Delta, odd_values: dict[str, Any]) -> None:
    delta = replace(delta, **odd_values)
    try:
        is_accepted = is_opaque_only(delta)
    except AttributeError:  # not an Operation: callers reject it earlier
        assert not isinstance(delta.operation, Operation)
        return
    if is_accepted:
        validate_delta(delta)


@pytest.mark.parametrize("data", [bytes(DELTA_BYTES_MAX), bytes(DELTA_BYTES_MAX + 1)])
def test_short_check_respects_the_byte_bound(data: bytes) -> None:
    assert is_opaque_only(Delta("a", opaque(data))) is (len(data) <= DELTA_BYTES_MAX)


UNIFORM_KINDS = st.sampled_from(
    [Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD, Kind.DELETE, Kind.SCALE, Kind.OPAQUE, 40]
)
BLOBS = st.sampled_from([b"", b"", b"x", b"abc"])
KEYS = st.sampled_from(["a", "key-1", "", "x" * 512, "x" * 513, "a\x1f", "\x7f", "é"])


@needs_native_core
@given(
    UNIFORM_KINDS,
    st.lists(st.tuples(KEYS, BLOBS), min_size=1, max_size=60),
    st.integers(0, 2),
    st.sampled_from([0.0, NAN, INF, 3e38]),
)
def test_homogeneous_check_agrees_with_validation(
    kind: int, named_blobs: list[tuple[str, bytes]], width: int, number: float
) -> None:
    keys, with_bytes = [key for key, _ in named_blobs], kind in (Kind.OPAQUE, 40)
    values = floats(*[number] * width) if kind != Kind.DELETE and not with_bytes else None
    indices = np.arange(width, dtype=np.uint32) if kind in (Kind.SPARSE, Kind.SPARSE_ADD) else None
    rows = [
        Delta(key, Operation(kind, values, indices, blob if with_bytes else b"")) for key, blob in named_blobs
    ]
    batch, general = batch_of(rows), batch_of(rows)
    assert batch.homogeneous
    fault = first_refusal(rows)
    is_accepted = NativeCore().batch_is_valid(batch)
    assert is_accepted <= (fault is None)
    assert is_accepted or fault or not batch.homogeneous or any(not key.isascii() for key in keys)
    for name in ("keys", "namespace_names", "namespace"):
        assert getattr(batch, name) == getattr(general, name)
    for name in ("values", "indices"):
        assert getattr(batch, name).tobytes() == getattr(general, name).tobytes()
    assert [batch.blob(row) for row in range(len(rows))] == [row.operation.data for row in rows]


@needs_native_core
@pytest.mark.parametrize("kind", [Kind.CREATE, Kind.SPARSE, Kind.DELETE, Kind.METADATA, Kind.TRANSFORM])
def test_invalid_bytes_of_a_kind_are_refused(kind: Kind) -> None:
    batch = batch_of([Delta("a", Operation(kind, floats(1) if kind is Kind.CREATE else None, data=b"\n"))])
    assert not NativeCore().batch_is_valid(batch)
    with pytest.raises(InvalidDelta):
        validate_batch(batch)


BAD_DOT = Dot(1, 0)


def batch_expecting(*expects: Dot) -> Batch:
    """Return a batch of one row with these entries in its column of expectations."""
    batch = encode_batch([replace(GOOD, expect=expects[0])], origin=7, base=1)
    columns = {Column(index): batch.column(Column(index)) for index in range(len(Column))}
    columns[Column.EXPECTS] = b"".join(EXPECT.pack(0, 0, *dot) for dot in expects)
    return assemble(
        {column: raw for column, raw in columns.items() if raw is not None},
        attributes=batch.attributes, count=batch.count, origin=7, epoch=0, base=1,
        hybrid_time=batch.hybrid_time, kinds_mask=batch.kinds_mask, dimension=batch.dimension,
    )  # fmt: skip


@pytest.mark.parametrize("later", [BAD_DOT, ABSENT, Dot(2, 2)])
def test_row_with_several_expectations_is_judged_by_the_first(later: Dot) -> None:
    valid = batch_expecting(Dot(1, 1), later)
    validate_batch(valid)
    assert valid.delta(0).expect == Dot(1, 1)
    with pytest.raises(InvalidDelta) as refused:
        validate_batch(batch_expecting(BAD_DOT, Dot(1, 1), later))
    assert (refused.value.field, refused.value.row) == ("expect", 0)
