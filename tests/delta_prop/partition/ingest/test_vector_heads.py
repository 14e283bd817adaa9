"""`VectorHeads`: heads, tombstones and dimensions against a plain fold; rows of forgotten vectors pass."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delta_prop.partition.core.native_heads import NativeVectorHeads
from delta_prop.partition.ingest.heads import ALIVE, DEAD, ORIGIN_SHIFT, SavedHeads, pack_heads
from delta_prop.partition.ingest.vector_heads import SavedVectors, VectorHeads
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import (
    ABSENT,
    Delta,
    Dot,
    Head,
    Kind,
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
)
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.partition.pipeline_bench import batch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.batch import Batch

ORIGIN, OTHER = 0xFFFF_FFFF_FFF0_0002, 7


def load_nothing(_namespace: str, _vector_id: str) -> Head | None:
    return None


class HeadsFixture:
    """`VectorHeads` that checks each batch before it is appended, as the pipeline does."""

    def __init__(self, **options: Any) -> None:
        self.vectors: VectorHeads = NativeVectorHeads(**options)
        self.next: dict[int, int] = {}

    def batch(self, *deltas: Delta, origin: int = ORIGIN) -> Batch:
        return batch_of(origin, self.next.get(origin, 1), *deltas)

    def send(self, *deltas: Delta, origin: int = ORIGIN, source: Source = Source.LOCAL) -> Batch:
        batch = self.batch(*deltas, origin=origin)
        if source is not Source.REPLICA:
            self.vectors.check(batch, load_nothing)
        self.vectors.note_appended(batch, source)
        self.next[origin] = batch.last + 1
        return batch

    def refusal(self, *deltas: Delta) -> Refused:
        with pytest.raises(Refused) as caught:
            self.send(*deltas)
        return caught.value


# --- against a plain fold

operations = st.sampled_from(
    [
        create([1.0, 2.0]),
        dense([3.0, 4.0]),
        create([1.0]),
        sparse([1], [1.0]),
        sparse([2], [1.0]),
        sparse_add([0], [1.0]),
        scale(2.0),
        offset(1.0),
        metadata_only(),
        opaque(b"x"),
        delete(),
    ]
)
deltas = st.builds(Delta, st.sampled_from("abc"), operations, st.sampled_from(["default", "other"]))
calls = st.lists(
    st.one_of(
        st.lists(deltas, min_size=1, max_size=4),
        st.builds(
            lambda operation, names: [Delta(name, operation) for name in names],
            operations,
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(calls)
def test_rows_are_refused_iff_the_fold_would_ignore_them(
    history: list[list[Delta]],
) -> None:
    fixture = HeadsFixture()
    states: dict[tuple[str, str], VectorState] = {}
    dimensions: dict[str, int] = {}
    heads: dict[tuple[str, str], Dot] = {}
    for rows in history:
        batch = fixture.batch(*rows)
        after, fixed, valid = dict(states), dict(dimensions), True
        for delta in rows:
            ref = (delta.namespace, delta.vector_id)
            valid = valid and _applies(delta, after.get(ref, VectorState()), fixed)
            after[ref] = apply(after.get(ref, VectorState()), delta.operation)
            if delta.operation.kind in (Kind.CREATE, Kind.DENSE):
                fixed.setdefault(delta.namespace, _length(delta))
        if not valid:
            with pytest.raises(InvalidDelta):
                fixture.send(*rows)
        else:
            fixture.send(*rows)
            states, dimensions = after, fixed
            heads |= {(delta.namespace, delta.vector_id): batch.dot(row) for row, delta in enumerate(rows)}
        for namespace_name in ("default", "other"):
            assert fixture.vectors.dimension(namespace_name) == dimensions.get(namespace_name, 0)
            for name in "abc":
                assert fixture.vectors.head(namespace_name, name) == heads.get((namespace_name, name))


@given(
    st.lists(
        st.tuples(st.lists(deltas, min_size=1, max_size=6), st.sampled_from([ORIGIN, OTHER])), max_size=10
    )
)
def test_column_checks_match_row_by_row_checks(history: list[tuple[list[Delta], int]]) -> None:
    by_column, by_row = HeadsFixture(), HeadsFixture()
    by_row.vectors = VectorHeads()
    for rows, origin in history:
        outcomes = []
        for fixture in (by_column, by_row):
            batch = fixture.batch(*rows, origin=origin)
            try:
                fixture.vectors.check(batch, load_nothing)
            except InvalidDelta as error:
                outcomes.append(str(error))
            else:
                fixture.vectors.count_concurrent(batch, lambda _: 0)
                fixture.send(*rows, origin=origin)
                outcomes.append("")
        assert outcomes[0] == outcomes[1]
        assert by_column.vectors.save() == by_row.vectors.save()
        assert (by_column.vectors.head_count, by_column.vectors.concurrent_updates) == (
            by_row.vectors.head_count,
            by_row.vectors.concurrent_updates,
        )
        for name in by_column.vectors.save().namespaces:
            assert heads_of(by_column.vectors, name) == heads_of(by_row.vectors, name)


MIXED_STEPS = st.lists(
    st.tuples(
        st.lists(st.lists(deltas, min_size=1, max_size=5), min_size=1, max_size=4),
        st.sampled_from([ORIGIN, ORIGIN, OTHER]),
    ),
    max_size=8,
)
ROWS = [Delta("a", opaque(b"x")), Delta("b", opaque(b"x"), "other")]
NEW_ROWS = [Delta("c", create([1.0, 2.0])), Delta("c", opaque(b"x"), "other")]
ROWS_ELSEWHERE = [Delta("a", opaque(b"x"), "third")]
REORDERED_ROWS = ROWS[::-1]
"""The same rows in another order, so that the batch names its namespaces in another order, too."""


@given(MIXED_STEPS)
@example([([ROWS, NEW_ROWS], ORIGIN), ([ROWS, REORDERED_ROWS], OTHER), ([ROWS], ORIGIN)])
@example(
    [
        ([ROWS, NEW_ROWS], ORIGIN),
        ([ROWS, ROWS], OTHER),
        ([REORDERED_ROWS, REORDERED_ROWS], OTHER),
        ([ROWS, ROWS], ORIGIN),
    ]
)
@example(
    [
        ([ROWS, NEW_ROWS], ORIGIN),
        ([[Delta("c", delete())]], ORIGIN),
        ([[*ROWS, Delta("c", offset(1.0))]], ORIGIN),
    ]
)
@example([([ROWS_ELSEWHERE * 4], OTHER), ([ROWS], ORIGIN), ([NEW_ROWS], OTHER), ([NEW_ROWS], ORIGIN)])
@example([([ROWS_ELSEWHERE * 4], OTHER), ([NEW_ROWS], OTHER), ([NEW_ROWS[:1]], ORIGIN)])
@example([([ROWS], ORIGIN), ([ROWS[:1]], OTHER), ([ROWS], ORIGIN), ([ROWS[1:]], OTHER), ([ROWS], ORIGIN)])
def test_batches_appended_together_match_one_by_one(steps: list[Any]) -> None:
    together, one_by_one = HeadsFixture(), HeadsFixture()
    one_by_one.vectors = VectorHeads()
    for fixture in (together, one_by_one):  # both namespaces have vectors from the start
        for name in ("default", "other"):
            fixture.send(*(Delta(key, create([1.0, 2.0]), name) for key in "ab"))
    for batches, origin in steps:
        append_both_ways(together, one_by_one, batches, origin, 3)


def append_both_ways(
    together: HeadsFixture, one_by_one: HeadsFixture, rows: list[Any], origin: int, seen_counter: int
) -> None:
    """Append batches in one call, and each alone, skipping those that are refused; compare the state."""
    new_batches, counter = [], together.next.get(origin, 1)
    for batch_rows in rows:
        new_batches.append(batch_of(origin, counter, *batch_rows))
        counter = new_batches[-1].last + 1
    for batch in new_batches:
        check_and_append(one_by_one.vectors, batch, seen_counter)
    while new_batches:
        noted = together.vectors.append_run(new_batches, Source.LOCAL, lambda _: seen_counter)
        new_batches = new_batches[noted + 1 :]  # without the refused one
    together.next[origin] = counter
    assert state_of(together.vectors) == state_of(one_by_one.vectors)


OPERATIONS = [
    create([1.0, 2.0]),
    dense([3.0, 4.0]),
    create([1.0]),
    sparse([1], [1.0]),
    delete(),
    opaque(b"x"),
]
UNIFORM_STEPS = st.lists(
    st.tuples(
        st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5), min_size=1, max_size=4),
        st.sampled_from(OPERATIONS),
        st.sampled_from([ORIGIN, ORIGIN, OTHER, 9]),
        st.integers(0, 12),
    ),
    max_size=10,
)


@given(UNIFORM_STEPS, st.integers(0, 10))
@example(
    [([["a"]], OPERATIONS[0], OTHER, 0), ([["b"]], OPERATIONS[0], 9, 0), ([["a", "b"]], OPERATIONS[1], 9, 0)],
    10,
)
@example(
    [
        ([["a"]], OPERATIONS[0], OTHER, 0),
        ([["b"]], OPERATIONS[0], 9, 0),
        ([["a"], ["a"]], OPERATIONS[1], 9, 0),
    ],
    10,
)
@example(
    [([["a"]], OPERATIONS[0], OTHER, 0), ([["b"]], OPERATIONS[0], 9, 0), ([["a", "a"]], OPERATIONS[1], 9, 1)],
    10,
)
def test_uniform_batches_appended_together_match_one_by_one(steps: list[Any], saved_after: int) -> None:
    together, one_by_one = HeadsFixture(), HeadsFixture()
    for number, (batches, operation, origin, seen_counter) in enumerate(steps):
        rows = [[Delta(key, operation) for key in keys] for keys in batches]
        append_both_ways(together, one_by_one, rows, origin, seen_counter)
        if number == saved_after:
            together.vectors, one_by_one.vectors = (
                restore_copy(together.vectors),
                restore_copy(one_by_one.vectors),
            )


def test_own_heads_are_not_concurrent_after_a_restore() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("a", create([1.0])))
    fixture.vectors = restore_copy(fixture.vectors)
    fixture.vectors.count_concurrent(fixture.batch(Delta("a", create([1.0]))), lambda _: 0)
    assert fixture.vectors.concurrent_updates == 0
    fixture.vectors.count_concurrent(fixture.batch(Delta("a", create([1.0])), origin=OTHER), lambda _: 0)
    assert fixture.vectors.concurrent_updates == 1


def check_and_append(vectors: VectorHeads, batch: Batch, seen_counter: int = 0) -> None:
    try:
        vectors.check(batch, load_nothing)
    except InvalidDelta:
        return
    vectors.count_concurrent(batch, lambda _: seen_counter)
    vectors.note_appended(batch, Source.LOCAL)


def state_of(vectors: VectorHeads) -> list[object]:
    """Return all that is known, except for namespaces without writes."""
    heads = {name: heads_of(vectors, name) for name in vectors.save().namespaces}
    return [vectors.save(), vectors.head_count, vectors.concurrent_updates, heads]


def test_a_run_stops_before_a_refused_batch() -> None:
    fixture = HeadsFixture()
    rows = [Delta("a", create([1.0, 2.0])), Delta("b", create([1.0, 2.0]), "other")]
    fixture.send(*rows, origin=OTHER)
    batches = [batch_of(ORIGIN, base, *rows) for base in (1, 3)]
    assert fixture.vectors.append_run(batches, Source.LOCAL, lambda _: 1) == 2
    assert fixture.vectors.concurrent_updates == 1  # the first change of "b" was not seen
    unknown = [Delta("a", opaque(b"x")), Delta("z", offset(1.0), "other")]
    batches = [batch_of(ORIGIN, 5, *rows), batch_of(ORIGIN, 7, *unknown), batch_of(ORIGIN, 9, *rows)]
    assert fixture.vectors.append_run(batches, Source.LOCAL, lambda _: 1) == 1
    assert fixture.vectors.head("default", "a") == Dot(ORIGIN, 5)


def _length(delta: Delta) -> int:
    assert delta.operation.values is not None
    return len(delta.operation.values)


def _applies(delta: Delta, state: VectorState, dimensions: dict[str, int]) -> bool:
    kind, dimension = delta.operation.kind, dimensions.get(delta.namespace, 0)
    if kind in (Kind.CREATE, Kind.DENSE):
        return not dimension or _length(delta) == dimension
    if kind in (Kind.DELETE, Kind.OPAQUE):
        return True
    indices = delta.operation.indices
    in_range = indices is None or not dimension or int(indices.max()) < dimension
    return state.alive and in_range  # only the fold knows whether a fact is opaque bytes


# --- refusals


@pytest.mark.parametrize(
    ("rows", "row", "field", "message"),
    [
        ([Delta("v", create([1.0, 2.0, 3.0]))], 0, "vector", "3 numbers, but namespace 'default' holds"),
        ([Delta("a", create([1.0, 2.0])), Delta("b", create([1.0]))], 1, "vector", "vectors of 2"),
        ([Delta("nobody", scale(2.0))], 0, "vector_id", "scale needs a living vector: create it first"),
        ([Delta("v", delete()), Delta("v", offset(1.0))], 1, "vector_id", "unknown or deleted"),
        ([Delta("v", sparse([0, 2], [1.0, 1.0]))], 0, "indices", "2 is outside 0 to 1"),
        ([Delta("v", offset(1.0)), Delta("v", sparse_add([9], [1.0]))], 1, "indices", "9 is outside 0 to 1"),
    ],
)
def test_refusal_names_row_field_and_bound(rows: Sequence[Delta], row: int, field: str, message: str) -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("v", create([1.0, 2.0])))
    refusal = fixture.refusal(*rows)
    assert (refusal.code, refusal.row, refusal.field) == (ErrorCode.INVALID_DELTA, row, field)
    assert message in refusal.message


def test_each_namespace_has_its_own_dimension() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("v", create([1.0])), Delta("v", create([1.0, 2.0]), "other"))
    assert (fixture.vectors.dimension("default"), fixture.vectors.dimension("other")) == (1, 2)
    assert fixture.refusal(Delta("w", create([1.0]), "other")).field == "vector"


def test_expect_is_checked_against_the_last_change() -> None:
    fixture = HeadsFixture()
    first = fixture.send(Delta("v", create([1.0]))).dot(0)
    second = fixture.send(Delta("v", offset(1.0), expect=first), origin=OTHER).dot(0)
    refusal = fixture.refusal(Delta("v", offset(1.0), expect=first))
    assert (refusal.code, refusal.field, refusal.details["current"]) == (ErrorCode.CONFLICT, "expect", second)
    assert fixture.refusal(Delta("nobody", create([1.0]), expect=first)).details["current"] is None
    fixture.send(Delta("v", offset(1.0), expect=second))


# --- forwarded deltas


def test_forwarded_delete_does_not_end_the_vector() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("v", create([1.0])))
    fixture.send(Delta("v", delete()), origin=OTHER, source=Source.REPLICA)
    fixture.send(Delta("v", offset(1.0)))  # the delete may sort before the create
    fixture.send(Delta("v", delete()))
    assert fixture.refusal(Delta("v", offset(1.0))).field == "vector_id"
    fixture.send(Delta("v", offset(1.0)), origin=OTHER, source=Source.REPLICA)
    fixture.send(Delta("v", offset(1.0)))


# --- heads of others


def test_other_heads_are_rows_last_written_by_another_origin() -> None:
    fixture = HeadsFixture()
    fixture.send(Delta("a", create([1.0])), Delta("b", create([1.0])))
    dot = fixture.send(Delta("b", offset(1.0)), origin=OTHER).dot(0)
    rows = [("default", name) for name in "abz"]
    assert list(fixture.vectors.other_heads(ORIGIN, iter(rows))) == [(1, dot)]
    assert [row for row, _ in fixture.vectors.other_heads(OTHER, iter(rows))] == [0]
    assert [row for row, _ in fixture.vectors.other_heads(99, iter(rows))] == [0, 1]
    assert fixture.vectors.writer_count == 2


# --- bounds


def test_heads_are_bounded_and_forgotten_vectors_pass() -> None:
    fixture = HeadsFixture(heads_max=100)
    for number in range(500):
        fixture.send(Delta(f"v{number}", create([1.0])))
    held_count = sum(fixture.vectors.head("default", f"v{number}") is not None for number in range(500))
    print(f"{held_count} of 500 heads held, bound 100")
    assert held_count <= 100
    assert fixture.vectors.head("default", "v499") is not None
    fixture.send(Delta("v0", offset(1.0)))
    fixture.send(Delta("never there", offset(1.0)))  # the fold ignores this delta
    fixture.send(Delta("v499", delete()))
    assert fixture.refusal(Delta("v499", offset(1.0))).field == "vector_id"


def test_forgotten_vectors_pass_until_they_are_deleted() -> None:
    fixture = HeadsFixture(heads_max=100)
    for number in range(500):
        fixture.send(Delta(f"v{number}", create([1.0, 2.0])))
    fixture.send(*(Delta(f"v{number}", sparse([1], [0.5])) for number in (0, 1, 499)))
    assert fixture.refusal(Delta("v0", sparse([2], [0.5]))).field == "indices"
    fixture.send(Delta("v499", delete()))
    missing = fixture.refusal(Delta("v0", sparse([1], [0.5])), Delta("v499", sparse([1], [0.5])))
    assert (missing.field, missing.row) == ("vector_id", 1)


def test_expect_of_a_forgotten_head_is_loaded() -> None:
    fixture = HeadsFixture(heads_max=1)
    first = fixture.send(Delta("a", create([1.0]))).dot(0)
    fixture.send(Delta("b", create([1.0])))
    loaded: list[str] = []

    def load(_namespace: str, vector_id: str) -> Head | None:
        loaded.append(vector_id)
        return Head(first, True)

    fixture.vectors.check(fixture.batch(Delta("a", offset(1.0), expect=first)), load)
    with pytest.raises(Refused, match="expects no vector"):
        fixture.vectors.check(fixture.batch(Delta("a", create([1.0]), expect=ABSENT)), load)
    assert loaded == ["a", "a"]


def test_heads_are_bounded_over_many_namespaces() -> None:
    vectors = NativeVectorHeads(heads_max=100)
    for number in range(1, 1001):
        delta = Delta("k", create([1.0]), f"namespace-{number}")
        vectors.note_appended(batch_of(16, number, delta), Source.LOCAL)
        head_count = sum(vectors.head(f"namespace-{n}", "k") is not None for n in range(1, number + 1))
        assert head_count <= 100
    assert vectors.head("namespace-1000", "k") == Dot(16, 1000)


WRITES = st.tuples(
    st.sampled_from([3, 3, 3, 4, 5]),  # the origin
    st.lists(st.tuples(st.sampled_from(["one", "two"]), st.sampled_from("abc")), min_size=1, max_size=3),
)


@given(st.lists(WRITES, max_size=20), st.integers(0, 30), st.integers(0, 20))
@example([(3, [("one", "a")]), (4, [("one", "b")]), (4, [("one", "a")])], 0, 9)
@example([(3, [("one", "a"), ("one", "b")]), (4, [("one", "a"), ("one", "b")])], 1, 9)
@example([(3, [("one", "a"), ("one", "b")]), (4, [("one", "a"), ("one", "b")])], 0, 9)
@example([(3, [("one", "a")]), (4, [("one", "a")]), (3, [("one", "a")])], 0, 1)
def test_concurrent_updates_are_counted_as_row_by_row(
    steps: list[tuple[int, list[tuple[str, str]]]], seen_counter: int, saved_after: int
) -> None:
    fixture, heads, expected = HeadsFixture(), dict[tuple[str, str], Dot](), 0
    for number, (origin, refs) in enumerate(steps):
        rows = [Delta(key, opaque(b"x"), namespace) for namespace, key in refs]
        batch = fixture.batch(*rows, origin=origin)
        for ref in refs:
            head = heads.get(ref, Dot(origin, 0))
            expected += head.origin != origin and head.counter > seen_counter
        fixture.vectors.count_concurrent(batch, lambda _: seen_counter)
        assert fixture.vectors.concurrent_updates == expected
        fixture.send(*rows, origin=origin)
        for row, ref in enumerate(refs):
            heads[ref] = batch.dot(row)
        if number == saved_after:
            fixture.vectors = restore_copy(fixture.vectors)


def heads_of(vectors: VectorHeads, namespace: str, rows: int = 2) -> dict[str, tuple[int, int]]:
    """Return the code of each head, and True if its vector is deleted."""
    return {
        key: (code, dead)
        for columns in vectors.copy_heads(namespace, rows)
        for key, code, dead in zip(*columns, strict=True)
        if code is not None
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["send", "more", "fewer"])), max_size=9))
def test_heads_can_be_copied_during_changes(changes: list[tuple[int, str]]) -> None:
    fixture, new = HeadsFixture(heads_max=39), count(100)
    first = [f"v{number}" for number in range(20)]
    fixture.send(*(Delta(name, create([1.0])) for name in first))
    copied = fixture.vectors.copy_heads("default", 3)
    copied_names: list[str] = []
    for number, step in changes:
        chunk, codes, _ = next(copied, ([], [], b""))
        copied_names += chunk
        assert codes == [
            None
            if head is None
            else fixture.vectors.save().writers.index(head.origin) << ORIGIN_SHIFT | head.counter
            for head in (fixture.vectors.head("default", name) for name in chunk)
        ]
        names = (
            [f"v{number}"]
            if step == "send"
            else [f"v{next(new)}" for _ in range(1 if step == "more" else 20)]
        )
        fixture.send(*(Delta(name, create([2.0])) for name in names), origin=OTHER)
    copied_names += [name for chunk, _, _ in copied for name in chunk]
    # A native table leaves out the heads that were dropped meanwhile.
    assert copied_names == [name for name in first if name in copied_names]
    assert len(copied_names) == len(first) or fixture.vectors.is_incomplete("default")


def restore_copy(vectors: VectorHeads) -> VectorHeads:
    """Return new `VectorHeads` restored from the saved ones."""
    saved, restored = vectors.save(), NativeVectorHeads()
    heads = []
    for name in saved.namespaces:
        known = heads_of(vectors, name)
        codes, states = (
            [code for code, _ in known.values()],
            [DEAD * is_dead for _, is_dead in known.values()],
        )
        packed = pack_heads(name, list(known), codes, states)
        heads.append(SavedHeads.read(packed, range(len(saved.writers))))
    restored.restore(saved, heads)
    restored.concurrent_updates = vectors.concurrent_updates
    return restored


@pytest.mark.parametrize("table", [VectorHeads, NativeVectorHeads])
@pytest.mark.parametrize(
    "columns",
    [
        SavedHeads("n", b"a\0b", bytes(4), bytes(8), bytes(2)),
        SavedHeads("n", b"a", bytes(8), bytes(16), bytes(2)),
        SavedHeads("n", b"a\0b", bytes(4), bytes(8), bytes(1)),
        SavedHeads("n", b"a", b"\1\0\0\0", bytes(8), bytes(1)),
    ],
)
def test_columns_that_do_not_fit_are_refused(table: type[VectorHeads], columns: SavedHeads) -> None:
    with pytest.raises(ValueError, match=r"head|argument"):
        table().restore(SavedVectors((7,), {"n": (0, True)}, True), [columns])


def test_saved_columns_of_other_lengths_are_refused() -> None:
    packed = pack_heads("n", ["a", "b"], [1, 2], [ALIVE, DEAD])
    for name in ("places", "counters", "states"):
        with pytest.raises(ValueError, match="other lengths"):
            SavedHeads.read(packed | {name: packed[name][:-8]}, [0])
    with pytest.raises(ValueError, match="head of origin 0, and there are 0"):
        SavedHeads.read(packed, [])
