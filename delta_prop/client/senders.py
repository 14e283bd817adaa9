"""The senders of one producer, one per priority, and the order between them.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delta_prop.client.offer import Offer
from delta_prop.client.sequence_sender import SequenceSender
from delta_prop.client.vector_order import VectorOrder
from delta_prop_wire.delta import Dot, Priority, make_origin, producer_id_of

if TYPE_CHECKING:
    from delta_prop_wire.frames import OriginGrant
    from delta_prop_wire.stamp import LogName


class Senders:
    """The senders of one producer, in one partition, `log`.

    `used`: those with offers until now, in the order of their first offer.
    """

    def __init__(self, name: str, first: Priority, *, can_split: bool) -> None:
        """`first`: the priority whose origin is claimed before something is offered."""
        self.log: LogName
        self._name = name
        self.all = tuple(SequenceSender(0, each, can_split=can_split) for each in Priority)
        self.used: list[SequenceSender] = []
        self.vector_order = VectorOrder()
        self._first = self.all[first]
        self._by_origin: dict[int, SequenceSender] = {}
        self._lost: dict[int, list[tuple[int, int]]] = {}  # origin to (after, until) of lost counters

    def bind(self, log: LogName) -> None:
        """Write to this partition. Call it once, before anything is sent."""
        self.log = log
        producer_id = producer_id_of(self._name, log.stream)
        for sender in self.all:
            sender.origin = make_origin(producer_id, sender.priority, log.partition)
        self._by_origin = {sender.origin: sender for sender in self.all}

    def to_claim(self) -> list[SequenceSender]:
        """Return the senders whose origins the hello of a connection claims."""
        return self.used or [self._first]

    def by_origin(self, origin: int) -> SequenceSender | None:
        """Return the sender of an origin; None if it is of another producer."""
        return self._by_origin.get(origin)

    def fair_order(self) -> Iterator[SequenceSender]:
        """Return the senders with something to send, those with the least virtual time first."""
        senders = [sender for sender in self.used if sender.is_granted and sender.is_busy]
        return iter(senders if len(senders) < 2 else sorted(senders, key=_virtual_time))

    def add(self, sender: SequenceSender, offer: Offer) -> None:
        """Queue an offer at its sender, after the offers on the same vectors in other senders."""
        used = self.used
        self.vector_order.track(offer, used)
        if sender not in used:
            used.append(sender)
        if not sender.is_busy:  # after an idle time it gets no more than its share
            lowest = min((other.virtual_time for other in used if other.is_busy), default=0.0)
            sender.virtual_time = max(sender.virtual_time, lowest)
        sender.waiting.append(offer)

    def apply_grant(self, sender: SequenceSender, grant: OriginGrant) -> int:
        """Note a grant; return the number of counters that the service has lost. Call `requeue_all` of each
        sender once all are granted.
        """
        sender.is_granted = True
        until = sender.grant(grant.epoch, grant.watermark)
        if until > grant.watermark:
            self._lost.setdefault(sender.origin, []).append((grant.watermark, until))
        return until - grant.watermark

    def is_lost(self, dot: Dot) -> bool:
        """True if the service has lost the delta after it acknowledged it."""
        return any(after < dot.counter <= until for after, until in self._lost.get(dot.origin, ()))


def _virtual_time(sender: SequenceSender) -> float:
    return sender.virtual_time
