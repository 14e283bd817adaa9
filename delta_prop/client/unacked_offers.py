"""Holds a producer's offers until they have an outcome: counts their calls and bytes, and finds the oldest.

Pure. Awaited offers, whose callers wait in `publish`, and other offers have different timeouts, so each kind
has a queue of its own, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.client.offer import Offer


class UnackedOffers:
    """Every offer without an outcome, once.

    `calls` counts the calls of all offers. Code that adds a call to an offer in here updates the counts.
    """

    __slots__ = ("_awaited", "_offers", "bytes", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self._offers: dict[Offer, None] = {}
        self._awaited: dict[Offer, None] = {}

    def __contains__(self, offer: Offer) -> bool:
        return offer in self._queue_of(offer)

    def all(self) -> list[Offer]:
        """Return all offers, the oldest of each kind first."""
        return [*self._offers, *self._awaited]

    def add(self, offer: Offer) -> None:
        """Add an offer."""
        self._queue_of(offer)[offer] = None
        self.calls += offer.calls
        self.bytes += offer.size

    def remove(self, offer: Offer) -> bool:
        """Remove an offer, which has its outcome; return True if it was in here."""
        queue = self._queue_of(offer)
        if offer not in queue:
            return False
        del queue[offer]
        self.calls -= offer.calls
        self.bytes -= offer.size
        return True

    def replace(self, offer: Offer, parts: Iterable[Offer]) -> None:
        """Replace an offer by `parts`, which were made at the same time."""
        queue = self._queue_of(offer)
        offers = list(queue)
        later_offers = offers[offers.index(offer) + 1 :]
        self.remove(offer)
        for part in parts:
            self.add(part)
        for later in later_offers:
            del queue[later]
            queue[later] = None

    def oldest(self, *, awaited: bool) -> Offer | None:
        """Return the oldest awaited offer, or the oldest of the others; None if there is none."""
        return next(iter(self._awaited if awaited else self._offers), None)

    def _queue_of(self, offer: Offer) -> dict[Offer, None]:
        return self._awaited if offer.is_awaited else self._offers
