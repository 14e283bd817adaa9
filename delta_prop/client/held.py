"""What a producer holds that has no outcome yet: how many calls, how many bytes, which is the oldest.

Pure. Offers, and what callers wait for only as long as `publish` does, expire at different times, so each
kind stands in a line of its own, the oldest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop.client.offer import Offer


class Held:
    """Every offer without an outcome, once. An offer counts as many calls as it holds: who has one that is
    held take in another call counts that here too.
    """

    __slots__ = ("_offers", "_waited_for", "bytes", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self._offers: dict[Offer, None] = {}
        self._waited_for: dict[Offer, None] = {}

    def __contains__(self, offer: Offer) -> bool:
        return offer in self._line(offer)

    def all(self) -> list[Offer]:
        """Of each kind the oldest first."""
        return [*self._offers, *self._waited_for]

    def add(self, offer: Offer) -> None:
        """One more."""
        self._line(offer)[offer] = None
        self.calls += offer.calls
        self.bytes += offer.size

    def remove(self, offer: Offer) -> bool:
        """One has its outcome; whether it was held."""
        line = self._line(offer)
        if offer not in line:
            return False
        del line[offer]
        self.calls -= offer.calls
        self.bytes -= offer.size
        return True

    def replace(self, offer: Offer, parts: Iterable[Offer]) -> None:
        """These stand for one that is held, and were made when it was."""
        line = self._line(offer)
        behind = list(line)
        behind = behind[behind.index(offer) + 1 :]
        self.remove(offer)
        for one in parts:
            self.add(one)
        for one in behind:
            del line[one]
            line[one] = None

    def oldest(self, *, waited_for: bool) -> Offer | None:
        """The oldest of a kind."""
        return next(iter(self._waited_for if waited_for else self._offers), None)

    def _line(self, offer: Offer) -> dict[Offer, None]:
        return self._waited_for if offer.waited_for else self._offers
