"""Vector clock algebra against its laws, and whole clocks rebuilt from changed entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.order.clock import (
    Order,
    OriginClocks,
    compare,
    covers,
    merge,
    to_canonical,
)
from delta_prop_wire.delta import Dot

clocks = st.dictionaries(st.integers(1, 4), st.integers(0, 3), max_size=4)


def test_missing_entry_equals_zero():
    assert compare({1: 1, 2: 0}, {1: 1}) is Order.EQUAL
    assert to_canonical({1: 1, 2: 0}) == to_canonical({1: 1}) == (Dot(1, 1),)


def test_orders():
    assert compare({1: 2}, {1: 1}) is Order.AFTER
    assert compare({}, {1: 1}) is Order.BEFORE
    assert compare({1: 1}, {2: 1}) is Order.CONCURRENT
    assert covers({1: 2}, (Dot(1, 2), Dot(1, 1)))


@given(clocks, clocks)
def test_one_of_four_and_each_way_round(one, other):
    mirrored = {Order.BEFORE: Order.AFTER, Order.AFTER: Order.BEFORE}
    order = compare(one, other)
    assert compare(other, one) is mirrored.get(order, order)
    assert (order is Order.CONCURRENT) == (not covers(one, other) and not covers(other, one))
    assert (order is Order.EQUAL) == (to_canonical(one) == to_canonical(other))


@given(clocks, clocks, clocks)
def test_merge_is_the_least_upper_bound(one, other, third):
    both = merge(one, other)
    assert covers(both, one)
    assert covers(both, other)
    assert to_canonical(both) == to_canonical(merge(other, one))
    assert merge(both, third) == merge(one, merge(other, third))
    assert to_canonical(merge(one, one)) == to_canonical(one)
    if covers(third, one) and covers(third, other):
        assert covers(third, both)


@given(st.lists(st.tuples(st.integers(1, 3), clocks), max_size=20))
def test_whole_clocks_from_changed_entries(batches):
    rebuilt, whole = OriginClocks(), {}
    for origin, clock in batches:
        entries = to_canonical(clock)
        rebuilt.note_appended(origin, entries)
        others = [dot for dot in entries if dot.origin != origin]
        whole[origin] = merge(whole.get(origin, {}), others)
    assert {origin: rebuilt.clock(origin) for origin in whole} == whole
    assert rebuilt.entries == sum(map(len, whole.values()))
    again = OriginClocks()
    again.restore(rebuilt.snapshot())
    assert again.snapshot() == rebuilt.snapshot()


def test_what_a_batch_saw():
    known = OriginClocks()
    known.note_appended(1, (Dot(2, 5),))
    assert known.has_seen(1, (), Dot(2, 5))
    assert not known.has_seen(1, (), Dot(2, 6))
    assert known.has_seen(1, (Dot(2, 6),), Dot(2, 6))
    assert known.has_seen(1, (), Dot(1, 99))  # what its own origin wrote before it
    assert not known.has_seen(3, (), Dot(2, 1))


def test_entries_never_go_back():
    known = OriginClocks()
    known.note_appended(1, (Dot(2, 5),))
    known.note_appended(1, (Dot(2, 3),))
    assert known.clock(1) == {2: 5}
    known.forget(1)
    assert known.entries == len(known) == 0


def test_bounds_forget_what_changed_longest_ago():
    known = OriginClocks(entries_max=5, entries_per_origin_max=3)
    known.note_appended(1, [Dot(origin, 1) for origin in (10, 11, 12)])
    known.note_appended(1, (Dot(10, 2), Dot(13, 1)))
    assert known.clock(1) == {12: 1, 10: 2, 13: 1}
    known.note_appended(2, (Dot(10, 1), Dot(11, 1)))
    known.note_appended(1, (Dot(10, 3),))
    known.note_appended(3, (Dot(10, 1),))
    assert known.snapshot().keys() == {1, 3}  # 2 wrote longest ago
    assert known.entries == 4
    assert known.forgotten == 3
