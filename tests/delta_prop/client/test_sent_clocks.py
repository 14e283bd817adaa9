"""Clock entries: each dot is named once, and again after the service has lost deltas."""

from __future__ import annotations

from delta_prop.producing.sent_clocks import SentClocks
from delta_prop_wire.delta import Dot


def test_dot_is_named_once_until_the_service_loses_deltas() -> None:
    clocks, predecessors = SentClocks(), [Dot(1, 5), Dot(2, 3), Dot(1, 4)]
    clock = clocks.make(predecessors)
    assert clock == [Dot(1, 5), Dot(2, 3)]
    clocks.on_drawn(clock)
    assert clocks.make(predecessors) == []
    clocks.owe_processed()
    assert clocks.make(predecessors) == []  # no batch has its outcome, so each is sent again
    clocks.on_processed(clock)
    clocks.owe_processed()
    assert clocks.make([Dot(2, 4)], lambda dot: dot == Dot(1, 5)) == [Dot(2, 4)]
    assert clocks.take_owed() == [Dot(1, 5), Dot(2, 3)]
    assert clocks.take_owed() == []
