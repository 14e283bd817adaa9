"""Arrow batches become blocks, and decoded batches equal the rows sent; bad rows are reported by id."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from delta_prop.spark.data_source.blocks import to_block  # noqa: E402
from delta_prop.spark.data_source.rows import SCHEMA, to_arrow  # noqa: E402
from delta_prop_wire import delta as d  # noqa: E402
from delta_prop_wire.batch import LoggedBatch  # noqa: E402
from delta_prop_wire.delta import Delta, Priority, Source, namespace_of  # noqa: E402
from delta_prop_wire.encode import encode_batch  # noqa: E402
from delta_prop_wire.errors import InvalidDelta  # noqa: E402

WRITE_SCHEMA = pa.schema([SCHEMA.field(name) for name in SCHEMA.names if name not in ("offset",)])
NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4)
OPERATIONS = st.one_of(
    st.builds(d.create, NUMBERS),
    st.builds(d.dense, NUMBERS),
    st.builds(lambda values: d.sparse(range(len(values)), values), NUMBERS),
    st.builds(lambda values: d.sparse_add(range(len(values)), values), NUMBERS),
    st.builds(d.scale, st.floats(-9, 9, width=32)),
    st.builds(d.opaque, st.binary(max_size=5)),
    st.just(d.delete()),
)
METADATA = st.none() | st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)
DELTAS = st.lists(
    st.builds(
        Delta,
        st.sampled_from(["doc-1", "ü", "doc-22"]),
        OPERATIONS,
        st.sampled_from(["docs", "äcker"]),
        metadata=METADATA.filter(lambda patch: patch is None or fits(patch)),
        topics=st.sampled_from([(), ("news",), ("news", "old")]),
    ),
    min_size=1,
    max_size=6,
)


def fits(patch: dict[str, Any]) -> bool:
    return all(not isinstance(value, int) or -(1 << 63) <= value < 1 << 64 for value in patch.values())


def row_of(delta: Delta) -> dict[str, Any]:
    """Return a user's row for a delta."""
    operation = delta.operation
    name = operation.kind.name.lower()
    row: dict[str, Any] = {"vector_id": delta.vector_id, "namespace": delta.namespace, "op": name}
    if operation.indices is not None:
        row |= {"indices": operation.indices.tolist(), "values": operation.values.tolist()}
    elif operation.values is not None:
        row["vector"] = operation.values.tolist()
    if name == "opaque":
        row["data"] = operation.data
    if delta.metadata is not None:
        row["metadata"] = json.dumps(dict(delta.metadata))
    if delta.topics:
        row["topics"] = list(delta.topics)
    return row


def arrow_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    names = {name for row in rows for name in row}
    schema = pa.schema([WRITE_SCHEMA.field(name) for name in WRITE_SCHEMA.names if name in names])
    return pa.RecordBatch.from_pylist(rows, schema=schema)


@given(DELTAS, st.integers(0, 2))
def test_rows_become_the_bytes_of_their_deltas(deltas: list[Delta], skipped: int) -> None:
    rows = arrow_batch([row_of(delta) for delta in deltas])
    skipped = min(skipped, len(deltas) - 1)
    block = to_block(rows.slice(skipped), namespace="docs")
    expected = encode_batch(deltas[skipped:], origin=3, base=1)
    assert bytes(block.encode(origin=3, base=1).raw) == bytes(expected.raw)


@given(DELTAS)
def test_batch_read_as_arrow_equals_its_deltas(deltas: list[Delta]) -> None:
    batch = encode_batch(deltas, origin=0xAB, base=9, priority=Priority.HIGH)
    rows = to_arrow(LoggedBatch(batch, 100, 50, Source.IMPORT))
    assert rows.schema == SCHEMA
    read_rows = rows.to_pylist()
    for row, delta in enumerate(deltas):
        expected = dict.fromkeys(SCHEMA.names) | row_of(delta)
        expected |= {"offset": 100 + row, "counter": 9 + row, "lamport": 50 + row, "origin": f"{0xAB:016x}"}
        expected |= {"priority": "high", "source": "import"}
        if expected["metadata"] is not None:
            assert json.loads(read_rows[row].pop("metadata")) == json.loads(expected.pop("metadata"))
        assert {name: read_rows[row][name] for name in expected if name in read_rows[row]} == {
            name: value for name, value in expected.items() if name in read_rows[row]
        }


def test_columns_left_out_get_their_defaults() -> None:
    block = to_block(arrow_batch([{"vector_id": "a", "vector": [1.0]}]), namespace="docs")
    expected = encode_batch([Delta("a", d.create([1.0]), "docs")], origin=1, base=1)
    assert bytes(block.encode(origin=1, base=1).raw) == bytes(expected.raw)
    block = to_block(arrow_batch([{"vector_id": "a", "data": b"x"}]), namespace="docs")
    assert block.encode(origin=1, base=1).delta(0).operation == d.opaque(b"x")


def test_doubles_and_long_indices_are_accepted() -> None:
    schema = pa.schema(
        {
            "vector_id": pa.large_string(),
            "op": pa.string(),
            "indices": pa.list_(pa.int64()),
            "values": pa.list_(pa.float64()),
        }
    )
    rows = pa.RecordBatch.from_pylist(
        [{"vector_id": "a", "op": "sparse", "indices": [3], "values": [0.1]}], schema=schema
    )
    delta = to_block(rows, namespace="n").encode(origin=1, base=1).delta(0)
    assert delta.operation == d.sparse([3], [0.1])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"op": "create"}, "vector: of vector_id 'bad': 0 numbers; create has 1 to 65536"),
        (
            {"op": "frobnicate"},
            "op: of vector_id 'bad': 'frobnicate' is not an operation: give one of create, sparse",
        ),
        ({}, "op: of vector_id 'bad': missing, with neither a vector nor data"),
        (
            {"vector": [1.0, -1e300]},
            "vector: of vector_id 'bad': number 1 is -1e+300, which does not fit in float32: numbers are "
            "finite and within ±3.4028235e+38 (float32): clamp it",
        ),
        ({"vector": [float("inf")]}, "vector: of vector_id 'bad': number 0 is inf; must be finite"),
        ({"op": "scale", "vector": [1e39]}, "factor: of vector_id 'bad': number 0 is 1e+39, which does not"),
        ({"vector": [1.0, None]}, "vector: of vector_id 'bad': has a null in it"),
        (
            {"op": "sparse", "indices": [1], "values": [1.0, 2.0]},
            "indices: of vector_id 'bad': 1 indices for 2",
        ),
        (
            {"op": "sparse", "indices": [-1], "values": [1.0]},
            "indices: of vector_id 'bad': -1 is not an index",
        ),
        ({"op": "sparse", "indices": [70000], "values": [1.0]}, "indices: of vector_id 'bad': index 70000"),
        ({"vector": [1.0], "values": [1.0]}, "values: of vector_id 'bad': given with a vector"),
        ({"vector": [1.0], "metadata": "{"}, "metadata: of vector_id 'bad': '{' is not JSON"),
        (
            {"vector": [1.0], "metadata": "[1]"},
            "metadata: of vector_id 'bad': it is of type list: give a JSON object",
        ),
        ({"vector": [1.0], "id": b"short"}, "id: of vector_id 'ok': missing, while other rows have one"),
        ({"vector": [1.0], "namespace": "n\n"}, "namespace: of vector_id 'bad': character 1 is U+000A"),
        ({"vector": [1.0], "topics": [""]}, "topics: of vector_id 'bad': 0 bytes"),
    ],
)
def test_bad_row_is_reported_by_its_vector_id(row: dict[str, Any], expected: str) -> None:
    good = {"vector_id": "ok", "vector": [1.0]}
    rows = [good, {"vector_id": "bad", **row}]
    names = {name for one in rows for name in one}
    wide_types = {"vector": pa.list_(pa.float64()), "indices": pa.list_(pa.int64())}
    schema = pa.schema(
        [
            (name, wide_types.get(name, WRITE_SCHEMA.field(name).type))
            for name in WRITE_SCHEMA.names
            if name in names
        ]
    )
    with pytest.raises(InvalidDelta) as error:
        to_block(pa.RecordBatch.from_pylist(rows, schema=schema), namespace="docs")
    assert error.value.message.startswith(expected)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["a", None], "row 7,001 of its partition, counted from 0, after vector_id 'a': show such rows with"),
        ([None, "b"], "row 7,000 of its partition, counted from 0, before vector_id 'b': "),
        ([None, None], "row 7,000 of its partition, counted from 0: show such rows with df.where"),
    ],
)
def test_row_without_vector_id_is_reported_by_row_and_neighbour(ids: list[str | None], expected: str) -> None:
    rows = arrow_batch([{"vector_id": one, "vector": [1.0]} for one in ids])
    with pytest.raises(InvalidDelta) as error:
        to_block(rows, namespace="docs", before=7_000)
    assert error.value.message.startswith(f"vector_id: missing in {expected}")


def test_default_namespace_is_the_prefix_of_the_vector_id() -> None:
    ids = ["docs:1", "plain", ":odd", "rows:a:b", "docs:2"]
    rows = pa.record_batch({"vector_id": ids, "op": ["delete"] * 5})
    batch = to_block(rows.slice(1), namespace=None).encode(origin=1, base=1)
    assert [batch.delta(row).namespace for row in range(4)] == [namespace_of(one) for one in ids[1:]]
    named = rows.append_column("namespace", pa.array(["x", None, "x", None, None], pa.string()))
    batch = to_block(named, namespace=None).encode(origin=1, base=1)
    assert [batch.delta(row).namespace for row in range(5)] == ["x", "default", "x", "rows", "docs"]
    batch = to_block(named, namespace="given").encode(origin=1, base=1)
    assert [batch.delta(row).namespace for row in range(5)] == ["x", "given", "x", "given", "given"]


def test_columns_become_batches_and_back_without_pandas() -> None:
    program = """
import sys
import numpy as np
import pyarrow as pa
from delta_prop.spark.arrays import array_of, fill_text
numbers = array_of(np.ones(3, "f4"), pa.float32())
vectors = pa.ListArray.from_arrays(array_of(np.array([0, 3], "i4"), pa.int32()), numbers)
rows = pa.record_batch([fill_text("a:b", 1), vectors], ["vector_id", "vector"])
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.data_source.rows import to_arrow
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Source
batch = to_block(rows, namespace=None).encode(origin=1, base=1)
assert to_arrow(LoggedBatch(batch, 0, 1, Source.LOCAL)).num_rows == 1
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
