"""Cold slots, found by hashes, equal those of a dictionary after any lookups, additions and releases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_sinks import cold_slots, vector_table
from delta_prop_sinks.cold_slots import COLLISIONS_MAX, ColdSlots, hashes_of
from delta_prop_sinks.vector_table import VectorTable

KEYS = [f"v{number}" for number in range(12)]
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["get", "in", "slot", "many", "known", "release", "len", "items", "item"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
    ),
    max_size=30,
)


@pytest.fixture(autouse=True)
def _colliding_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make many ids collide, and every table cold."""
    monkeypatch.setattr(cold_slots, "hash_of", lambda key: len(key) + int(key[1:]) % 3)
    monkeypatch.setattr(vector_table, "COLD_SLOTS_MIN", 1)


def make_table(count: int, *, cold: bool) -> VectorTable:
    table, keys = VectorTable("n"), KEYS[:count]
    heads, row_forms = np.ones((count, 4), np.int64), np.ones(count, np.uint8)
    table.extend(keys, heads, row_forms, np.ones((count, 2), np.float32), cold=cold)
    if cold:
        table.index_ids(hashes_of(keys))
        assert isinstance(table.slots, ColdSlots)
    return table


def call_table(table: VectorTable, call_name: str, keys: list[str]) -> object:
    key = keys[0]
    if call_name == "slot":
        return table.slot_of(key)
    if call_name == "many":
        return table.slots_of(keys).tolist()
    if call_name == "known":
        return table.find_slots(keys).tolist()
    if call_name == "release":
        return table.release(table.slots[key]) if key in table.slots else None
    if call_name == "item":
        try:
            return table.slots[key]
        except KeyError:
            return "not there"
    if call_name == "items":
        return sorted(table.slots.items()), sorted(table.slots), sorted(table.slots.values())
    if call_name == "len":
        return len(table.slots), bool(table.slots), table.size
    return table.slots.get(key) if call_name == "get" else key in table.slots


@given(st.integers(1, 10), CALLS)
def test_cold_slots_answer_like_a_dictionary(count: int, calls: list[tuple[str, list[str]]]) -> None:
    cold, warm = make_table(count, cold=True), make_table(count, cold=False)
    for call_name, keys in [*calls, ("items", KEYS), ("len", KEYS)]:
        assert call_table(cold, call_name, keys) == call_table(warm, call_name, keys)


def test_duplicate_id_is_refused() -> None:
    ids: list[str | None] = ["v1", "v4", "v2", "v1"]
    with pytest.raises(ValueError, match="occurs twice"):
        ColdSlots.from_hashes(ids, hashes_of(["v1", "v4", "v2", "v1"]))
    not_adjacent = ["v1", "v4", "v7", "v1"]  # all four collide, and the two equal ids are not adjacent
    with pytest.raises(ValueError, match="occurs twice"):
        ColdSlots.from_hashes(list(not_adjacent), hashes_of(not_adjacent))
    with_duplicate = VectorTable("n")
    with_duplicate.extend(["v1", "v1"], np.ones((2, 4), np.int64), np.ones(2, np.uint8), None, cold=True)
    with pytest.raises(ValueError, match="twice"):
        with_duplicate.index_ids(hashes_of(["v1", "v1"]))


def test_too_many_colliding_ids_get_a_dictionary() -> None:
    keys = [f"v{3 * number}" for number in range(100, 102 + COLLISIONS_MAX)]
    assert len(set(hashes_of(keys).tolist())) == 1
    table = VectorTable("n")
    table.extend(keys, np.ones((len(keys), 4), np.int64), np.ones(len(keys), np.uint8), None, cold=True)
    table.index_ids(hashes_of(keys))
    assert type(table.slots) is dict
    assert table.slots[keys[-1]] == len(keys) - 1
