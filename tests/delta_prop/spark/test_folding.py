"""The columnar fold equals the row-by-row fold for any history, from the log's start or from states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from delta_prop.spark.states import folding_numbers  # noqa: E402
from delta_prop.spark.states.changes import CHANGES, buckets_of, changes_of, join_keys, split_keys  # noqa: E402
from delta_prop.spark.states.folding import fold  # noqa: E402
from delta_prop.spark.states.folding_rows import state_of_row  # noqa: E402
from delta_prop_broker.log.memory import MemoryLog  # noqa: E402
from delta_prop_broker.retention.sorted_run import Change, ChangeFolder  # noqa: E402
from delta_prop_wire import delta as d  # noqa: E402
from delta_prop_wire.algebra import VectorState  # noqa: E402
from delta_prop_wire.batch import LoggedBatch  # noqa: E402
from delta_prop_wire.delta import Delta, Source  # noqa: E402
from delta_prop_wire.duplicate_ids import IdentifiedDelta  # noqa: E402
from delta_prop_wire.state_rows import StateRow, encode_states  # noqa: E402
from tests.broker.histories import Name, Rows, Step, Writer, comparable, steps, steps_with_ids  # noqa: E402
from tests.golden.fold_histories import histories  # noqa: E402
from tests.golden.folds import batch_of, format_state, refused_field, states_of  # noqa: E402
from tests.sinks.strategies import deltas as random_deltas  # noqa: E402
from tests.sinks.support import FakeLog  # noqa: E402

RANDOM_STEPS = st.builds(Step, st.lists(random_deltas, min_size=1, max_size=6), st.integers(1, 3), st.just(0))


EXTREME_NUMBERS = st.sampled_from([3e38, -3e38, 2.0, 0.1])
EXTREME_OPERATIONS = st.one_of(
    st.builds(d.create, st.lists(EXTREME_NUMBERS, min_size=2, max_size=2)),
    st.builds(
        lambda pairs: d.sparse_add(*zip(*pairs, strict=True)),
        st.lists(st.tuples(st.just(0), EXTREME_NUMBERS), min_size=1, max_size=3),
    ),
    st.builds(lambda value: d.sparse([1], [value]), EXTREME_NUMBERS),
    st.builds(d.scale, EXTREME_NUMBERS),
    st.builds(d.offset, EXTREME_NUMBERS),
)
EXTREME_STEPS = st.builds(
    Step,
    st.lists(st.builds(Delta, st.sampled_from("ab"), EXTREME_OPERATIONS), min_size=1, max_size=6),
    st.integers(1, 2),
    st.integers(0, 6),
)


def log_batches(history: list[Step]) -> list[LoggedBatch]:
    writer = Writer(MemoryLog(bytes(16)))  # type: ignore[arg-type]
    for step in history:
        writer.append(step)
    return writer.batches


def table(batches: list[LoggedBatch], end: int | None = None) -> Any:
    return pa.Table.from_batches([changes_of(logged, end) for logged in batches], schema=CHANGES)


def states(folded: Any) -> dict[Name, tuple[VectorState, int]]:
    folded.validate(full=True)
    namespaces, ids = split_keys(folded.column("key").combine_chunks())
    names = list(zip(namespaces.to_pylist(), ids.to_pylist(), strict=True))
    assert len(set(names)) == len(names), "each vector must have only one row"
    rows = folded.to_pylist()
    return {name: (state_of_row(row), row["offset"]) for name, row in zip(names, rows, strict=True)}


def check_fold(history: list[Step], end: int | None = None) -> None:
    batches = log_batches(history)
    rows = Rows.below(batches, 1 << 60 if end is None else end)
    folded = states(fold(table(batches, end)))
    assert {name: comparable(state) for name, (state, _) in folded.items()} == {
        name: comparable(state) for name, state in rows.fold().items()
    }
    for name, (state, offset) in folded.items():
        assert (state.key, offset) in [(key, row_offset) for key, row_offset, _, _ in rows.changes[name]]


@given(st.lists(steps_with_ids, max_size=20))
def test_columnar_fold_equals_the_fold_of_the_log(history: list[Step]) -> None:
    check_fold(history)


@given(st.lists(RANDOM_STEPS, max_size=12) | st.lists(EXTREME_STEPS, min_size=1, max_size=4))
def test_numbers_at_the_limits_of_their_range_saturate_equally(history: list[Step]) -> None:
    check_fold(history)


@given(st.lists(RANDOM_STEPS, max_size=8), st.integers(1, 3))
def test_vector_changed_in_many_rounds_is_folded_equally(history: list[Step], rounds_max: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folding_numbers, "ROUNDS_MAX", rounds_max)
        check_fold(history)


@given(st.lists(steps, min_size=1, max_size=8), st.integers(0, 30))
def test_fold_ignores_rows_from_its_end_offset_on(history: list[Step], end: int) -> None:
    check_fold(history, end)


@given(
    st.lists(steps_with_ids, min_size=2, max_size=16) | st.lists(EXTREME_STEPS, min_size=2, max_size=5),
    st.data(),
)
def test_fold_of_a_tail_onto_states_equals_compaction(history: list[Step], data: st.DataObject) -> None:
    batches = log_batches(history)
    cut = data.draw(st.integers(0, len(batches)))
    folded_prefix = fold(table(batches[:cut]))
    logged = snapshot_of(folded_prefix)
    folded = states(fold(pa.concat_tables([table(batches[cut:]), table(logged)])))
    assert {name: (comparable(one), offset) for name, (one, offset) in folded.items()} == fold_as_compaction(
        states(folded_prefix), batches[cut:]
    )


def test_golden_histories_fold_to_the_golden_states() -> None:
    for name, changes in histories():
        log = FakeLog()
        for change in changes:
            if refused_field(change) is None:
                log.forward(batch_of([change]), change.lamport)
        expected = {vector_id: format_state(state) for vector_id, state in states_of(changes).items()}
        folded = states(fold(table(log.batches))) if log.batches else {}
        assert {key: format_state(state) for (_, key), (state, _) in folded.items()} == expected, name


def snapshot_of(folded: Any) -> list[LoggedBatch]:
    """Return the states as rows of a snapshot."""
    rows = [StateRow(*name, state, offset) for name, (state, offset) in states(folded).items()]
    return [LoggedBatch(encode_states(rows), 0, 0, Source.LOCAL)] if rows else []


def fold_as_compaction(
    before: dict[Name, tuple[VectorState, int]], tail: list[LoggedBatch]
) -> dict[Name, Any]:
    """Fold a tail onto states, as compaction does."""
    rows, folder, folded = Rows.below(tail, 1 << 60), ChangeFolder(), {}
    known_ids = {logged.offset + row: logged.known_ids for logged in tail for row in range(logged.count)}
    for name in before.keys() | rows.changes.keys():
        changes = []
        for key, offset, operation, patch in sorted(rows.changes.get(name, ()), key=lambda row: row[0]):
            id_ = rows.ids.get(offset)
            identified = None if id_ is None else IdentifiedDelta(id_, key, offset, known_ids[offset])
            changes.append(Change("", key, offset, 0, operation, patch, identified))
        state, offset = folder.fold(changes, *before.get(name, (VectorState(), 0)))
        folded[name] = (comparable(state), offset)
    return folded


def test_duplicate_rows_have_one_effect() -> None:
    batches = log_batches([Step([Delta("a", d.create([1, 2])), Delta("a", d.sparse_add([0], [1]))], 1, 0)])
    folded = fold(pa.concat_tables([table(batches), table(batches)]))
    assert folded.column("values").to_pylist() == [[2.0, 2.0]]
    assert fold(CHANGES.empty_table()).num_rows == 0


def test_many_vectors_are_folded_without_a_call_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_prop.spark.states.folding.fold_rows", None)
    numbers = np.random.default_rng(1).normal(size=(500, 8)).astype(np.float32)
    rows = [Delta(f"v{row:03}", d.create(numbers[row])) for row in range(500)]
    rows += [Delta(f"v{row:03}", d.sparse([row % 8], [row])) for row in range(0, 500, 3)]
    rows += [Delta(f"v{row:03}", d.sparse_add([0, 7], [1, row])) for row in range(0, 500, 5)]
    rows += [Delta(f"v{row:03}", d.scale(2)) for row in range(0, 500, 7)]
    rows += [Delta(f"v{row:03}", d.delete()) for row in range(0, 500, 11)]
    check_fold([Step(rows, 1, 0), Step(rows[:250], 2, 0)])


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9)), max_size=9))
def test_bucket_of_a_vector_depends_only_on_its_name(names: list[Name]) -> None:
    names = [(a.replace("\0", "0"), b.replace("\0", "0")) for a, b in names]
    columns = [pa.array([one[index] for one in names], pa.string()) for index in (0, 1)]
    keys = join_keys(*columns)
    assert [one.to_pylist() for one in split_keys(keys)] == [one.to_pylist() for one in columns]
    buckets = buckets_of(keys, 7).tolist()
    assert all(0 <= bucket < 7 for bucket in buckets)
    for index in range(len(names)):
        assert buckets_of(keys.slice(index, 1), 7).tolist() == [buckets[index]]


def test_buckets_are_filled_evenly() -> None:
    keys = join_keys(pa.array(["ns"] * 8_000), pa.array([f"doc-{number}" for number in range(8_000)]))
    counts = np.bincount(buckets_of(keys, 16), minlength=16)
    assert counts.min() > 400
    assert counts.max() < 600


def test_control_rows_are_not_changes() -> None:
    batches = log_batches([Step(None, 1, 0), Step([Delta("a", d.create([1.0]))], 1, 0)])
    assert table(batches).column("offset").to_pylist() == [2]


def test_changes_older_than_a_state_are_only_counted() -> None:
    def create_and_offset(value: float, origin: int, lamport_lag: int) -> Step:
        return Step([Delta("a", d.create([value])), Delta("a", d.offset(1))], origin, lamport_lag)

    batches = log_batches(
        [
            create_and_offset(1, 1, 0),
            create_and_offset(2, 1, 0),
            create_and_offset(3, 2, 4),
            create_and_offset(4, 2, 0),
        ]
    )
    for cut, ignored in ((0, 0), (1, 1), (2, 2), (3, 0)):
        folded_prefix = fold(table(batches[:cut]))
        folded = fold(pa.concat_tables([table(batches[cut:]), table(snapshot_of(folded_prefix))]))
        assert folded.column("values").to_pylist() == [[5.0]]
        assert folded.column("ignored").to_pylist() == [ignored]
