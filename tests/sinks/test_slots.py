"""The native slots and their twin give vectors the same slots after any calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks.slots import Slots, make_slots
from delta_prop_wire.core import core_mode
from tests.native_core import needs_native_core

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_native_core

IDS = st.sampled_from([*(f"v{number}" for number in range(40)), "é", "", "x" * 3000])
SLOTS = st.integers(0, 50)


def remove(slots: Slots, numbers: list[int]) -> None:
    for slot in numbers:
        if slot < slots.used:
            slots.remove(slot)


CALLS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Slots, Any], object]]] = {
    "add": (IDS, lambda slots, vector_id: slots.add(vector_id)),
    "add many": (
        st.lists(IDS, max_size=40),
        lambda slots, vector_ids: slots.add_all(vector_ids),
    ),
    "get": (IDS, lambda slots, vector_id: slots.get(vector_id)),
    "item": (IDS, lambda slots, vector_id: slots[vector_id]),
    "contains": (IDS, lambda slots, vector_id: vector_id in slots),
    "remove": (
        st.lists(SLOTS, unique=True, min_size=1, max_size=40),
        remove,
    ),
    "ids": (st.tuples(SLOTS, SLOTS), lambda slots, bounds: slots.ids(*bounds)),
}

STEPS = st.lists(
    st.sampled_from(sorted(CALLS)).flatmap(lambda name: st.tuples(st.just(name), CALLS[name][0])), max_size=60
)


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except KeyError as error:
        return KeyError, error.args


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_both_cores_give_the_same_slots(steps: list[tuple[str, Any]]) -> None:
    with core_mode.switched("native"):
        native = make_slots()
    twin = Slots()
    assert type(native) is not type(twin)
    for name, argument in steps:
        call = CALLS[name][1]
        assert outcome(partial(call, native, argument)) == outcome(partial(call, twin, argument))
        assert len(native) == len(twin)
        assert native.used == twin.used
    assert native.ids(0, native.used) == twin.ids(0, twin.used)
    for vector_id, slot in twin.items():
        assert native[vector_id] == slot


def test_many_ids_are_found_while_the_index_grows_and_shrinks() -> None:
    with core_mode.switched("native"):
        slots: Any = make_slots()
    ids = [f"vector-{number}" for number in range(20_000)]
    for number, vector_id in enumerate(ids):
        assert slots.add(vector_id) == number
        assert slots[ids[number // 2]] == number // 2
        if number % 7 == 6:
            slots.remove(number)
            assert slots.get(vector_id) is None
            assert slots.add(vector_id) == number
    for number in range(0, 20_000, 2):
        slots.remove(number)
    assert len(slots) == 10_000
    assert [slots.get(vector_id) for vector_id in ids] == [
        None if number % 2 == 0 else number for number in range(20_000)
    ]
    bytes_before = slots.bytes
    for turn in range(10):  # removed ids take no memory for long
        for number in range(10_000):
            slots.remove(slots.add(f"other-{turn}-{number:010}"))
    assert slots.bytes < 2 * bytes_before


def test_too_long_id_is_refused() -> None:
    with core_mode.switched("native"):
        slots = make_slots()
    assert slots.add("x" * 65_535) == 0
    with pytest.raises(ValueError, match="65536 bytes"):
        slots.add("x" * 65_536)
