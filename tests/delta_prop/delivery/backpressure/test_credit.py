"""Credits: limits in deltas and in bytes, which only a single oversized batch may exceed."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from delta_prop.delivery.backpressure.pacer import Credits
from delta_prop_wire.errors import UsageError


def test_deltas_and_bytes_are_limited_separately() -> None:
    window = Credits(10, 1_000)
    window.take(6, 100)
    assert window.can_take(4, 900)
    assert not window.can_take(5, 1)
    assert not window.can_take(1, 901)
    assert window.available == (4, 900)
    assert window.used_share == 0.6
    window.take(1, 700)
    assert window.used_share == 0.8


@pytest.mark.parametrize(("count", "size"), [(11, 1), (1, 1_001), (1_000, 1_000_000)])
def test_batch_larger_than_window_is_taken_only_when_empty(count: int, size: int) -> None:
    window = Credits(10, 1_000)
    window.take(1, 1)
    assert not window.can_take(count, size)
    window.release(1, 1)
    window.take(count, size)
    assert min(window.available) == 0
    assert not window.can_take(1, 1)
    window.release(count, size)
    assert window.available == (10, 1_000)


def test_take_or_release_beyond_window_raises_and_changes_nothing() -> None:
    window = Credits(10, 1_000)
    window.take(8, 80)
    with pytest.raises(UsageError, match="3 deltas of 30 bytes: only 2 deltas, 920 bytes are left"):
        window.take(3, 30)
    with pytest.raises(UsageError, match="9 deltas of 80 bytes: only 8 and 80 are out"):
        window.release(9, 80)
    with pytest.raises(UsageError, match="81"):
        window.release(8, 81)
    assert (window.deltas_outstanding, window.bytes_outstanding) == (8, 80)


def test_outstanding_amount_may_be_set_above_the_window() -> None:
    window = Credits(10, 1_000)
    window.set_outstanding(15, 200)
    assert window.available == (0, 800)
    assert not window.can_take(1, 1)
    window.set_outstanding(0, 0)
    assert window.can_take(10, 1_000)
    with pytest.raises(UsageError, match="-1 deltas"):
        window.set_outstanding(-1, 0)


@pytest.mark.parametrize(("deltas_max", "bytes_max"), [(0, 1), (1, 0), (-1, 1)])
def test_window_limits_below_one_are_rejected(deltas_max: int, bytes_max: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Credits(deltas_max, bytes_max)


class CreditsMachine(RuleBasedStateMachine):
    """Takes and releases any batches, and compares with a list of the batches in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Credits(100, 1_000)
        self.taken: list[tuple[int, int]] = []

    @rule(count=st.integers(1, 150), size=st.integers(0, 1_500))
    def take_batch(self, count: int, size: int) -> None:
        if self.window.can_take(count, size):
            self.window.take(count, size)
            self.taken.append((count, size))
        else:
            assert self.taken
            with pytest.raises(UsageError):
                self.window.take(count, size)

    @rule(index=st.integers(0, 1_000))
    def release_batch(self, index: int) -> None:
        if self.taken:
            self.window.release(*self.taken.pop(index % len(self.taken)))

    @invariant()
    def window_is_never_exceeded(self) -> None:
        deltas, size = sum(count for count, _ in self.taken), sum(size for _, size in self.taken)
        assert (self.window.deltas_outstanding, self.window.bytes_outstanding) == (deltas, size)
        assert len(self.taken) <= 1 or (deltas <= 100 and size <= 1_000)
        assert min(self.window.available) >= 0
        assert self.window.available == (max(100 - deltas, 0), max(1_000 - size, 0))


TestCreditsModel = CreditsMachine.TestCase
