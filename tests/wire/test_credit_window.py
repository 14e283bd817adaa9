"""CreditWindow: open while both balances are above 0, charged in full, capped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.credit_window import NO_CREDIT, CreditWindow
from delta_prop_wire.frames import Credit

SMALL = st.integers(0, 30)
STEPS = st.lists(
    st.tuples(st.just("grant"), st.builds(Credit, SMALL, SMALL))
    | st.tuples(st.just("spend"), st.builds(Credit, SMALL, SMALL))
)


@given(first=st.builds(Credit, SMALL, SMALL), steps=STEPS)
def test_balance_is_granted_minus_spent_credit(first: Credit, steps: list[tuple[str, Credit]]) -> None:
    window, deltas, size = CreditWindow(first), *first
    for step, credit in steps:
        if step == "grant":
            window.grant(credit)
            deltas, size = deltas + credit.deltas, size + credit.bytes
        elif window.is_open:
            window.spend(*credit)
            deltas, size = deltas - credit.deltas, size - credit.bytes
        assert window.is_open == (deltas > 0 and size > 0)
        assert window.remaining == (max(deltas, 0), max(size, 0))


@given(steps=STEPS)
def test_unbounded_window_is_always_open(steps: list[tuple[str, Credit]]) -> None:
    window = CreditWindow(None)
    for step, credit in steps:
        if step == "grant":
            window.grant(credit)
        else:
            window.spend(*credit)
        assert window.is_open
        assert window.remaining is None


def test_overdraft_is_deducted_from_later_credit() -> None:
    window = CreditWindow(Credit(1, 1))
    window.spend(100, 5000)
    assert not window.is_open
    window.grant(Credit(99, 10_000))
    assert not window.is_open
    assert window.remaining == (0, 5001)
    window.grant(Credit(1, 0))
    assert window.is_open


def test_window_is_closed_without_deltas_or_bytes() -> None:
    assert not CreditWindow(Credit(5, 0)).is_open
    assert not CreditWindow(Credit(0, 5)).is_open
    assert not CreditWindow(NO_CREDIT).is_open


def test_remaining_credit_is_capped() -> None:
    window = CreditWindow(Credit((1 << 64) - 1, (1 << 64) - 1))
    window.grant(Credit((1 << 64) - 1, (1 << 64) - 1))
    assert window.remaining == ((1 << 63) - 1, (1 << 63) - 1)


def test_window_can_be_reset() -> None:
    window = CreditWindow(NO_CREDIT)
    window.reset(None)
    assert window.is_open
    window.reset(Credit(2, 3))
    assert window.remaining == (2, 3)
