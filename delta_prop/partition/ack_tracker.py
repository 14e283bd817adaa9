"""Holds appended batches until they are visible to sinks and safe to acknowledge.

A batch gets its offset before it is written. Sinks receive it once the log's high watermark has passed it;
its producer is acknowledged once the log stores it at the requested ack level. The *marks* of a log are its
high watermark and, per ack level, the offset up to which rows are stored. An in-memory log has all marks at
its end, so nothing waits here. Pure.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.refusals import add_dot
from delta_prop_wire.delta import AckLevel, Dot
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt
    from delta_prop.partition.listener import PartitionListener
    from delta_prop.partition.storage.committer import Committer
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch

    OutcomeCallback = Callable[[Refused | None], None]
    """Called with None once rows are stored, or with the refusal if they were lost."""

logger = logging.getLogger("delta_prop")

_LEVELS = tuple(AckLevel)
assert [*map(int, _LEVELS)] == [*range(len(_LEVELS))], "an ack level is the index of its queue"
_next_offset = attrgetter("next_offset")


class _PendingAck(NamedTuple):
    """An acknowledgement that waits for a mark: of deltas, by their receipt, or else by a callback.

    `batches`: those that the receipt stands for; if they are several, their outcomes may differ after a
    failure.
    """

    next_offset: int
    receipt: Receipt | None
    outcome: PublishAck | Refused | None
    batches: Sequence[LoggedBatch] = ()
    on_outcome: OutcomeCallback | None = None


class AckTracker:
    """Batches and acknowledgements that wait for the log's marks, each in offset order."""

    def __init__(self, log: Log, listener: PartitionListener, committer: Committer | None = None) -> None:
        """Create a tracker; the committer is notified when something starts to wait, and moves the marks."""
        self._log = log
        self._route = listener.route
        self._committer = committer
        self.refused = 0
        """Number of refusals that were reported."""
        self._suspended = False
        self._not_visible: deque[LoggedBatch] = deque()
        self._pending_acks: tuple[deque[_PendingAck], ...] = tuple(deque() for _ in AckLevel)
        """One queue per ack level, each in offset order."""

    def note_appended(self, batches: Sequence[LoggedBatch], receipt: Receipt, level: AckLevel) -> None:
        """Route batches appended one after another, and report them once the log stores them at `level`.

        If the log fails, each has its own outcome.
        """
        log, logged, batch, end = self._log, batches[0], batches[0].batch, batches[-1].next_offset
        if self._not_visible or logged.offset >= log.high_watermark:
            self._not_visible += batches
            self._notify_committer()
        else:
            for visible in batches:
                self.route_when_visible(visible)
        outcome = PublishAck(logged.offset, Dot(batch.origin, batch.base), end - logged.offset, level, {})
        if end <= log.offset_at_level(level):
            if not receipt.done:
                receipt.acknowledge(outcome)
            return
        self._wait(_PendingAck(end, receipt, outcome, batches), level)
        receipt.mark_appended(outcome)

    def report(
        self,
        receipt: Receipt,
        level: AckLevel,
        outcome: PublishAck | Refused,
        next_offset: int | None = None,
    ) -> None:
        """Report an outcome once the log stores it at `level`: a duplicate, once its first copy is stored.

        `next_offset`: the offset after the rows that were appended for it.
        """
        if isinstance(outcome, PublishAck) and (next_offset is None or outcome.duplicates):
            next_offset = max(outcome.next_offset, next_offset or 0)
        assert next_offset is not None
        pending_ack = _PendingAck(next_offset, receipt, outcome)
        if next_offset <= self._log.offset_at_level(level):
            self._report(pending_ack, None)
            return
        self._wait(pending_ack, level)
        receipt.mark_appended(outcome if isinstance(outcome, PublishAck) else None)

    def refuse(self, receipt: Receipt, refusal: Refused) -> None:
        """Report a refusal, unless an outcome was reported."""
        self.refused += 1
        if not receipt.done:
            receipt.refuse(refusal)

    def route_when_visible(self, logged: LoggedBatch) -> None:
        """Route an appended batch to the sinks, now or as soon as it is visible."""
        if not self._not_visible and logged.next_offset <= self._log.high_watermark:
            self._route(logged)
        else:
            self._not_visible.append(logged)
            self._notify_committer()

    def when_reached(self, next_offset: int, level: AckLevel, on_outcome: OutcomeCallback) -> None:
        """Call `on_outcome(None)` once all rows below `next_offset` are stored at `level`, maybe at once; if
        the log fails first, call it with the failure.
        """
        if next_offset <= self._log.offset_at_level(level):
            on_outcome(None)
        else:
            self._wait(_PendingAck(next_offset, None, None, on_outcome=on_outcome), level)

    def _wait(self, pending_ack: _PendingAck, level: AckLevel) -> None:
        """Hold an acknowledgement until the log stores it at `level`.

        If the log fails first, its deltas are in doubt until a recovery decides.
        """
        if level >= AckLevel.DURABLE:  # a duplicate may ask for a higher level than its first copy did
            self._log.request_sync()
            self._notify_committer()
        waiting, next_offset = self._pending_acks[level], pending_ack.next_offset
        if waiting and next_offset < waiting[-1].next_offset:  # a duplicate that waits for its first copy
            waiting.insert(bisect_right(waiting, next_offset, key=_next_offset), pending_ack)
        else:
            waiting.append(pending_ack)

    def _split(self, pending_ack: _PendingAck) -> list[_PendingAck]:
        """Return an acknowledgement for each batch of a run, with a receipt of its own."""
        receipt, outcome, batches = pending_ack.receipt, pending_ack.outcome, pending_ack.batches
        if receipt is None or not isinstance(outcome, PublishAck) or len(batches) < 2:
            return [pending_ack]
        receipts = receipt.split([logged.count for logged in batches])
        return [
            _PendingAck(
                logged.next_offset,
                batch_receipt,
                PublishAck(logged.offset, logged.batch.dot(0), logged.count, outcome.level, {}),
            )
            for logged, batch_receipt in zip(batches, receipts, strict=True)
        ]

    def _settle(self, pending_ack: _PendingAck, failure: Refused | None) -> None:
        """Report an outcome, and log what a callback raises: no caller would see it, and others must run."""
        try:
            self._report(pending_ack, failure)
        except Exception:
            logger.exception("an outcome callback failed")

    def _report(self, pending_ack: _PendingAck, failure: Refused | None) -> None:
        _, receipt, outcome, _, on_outcome = pending_ack
        if receipt is None:
            if on_outcome is not None:
                on_outcome(failure)
        elif isinstance(outcome, PublishAck) and failure is None:
            if not receipt.done:
                receipt.acknowledge(outcome)
        elif failure is not None and failure.retryable:
            self.refuse(receipt, failure)
        elif isinstance(outcome, Refused):
            self.refuse(receipt, outcome)
        elif failure is not None and outcome is not None:
            self.refuse(receipt, add_dot(failure, outcome.dot))

    def _notify_committer(self) -> None:
        if self._committer is not None:
            self._committer.notify()

    def advance(self) -> None:
        """Route and acknowledge everything that the marks have passed, sinks first."""
        self.route_visible()
        self.acknowledge_stored()

    def route_visible(self) -> None:
        """Route all batches that the high watermark has passed."""
        not_visible = self._not_visible
        if not_visible and not self._suspended:
            visible = self._log.high_watermark
            while not_visible and not_visible[0].next_offset <= visible:
                self._route(not_visible.popleft())

    def acknowledge_stored(self) -> None:
        """Report all outcomes whose marks were reached."""
        if self._suspended:
            return
        log = self._log
        for level, waiting in zip(_LEVELS, self._pending_acks, strict=True):
            if waiting:
                mark = log.offset_at_level(level)
                while waiting and waiting[0].next_offset <= mark:
                    self._settle(waiting.popleft(), None)

    def suspend(self, refusal: Refused) -> None:
        """Stop routing and acknowledging after a log failure, until `resume` or `fail`.

        A delta that waits for its mark is in doubt: recovery of the log may still find it.
        """
        self._suspended = True
        self._not_visible.clear()
        without_receipt: list[_PendingAck] = []
        for waiting in self._pending_acks:
            for pending_ack in [*waiting]:
                if pending_ack.receipt is None:
                    waiting.remove(pending_ack)
                    without_receipt.append(pending_ack)
                else:
                    pending_ack.receipt.mark_in_doubt()
        for pending_ack in without_receipt:
            self._settle(pending_ack, refusal)

    def resume(self, end: int, refusal: Refused) -> None:
        """Resolve all waiters after the log was recovered up to offset `end`.

        Everything below `end` is stored at every level; the rest was lost and gets the refusal.
        """
        self._suspended = False
        self._resolve(end, refusal)

    def fail(self, refusal: Refused) -> None:
        """Refuse all waiters, since the marks will not move any more; nothing that waits is routed."""
        self._not_visible.clear()
        self._resolve(0, refusal)

    def _resolve(self, end: int, refusal: Refused) -> None:
        """Report success to the waiters for rows below `end`, and the refusal to the others."""
        waiting_by_level, self._pending_acks = self._pending_acks, tuple(deque() for _ in AckLevel)
        for pending_ack in chain.from_iterable(waiting_by_level):
            is_split = pending_ack.next_offset > end
            for part in self._split(pending_ack) if is_split else (pending_ack,):
                self._settle(part, None if part.next_offset <= end else refusal)
