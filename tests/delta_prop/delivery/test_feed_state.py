"""The table of a feed's states: every pair of a state and an event is a move of the table, or an error."""

from __future__ import annotations

from itertools import product

import pytest

from delta_prop.delivery.feed_state import ACTIVE_STATES, MOVES, FeedEvent, FeedState, FeedStatus
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

ENDS = {
    FeedEvent.STOP: FeedState.STOPPED,
    FeedEvent.PAUSE: FeedState.PAUSED,
    FeedEvent.INVALIDATE: FeedState.NEEDS_SNAPSHOT,
    FeedEvent.CLOSE: FeedState.CLOSED,
}
"""The events that end a feed, and their states, from the least to the most severe."""
SEVERITY = [*ENDS.values()]


def refusal(text: str) -> Refused:
    return Refused(ErrorCode.PROCESSING_FAILED, text)


def status_in(state: FeedState) -> FeedStatus:
    """Return a status in a state, reached by moves."""
    status = FeedStatus()
    for event in FeedEvent:
        if MOVES.get((FeedState.IDLE, event)) is state:
            if event in ENDS:
                status.end(event, refusal("first"))
            else:
                status.move(event)
            break
    assert status.state is state
    return status


@pytest.mark.parametrize(("state", "event"), [*product(FeedState, FeedEvent)])
def test_each_pair_is_a_move_or_an_error(state: FeedState, event: FeedEvent) -> None:
    status, is_active = status_in(state), state in ACTIVE_STATES
    assert status.has_ended is not is_active
    if event in ENDS:
        is_reason = status.end(event, refusal("second"))
        is_worse = is_active or SEVERITY.index(ENDS[event]) > SEVERITY.index(state)
        assert status.state is (ENDS[event] if is_worse else state)
        assert is_reason is (is_active or (is_worse and event is not FeedEvent.CLOSE))
        assert status.reason is not None
        assert status.reason.message == ("second" if is_reason else "first")
        assert status.has_ended
    elif is_active is (event is not FeedEvent.CONTINUE) and state is not FeedState.CLOSED:
        status.move(event)
        assert (status.has_ended, status.reason) == (False, None)
        assert status.state in ACTIVE_STATES
    else:
        with pytest.raises(KeyError):
            status.move(event)
        assert status.state is state


def test_table_reaches_every_state() -> None:
    assert set(MOVES.values()) == set(FeedState)


@pytest.mark.parametrize("event", ENDS)
def test_any_reason_replaces_that_of_a_full_quarantine(event: FeedEvent) -> None:
    status = status_in(FeedState.STOPPED)
    status.is_full = True
    assert status.end(event, refusal("second"))
    assert (status.state, status.is_full) == (ENDS[event], False)
    assert status.reason is not None
    assert status.reason.message == "second"
