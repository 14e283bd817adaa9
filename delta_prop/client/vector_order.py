"""Finds the offers of other senders that an offer depends on, so that a vector's deltas keep the call order.

Pure. As long as a producer has one sender, that sender's order suffices and nothing is tracked. A block keeps
only the order of its own sender: its rows are not decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from delta_prop.producing.last_dots import LastDots

if TYPE_CHECKING:
    from delta_prop.client.offer import Offer, PendingDot
    from delta_prop.client.sequence_sender import SequenceSender


class VectorOrder:
    """The newest dot of each of the vectors that were offered last.

    Tracking starts when there are two senders, or when the caller numbers its deltas.
    """

    def __init__(self) -> None:
        self._last_dots: LastDots[PendingDot] | None = None

    def stays_untracked(self, sender: SequenceSender, senders: Sequence[SequenceSender]) -> bool:
        """True if nothing is tracked, and an offer of `sender` without a counter would not start it."""
        if self._last_dots is not None or sender.last_numbered is not None:
            return False
        return not senders or (len(senders) == 1 and senders[0] is sender)

    def starts_tracking(self, offer: Offer, senders: Sequence[SequenceSender]) -> bool:
        """True if tracking starts with this offer."""
        if self._last_dots is not None:
            return False
        if offer.is_block:
            return False
        return offer.counter is not None or any(
            sender.origin != offer.pending_dot.origin for sender in senders
        )

    def track(self, offer: Offer, senders: Sequence[SequenceSender]) -> None:
        """Set an offer's `predecessors`. `senders`: those in use before it."""
        if self._last_dots is None:
            if not self.starts_tracking(offer, senders):
                return
            self._last_dots = LastDots(_collect_heads(senders))
        if offer.is_block:
            return
        vectors = [(delta.namespace, delta.vector_id) for delta in offer.decoded_deltas]
        offer.predecessors = self._last_dots.of_others(vectors, offer.pending_dot.origin)
        self._last_dots.note(vectors, offer.pending_dot)


def _collect_heads(senders: Iterable[SequenceSender]) -> dict[tuple[str, str], PendingDot]:
    """Return the heads of offers without an outcome; no later offer can overtake an acknowledged one."""
    heads: dict[tuple[str, str], PendingDot] = {}
    for sender in senders:
        for unacked in sender.unacked.values():
            batch = unacked.batch
            keys = list(zip(batch.namespaces, batch.keys, strict=True))
            for row, offer in unacked.offers:
                heads.update(dict.fromkeys(keys[row : row + offer.count], offer.pending_dot))
        for offer in sender.waiting:
            deltas = () if offer.is_block else offer.decoded_deltas
            heads.update(((delta.namespace, delta.vector_id), offer.pending_dot) for delta in deltas)
    return heads
