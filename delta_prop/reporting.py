"""Reports outcomes to receipts: an acknowledgement once the log keeps what it promises, a refusal at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from delta_prop.published import Published
from delta_prop.refusals import with_dot
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.receipt import Receipt
    from delta_prop.settling import Part, Settling
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import AckLevel


class Reporter:
    """Owns the way from an outcome to its receipt. `refused` counts the refusals."""

    def __init__(self, settling: Settling) -> None:
        self._settling = settling
        self.refused = 0

    def report(
        self,
        receipt: Receipt,
        level: AckLevel,
        outcome: Published | Refused,
        next_offset: int | None = None,
    ) -> None:
        """Report an outcome that the log holds once it is kept as asked: a repeat, once its first copy is.

        `next_offset`: behind what was logged for it, which is kept as well then.
        """
        if isinstance(outcome, Published) and (next_offset is None or outcome.duplicates):
            next_offset = max(outcome.next_offset, next_offset or 0)
        assert next_offset is not None
        if self._settling.when_kept(next_offset, level, partial(self._settle, receipt, outcome), receipt):
            receipt.placed(outcome if isinstance(outcome, Published) else None)

    def report_run(self, placed: Sequence[LoggedBatch], receipt: Receipt, level: AckLevel) -> None:
        """Report batches that got their places one behind the other. If the log fails, each is for itself."""
        first, end = placed[0], placed[-1].next_offset
        outcome = Published(first.offset, first.batch.dot(0), end - first.offset, level, {})
        split = partial(self._split, placed, receipt, level) if len(placed) > 1 else None
        if self._settling.when_kept(end, level, partial(self._settle, receipt, outcome), receipt, split):
            receipt.placed(outcome)

    def refuse(self, receipt: Receipt, refusal: Refused) -> None:
        """Report a refusal, unless an outcome was reported."""
        self.refused += 1
        if not receipt.done:
            receipt.refuse(refusal)

    def _split(self, placed: Sequence[LoggedBatch], receipt: Receipt, level: AckLevel) -> list[Part]:
        """Each batch of a run with a receipt of its own."""
        parts: list[Part] = []
        for logged, part in zip(placed, receipt.split([one.count for one in placed]), strict=True):
            outcome = Published(logged.offset, logged.batch.dot(0), logged.count, level, {})
            parts.append((logged.next_offset, partial(self._settle, part, outcome)))
        return parts

    def _settle(self, receipt: Receipt, outcome: Published | Refused, failure: Refused | None) -> None:
        if failure is not None and failure.retryable:
            self.refuse(receipt, failure)
        elif isinstance(outcome, Refused):
            self.refuse(receipt, outcome)
        elif failure is not None:
            self.refuse(receipt, with_dot(failure, outcome.dot))
        elif not receipt.done:
            receipt.acknowledge(outcome)
