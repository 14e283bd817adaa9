"""Clock entries: each dot is named once, and again after the service has lost deltas."""

from __future__ import annotations

from delta_prop.client.offer import Offer, OutcomeListener, PendingDot
from delta_prop.client.sent_clocks import SentClocks
from delta_prop_wire.delta import Delta, Dot, Priority, create
from delta_prop_wire.errors import Refused


class Ignored(OutcomeListener):
    def on_outcome(self, outcome: object) -> None:
        assert not isinstance(outcome, Refused)


def offer_after(*dots: Dot) -> Offer:
    offer = Offer(Priority.NORMAL, [Delta("a", create([1.0]))], Ignored())
    predecessors = []
    for dot in dots:
        pending = PendingDot(dot.origin)
        pending.counter = dot.counter
        predecessors.append(pending)
    offer.predecessors = predecessors
    return offer


def test_dot_is_named_once_until_the_service_loses_deltas() -> None:
    clocks, offers = SentClocks(), [offer_after(Dot(1, 5), Dot(2, 3), Dot(1, 4))]
    clock = clocks.make(offers, lambda _: False)
    assert clock == [Dot(1, 5), Dot(2, 3)]
    clocks.on_drawn(clock)
    assert clocks.make(offers, lambda _: False) == []
    clocks.owe_processed()
    assert clocks.make(offers, lambda _: False) == []  # no batch has its outcome, so each is sent again
    clocks.on_processed(clock)
    clocks.owe_processed()
    assert clocks.make([offer_after(Dot(2, 4))], lambda dot: dot == Dot(1, 5)) == [Dot(2, 4)]
    assert clocks.take_owed() == [Dot(1, 5), Dot(2, 3)]
    assert clocks.take_owed() == []
