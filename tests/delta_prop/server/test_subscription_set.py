"""`SubscriptionSet`: the rows that subscriptions select, against a search row by row."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.delivery.routing_table import NoRows, RoutingTable
from delta_prop.server import subscription_set
from delta_prop.server.subscription_set import SubscriptionSet
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Priority, Source, create, delete, opaque, scale
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Filter, Subscription
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic
from tests.delta_prop.server.session_fakes import reader_of

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACES = ("a", "b", "c")
TOPICS = [
    Topic.parse(text)
    for text in ("*", "v:k1", "v:k2", "ns:a", "ns:b", "op:create", "op:scale", "op:opaque", "c:x", "c:y")
]

deltas = st.builds(
    Delta,
    st.sampled_from(["k1", "k2", "k3", "k4"]),
    st.sampled_from([create([1.0]), scale(2.0), delete(), opaque(b"x")]),
    namespace=st.sampled_from(NAMESPACES),
    topics=st.sampled_from([(), (), ("x",), ("x", "y")]),
)
filters = st.none() | st.builds(
    Filter,
    sources=st.sampled_from([(), (Source.LOCAL,), (Source.REPLICA, Source.IMPORT)]),
    priorities=st.sampled_from([(), (Priority.NORMAL,), (Priority.CRITICAL, Priority.LOW)]),
)
requests = st.lists(
    st.tuples(st.lists(st.sampled_from(TOPICS), min_size=1, max_size=3, unique=True), filters),
    min_size=1,
    max_size=4,
)
scopes = st.none() | st.sets(st.sampled_from(NAMESPACES))


@st.composite
def batches(draw: st.DrawFn) -> LoggedBatch:
    namespace = draw(st.none() | st.sampled_from(NAMESPACES))
    rows = draw(st.lists(deltas, min_size=1, max_size=8))
    if namespace is not None:
        rows = [Delta(row.vector_id, row.operation, namespace, topics=row.topics) for row in rows]
    batch = encode_batch(rows, origin=16, base=1, priority=draw(st.sampled_from(list(Priority))))
    return LoggedBatch(batch, 100, 7, draw(st.sampled_from(list(Source))))


def naive_rows(
    logged: LoggedBatch, requested: list[tuple[list[Topic], Filter | None]], scope: set[str] | None
) -> list[int]:
    """Return the selected rows, found row by row and subscription by subscription."""
    selected = []
    for row in range(logged.count):
        delta = logged.batch.delta(row, logged.source)
        is_wanted = any(
            any(topic.matches(delta) for topic in topics)
            and (filter_ is None or not filter_.sources or delta.source in filter_.sources)
            and (filter_ is None or not filter_.priorities or delta.priority in filter_.priorities)
            for topics, filter_ in requested
        )
        if is_wanted and (scope is None or delta.namespace in scope):
            selected.append(row)
    return selected


def as_list(rows: object, logged: LoggedBatch) -> list[int]:
    if isinstance(rows, NoRows):
        return []
    if rows is None:
        return list(range(logged.count))
    assert isinstance(rows, np.ndarray)
    assert 0 < len(rows) < logged.count
    return list(rows.tolist())


def subscription(number: int, *topics: Topic | str, filter_: Filter | None = None) -> Subscription:
    parsed = tuple(Topic.parse(topic) if isinstance(topic, str) else topic for topic in topics)
    return Subscription(number, parsed, filter=filter_)


@settings(max_examples=50, deadline=None)
@given(requests, scopes, st.lists(batches(), min_size=1, max_size=4), st.data())
def test_selected_rows_match_the_naive_search(
    requested: list[tuple[list[Topic], Filter | None]],
    scope: set[str] | None,
    logged: list[LoggedBatch],
    data: st.DataObject,
) -> None:
    subscriptions = SubscriptionSet(reader_of(scope))
    for number, (topics, filter_) in zip(count(5), requested, strict=False):
        subscriptions.add(subscription(number, *topics, filter_=filter_))
    removed = data.draw(st.none() | st.integers(0, len(requested) - 1))
    if removed is not None:
        for batch in logged:
            subscriptions.rows(batch)  # cached results are invalid after a change
        subscriptions.remove(5 + removed)
        requested = requested[:removed] + requested[removed + 1 :]
    table: RoutingTable[str] = RoutingTable()
    table.subscribe("all of them", subscriptions.topics)
    for batch in logged:
        expected = naive_rows(batch, requested, scope)
        assert as_list(subscriptions.rows(batch), batch) == expected
        routed = dict(table.plan(batch.batch))
        if "all of them" in routed:
            assert as_list(subscriptions.narrow(batch, routed["all of them"]), batch) == expected
        else:
            assert not expected
        if subscriptions.wants_all:
            assert expected == list(range(batch.count))


def test_wants_all_only_without_filter_or_scope() -> None:
    def wants_all(*requested: Subscription, scope: set[str] | None = None) -> bool:
        subscriptions = SubscriptionSet(reader_of(scope))
        for request in requested:
            subscriptions.add(request)
        return subscriptions.wants_all

    local_only = Filter(sources=(Source.LOCAL,))
    assert wants_all(subscription(1, "*"))
    assert wants_all(subscription(1, "ns:a", filter_=local_only), subscription(2, "*", filter_=Filter()))
    assert not wants_all(subscription(1, "ns:a", "op:create"))
    assert not wants_all(subscription(1, "*", filter_=local_only))
    assert not wants_all(subscription(1, "*"), scope={"a", "b", "c"})
    assert not wants_all()


def test_control_rows_are_never_selected() -> None:
    subscriptions = SubscriptionSet(reader_of(None))
    subscriptions.add(subscription(1, "*"))
    noop = encode_noop(code=ErrorCode.INVALID_DELTA, origin=16, base=1, count=3)
    assert isinstance(subscriptions.rows(LoggedBatch(noop, 0, 1, Source.LOCAL)), NoRows)


def test_refused_request_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_set, "SUBSCRIPTIONS_MAX", 2)
    monkeypatch.setattr(subscription_set, "TOPICS_MAX", 3)
    subscriptions = SubscriptionSet(reader_of(None))
    subscriptions.add(subscription(1, "ns:a", "ns:b"))

    def refusal_message(call: Callable[[], None]) -> str:
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value.code is ErrorCode.BAD_REQUEST
        assert len(subscriptions) == 1
        assert subscriptions.topics == (Topic.parse("ns:a"), Topic.parse("ns:b"))
        return caught.value.message

    assert "subscription 1: already open" in refusal_message(lambda: subscriptions.add(subscription(1, "*")))
    assert "2 subscriptions of 4 topics" in refusal_message(
        lambda: subscriptions.add(subscription(2, "v:1", "v:2"))
    )
    assert "subscription 7: not open on this connection: name one of [1]" in refusal_message(
        lambda: subscriptions.remove(7)
    )
    subscriptions.add(subscription(2, "ns:b", "v:1"))
    subscriptions.remove(1)
    subscriptions.add(subscription(3, "v:1"))
    with pytest.raises(Refused, match="3 subscriptions"):
        subscriptions.add(subscription(4, "v:1"))
    subscriptions.clear()
    assert (len(subscriptions), subscriptions.topics) == (0, ())
