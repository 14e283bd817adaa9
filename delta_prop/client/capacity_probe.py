"""Sends one batch as a probe while the service has no capacity, and holds the others back.

Pure. If every unacknowledged batch were resent, each would be refused for the same cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.sequence_sender import SequenceSender, UnackedBatch

NO_CAPACITY_CODES = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.LOG_FULL, ErrorCode.LOG_FAILED})
"""Refusals that are not about the batch itself: the next batch would be refused too."""
PROBE_TIMEOUT_S = 5.0
"""Time without an answer after which all batches may be sent: the probe may depend on one held back here."""


class CapacityProbe:
    """The last refusal for lack of capacity, and the probe in flight.

    `refusal`: why the service takes nothing; None while it takes batches, as far as is known.
    `last_refusal`: the last retryable one for any cause, since the last outcome.
    """

    __slots__ = ("_deadline", "_probe", "last_refusal", "refusal")

    def __init__(self) -> None:
        self.refusal: Refused | None = None
        self.last_refusal: Refused | None = None
        self._probe: UnackedBatch | None = None
        self._deadline = 0.0

    def wait_s(self, now: float) -> float:
        """Return the seconds for which a probe in flight stops all others; 0: a batch may be sent."""
        if self._probe is None:
            return 0.0
        if now >= self._deadline:
            self.reset()
            return 0.0
        return self._deadline - now

    def choose(self, senders: Iterable[SequenceSender]) -> Iterable[SequenceSender]:
        """Return the senders that may send: while `refusal` is set, that of the refused batch sent first.

        Later batches may depend on this batch.
        """
        if self.refusal is None:
            return senders
        senders = list(senders)
        refused = [sender for sender in senders if sender.retries]
        return [min(refused, key=_first_send_order)] if refused else senders

    def on_sent(self, unacked: UnackedBatch, now: float) -> None:
        """Note that a batch is sent: while `refusal` is set, it is the probe."""
        if self.refusal is not None:
            self._probe, self._deadline = unacked, now + PROBE_TIMEOUT_S

    def on_refused(self, unacked: UnackedBatch, refusal: Refused) -> None:
        """Note that a batch was refused, for lack of capacity or for another cause."""
        if refusal.code in NO_CAPACITY_CODES and (self.refusal is None or self._probe is unacked):
            self.refusal = refusal
        if self._probe is unacked:
            self._probe = None

    def on_answered(self, unacked: UnackedBatch) -> None:
        """Note that a batch has its outcome: if it was the probe, the others may be sent."""
        self.last_refusal = None
        if self._probe is unacked:
            self.reset()

    def on_disconnect(self) -> None:
        """Note that no probe is in flight any more."""
        self._probe = None

    def reset(self) -> None:
        """Allow every batch to be sent."""
        self.refusal = self._probe = None


def _first_send_order(sender: SequenceSender) -> int:
    return sender.retries[0].send_order
