"""Heads, tombstones, dimensions: what the edge knows, against a plain fold; what it forgot it lets pass."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delta_prop.ingest.namespaces import ORIGIN_SHIFT
from delta_prop.ingest.vector_heads import VectorHeads
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
from tests.delta_prop.chains import batch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.batch import Batch

ORIGIN, OTHER = 0xFFFF_FFFF_FFF0_0002, 7


def nothing(_namespace: str, _vector_id: str) -> Head | None:
    return None


class Edge:
    """A `Vectors` that is checked before each batch, as the chain does."""

    def __init__(self, **options: Any) -> None:
        self.vectors = VectorHeads(**options)
        self.next: dict[int, int] = {}

    def batch(self, *deltas: Delta, origin: int = ORIGIN) -> Batch:
        return batch_of(origin, self.next.get(origin, 1), *deltas)

    def send(self, *deltas: Delta, origin: int = ORIGIN, source: Source = Source.LOCAL) -> Batch:
        batch = self.batch(*deltas, origin=origin)
        if source is not Source.REPLICA:
            self.vectors.check(batch, nothing)
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
def test_what_is_refused_is_what_the_fold_would_ignore_and_nothing_changes(
    history: list[list[Delta]],
) -> None:
    edge = Edge()
    states: dict[tuple[str, str], VectorState] = {}
    dimensions: dict[str, int] = {}
    heads: dict[tuple[str, str], Dot] = {}
    for rows in history:
        batch = edge.batch(*rows)
        after, fixed, sound = dict(states), dict(dimensions), True
        for delta in rows:
            ref = (delta.namespace, delta.vector_id)
            sound = sound and _applies(delta, after.get(ref, VectorState()), fixed)
            after[ref] = apply(after.get(ref, VectorState()), delta.operation)
            if delta.operation.kind in (Kind.CREATE, Kind.DENSE):
                fixed.setdefault(delta.namespace, _length(delta))
        if not sound:
            with pytest.raises(InvalidDelta):
                edge.send(*rows)
        else:
            edge.send(*rows)
            states, dimensions = after, fixed
            heads |= {(delta.namespace, delta.vector_id): batch.dot(row) for row, delta in enumerate(rows)}
        for space in ("default", "other"):
            assert edge.vectors.dimension(space) == dimensions.get(space, 0)
            for name in "abc":
                assert edge.vectors.head(space, name) == heads.get((space, name))


class RowByRow(VectorHeads):
    """Looks at each row of a mixed batch."""

    def _can_all_apply(self, batch: Batch) -> bool:
        return False

    def _moves_heads_only(self, *_: object, **__: object) -> bool:
        return False


@given(
    st.lists(
        st.tuples(st.lists(deltas, min_size=1, max_size=6), st.sampled_from([ORIGIN, OTHER])), max_size=10
    )
)
def test_mixed_rows_are_looked_at_by_columns_as_one_by_one(history: list[tuple[list[Delta], int]]) -> None:
    short, long = Edge(), Edge()
    long.vectors = RowByRow()
    for rows, origin in history:
        outcomes = []
        for edge in (short, long):
            batch = edge.batch(*rows, origin=origin)
            try:
                edge.vectors.check(batch, nothing)
            except InvalidDelta as error:
                outcomes.append(str(error))
            else:
                edge.vectors.count_concurrent(batch, lambda _: 0)
                edge.send(*rows, origin=origin)
                outcomes.append("")
        assert outcomes[0] == outcomes[1]
        assert short.vectors.save() == long.vectors.save()
        assert (short.vectors.head_count, short.vectors.concurrent_updates) == (
            long.vectors.head_count,
            long.vectors.concurrent_updates,
        )
        for name in short.vectors.save().namespaces:
            assert heads_of(short.vectors, name) == heads_of(long.vectors, name)


STORY = st.lists(
    st.tuples(
        st.lists(st.lists(deltas, min_size=1, max_size=5), min_size=1, max_size=4),
        st.sampled_from([ORIGIN, ORIGIN, OTHER]),
    ),
    max_size=8,
)
ROW = [Delta("a", opaque(b"x")), Delta("b", opaque(b"x"), "other")]
NEW = [Delta("c", create([1.0, 2.0])), Delta("c", opaque(b"x"), "other")]
ELSEWHERE = [Delta("a", opaque(b"x"), "third")]
TURNED = ROW[::-1]
"""The same names, in another table."""


@given(STORY)
@example([([ROW, NEW], ORIGIN), ([ROW, TURNED], OTHER), ([ROW], ORIGIN)])
@example([([ROW, NEW], ORIGIN), ([ROW, ROW], OTHER), ([TURNED, TURNED], OTHER), ([ROW, ROW], ORIGIN)])
@example(
    [([ROW, NEW], ORIGIN), ([[Delta("c", delete())]], ORIGIN), ([[*ROW, Delta("c", offset(1.0))]], ORIGIN)]
)
@example([([ELSEWHERE * 4], OTHER), ([ROW], ORIGIN), ([NEW], OTHER), ([NEW], ORIGIN)])
@example([([ELSEWHERE * 4], OTHER), ([NEW], OTHER), ([NEW[:1]], ORIGIN)])
@example([([ROW], ORIGIN), ([ROW[:1]], OTHER), ([ROW], ORIGIN), ([ROW[1:]], OTHER), ([ROW], ORIGIN)])
def test_batches_that_come_together_move_what_they_move_one_by_one(story: list[Any]) -> None:
    together, singly = Edge(), Edge()
    singly.vectors = RowByRow()
    for edge in (together, singly):  # so that there is something to build on
        for name in ("default", "other"):
            edge.send(*(Delta(key, create([1.0, 2.0]), name) for key in "ab"))
    for batches, origin in story:
        if len(batches) == 1 and len({(row.namespace, row.operation.kind) for row in batches[0]}) == 1:
            alike = batch_of(origin, together.next.get(origin, 1), *batches[0])
            if together.vectors.append_uniform([alike], Source.LOCAL, three):
                noted(singly.vectors, alike, 3)
                together.next[origin] = alike.last + 1
                assert told(together.vectors) == told(singly.vectors)
                continue
        made, counter = [], together.next.get(origin, 1)
        for rows in batches:
            made.append(batch_of(origin, counter, *rows))
            counter = made[-1].last + 1
        for batch in made[together.vectors.append_heterogeneous(made, three) :]:
            noted(together.vectors, batch, 3)
        for batch in made:
            noted(singly.vectors, batch, 3)
        together.next[origin] = counter
        assert told(together.vectors) == told(singly.vectors)


ALIKE = [create([1.0, 2.0]), dense([3.0, 4.0]), create([1.0]), sparse([1], [1.0]), delete(), opaque(b"x")]
PLAIN_STORY = st.lists(
    st.tuples(
        st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5), min_size=1, max_size=4),
        st.sampled_from(ALIKE),
        st.sampled_from([ORIGIN, ORIGIN, OTHER, 9]),
        st.integers(0, 12),
    ),
    max_size=10,
)


@given(PLAIN_STORY, st.integers(0, 10))
@example([([["a"]], ALIKE[0], OTHER, 0), ([["b"]], ALIKE[0], 9, 0), ([["a", "b"]], ALIKE[1], 9, 0)], 10)
@example([([["a"]], ALIKE[0], OTHER, 0), ([["b"]], ALIKE[0], 9, 0), ([["a"], ["a"]], ALIKE[1], 9, 0)], 10)
@example([([["a"]], ALIKE[0], OTHER, 0), ([["b"]], ALIKE[0], 9, 0), ([["a", "a"]], ALIKE[1], 9, 1)], 10)
def test_plain_batches_move_together_what_they_move_one_by_one_whoever_wrote_before(
    story: list[Any], saved_after: int
) -> None:
    together, singly = Edge(), Edge()
    for number, (batches, operation, origin, seen) in enumerate(story):
        made, counter = [], together.next.get(origin, 1)
        for keys in batches:
            made.append(batch_of(origin, counter, *(Delta(key, operation) for key in keys)))
            counter = made[-1].last + 1
        if not together.vectors.append_uniform(made, Source.LOCAL, lambda _, seen=seen: seen):  # type: ignore[misc]
            for batch in made:
                noted(together.vectors, batch, seen)
        for batch in made:
            noted(singly.vectors, batch, seen)
        together.next[origin] = counter
        assert told(together.vectors) == told(singly.vectors)
        if number == saved_after:
            together.vectors, singly.vectors = restored(together.vectors), restored(singly.vectors)


def test_rows_that_others_changed_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    edge.send(*(Delta(key, create([1.0, 2.0])) for key in "abc"), origin=OTHER)
    edge.send(Delta("d", create([1.0, 2.0])))
    monkeypatch.setattr(VectorHeads, "check", lambda *_: pytest.fail("one by one"))
    made = [batch_of(ORIGIN, at, *(Delta(key, sparse([1], [1.0])) for key in "abd")) for at in (2, 5)]
    assert edge.vectors.append_uniform(made, Source.LOCAL, lambda _: 1)
    assert edge.vectors.concurrent_updates == 1  # "a" had been seen, and the second time all are its own
    assert edge.vectors.head("default", "b") == Dot(ORIGIN, 6)


def test_where_one_has_written_its_rows_are_its_own_after_a_start_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edge = Edge()
    edge.send(Delta("a", create([1.0])))
    edge.vectors = restored(edge.vectors)
    with monkeypatch.context() as patch:
        patch.setattr(VectorHeads, "_head_codes", lambda *_: pytest.fail("heads are looked up"))
        edge.vectors.count_concurrent(edge.batch(Delta("a", create([1.0]))), lambda _: 0)
    edge.vectors.count_concurrent(edge.batch(Delta("a", create([1.0])), origin=OTHER), lambda _: 0)
    assert edge.vectors.concurrent_updates == 1


def noted(vectors: VectorHeads, batch: Batch, seen: int = 0) -> None:
    try:
        vectors.check(batch, nothing)
    except InvalidDelta:
        return
    vectors.count_concurrent(batch, lambda _: seen)
    vectors.note_appended(batch, Source.LOCAL)


def three(_origin: int) -> int:
    """Return 3 as the highest counter seen."""
    return 3


def told(vectors: VectorHeads) -> list[object]:
    """All that is known, but for namespaces that nobody has written in."""
    heads = {name: heads_of(vectors, name) for name in vectors.save().namespaces}
    return [vectors.save(), vectors.head_count, vectors.concurrent_updates, heads]


def test_rows_that_differ_move_heads_together_whoever_wrote_before() -> None:
    edge = Edge()
    rows = [Delta("a", create([1.0, 2.0])), Delta("b", create([1.0, 2.0]), "other")]
    edge.send(*rows, origin=OTHER)
    assert (
        edge.vectors.append_heterogeneous([batch_of(ORIGIN, 1, *rows)], three) == 0
    )  # it has not written yet
    edge.send(Delta("c", opaque(b"x")))
    batches = [batch_of(ORIGIN, at, *rows) for at in (2, 4)]
    assert edge.vectors.append_heterogeneous(batches, lambda _: 1) == 2
    assert edge.vectors.concurrent_updates == 1  # the second one's first change was not seen
    facts = [Delta("d", opaque(b"x"), "other"), Delta("a", sparse([1], [1.0]))]
    batches = [batch_of(ORIGIN, at, *facts) for at in (6, 8, 10)]
    assert edge.vectors.append_heterogeneous(batches, three) == 3
    assert edge.vectors.head("default", "a") == Dot(ORIGIN, 11)
    assert (edge.vectors.head_count, edge.vectors.concurrent_updates) == (4, 1)
    unknown = [Delta("a", opaque(b"x")), Delta("z", offset(1.0), "other")]
    assert edge.vectors.append_heterogeneous([batch_of(ORIGIN, 12, *unknown)], three) == 0
    last = [Delta("a", opaque(b"x")), Delta("b", delete(), "other")]
    batches = [batch_of(ORIGIN, 12, *facts), batch_of(ORIGIN, 14, *last)]
    assert edge.vectors.append_heterogeneous(batches, three) == 1


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
    return state.alive and in_range  # that a fact is opaque bytes is for the fold to know


# --- what is told


@pytest.mark.parametrize(
    ("rows", "row", "field", "words"),
    [
        ([Delta("v", create([1.0, 2.0, 3.0]))], 0, "vector", "3 numbers, but namespace 'default' holds"),
        ([Delta("a", create([1.0, 2.0])), Delta("b", create([1.0]))], 1, "vector", "vectors of 2"),
        ([Delta("nobody", scale(2.0))], 0, "vector_id", "scale needs a living vector: create it first"),
        ([Delta("v", delete()), Delta("v", offset(1.0))], 1, "vector_id", "unknown or deleted"),
        ([Delta("v", sparse([0, 2], [1.0, 1.0]))], 0, "indices", "2 is outside 0 to 1"),
        ([Delta("v", offset(1.0)), Delta("v", sparse_add([9], [1.0]))], 1, "indices", "9 is outside 0 to 1"),
    ],
)
def test_a_refusal_names_row_field_and_bound(rows: Sequence[Delta], row: int, field: str, words: str) -> None:
    edge = Edge()
    edge.send(Delta("v", create([1.0, 2.0])))
    refusal = edge.refusal(*rows)
    assert (refusal.code, refusal.row, refusal.field) == (ErrorCode.INVALID_DELTA, row, field)
    assert words in refusal.message


def test_each_namespace_has_a_dimension_of_its_own() -> None:
    edge = Edge()
    edge.send(Delta("v", create([1.0])), Delta("v", create([1.0, 2.0]), "other"))
    assert (edge.vectors.dimension("default"), edge.vectors.dimension("other")) == (1, 2)
    assert edge.refusal(Delta("w", create([1.0]), "other")).field == "vector"


def test_expect_is_checked_against_the_last_change() -> None:
    edge = Edge()
    first = edge.send(Delta("v", create([1.0]))).dot(0)
    second = edge.send(Delta("v", offset(1.0), expect=first), origin=OTHER).dot(0)
    refusal = edge.refusal(Delta("v", offset(1.0), expect=first))
    assert (refusal.code, refusal.field, refusal.details["current"]) == (ErrorCode.CONFLICT, "expect", second)
    assert edge.refusal(Delta("nobody", create([1.0]), expect=first)).details["current"] is None
    edge.send(Delta("v", offset(1.0), expect=second))


# --- forwarded deltas


def test_a_forwarded_delete_claims_nothing() -> None:
    edge = Edge()
    edge.send(Delta("v", create([1.0])))
    edge.send(Delta("v", delete()), origin=OTHER, source=Source.REPLICA)
    edge.send(Delta("v", offset(1.0)))  # the delete may sort before the create
    edge.send(Delta("v", delete()))
    assert edge.refusal(Delta("v", offset(1.0))).field == "vector_id"
    edge.send(Delta("v", offset(1.0)), origin=OTHER, source=Source.REPLICA)
    edge.send(Delta("v", offset(1.0)))


# --- heads of others


def test_other_heads_are_the_rows_that_somebody_else_wrote_last() -> None:
    edge = Edge()
    edge.send(Delta("a", create([1.0])), Delta("b", create([1.0])))
    dot = edge.send(Delta("b", offset(1.0)), origin=OTHER).dot(0)
    rows = [("default", name) for name in "abz"]
    assert list(edge.vectors.other_heads(ORIGIN, iter(rows))) == [(1, dot)]
    assert [row for row, _ in edge.vectors.other_heads(OTHER, iter(rows))] == [0]
    assert [row for row, _ in edge.vectors.other_heads(99, iter(rows))] == [0, 1]
    assert edge.vectors.writer_count == 2


# --- bounds


def test_heads_are_bounded_and_what_is_forgotten_passes() -> None:
    edge = Edge(heads_max=100)
    for number in range(500):
        edge.send(Delta(f"v{number}", create([1.0])))
    held = sum(edge.vectors.head("default", f"v{number}") is not None for number in range(500))
    print(f"{held} of 500 heads held, bound 100")
    assert held <= 100
    assert edge.vectors.head("default", "v499") is not None
    edge.send(Delta("v0", offset(1.0)))
    edge.send(Delta("never there", offset(1.0)))  # the fold ignores it
    edge.send(Delta("v499", delete()))
    assert edge.refusal(Delta("v499", offset(1.0))).field == "vector_id"


def test_what_is_forgotten_passes_without_a_look_at_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge(heads_max=100)
    for number in range(500):
        edge.send(Delta(f"v{number}", create([1.0, 2.0])))
    with monkeypatch.context() as patch:
        patch.setattr(VectorHeads, "_check_rows", lambda *_: pytest.fail("row by row"))
        edge.send(*(Delta(f"v{number}", sparse([1], [0.5])) for number in (0, 1, 499)))
    assert edge.refusal(Delta("v0", sparse([2], [0.5]))).field == "indices"
    edge.send(Delta("v499", delete()))
    gone = edge.refusal(Delta("v0", sparse([1], [0.5])), Delta("v499", sparse([1], [0.5])))
    assert (gone.field, gone.row) == ("vector_id", 1)


def test_expect_of_a_forgotten_head_is_looked_up() -> None:
    edge = Edge(heads_max=1)
    first = edge.send(Delta("a", create([1.0]))).dot(0)
    edge.send(Delta("b", create([1.0])))
    asked: list[str] = []

    def load(_namespace: str, vector_id: str) -> Head | None:
        asked.append(vector_id)
        return Head(first, True)

    edge.vectors.check(edge.batch(Delta("a", offset(1.0), expect=first)), load)
    with pytest.raises(Refused, match="expects no vector"):
        edge.vectors.check(edge.batch(Delta("a", create([1.0]), expect=ABSENT)), load)
    assert asked == ["a", "a"]


def test_heads_are_bounded_over_namespaces_of_one_vector_each() -> None:
    vectors = VectorHeads(heads_max=100)
    for number in range(1, 1001):
        delta = Delta("k", create([1.0]), f"namespace-{number}")
        vectors.note_appended(batch_of(16, number, delta), Source.LOCAL)
        known = sum(vectors.head(f"namespace-{n}", "k") is not None for n in range(1, number + 1))
        assert known <= 100
    assert vectors.head("namespace-1000", "k") == Dot(16, 1000)


WRITTEN = st.tuples(
    st.sampled_from([3, 3, 3, 4, 5]),  # the origin
    st.lists(st.tuples(st.sampled_from(["one", "two"]), st.sampled_from("abc")), min_size=1, max_size=3),
)


@given(st.lists(WRITTEN, max_size=20), st.integers(0, 30), st.integers(0, 20))
@example([(3, [("one", "a")]), (4, [("one", "b")]), (4, [("one", "a")])], 0, 9)
@example([(3, [("one", "a"), ("one", "b")]), (4, [("one", "a"), ("one", "b")])], 1, 9)
@example([(3, [("one", "a"), ("one", "b")]), (4, [("one", "a"), ("one", "b")])], 0, 9)
@example([(3, [("one", "a")]), (4, [("one", "a")]), (3, [("one", "a")])], 0, 1)
def test_conflicts_are_counted_as_they_would_be_row_by_row(
    story: list[tuple[int, list[tuple[str, str]]]], seen: int, saved_after: int
) -> None:
    edge, heads, conflicts = Edge(), dict[tuple[str, str], Dot](), 0
    for number, (origin, named) in enumerate(story):
        rows = [Delta(key, opaque(b"x"), namespace) for namespace, key in named]
        batch = edge.batch(*rows, origin=origin)
        for name in named:
            head = heads.get(name, Dot(origin, 0))
            conflicts += head.origin != origin and head.counter > seen
        edge.vectors.count_concurrent(batch, lambda _: seen)
        assert edge.vectors.concurrent_updates == conflicts
        edge.send(*rows, origin=origin)
        for row, name in enumerate(named):
            heads[name] = batch.dot(row)
        if number == saved_after:
            edge.vectors = restored(edge.vectors)


def heads_of(vectors: VectorHeads, namespace: str, rows: int = 2) -> dict[str, tuple[int, int]]:
    """The code of each head, and whether its vector is dead."""
    return {
        key: (code, dead)
        for some in vectors.copy_heads(namespace, rows)
        for key, code, dead in zip(*some, strict=True)
        if code is not None
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["send", "more", "fewer"])), max_size=9))
def test_heads_are_copied_while_vectors_come_and_go(steps: list[tuple[int, str]]) -> None:
    edge, new = Edge(heads_max=39), count(100)
    first = [f"v{at}" for at in range(20)]
    edge.send(*(Delta(name, create([1.0])) for name in first))
    copied = edge.vectors.copy_heads("default", 3)
    done: list[str] = []
    for at, what in steps:
        some, codes, _ = next(copied, ([], [], b""))
        done += some
        assert codes == [
            None if head is None else edge.vectors._writer_indexes[head.origin] << ORIGIN_SHIFT | head.counter
            for head in (edge.vectors.head("default", name) for name in some)
        ]
        names = (
            [f"v{at}"] if what == "send" else [f"v{next(new)}" for _ in range(1 if what == "more" else 20)]
        )
        edge.send(*(Delta(name, create([2.0])) for name in names), origin=OTHER)
    done += [name for some, _, _ in copied for name in some]
    assert done == first


def restored(vectors: VectorHeads) -> VectorHeads:
    """Save vector heads; restore new ones."""
    saved, again = vectors.save(), VectorHeads()
    heads = {}
    for name in saved.namespaces:
        found = heads_of(vectors, name)
        heads[name] = (
            {key: code for key, (code, _) in found.items()},
            {key for key in found if found[key][1]},
        )
    again.restore(saved, heads)
    again.concurrent_updates = vectors.concurrent_updates
    return again
