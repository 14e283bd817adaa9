"""An audit reports exactly the planted differences between a log and a sink's rows; repairs correct them."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from delta_prop.auditing import Difference  # noqa: E402
from delta_prop.spark.states.buckets import SINK_STATES, spread, spread_sink_states  # noqa: E402
from delta_prop.spark.states.differences import DIFFERENCES, find_differences  # noqa: E402
from delta_prop.spark.states.folding import fold  # noqa: E402
from delta_prop.spark.states.folding_rows import FoldedVector, states_of  # noqa: E402
from delta_prop_wire import delta as d  # noqa: E402
from delta_prop_wire.algebra import VectorState, apply  # noqa: E402
from delta_prop_wire.delta import Delta, Kind, Operation  # noqa: E402
from tests.broker.histories import Name, Rows, Step, comparable, steps_with_ids  # noqa: E402
from tests.delta_prop.auditing.expected_differences import differences_of, history_states  # noqa: E402
from tests.delta_prop.spark.logs import write  # noqa: E402
from tests.delta_prop.spark.test_folding import log_batches, states, table  # noqa: E402

SinkContents = dict[Name, tuple[VectorState, int]]


def find_in_one_bucket(
    batches: list[Any], contents: SinkContents, next_offset: int, quarantined: Any = ()
) -> list[dict[str, Any]]:
    """Return the differences found in a single bucket."""
    sink_states = states_of([FoldedVector("\0".join(name), *one) for name, one in contents.items()])
    blobs = [spread_sink_states(sink_states, 1), *spread(batches, 1)]
    assert blobs[0].column(1).to_pylist() in ([SINK_STATES], [])
    blobs = pa.Table.from_batches(blobs).sort_by("first").to_batches()
    rows = [row for batch in find_differences(blobs, next_offset, quarantined) for row in batch.to_pylist()]
    assert all(batch.schema == DIFFERENCES for batch in find_differences(blobs, next_offset))
    return rows


@given(st.lists(steps_with_ids, min_size=1, max_size=14), st.data())
def test_correct_sink_at_any_cursor_has_no_differences(history: list[Step], data: st.DataObject) -> None:
    batches = log_batches(history)
    next_offset = data.draw(st.integers(0, batches[-1].next_offset))
    contents: SinkContents = states(fold(table(batches, next_offset)))
    rows = Rows.below(batches, 1 << 60)
    for name in data.draw(st.sets(st.sampled_from(sorted(rows.changes)))) if rows.changes else ():
        later = [offset for _, offset, _, _ in rows.changes[name] if offset >= next_offset]
        if later:  # the sink's rows may be ahead of its cursor
            ahead = data.draw(st.sampled_from(later))
            state, _ = states(fold(table(batches, ahead + 1)))[name]
            contents[name] = (state, ahead)
    assert find_in_one_bucket(batches, contents, next_offset) == []


LOG = [
    Step(
        [Delta(f"v{number}", d.create([number, 1, 2]), metadata={"at": number}) for number in range(6)], 1, 0
    ),
    Step([Delta("b", d.opaque(b"one"), metadata={"x": 1}), Delta("v5", d.delete())], 1, 0),
    Step([Delta("v0", d.sparse([2], [9]))], 1, 0),
    Step([Delta("v1", d.sparse([2], [9]))], 1, 0),
]


def batches_and_sink_rows() -> tuple[list[Any], SinkContents]:
    batches = log_batches(LOG)
    return batches, states(fold(table(batches)))


def name_of(vector_id: str) -> Name:
    return ("default", vector_id)


def with_changes(state: VectorState, **more: Any) -> VectorState:
    fields = {
        field: getattr(state, field) for field in ("alive", "vector", "data", "metadata", "ignored", "key")
    }
    return VectorState(**(fields | more))


def test_every_kind_of_difference_is_reported_with_its_reason() -> None:
    batches, contents = batches_and_sink_rows()
    before = states(fold(table(batches, 8)))
    del contents[name_of("v2")]
    contents[name_of("v0")] = before[name_of("v0")]
    contents[name_of("v5")] = before[name_of("v4")]
    contents[name_of("w")] = before[name_of("v4")]
    state, offset = contents[name_of("v3")]
    contents[name_of("v3")] = (with_changes(state, vector=state.vector + np.float32([0, 1, 1])), offset)
    state, offset = contents[name_of("v4")]
    contents[name_of("v4")] = (with_changes(state, metadata={"at": 4, "more": 1}), offset)
    rows = {row["vector_id"]: row for row in find_in_one_bucket(batches, contents, 10)}
    assert {one: (row["difference"], row["reason"]) for one, row in rows.items()} == {
        "v2": ("missing", "the log has it since offset 2; the sink has no row"),
        "v0": ("stale", "number 2 is 2, not 9; it lacks the delta at offset 8"),
        "v5": ("extra", "the log has it deleted since offset 7"),
        "w": ("extra", "the log has no such vector"),
        "v3": ("corrupted", "number 1 is 2, not 1, and 1 more; it has the delta at offset 3"),
        "v4": ("corrupted", "its metadata differ in 'more'; it has the delta at offset 4"),
    }
    for one, row in rows.items():
        assert (row["op"], row["vector"]) == {
            "v0": ("create", [0, 1, 9]),
            "v2": ("create", [2, 1, 2]),
            "v3": ("create", [3, 1, 2]),
            "v4": ("create", [4, 1, 2]),
            "v5": ("delete", None),
            "w": ("delete", None),
        }[one]
        assert row["metadata"] == (None if row["vector"] is None else json.dumps({"at": int(one[1])}))
        assert row["origin"] == (None if one == "w" else f"{1:016x}")
        assert row["counter"] == {"v0": 9, "v2": 3, "v3": 4, "v4": 5, "v5": 8, "w": None}[one]


FAULTS = [
    (
        {"alive": False, "vector": None, "metadata": {}},
        "corrupted",
        "it is deleted, not a vector; it has the delta",
    ),
    (
        {"vector": np.zeros(2, np.float32)},
        "corrupted",
        "it has 2 numbers, not 3; it has the delta at offset 2",
    ),
    ({"vector": None, "data": b"x"}, "corrupted", "it is bytes, not a vector; it has the delta at offset 2"),
    ({"key": (2, 1, 2)}, "stale", "its content is correct; it lacks the delta at offset 2"),
    ({"key": (99, 1, 2)}, "corrupted", "its content is correct; its last delta is not in the log"),
    (
        {"alive": False, "vector": None, "metadata": {}, "key": (1, 1, 1)},
        "missing",
        "the log has it since offset 2; the s",
    ),
    ({"vector": np.float32([2, 1, -0.0])}, "corrupted", "number 2 is -0, not 2"),
]


@pytest.mark.parametrize(("change", "difference", "reason"), FAULTS)
def test_fault_of_a_row_is_reported_with_its_reason(
    change: dict[str, Any], difference: str, reason: str
) -> None:
    batches, contents = batches_and_sink_rows()
    state, offset = contents[name_of("v2")]
    contents[name_of("v2")] = (with_changes(state, **change), offset)
    (row,) = find_in_one_bucket(batches, contents, 10)
    assert row["difference"] == difference
    assert row["reason"].startswith(reason)
    assert (row["op"], row["vector"]) == ("create", [2, 1, 2])


def test_repair_of_bytes_restores_data_and_metadata() -> None:
    batches, contents = batches_and_sink_rows()
    state, offset = contents[name_of("b")]
    contents[name_of("b")] = (with_changes(state, data=b"other", metadata={"y": 2, "x": 1}), offset)
    (row,) = find_in_one_bucket(batches, contents, 10)
    assert row["reason"] == "its 5 bytes are not the 3 of the log; it has the delta at offset 6"
    assert (row["op"], row["data"], json.loads(row["metadata"])) == ("opaque", b"one", {"x": 1, "y": None})


def test_repair_of_a_lagging_sink_uses_the_current_state() -> None:
    batches, _ = batches_and_sink_rows()
    contents = states(fold(table(batches, 8)))
    state, offset = contents[name_of("v1")]
    contents[name_of("v1")] = (with_changes(state, vector=np.zeros(3, np.float32)), offset)
    (row,) = find_in_one_bucket(batches, contents, 8)
    assert row["reason"] == "number 0 is 0, not 1, and 2 more; it has the delta at offset 1"
    assert (row["vector"], row["counter"]) == ([1, 1, 9], 10)


def test_order_of_metadata_keys_is_ignored() -> None:
    batches = log_batches(
        [Step([Delta("a", d.create([1.0]), metadata={"x": 1, "y": {"b": 1, "a": 2}})], 1, 0)]
    )
    contents = states(fold(table(batches)))
    state, offset = contents[name_of("a")]
    contents[name_of("a")] = (with_changes(state, metadata={"y": {"a": 2, "b": 1}, "x": 1}), offset)
    assert find_in_one_bucket(batches, contents, 1) == []


@given(st.lists(steps_with_ids, min_size=2, max_size=12), st.data())
def test_repair_of_any_row_makes_it_correct(history: list[Step], data: st.DataObject) -> None:
    batches = log_batches(history)
    contents = states(fold(table(batches)))
    names = sorted(contents)
    if not names:
        return
    repaired_name = data.draw(st.sampled_from(names))
    other_state = data.draw(
        st.sampled_from([VectorState(key=(1, 9, 9)), *(state for state, _ in contents.values())])
    )
    state, offset = contents[repaired_name]
    contents[repaired_name] = (with_changes(other_state, key=state.key), offset)
    rows = find_in_one_bucket(batches, contents, batches[-1].next_offset)
    if comparable(with_changes(other_state, key=state.key, ignored=0)) == comparable(
        with_changes(state, ignored=0)
    ):
        assert rows == []
        return
    (row,) = rows
    vector = None if row["vector"] is None else np.array(row["vector"], np.float32)
    operation = Operation(Kind[row["op"].upper()], vector, data=row["data"] or b"")
    patch = None if row["metadata"] is None else json.loads(row["metadata"])
    for before in (contents[repaired_name][0], state, VectorState()):
        assert apply(before, operation, patch).content == state.content


def test_quarantined_row_is_reported_but_not_repaired() -> None:
    batches, contents = batches_and_sink_rows()
    del contents[name_of("v2")]
    (row,) = find_in_one_bucket(batches, contents, 10, quarantined={"default\0v2"})
    assert row["difference"] == "quarantined"
    assert row["reason"].endswith("the sink has no row; deltas of it are in the quarantine")
    assert row["op"] is None


@given(st.lists(steps_with_ids, min_size=1, max_size=12), st.data())
def test_report_equals_that_of_an_audit_without_spark(history: list[Step], data: st.DataObject) -> None:
    """The reports are equal for any state of the sink: some of its rows are changed, exchanged or lost."""
    with TemporaryDirectory() as folder:
        batches = write(Path(folder), history).batches
        rows = Rows.below(batches, 1 << 60)
        next_offset = data.draw(st.integers(0, batches[-1].next_offset))
        contents = history_states(rows, dict.fromkeys(rows.changes, next_offset))
        for name in data.draw(st.sets(st.sampled_from(sorted(contents)))) if contents else ():
            state, offset = contents.pop(name)
            others = [state, VectorState(key=(1, 9, 9)), *(one for one, _ in contents.values())]
            other = data.draw(st.sampled_from(others))
            key = data.draw(st.sampled_from([state.key, other.key]))
            target = data.draw(st.sampled_from([name, ("n", "new"), None]))
            if target is not None:
                contents[target] = (with_changes(other, key=key), offset)
        quarantined = frozenset(data.draw(st.sets(st.sampled_from(["n\0a", "n\0b", "n\0new"]))))
        on_spark = sorted(
            find_in_one_bucket(batches, contents, next_offset, quarantined),
            key=itemgetter("namespace", "vector_id"),
        )
        local = differences_of(folder, contents, next_offset, quarantined=quarantined)
        assert [one.line() for one in local] == [Difference(**row).line() for row in on_spark]
