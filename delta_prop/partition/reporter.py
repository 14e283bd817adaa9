"""Reporting of outcomes to receipts: an acknowledgement at its ack level, a refusal at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.refusals import add_dot
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.calls.receipt import Receipt
    from delta_prop.partition.ack_tracker import AckTracker, BatchAck
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import AckLevel


class Reporter:
    """Passes outcomes to their receipts. `refused` counts the refusals."""

    def __init__(self, ack_tracker: AckTracker) -> None:
        self._ack_tracker = ack_tracker
        self.refused = 0

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
        if self._ack_tracker.when_reached(
            next_offset, level, partial(self._settle, receipt, outcome), receipt
        ):
            receipt.mark_appended(outcome if isinstance(outcome, PublishAck) else None)

    def report_run(self, batches: Sequence[LoggedBatch], receipt: Receipt, level: AckLevel) -> None:
        """Report batches appended one after another. If the log fails, each has its own outcome."""
        first, end = batches[0], batches[-1].next_offset
        outcome = PublishAck(first.offset, first.batch.dot(0), end - first.offset, level, {})
        split = partial(self._split, batches, receipt, level) if len(batches) > 1 else None
        if self._ack_tracker.when_reached(
            end, level, partial(self._settle, receipt, outcome), receipt, split
        ):
            receipt.mark_appended(outcome)

    def refuse(self, receipt: Receipt, refusal: Refused) -> None:
        """Report a refusal, unless an outcome was reported."""
        self.refused += 1
        if not receipt.done:
            receipt.refuse(refusal)

    def _split(self, batches: Sequence[LoggedBatch], receipt: Receipt, level: AckLevel) -> list[BatchAck]:
        """Return an acknowledgement for each batch of a run, with a receipt of its own."""
        batch_acks: list[BatchAck] = []
        receipts = receipt.split([logged.count for logged in batches])
        for logged, batch_receipt in zip(batches, receipts, strict=True):
            outcome = PublishAck(logged.offset, logged.batch.dot(0), logged.count, level, {})
            batch_acks.append((logged.next_offset, partial(self._settle, batch_receipt, outcome)))
        return batch_acks

    def _settle(self, receipt: Receipt, outcome: PublishAck | Refused, failure: Refused | None) -> None:
        if failure is not None and failure.retryable:
            self.refuse(receipt, failure)
        elif isinstance(outcome, Refused):
            self.refuse(receipt, outcome)
        elif failure is not None:
            self.refuse(receipt, add_dot(failure, outcome.dot))
        elif not receipt.done:
            receipt.acknowledge(outcome)
