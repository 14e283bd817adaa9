"""Vector clock algebra against its laws, and full clocks rebuilt from changed entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.partition.order.clock import (
    Order,
    OriginClocks,
    compare,
    covers,
    merge,
    to_canonical,
)
from delta_prop_wire.delta import Dot

clocks = st.dictionaries(st.integers(1, 4), st.integers(0, 3), max_size=4)


def test_missing_clock_entry_equals_zero():
    assert compare({1: 1, 2: 0}, {1: 1}) is Order.EQUAL
    assert to_canonical({1: 1, 2: 0}) == to_canonical({1: 1}) == (Dot(1, 1),)


def test_compare_and_covers_return_relation_of_two_clocks():
    assert compare({1: 2}, {1: 1}) is Order.AFTER
    assert compare({}, {1: 1}) is Order.BEFORE
    assert compare({1: 1}, {2: 1}) is Order.CONCURRENT
    assert covers({1: 2}, (Dot(1, 2), Dot(1, 1)))


@given(clocks, clocks)
def test_compare_with_swapped_clocks_returns_the_mirrored_order(left, right):
    mirrored = {Order.BEFORE: Order.AFTER, Order.AFTER: Order.BEFORE}
    order = compare(left, right)
    assert compare(right, left) is mirrored.get(order, order)
    assert (order is Order.CONCURRENT) == (not covers(left, right) and not covers(right, left))
    assert (order is Order.EQUAL) == (to_canonical(left) == to_canonical(right))


@given(clocks, clocks, clocks)
def test_merge_is_the_least_upper_bound(left, right, third):
    merged = merge(left, right)
    assert covers(merged, left)
    assert covers(merged, right)
    assert to_canonical(merged) == to_canonical(merge(right, left))
    assert merge(merged, third) == merge(left, merge(right, third))
    assert to_canonical(merge(left, left)) == to_canonical(left)
    if covers(third, left) and covers(third, right):
        assert covers(third, merged)


@given(st.lists(st.tuples(st.integers(1, 3), clocks), max_size=20))
def test_full_clocks_are_rebuilt_from_changed_entries(batches):
    rebuilt, full = OriginClocks(), {}
    for origin, clock in batches:
        entries = to_canonical(clock)
        rebuilt.note_appended(origin, entries)
        others = [dot for dot in entries if dot.origin != origin]
        full[origin] = merge(full.get(origin, {}), others)
    assert {origin: rebuilt.clock(origin) for origin in full} == full
    assert rebuilt.entry_count == sum(map(len, full.values()))
    restored = OriginClocks()
    restored.restore(rebuilt.snapshot())
    assert restored.snapshot() == rebuilt.snapshot()


def test_has_seen_is_true_for_clock_batch_entries_and_own_origin():
    origin_clocks = OriginClocks()
    origin_clocks.note_appended(1, (Dot(2, 5),))
    assert origin_clocks.has_seen(1, (), Dot(2, 5))
    assert not origin_clocks.has_seen(1, (), Dot(2, 6))
    assert origin_clocks.has_seen(1, (Dot(2, 6),), Dot(2, 6))
    assert origin_clocks.has_seen(1, (), Dot(1, 99))  # an origin has seen its own deltas
    assert not origin_clocks.has_seen(3, (), Dot(2, 1))


def test_clock_entries_never_decrease():
    origin_clocks = OriginClocks()
    origin_clocks.note_appended(1, (Dot(2, 5),))
    origin_clocks.note_appended(1, (Dot(2, 3),))
    assert origin_clocks.clock(1) == {2: 5}
    origin_clocks.forget(1)
    assert origin_clocks.entry_count == len(origin_clocks) == 0


def test_clock_bounds_evict_the_least_recent_entries():
    origin_clocks = OriginClocks(entries_max=5, entries_per_origin_max=3)
    origin_clocks.note_appended(1, [Dot(origin, 1) for origin in (10, 11, 12)])
    origin_clocks.note_appended(1, (Dot(10, 2), Dot(13, 1)))
    assert origin_clocks.clock(1) == {12: 1, 10: 2, 13: 1}
    origin_clocks.note_appended(2, (Dot(10, 1), Dot(11, 1)))
    origin_clocks.note_appended(1, (Dot(10, 3),))
    origin_clocks.note_appended(3, (Dot(10, 1),))
    assert origin_clocks.snapshot().keys() == {1, 3}  # origin 2 wrote least recently
    assert origin_clocks.entry_count == 4
    assert origin_clocks.forgotten_count == 3
