"""Windows: open while both balances are above 0, charged in full, and never more than was granted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.frames import Credit
from delta_prop_wire.window import NOTHING, Window

SMALL = st.integers(0, 30)
STEPS = st.lists(
    st.tuples(st.just("grant"), st.builds(Credit, SMALL, SMALL))
    | st.tuples(st.just("spend"), st.builds(Credit, SMALL, SMALL))
)


@given(first=st.builds(Credit, SMALL, SMALL), steps=STEPS)
def test_balances_are_sums(first: Credit, steps: list[tuple[str, Credit]]) -> None:
    window, deltas, size = Window(first), *first
    for step, credit in steps:
        if step == "grant":
            window.grant(credit)
            deltas, size = deltas + credit.deltas, size + credit.bytes
        elif window.open:
            window.spend(*credit)
            deltas, size = deltas - credit.deltas, size - credit.bytes
        assert window.open == (deltas > 0 and size > 0)
        assert window.left == (max(deltas, 0), max(size, 0))


@given(steps=STEPS)
def test_without_a_bound_it_is_always_open(steps: list[tuple[str, Credit]]) -> None:
    window = Window(None)
    for step, credit in steps:
        if step == "grant":
            window.grant(credit)
        else:
            window.spend(*credit)
        assert window.open
        assert window.left is None


def test_one_frame_may_take_more_than_is_left_and_the_debt_is_kept() -> None:
    window = Window(Credit(1, 1))
    window.spend(100, 5000)
    assert not window.open
    window.grant(Credit(99, 10_000))
    assert not window.open
    assert window.left == (0, 5001)
    window.grant(Credit(1, 0))
    assert window.open


def test_either_part_closes_it() -> None:
    assert not Window(Credit(5, 0)).open
    assert not Window(Credit(0, 5)).open
    assert not Window(NOTHING).open


def test_what_is_left_can_be_told_however_much_was_granted() -> None:
    window = Window(Credit((1 << 64) - 1, (1 << 64) - 1))
    window.grant(Credit((1 << 64) - 1, (1 << 64) - 1))
    assert window.left == ((1 << 63) - 1, (1 << 63) - 1)


def test_it_can_begin_anew() -> None:
    window = Window(NOTHING)
    window.begin(None)
    assert window.open
    window.begin(Credit(2, 3))
    assert window.left == (2, 3)
