"""What an offer follows on in other lanes, so that one vector's deltas keep the order of the calls.

Pure. As long as a producer has one lane, that lane's order says it all and nothing is remembered. Blocks keep
the order of their own lane alone: nobody looks at their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop.client.lane import Lane
    from delta_prop.client.offer import Offer, Place

HEADS_MAX = 100_000


class Heads:
    """The last place of each vector, once there are two lanes or the caller numbers; the newest of them."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Place] | None = None

    def idle(self, lane: Lane, lanes: Sequence[Lane]) -> bool:
        """Whether nothing is remembered, nor would be for what is added to this lane without a number."""
        if self._last is not None or lane.numbered is not None:
            return False
        return not lanes or (len(lanes) == 1 and lanes[0] is lane)

    def begins(self, offer: Offer, lanes: Sequence[Lane]) -> bool:
        """Whether this is the offer from which on heads are remembered."""
        if self._last is not None:
            return False
        if offer.is_block:
            return False
        return offer.counter is not None or any(lane.origin != offer.place.origin for lane in lanes)

    def note(self, offer: Offer, lanes: Sequence[Lane]) -> None:
        """Tell an offer what it is `behind`. `lanes`: those in use before it."""
        if self._last is None:
            if not self.begins(offer, lanes):
                return
            self._last = _found(lanes)
        last, place = self._last, offer.place
        behind: dict[Place, None] = {}
        for delta in () if offer.is_block else offer.rows:
            key = (delta.namespace, delta.vector_id)
            head = last.pop(key, None)
            if head is not None and head.origin != place.origin:
                behind[head] = None
            last[key] = place
        while len(last) > HEADS_MAX:
            del last[next(iter(last))]
        offer.behind = list(behind)


def _found(lanes: Iterable[Lane]) -> dict[tuple[str, str], Place]:
    """The heads among what has no outcome yet. What was acknowledged has its place: nothing overtakes it."""
    last: dict[tuple[str, str], Place] = {}
    for lane in lanes:
        for frame in lane.open.values():
            batch = frame.batch
            names = list(zip(batch.namespaces, batch.keys, strict=True))
            for row, offer in frame.offers:
                last.update(dict.fromkeys(names[row : row + offer.count], offer.place))
        for offer in lane.waiting:
            rows = () if offer.is_block else offer.rows
            last.update(((one.namespace, one.vector_id), offer.place) for one in rows)
    return last
