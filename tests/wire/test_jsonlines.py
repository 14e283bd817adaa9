"""JSON lines: exact round trips, the documented examples, and the error for each invalid field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.delta import (
    ABSENT,
    Delta,
    Dot,
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
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.jsonlines import LINE_BYTES_MAX, delta_from_line, delta_to_json, to_line

SOME_ID = bytes(range(16))
FULL = Delta(
    "doc-1",
    sparse([0, 3], [0.1, -2]),
    namespace="docs",
    id=SOME_ID,
    dot=Dot(0xABC, 7),
    parents=(Dot(1, 2), SOME_ID),
    clock=(Dot(3, 4),),
    timestamp=99,
    priority=Priority.CRITICAL,
    source=Source.IMPORT,
    metadata={"title": "Grün", "old": None},
    topics=("red", "blue"),
    expect=Dot(5, 6),
)


@pytest.mark.parametrize(
    ("line", "delta"),
    [
        (
            '{"vector_id": "doc-1", "namespace": "docs", "op": "create", "vector": [0.1, 0.2]}',
            Delta("doc-1", create([0.1, 0.2]), namespace="docs"),
        ),
        (
            '{"vector_id": "doc-1", "namespace": "docs", "op": "sparse", "indices": [0], "values": [0.5]}',
            Delta("doc-1", sparse([0], [0.5]), namespace="docs"),
        ),
        (
            '{"vector_id": "r-9", "namespace": "rows", "op": "opaque", "data": "aGk="}',
            Delta("r-9", opaque(b"hi"), namespace="rows"),
        ),
        (
            '{"vector_id": "d", "namespace": "default", "op": "dense", "vector": [1.0]}',
            Delta("d", dense([1])),
        ),
        (
            '{"vector_id": "d", "namespace": "default", "op": "sparse_add", "indices": [], "values": []}',
            Delta("d", sparse_add([], [])),
        ),
        ('{"vector_id": "d", "namespace": "default", "op": "scale", "factor": 0.5}', Delta("d", scale(0.5))),
        (
            '{"vector_id": "d", "namespace": "default", "op": "offset", "amount": -1.0}',
            Delta("d", offset(-1)),
        ),
        (
            '{"vector_id": "d", "namespace": "default", "op": "transform", "name": "norm"}',
            Delta("d", transform("norm")),
        ),
        ('{"vector_id": "d", "namespace": "default", "op": "delete"}', Delta("d", delete())),
        (
            '{"vector_id": "d", "namespace": "default", "op": "metadata", "metadata": {"a": null}}',
            Delta("d", metadata_only(), metadata={"a": None}),
        ),
        (
            '{"vector_id": "d", "namespace": "n", "op": "metadata", "metadata": {}, "expect": "absent"}',
            Delta("d", metadata_only(), "n", metadata={}, expect=ABSENT),
        ),
        (
            '{"vector_id": "d", "namespace": "default", "op": "12", "data": "AP8="}',
            Delta("d", Operation(12, data=b"\0\xff")),
        ),
        (
            '{"vector_id": "doc-1", "namespace": "docs", "op": "sparse", "indices": [0, 3], "values": [0.1, '
            '-2.0], "metadata": {"title": "Grün", "old": null}, "topics": ["red", "blue"], '
            '"priority": "critical", "source": "import", '
            '"id": "000102030405060708090a0b0c0d0e0f", "dot": "0000000000000abc:7", '
            '"parents": ["0000000000000001:2", "000102030405060708090a0b0c0d0e0f"], '
            '"clock": ["0000000000000003:4"], "timestamp": 99, "expect": "0000000000000005:6"}',
            FULL,
        ),
    ],
)
def test_golden_lines(line: str, delta: Delta) -> None:
    assert delta_from_line(line) == delta
    assert delta_from_line(line.encode()) == delta
    assert delta_from_line(json.loads(line)) == delta
    assert to_line(delta) == line


@pytest.mark.parametrize(
    ("fields", "operation"),
    [
        ({"op": "create", "values": [0.1, 2]}, create([0.1, 2])),
        ({"op": "dense", "values": [0.5], "vector": None}, dense([0.5])),
        ({"op": "scale", "values": [0.5]}, scale(0.5)),
        ({"op": "offset", "values": [-1]}, offset(-1)),
        ({"op": "transform", "data": "bm9ybQ=="}, transform("norm")),
        ({"op": "sparse", "indices": [3], "values": [1]}, sparse([3], [1])),
    ],
)
def test_field_names_of_the_protocol_are_accepted(fields: dict[str, Any], operation: Operation) -> None:
    delta = Delta("d", operation)
    assert delta_from_line({"vector_id": "d"} | fields) == delta
    assert delta_from_line(json.dumps({"vector_id": "d"} | fields)) == delta
    assert delta_from_line(to_line(delta)) == delta


def test_partition_follows_the_offset_and_is_ignored_on_reading() -> None:
    line = to_line(FULL, 17, 3)
    assert line.startswith('{"offset": 17, "partition": 3, "vector_id"')
    assert delta_from_line(line) == FULL


def test_offset_is_written_first_and_ignored_on_reading() -> None:
    line = to_line(FULL, 17)
    assert line.startswith('{"offset": 17, "vector_id"')
    assert delta_to_json(FULL, 17)["offset"] == 17
    assert delta_from_line(line) == FULL


def test_optional_fields_may_be_omitted() -> None:
    line = {
        "vector_id": "docs:1",
        "op": "create",
        "vector": [1],
        "id": None,
        "parents": None,
        "metadata": None,
    }
    assert delta_from_line(line) == Delta("docs:1", create([1]), namespace="docs")
    assert delta_from_line({"vector_id": "1", "op": "delete"}).namespace == "default"
    assert delta_from_line(b'\xef\xbb\xbf{"vector_id": "1", "op": "delete"}\r\n') == Delta("1", delete())


@pytest.mark.parametrize("number", [0.1, 1e16, 3.4028235e38, -0.0, 1e-45, 16777216.0, 1 / 3])
def test_numbers_are_short_and_exact(number: float) -> None:
    text = to_line(Delta("d", create([number])))
    digits = text.split("[")[1].split("]")[0]
    assert len(digits) <= 15
    assert np.float32(float(digits)).tobytes() == np.float32(number).tobytes()


def valid_line(**changes: Any) -> dict[str, Any]:
    return {"vector_id": "d", "op": "create", "vector": [1, 2]} | changes


TOO_LARGE_VALUES = {"values": [1, 1e39]}
SPARSE = {"vector_id": "d", "op": "sparse", "indices": [0], "values": [1]}


@pytest.mark.parametrize(
    ("line", "field", "fix"),
    [
        ("", "line", "write one object per line"),
        ("{", "line", "character 2"),
        ("[1]", "line", "an array, not an object: write one object per line"),
        ("7", "line", "a number, not an object"),
        ("7.5", "line", "a number, not"),
        ("null", "line", "null, not"),
        ("true", "line", "true, not"),
        ("false", "line", "false, not"),
        ('"a"', "line", "text, not"),
        (b"\xff\xfe", "line", "save the file as UTF-8"),
        ("[" * 100_000, "line", "flatten it"),
        ('{"vector_id": "d", "op": "create", "vector": [NaN]}', "line", "NaN is not JSON"),
        ('{"vector_id": "d", "op": "create", "vector": [-Infinity]}', "line", "-Infinity is not JSON"),
        ('{"vector_id": "d", "op": "create", "vector": [' + "9" * 5000 + "]}", "line", "too many digits"),
        (" " * (LINE_BYTES_MAX + 1), "line", f"more than {LINE_BYTES_MAX} bytes: split the delta"),
        ('{"vector_id": "d", "op": "offset", "amount": 1, "amount": 2}', "line", "'amount' occurs twice"),
        (
            '{"vector_id": "d", "op": "metadata", "metadata": {"a": [{"b": 1, "c": 2, "b": 1}]}}',
            "line",
            "key 'b' occurs twice in one object: leave one of them out",
        ),
        (valid_line(op=None), "op", "missing: give one of create, sparse, dense"),
        (valid_line(op="replace"), "op", "'replace' is unknown"),
        (valid_line(op=0), "op", "unknown"),
        ({"op": "delete"}, "vector_id", "missing"),
        (valid_line(vector_id=7), "vector_id", "put it in quotes"),
        (valid_line(vector_id=""), "vector_id", "1 to 512"),
        (valid_line(namespace=7), "namespace", "give text"),
        (valid_line(vectr=[1]), "vectr", "not a field of create: use clock, dot,"),
        (
            valid_line(values=[1]),
            "values",
            "given besides vector, which means the same: leave one of them out",
        ),
        ({"vector_id": "d", "op": "create"}, "vector", "missing: create needs vector (or values)"),
        ({"vector_id": "d", "op": "create", "values": None}, "vector", "needs vector (or values)"),
        ({"vector_id": "d", "op": "delete", "values": [1]}, "values", "not a field of delete"),
        ({"vector_id": "d", "op": "transform", "values": [1]}, "name", "needs name (or data)"),
        ({"vector_id": "d", "op": "sparse", "indices": []}, "values", "needs indices and values"),
        ({"vector_id": "d", "op": "delete", "vector": [1]}, "vector", "not a field of delete"),
        (valid_line(vector="1,2"), "vector", "give a list of numbers"),
        (valid_line(vector=[1, "2"]), "vector", "number 1 is '2'"),
        (valid_line(vector=[True]), "vector", "number 0 is True"),
        (valid_line(vector=[[1]]), "vector", "give numbers only"),
        (valid_line(vector=[1, 1e39]), "vector", "number 1 is inf"),
        (valid_line(vector=[10**400]), "vector", "too large"),
        (valid_line(vector=[]), "vector", "give more"),
        (SPARSE | {"indices": [-1]}, "indices", "-1 at position 0"),
        (SPARSE | {"indices": [0.0]}, "indices", "count from 0"),
        (SPARSE | {"indices": [True]}, "indices", "count from 0"),
        (SPARSE | {"indices": 0}, "indices", "list of whole numbers"),
        (SPARSE | {"indices": [0, 1]}, "indices", "2 indices for 1 values"),
        (SPARSE | {"indices": [1 << 32]}, "indices", "whole number"),
        ({"vector_id": "d", "op": "scale", "factor": "2"}, "factor", "give numbers only"),
        ({"vector_id": "d", "op": "offset", "amount": [2]}, "amount", "give numbers only"),
        ({"vector_id": "d", "op": "transform", "name": 1}, "name", "put it in quotes"),
        ({"vector_id": "d", "op": "transform", "name": "\ud800"}, "name", "UTF-8"),
        ({"vector_id": "d", "op": "opaque", "data": "a"}, "data", "not base64"),
        ({"vector_id": "d", "op": "opaque", "data": "é==="}, "data", "not base64"),
        ({"vector_id": "d", "op": "opaque", "data": "aGk\n="}, "data", "not base64"),
        ({"vector_id": "d", "op": "metadata"}, "metadata", "missing"),
        (valid_line(metadata=[1]), "metadata", "give a JSON object"),
        (valid_line(id="12"), "id", "32 hex digits"),
        (valid_line(id="0" * 31 + "g"), "id", "32 hex digits"),
        (valid_line(dot="1:2"), "dot", "ORIGIN:COUNTER"),
        (valid_line(expect="0000000000000001:0"), "expect", "counters run from 1"),
        (valid_line(parents="x"), "parents", "put it in brackets"),
        (valid_line(parents=["x"]), "parents", "32 hex digits"),
        (valid_line(parents=["x:1"]), "parents", "ORIGIN:COUNTER"),
        (valid_line(parents=[7]), "parents", "32 hex digits"),
        (valid_line(clock=[7]), "clock", "ORIGIN:COUNTER"),
        (valid_line(timestamp="now"), "timestamp", "whole number"),
        (valid_line(priority="urgent"), "priority", "critical, high, normal, low"),
        (valid_line(priority=2), "priority", "give one of"),
        (valid_line(source="me"), "source", "local, replica, import, transform"),
        (valid_line(topics="red"), "topics", "put it in brackets"),
        (valid_line(topics=[""]), "topics", "1 to 255"),
        (valid_line(topics=[7]), "topics", "give text"),
        ({"vector_id": "d", "op": "dense"} | TOO_LARGE_VALUES, "values", "number 1 is inf"),
        (
            {"vector_id": "d", "op": "dense", "values": []},
            "values",
            "0 numbers; dense has 1 to 65536: give more",
        ),
        ({"vector_id": "d", "op": "dense", "values": [1.0, "2"]}, "values", "number 1 is '2'"),
        ({"vector_id": "d", "op": "dense", "values": "AACAPw=="}, "values", "give a list of numbers"),
        ({"vector_id": "d", "op": "dense", "values": 1}, "values", "give a list of numbers"),
        ({"vector_id": "d", "op": "dense", "values": [float("nan")]}, "values", "number 0 is nan"),
        ('{"vector_id": "d", "op": "dense", "values": [NaN]}', "line", "NaN is not JSON"),
        ({"vector_id": "d", "op": "scale", "values": 2}, "values", "give a list of numbers"),
        ({"vector_id": "d", "op": "scale", "values": []}, "values", "0 numbers; scale has 1: give more"),
        (
            {"vector_id": "d", "op": "offset", "values": [1, 2]},
            "values",
            "2 numbers; offset has 1: give fewer",
        ),
        ({"vector_id": "d", "op": "offset", "values": [1], "amount": 1}, "values", "given besides amount"),
        ({"vector_id": "d", "op": "transform", "data": "norm!"}, "data", "not base64"),
        ({"vector_id": "d", "op": "transform", "data": ""}, "data", "1 to 255"),
        ({"vector_id": "d", "op": "dense", "values": [1], "topics": "x"}, "topics", "put it in brackets"),
    ],
)
def test_invalid_line_error_names_the_field_and_the_fix(line: Any, field: str, fix: str) -> None:
    with pytest.raises(InvalidDelta) as caught:
        delta_from_line(line)
    assert caught.value.field == field
    assert fix in caught.value.message
    assert len(caught.value.message) < 400


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
PAIRS = st.lists(st.tuples(st.integers(0, 65_535), NUMBERS), max_size=4)
OPERATIONS = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=4).map(create),
    st.lists(NUMBERS, min_size=1, max_size=4).map(dense),
    PAIRS.map(lambda pairs: sparse([i for i, _ in pairs], [x for _, x in pairs])),
    PAIRS.map(lambda pairs: sparse_add([i for i, _ in pairs], [x for _, x in pairs])),
    NUMBERS.map(scale),
    NUMBERS.map(offset),
    TEXTS.map(transform),
    st.binary(max_size=9).map(opaque),
    st.just(delete()),
    st.builds(Operation, st.integers(10, 63), data=st.binary(max_size=4)),
)
DOTS = st.builds(Dot, st.integers(0, (1 << 64) - 1), st.integers(1, (1 << 63) - 1))
IDS = st.binary(min_size=16, max_size=16)
JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 1 << 63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
DELTAS = st.builds(
    Delta,
    TEXTS,
    OPERATIONS,
    namespace=TEXTS,
    id=st.none() | IDS,
    dot=st.none() | DOTS,
    parents=st.lists(DOTS | IDS, max_size=2).map(tuple),
    clock=st.lists(DOTS, max_size=2, unique_by=lambda dot: dot.origin).map(tuple),
    timestamp=st.integers(0, (1 << 64) - 1),
    priority=st.sampled_from(Priority),
    source=st.sampled_from(Source),
    metadata=st.none() | st.dictionaries(TEXTS, JSONS, max_size=2),
    topics=st.lists(TEXTS, max_size=2).map(tuple),
    expect=st.none() | st.just(ABSENT) | DOTS,
)


@given(DELTAS)
def test_delta_round_trips_through_a_line(delta: Delta) -> None:
    line = to_line(delta, 5)
    assert "\n" not in line
    parsed = delta_from_line(line)
    assert parsed == delta
    assert type(parsed.priority) is Priority
    assert to_line(parsed) == to_line(delta)


def test_numbers_round_trip_to_the_last_bit(full: bool) -> None:
    count = 60_000 if not full else 6_000_000
    for start in range(0, count, 60_000):
        bits = (np.arange(start, start + 60_000, dtype=np.uint64) * 2_654_435_761 % (1 << 32)).astype(
            np.uint32
        )
        numbers = bits.view(np.float32)
        numbers = numbers[np.isfinite(numbers)]
        parsed = delta_from_line(to_line(Delta("d", create(numbers)))).operation.values
        assert parsed is not None
        assert parsed.tobytes() == numbers.tobytes()


@given(st.text(max_size=20) | st.binary(max_size=20) | st.dictionaries(st.text(max_size=9), JSONS))
def test_garbage_raises_only_invalid_delta(line: Any) -> None:
    with pytest.raises(InvalidDelta):
        delta_from_line(line)


@given(
    st.dictionaries(
        st.sampled_from(["vector", "values", "id", "parents", "metadata", "topics", "timestamp", "priority"]),
        JSONS,
    )
)
def test_random_fields_are_refused_or_round_trip(fields: dict[str, Any]) -> None:
    try:
        delta = delta_from_line(valid_line(**fields))
    except InvalidDelta:
        return
    assert delta_from_line(to_line(delta)) == delta
