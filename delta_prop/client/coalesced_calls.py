"""Calls of one opaque delta each, coalesced: as long as nothing fails they are one offer with one outcome.

Pure. If one call is to be treated differently from the others, all are first `split` into offers of their
own. This slow path gives each caller the same outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.offer import Offer, OutcomeListener, PendingDot
from delta_prop_wire.delta import Delta, Priority
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.client.sequence_sender import UnackedBatch
    from delta_prop.platform.one_shot import OneShot

CALLS_MAX = 1_000
CALLS_BYTES_MAX = 256 * 1024
CALLS_WINDOW_S = 0.01
"""A call joins the calls before it if it comes within this time after the first; all share one deadline."""


class CoalescedCalls(Offer):
    """Deltas for which `validate.is_opaque_only` is true, each with the waker of its caller.

    `ProducerState.offer_call` adds calls as long as no other offer is queued after these.
    """

    __slots__ = ("parts", "pending_deltas", "wakers")

    def __init__(self, priority: Priority, now: float, listener: OutcomeListener) -> None:
        """`listener` is notified as callers are."""
        self.pending_deltas: list[Delta] = []
        super().__init__(priority, self.pending_deltas, listener)
        self.offered_at = now
        self.is_awaited = self.is_opaque_only = True
        self.wakers: list[OneShot] = []
        self.parts: list[Offer] = []

    @property
    def calls(self) -> int:
        """See `Offer`."""
        return self.count

    def mark_encoded(self, unacked: UnackedBatch) -> None:
        """See `Offer`."""
        super().mark_encoded(unacked)
        self.pending_deltas = []

    def split(self) -> list[Offer]:
        """Return the calls as offers of their own; the caller puts them in the position of this offer."""
        parts = self.parts = [
            Offer(self.priority, (), _CallListener(waker, self.listener)) for waker in self.wakers
        ]
        last_counter = self.pending_dot.counter  # 0: no dot is drawn yet
        size = self.size // self.count
        for row, part in enumerate(parts):
            part.count, part.size = 1, size
            part.deltas = self.pending_deltas[row : row + 1]  # empty if a batch holds the delta
            part.offered_at, part.unacked_batch, part.refusal, part.is_awaited = (
                self.offered_at,
                self.unacked_batch,
                self.refusal,
                True,
            )
            part.pending_dot = PendingDot(self.pending_dot.origin)
            part.pending_dot.counter = last_counter and last_counter - len(parts) + 1 + row
        return parts

    def settle(self, outcome: PublishAck | Refused) -> None:
        """Report the same outcome to all calls; each takes its row of an acknowledgement."""
        wakers = self.wakers
        self.pending_deltas, self.wakers = [], []
        super().settle(outcome)
        for waker in wakers:
            if not waker.done():
                waker.set_result(outcome)


class _CallListener:
    """Listener of one call that became an offer of its own."""

    __slots__ = ("_listener", "_waker")

    def __init__(self, waker: OneShot, listener: OutcomeListener) -> None:
        self._waker = waker
        self._listener = listener

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        """Wake the caller with the outcome."""
        if not self._waker.done():
            self._waker.set_result(outcome)
        self._listener.on_outcome(outcome)
