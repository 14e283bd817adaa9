"""Routing by every kind of topic: each target gets a batch once, with the rows that match its topics."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery import routing_table as table_module
from delta_prop.delivery.routing_table import NO_ROWS, RoutingTable
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import Delta, create, delete, scale
from delta_prop_wire.encode import encode_batch, encode_noop, encode_vectors
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import ALL, Topic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


DELTA = Delta("v-1", create([1.0]), "docs", topics=frozenset({"hot"}))

NAMES = ("a", "b", "c")
OPERATIONS = (create([1.0, 2.0]), scale(2.0), delete())
TOPICS = [
    ALL,
    *(Topic.parse(f"{prefix}:{name}") for prefix in ("v", "ns", "c") for name in NAMES),
    *(Topic.parse(f"op:{kind}") for kind in ("create", "scale", "delete")),
]

deltas = st.builds(
    Delta,
    vector_id=st.sampled_from(NAMES),
    operation=st.sampled_from(OPERATIONS),
    namespace=st.sampled_from(NAMES),
    topics=st.frozensets(st.sampled_from(NAMES), max_size=2),
)
topic_lists = st.lists(st.sampled_from(TOPICS), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("topic", "other"),
    [
        ("*", None),
        ("v:v-1", "v:v-2"),
        ("ns:docs", "ns:rows"),
        ("op:create", "op:delete"),
        ("c:hot", "c:cold"),
    ],
)
@pytest.mark.parametrize("with_other_rows", [False, True])
def test_each_topic_kind_matches_only_its_rows(topic: str, other: str | None, with_other_rows: bool) -> None:
    table = _table({"matching": [topic], **({"other": [other]} if other else {})})
    if not with_other_rows:
        assert _plan(table, [DELTA]) == {"matching": [0]}
        return
    unmatched = Delta("v-3", scale(2.0), "else")
    everything = topic == "*"
    assert _plan(table, [unmatched, DELTA, unmatched]) == {"matching": [0, 1, 2] if everything else [1]}
    assert _plan(table, [unmatched]) == ({"matching": [0]} if everything else {})


def test_target_with_many_matching_topics_gets_batch_once() -> None:
    topics = ["*", "v:v-1", "ns:docs", "op:create", "c:hot"]
    for subscribed_topics in (topics, topics[1:], topics[1:2], topics[2:], [topics[1], topics[4]]):
        table = _table({"sink": [*subscribed_topics, *subscribed_topics]})
        assert _plan(table, [DELTA, DELTA]) == {"sink": [0, 1]}


def test_topics_of_one_target_select_the_union_of_rows() -> None:
    table = _table({"sink": ["v:a", "ns:b", "op:delete", "c:t"]})
    batch = [
        Delta("a", create([1.0]), "x"),
        Delta("b", create([1.0]), "x"),
        Delta("c", create([1.0]), "b"),
        Delta("d", delete(), "x"),
        Delta("e", create([1.0]), "x", topics=frozenset({"t", "u"})),
        Delta("f", create([1.0]), "x", topics=frozenset({"u"})),
    ]
    assert _plan(table, batch) == {"sink": [0, 2, 3, 4]}


def test_plan_with_all_rows_matching_has_none_for_rows() -> None:
    table = _table({"a": ["v:x", "v:y"], "b": ["ns:n", "ns:m"], "c": ["*"]})
    batch = _batch([Delta("x", create([1.0]), "n"), Delta("y", create([1.0]), "m")])
    assert dict(table.plan(batch)) == {"a": None, "b": None, "c": None}


def test_control_rows_go_to_no_target() -> None:
    table = _table({"sink": ["*"]})
    noop = encode_noop(origin=16, base=1, count=2, code=ErrorCode.INVALID_DELTA)
    assert list(table.plan(noop)) == []
    assert table.rows_for("sink", noop) is NO_ROWS


def test_resubscribe_replaces_and_unsubscribe_removes() -> None:
    table = _table({"a": ["v:v-1"], "b": ["*"]})
    assert _plan(table, [DELTA]) == {"a": [0], "b": [0]}
    table.subscribe("a", [Topic.parse("ns:rows")])
    assert _plan(table, [DELTA]) == {"b": [0]}
    table.unsubscribe("b")
    table.unsubscribe("b")
    assert _plan(table, [DELTA]) == {}
    assert table.rows_for("b", _batch([DELTA])) is NO_ROWS
    table.subscribe("b", [Topic.parse("v:v-1")])
    assert _plan(table, [DELTA]) == {"b": [0]}


def test_cached_plans_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "PLANS_MAX", 8)
    table = _table({"sink": ["ns:n-50"]})
    plans = [_plan(table, [Delta("v", create([1.0]), f"n-{number}")]) for number in range(100)]
    assert [number for number, plan in enumerate(plans) if plan] == [50]
    assert len(table._plans) <= 8


@given(
    subscriptions=st.dictionaries(st.sampled_from(["s1", "s2", "s3", "s4"]), topic_lists, max_size=4),
    batches=st.lists(st.lists(deltas, min_size=1, max_size=6), min_size=1, max_size=4),
    last_subscription=st.tuples(st.sampled_from(["s1", "s2", "s5"]), topic_lists),
)
def test_plan_equals_matching_each_delta(
    subscriptions: dict[str, list[Topic]],
    batches: list[list[Delta]],
    last_subscription: tuple[str, list[Topic]],
) -> None:
    table: RoutingTable[str] = RoutingTable()
    for target, topics in subscriptions.items():
        table.subscribe(target, topics)
    for batch in batches:
        _check_against_each_delta(table, subscriptions, batch)
    table.subscribe(*last_subscription)
    for batch in batches:
        _check_against_each_delta(table, {**subscriptions, last_subscription[0]: last_subscription[1]}, batch)


@pytest.mark.alone
def test_matching_cost_per_batch_and_per_delta() -> None:
    everyone = _table({f"sink-{number}": ["*"] for number in range(5)})
    single_row_batch = encode_vectors(["v"], np.zeros((1, 8), np.float32), namespace="n", origin=16, base=1)
    batch_us = _cost_us(everyone, [single_row_batch] * 1000)

    by_id = _table({f"sink-{number}": [f"v:{number * 100}"] for number in range(1000)})
    numbers = np.random.default_rng(5).integers(0, 100_000, (500, 100))
    batches = [
        encode_vectors(
            [str(key) for key in keys], np.zeros((100, 8), np.float32), namespace="n", origin=16, base=1
        )
        for keys in numbers.tolist()
    ]
    for batch in batches:
        assert batch.keys  # the first reader decodes the keys once; this is not measured here
    delta_us = _cost_us(by_id, batches) / 100
    print(f"5 x all, batch of 1: {batch_us:.2f} us; 1000 vector ids, batch of 100: {delta_us:.3f} us a delta")
    assert batch_us < 4  # target: 1; other work shares the machine
    assert delta_us < 0.4  # target: 0.1


def _table(subscriptions: Mapping[str, Sequence[str]]) -> RoutingTable[str]:
    table: RoutingTable[str] = RoutingTable()
    for target, topics in subscriptions.items():
        table.subscribe(target, [Topic.parse(topic) for topic in topics])
    return table


def _batch(batch: Sequence[Delta]) -> Batch:
    return encode_batch(batch, origin=16, base=1)


def _plan(table: RoutingTable[str], batch: Sequence[Delta]) -> dict[str, list[int]]:
    """Return each target's rows; check that no target is named twice."""
    plan = table.plan(_batch(batch))
    assert len({target for target, _ in plan}) == len(plan)
    return {target: list(range(len(batch))) if rows is None else rows.tolist() for target, rows in plan}


def _check_against_each_delta(
    table: RoutingTable[str], subscriptions: Mapping[str, Sequence[Topic]], batch: Sequence[Delta]
) -> None:
    expected = defaultdict(list)
    for target, topics in subscriptions.items():
        for row, delta in enumerate(batch):
            if any(topic.matches(delta) for topic in topics):
                expected[target].append(row)
    assert _plan(table, batch) == expected
    encoded = _batch(batch)
    for target in subscriptions:
        rows = table.rows_for(target, encoded)
        if rows is NO_ROWS:
            assert target not in expected
        else:
            assert expected[target] == (list(range(len(batch))) if rows is None else list(rows))


def _cost_us(table: RoutingTable[str], batches: Sequence[Batch]) -> float:
    spent = []
    for _ in range(5):
        start_s = time.thread_time()
        for batch in batches:
            table.plan(batch)
        spent.append(time.thread_time() - start_s)
    return min(spent) / len(batches) * 1e6


def test_batches_with_the_same_namespaces_share_their_table() -> None:
    rows = [Delta("a", create([1.0]), "docs")]
    first, second = (Batch(encode_batch(rows, origin=16, base=base).raw) for base in (1, 2))
    assert first.namespace_names is second.namespace_names
