"""`SendTiming`: the moves between its states, and the time until the next chunk."""

from __future__ import annotations

from itertools import product

import pytest

from delta_prop.server.send_queue import BATCH_DELTAS_MAX, MOVES, READ_RETRY_S, SendState, SendTiming
from tests.delta_prop.server.session_fakes import FixedClock, subscription

WAITS = (SendState.LINGERING, SendState.NO_CREDIT, SendState.DISK_FAILING)


def make_timing(state: SendState = SendState.ACTIVE) -> SendTiming:
    timing = SendTiming(FixedClock(), batch_bytes_max=1_000)
    timing.state = state
    return timing


@pytest.mark.parametrize(("state", "following"), list(product(SendState, SendState)))
def test_only_an_active_session_begins_to_wait(state: SendState, following: SendState) -> None:
    timing = make_timing(state)
    is_wait = following in WAITS and following is not state
    if is_wait and state is not SendState.ACTIVE:
        with pytest.raises(AssertionError, match=f"{following.value} cannot follow {state.value}"):
            timing.enter(following)
        assert timing.state is state
    else:
        timing.enter(following)
        assert timing.state is following


def test_every_state_may_be_followed_by_active_and_idle() -> None:
    assert all({SendState.ACTIVE, SendState.IDLE} <= following for following in MOVES.values())
    assert MOVES.keys() == set(SendState)


@pytest.mark.parametrize(
    ("state", "wait_s"),
    [
        (SendState.ACTIVE, 0.0),
        (SendState.IDLE, None),
        (SendState.LINGERING, 0.25),
        (SendState.NO_CREDIT, None),
        (SendState.DISK_FAILING, READ_RETRY_S),
    ],
)
def test_writer_waits_as_the_state_says(state: SendState, wait_s: float | None) -> None:
    timing = make_timing()
    timing.start(subscription(wait_ms_max=250))
    timing.note_sent(now=100.0)
    if state is SendState.DISK_FAILING:
        timing.note_disk_failed(now=100.0)
    else:
        timing.enter(state)
    assert timing.wait_s(now=100.0) == wait_s
    assert timing.wait_s(now=200.0) == (None if wait_s is None else 0.0)


def test_only_the_first_disk_failure_in_a_row_is_reported() -> None:
    timing = make_timing()
    assert timing.note_disk_failed(now=1.0)
    assert not timing.note_disk_failed(now=2.0)
    timing.note_read()
    assert timing.note_disk_failed(now=3.0)


def test_batches_linger_only_for_the_time_asked_for() -> None:
    timing = make_timing()
    timing.start(subscription(batch_deltas_max=1 << 30, wait_ms_max=0))
    timing.note_sent(now=100.0)
    assert not timing.may_linger(100.0)
    assert timing.batch_deltas_max == BATCH_DELTAS_MAX
    timing.start(subscription(wait_ms_max=500))
    assert not timing.has_just_sent
    assert timing.may_linger(100.4)
    assert not timing.may_linger(100.5)
