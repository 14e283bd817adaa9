"""Entries of a cache: their bounds, and the state objects that are made for readers."""

from __future__ import annotations

import numpy as np

from delta_prop_sinks.cache_entries import CacheEntries
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import create


def state(value: float, key: tuple[int, int, int] = (1, 1, 1)) -> VectorState:
    return apply(VectorState(), create(np.full(4, value, np.float32)), {}, key)


def test_least_recently_requested_entries_are_evicted() -> None:
    entries = CacheEntries(2, 1 << 20)
    for name in "abc":
        entries.put(("docs", name), state(1.0))
    entries.order.move_to_end(("docs", "a"))
    assert entries.evict_excess() == 1
    assert list(entries.order) == [("docs", "c"), ("docs", "a")]
    assert "b" not in entries.tables["docs"].slots


def test_size_bounds_all_tables_and_empty_ones_go() -> None:
    entries = CacheEntries(100, 1 << 20)
    entries.put(("docs", "a"), state(1.0))
    assert entries.evict_excess() == 0
    assert entries.size > 0
    entries.bytes_max = 1
    assert entries.evict_excess() == 1
    assert (entries.size, entries.tables) == (0, {})


def test_state_object_is_made_once_until_its_entry_changes() -> None:
    entries = CacheEntries(100, 1 << 20)
    ref = ("docs", "a")
    entries.put(ref, state(1.0))
    entries.evict_excess()
    first = entries.state(ref)
    assert entries.state(ref) is first
    size, table = entries.size, entries.table("docs")
    slot = table.slots["a"]
    table.set_vector(slot, np.full(4, 2.0, np.float32))
    table.set_head(slot, 9, *table.head(slot)[1:])
    assert entries.size == size
    assert entries.state(ref).vector.tolist() == [2.0] * 4  # type: ignore[union-attr]
    assert entries.size == size
    entries.drop(ref)
    entries.evict_excess()
    assert entries.size == 0


def test_states_that_exceed_their_share_are_forgotten() -> None:
    entries = CacheEntries(100, 8 * 600)
    for name in "ab":
        entries.put(("docs", name), state(1.0))
        entries.state(("docs", name))
    assert list(entries.states) == [("docs", "b")]
