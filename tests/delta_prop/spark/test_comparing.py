"""A comparison of two tables gives minimal deltas, which turn the old table exactly into the new one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from delta_prop.auditing.differences import diff_metadata  # noqa: E402
from delta_prop.spark.jobs.comparing import DELTAS, compare  # noqa: E402
from delta_prop.spark.jobs.pairs import FACTS, MEMBER, NEW, OLD  # noqa: E402
from delta_prop_wire import delta as d  # noqa: E402
from delta_prop_wire.algebra import VectorState, apply  # noqa: E402
from delta_prop_wire.delta import Kind, Operation  # noqa: E402
from delta_prop_wire.errors import InvalidDelta  # noqa: E402
from delta_prop_wire.metadata import merge  # noqa: E402

Name = tuple[str, str]
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.5, 3e38, 1e-45, -7.25])
CONTENT = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=6),
    st.lists(NUMBERS, min_size=4, max_size=4),
    st.binary(max_size=3),
)
METADATA = st.dictionaries(
    st.sampled_from(["a", "ü"]), st.none() | st.integers(0, 2) | st.sampled_from(["x", '"'])
)
TABLES = st.dictionaries(
    st.tuples(st.sampled_from(["n", "m"]), st.sampled_from(["a", "b", "c", "ab", "é"])),
    st.tuples(CONTENT, METADATA),
)
SCHEMA = pa.schema(
    [
        ("namespace", pa.string()),
        ("vector_id", pa.string()),
        ("side", pa.int32()),
        ("vector", pa.list_(pa.float32())),
        ("data", pa.binary()),
        ("metadata", pa.string()),
        ("wrong", pa.string()),
    ]
)


def fact(
    name: Name, side: int, content: Any, metadata: dict[str, Any], *, has_member_columns: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"namespace": name[0], "vector_id": name[1], "side": side}
    row["data" if isinstance(content, bytes) else "vector"] = content
    if has_member_columns:
        return row | {
            MEMBER + key: f"{json.dumps(key, ensure_ascii=False)}:{json.dumps(value)}"
            for key, value in metadata.items()
            if value is not None
        }
    return row | {"metadata": json.dumps(metadata) if metadata else None}


def rows_of(
    old: dict[Name, Any], new: dict[Name, Any], *, has_member_columns: bool = False, size: int = 100
) -> list[Any]:
    rows = [
        fact(name, side, *table[name], has_member_columns=has_member_columns)
        for side, table in ((OLD, old), (NEW, new))
        for name in table
    ]
    rows.sort(key=lambda row: (row["namespace"], row["vector_id"], row["side"]))
    schema = SCHEMA
    for name in ("a", "ü") if has_member_columns else ():
        schema = schema.append(pa.field(MEMBER + name, pa.string()))
    return pa.Table.from_pylist(rows, schema=schema).to_batches(size)


def deltas(batches: Any, threshold: float = 0.0) -> list[dict[str, Any]]:
    rows = [row for batch in compare(batches, threshold) for row in batch.cast(DELTAS).to_pylist()]
    for batch in compare(batches, threshold):
        batch.validate(full=True)
    return rows


def state(content: Any, metadata: dict[str, Any]) -> VectorState:
    operation = d.opaque(content) if isinstance(content, bytes) else d.create(content)
    return apply(VectorState(), operation, metadata)


def apply_deltas(old: dict[Name, Any], rows: list[dict[str, Any]]) -> dict[Name, VectorState]:
    states = {name: state(*content) for name, content in old.items()}
    for row in rows:
        kind, name = Kind[row["op"].upper()], (row["namespace"], row["vector_id"])
        numbers = row["vector"] if row["vector"] is not None else row["values"]
        operation = Operation(
            kind,
            None if numbers is None else np.array(numbers, np.float32),
            None if row["indices"] is None else np.array(row["indices"], np.uint32),
            row["data"] or b"",
        )
        patch = None if row["metadata"] is None else json.loads(row["metadata"])
        assert patch is None or patch
        assert name in states or kind in (Kind.CREATE, Kind.OPAQUE)
        states[name] = apply(states.get(name, VectorState()), operation, patch)
        assert not states[name].ignored
        if not states[name].alive:
            del states[name]
    return states


@given(TABLES, TABLES, st.booleans(), st.sampled_from([1, 2, 100]))
def test_deltas_turn_the_old_table_into_the_new_one(
    old: dict[Name, Any], new: dict[Name, Any], has_member_columns: bool, size: int
) -> None:
    rows = deltas(rows_of(old, new, has_member_columns=has_member_columns, size=size))
    states = apply_deltas(old, rows)
    assert {name: one.content for name, one in states.items()} == {
        name: state(*content).content for name, content in new.items()
    }
    assert len({(row["namespace"], row["vector_id"]) for row in rows}) == len(rows), (
        "each fact must have only one delta"
    )
    same = [
        name for name in old.keys() & new.keys() if state(*old[name]).content == state(*new[name]).content
    ]
    assert not {(row["namespace"], row["vector_id"]) for row in rows} & set(same)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=9), st.sampled_from([0.0, 0.4, 1.0, 1e30]))
def test_only_numbers_changed_above_the_threshold_are_sent(
    pairs: list[tuple[float, float]], threshold: float
) -> None:
    old, new = (np.array(one, np.float32) for one in zip(*pairs, strict=True))
    rows = deltas(rows_of({("n", "a"): (old.tolist(), {})}, {("n", "a"): (new.tolist(), {})}), threshold)
    changed = np.abs(new.astype(float) - old) > threshold if threshold else old.view("u4") != new.view("u4")
    vector = apply_deltas({("n", "a"): (old.tolist(), {})}, rows)["n", "a"].vector
    assert vector is not None
    assert vector.tobytes() == np.where(changed, new, old).tobytes()
    count = int(changed.sum())
    expected_ops = [] if not count else ["sparse"] if 8 * count < 4 * len(old) else ["dense"]
    assert [row["op"] for row in rows] == expected_ops


def test_each_delta_holds_only_what_changed() -> None:
    old = {
        ("n", "a"): ([1, 2, 3, 4, 5], {"t": "x", "u": 1}),
        ("n", "b"): ([1], {}),
        ("n", "d"): ([7], {"k": {"m": 1, "n": 2}}),
    }
    new = {
        ("n", "a"): ([1, 2, 3, 4, 6], {"t": "y", "u": 1}),
        ("n", "c"): ([1.5], {"v": [1]}),
        ("n", "d"): ([7], {"k": {"m": 1}}),
    }
    rows = [
        {key: value for key, value in row.items() if value is not None} for row in deltas(rows_of(old, new))
    ]
    assert rows == [
        {
            "vector_id": "a",
            "namespace": "n",
            "op": "sparse",
            "indices": [4],
            "values": [6.0],
            "metadata": '{"t":"y"}',
        },
        {"vector_id": "b", "namespace": "n", "op": "delete"},
        {"vector_id": "c", "namespace": "n", "op": "create", "vector": [1.5], "metadata": '{"v":[1]}'},
        {"vector_id": "d", "namespace": "n", "op": "metadata", "metadata": '{"k":{"n":null}}'},
    ]


JSON = st.recursive(
    st.integers(0, 2) | st.booleans() | st.sampled_from(["", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("ab"), JSON, max_size=2)


@given(OBJECTS, OBJECTS)
def test_patch_turns_one_object_into_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = diff_metadata(old, new)
    before, after, patched = (json.dumps(one, sort_keys=True) for one in (old, new, merge(old, patch)))
    assert patched == after
    assert (patch == {}) == (before == after)


BAD_ROWS = [
    ({"vector": [1.0, None]}, "number 1 of the vector is NULL"),
    ({"vector": [1.0, 2.0, float("nan")]}, "number 2 of the vector is nan, which is not a finite float32"),
    ({"vector": [float("inf")]}, "number 0 of the vector is inf"),
    ({"vector": None}, "the vector is NULL: leave the row out to delete the fact"),
    ({"wrong": "column price is not finite"}, "column price is not finite"),
    ({"metadata": "[1]"}, r"metadata '\[1\]' is not a JSON object"),
    ({"metadata": "{"}, "metadata '{' is not JSON"),
    ({"vector_id": None}, "the key is NULL"),
    ({"vector_id": "a"}, "the key occurs more than once: keep one row"),
]


@pytest.mark.parametrize(
    ("side", "change", "expected"),
    [(side, *bad) for side in (OLD, NEW) for bad in BAD_ROWS if side == NEW or "metadata" not in bad[0]],
)
def test_bad_row_is_reported_with_its_table_and_key(side: int, change: dict[str, Any], expected: str) -> None:
    good = {"namespace": "n", "vector_id": "a", "side": side, "vector": [1.0]}
    bad = {"namespace": "n", "vector_id": "b", "side": side, "vector": [2.0]} | change
    batches = pa.Table.from_pylist([good, bad], schema=SCHEMA).to_batches()
    with pytest.raises(
        InvalidDelta, match=f"{('old', 'new')[side]} table: vector_id {bad['vector_id']!r}: {expected}"
    ):
        list(compare(batches))


def test_empty_tables_give_no_deltas() -> None:
    assert list(compare([])) == []
    assert list(compare([pa.RecordBatch.from_pylist([], schema=SCHEMA)])) == []
    assert tuple(SCHEMA.names) == FACTS
