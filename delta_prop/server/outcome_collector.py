"""Collects the outcomes of the frames that one connection has sent, for its next Ack and its Nacks.

Each outcome, acknowledgement or refusal, is reported once; with it, the credit of its frame is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop.calls.refusals import KnownOutcome
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, AckRange, Credit, Nack
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.answers import RefusalLog
    from delta_prop.server.connection_writer import ConnectionWriter
    from delta_prop.server.server_context import Counters
    from delta_prop_wire.batch import Batch

RANGES_MAX = 1_000
"""Maximum ranges in one Ack; more go into the next."""


class PendingFrame(Receipt):
    """A frame, or a run of frames, whose outcome is to be reported. `batches`: those of a run.

    `first`, `last`: the sequences of its deltas; `size`: bytes for which credit was charged.
    """

    __slots__ = ("_collector", "batches", "count", "first", "is_ack_wanted", "last", "size")

    def __init__(
        self,
        collector: OutcomeCollector,
        first: int,
        count: int,
        size: int,
        *,
        is_ack_wanted: bool,
        batches: Sequence[Batch] = (),
    ) -> None:
        super().__init__()
        self.first = first
        self.last = first + count - 1
        self.count = count
        self.size = size
        self.batches = batches
        self.is_ack_wanted = is_ack_wanted
        self._collector = collector

    def split(self, counts: Sequence[int]) -> list[PendingFrame]:
        """See `Receipt`; a run is split into its frames."""
        return self._collector.split(self, counts)

    def acknowledge(self, published: PublishAck) -> None:
        """Settle with an acknowledgement; fast if only the connection is notified."""
        if self._callbacks is not None or self._event is not None:
            self._acknowledge(published)
            return
        self.state = OfferState.ACKNOWLEDGED
        self._outcome = published
        self._withdraw = self.item = None
        self._collector.settle(self)

    def _finish(self) -> None:
        super()._finish()
        self._collector.settle(self)


class OutcomeCollector:
    """The outcomes of one connection's frames. `writer` is notified when there are some to report."""

    def __init__(self, writer: ConnectionWriter, counters: Counters, refusals: RefusalLog) -> None:
        self.has_answers = False
        """True while there is something to report."""
        self.is_unauthorized = False
        """True once the token did not allow something: the connection ends once that is reported."""
        self.pending: deque[PendingFrame] = deque()
        """The frames without an outcome, and those behind them, in the order of their sequences."""
        self.owed_deltas = self.owed_bytes = 0
        """Credit to return with the next Ack."""
        self._notify = writer.notify
        self._counters = counters
        self._refusals = refusals
        self._acked_sequence = 0
        self._ranges: list[AckRange] = []
        self._nacks: deque[Nack] = deque()
        self._closed = False

    def open(
        self, first: int, count: int, size: int, *, is_ack_wanted: bool, batches: Sequence[Batch] = ()
    ) -> PendingFrame:
        """Return the receipt of a frame, or of a run of `batches`, whose outcome is to be reported.

        `first`: the first of its `count` sequences; `size`: bytes for which credit was charged.
        """
        entry = PendingFrame(self, first, count, size, is_ack_wanted=is_ack_wanted, batches=batches)
        self.pending.append(entry)
        return entry

    def split(self, run: PendingFrame, counts: Sequence[int]) -> list[PendingFrame]:
        """Replace a run by its frames, as their outcomes differ."""
        frames, first = [], run.first
        for batch, count in zip(run.batches, counts, strict=False):
            frames.append(PendingFrame(self, first, count, batch.size, is_ack_wanted=run.is_ack_wanted))
            first += count
        index = self.pending.index(run)
        self.pending = deque([*islice(self.pending, index), *frames, *islice(self.pending, index + 1, None)])
        return frames

    def settle(self, entry: PendingFrame) -> None:
        """Note the outcome of a frame."""
        if entry.state is OfferState.ACKNOWLEDGED:
            if entry.is_ack_wanted:
                self._add_ranges(entry, entry.result())
        elif (refusal := entry.refusal()) is not None:
            self._add_refusal(entry, refusal)
        self.owed_deltas += entry.count
        self.owed_bytes += entry.size
        self.has_answers = True
        if not self._closed:
            self._notify()

    def take_answers(self, *, throttled: bool) -> Sequence[Ack | Nack]:
        """Return all that is to be reported now, refusals first.

        Callers check `has_answers` before, which is faster. `throttled`: if True, no credit is returned yet.
        """
        self.has_answers = throttled
        answers: list[Ack | Nack] = [*self._nacks]
        self._nacks.clear()
        previously_acked, has_advanced = self._acked_sequence, False
        while self.pending and self.pending[0].done:
            self._acked_sequence = max(self._acked_sequence, self.pending.popleft().last)
            has_advanced = True
        credit = None if throttled else self._take_owed_credit()
        while has_advanced or credit is not None or self._ranges:
            ranges, self._ranges = self._ranges[:RANGES_MAX], self._ranges[RANGES_MAX:]
            # A sequence without a range has no offset, so Acks advance it only with the last ranges.
            answers.append(
                Ack(
                    previously_acked if self._ranges else self._acked_sequence,
                    ranges=tuple(ranges),
                    credit=credit,
                )
            )
            has_advanced, credit = bool(self._ranges), None
        self._counters.acks += len(answers)
        return answers

    def close(self) -> None:
        """Stop notifying: the connection has closed."""
        self._closed = True

    # --- helpers

    def _add_refusal(self, entry: PendingFrame, refusal: Refused) -> None:
        if refusal.code is ErrorCode.UNAUTHORIZED and not isinstance(refusal, Unauthorized):
            refusal = Unauthorized(refusal.message)  # the same text for every cause
        self.is_unauthorized = self.is_unauthorized or isinstance(refusal, Unauthorized)
        self._nacks.append(Nack.of_frame(entry.first, refusal))
        if isinstance(refusal, KnownOutcome):
            self._counters.count_nack(refusal.code)  # it reports the outcome of an earlier delta
        else:
            self._refusals.record("DATA", refusal)

    def _add_ranges(self, entry: PendingFrame, published: PublishAck) -> None:
        if not (entry.sliced_offsets or published.duplicates) and published.offset is not None:
            self._add_range(AckRange(entry.first, entry.first + published.count - 1, published.offset))
            return
        first = entry.first + len(entry.sliced_offsets)  # after the rows that the log had before
        for sequence, offset in enumerate(entry.sliced_offsets, start=entry.first):
            ack_offset = UNKNOWN_OFFSET if offset is None else offset
            self._add_range(AckRange(sequence, sequence, ack_offset, duplicate=True))
        for ack_range in make_ack_ranges(first, published):
            self._add_range(ack_range)
        self._counters.duplicate_acks += len(entry.sliced_offsets) + len(published.duplicates)

    def _add_range(self, ack_range: AckRange) -> None:
        ranges = self._ranges
        if ranges:
            last = ranges[-1]
            is_contiguous = (
                last.offset + ack_range.first - last.first == ack_range.offset
                and last.offset != UNKNOWN_OFFSET
            )
            if last.last + 1 == ack_range.first and is_contiguous and last.duplicate == ack_range.duplicate:
                ranges[-1] = AckRange(last.first, ack_range.last, last.offset, last.duplicate)
                return
        ranges.append(ack_range)

    def _take_owed_credit(self) -> Credit | None:
        if not (self.owed_deltas or self.owed_bytes):
            return None
        credit = Credit(self.owed_deltas, self.owed_bytes)
        self.owed_deltas = self.owed_bytes = 0
        return credit


def make_ack_ranges(first: int, published: PublishAck) -> tuple[AckRange, ...]:
    """Return the offsets of a batch's rows as ranges; its sequences begin at `first`."""
    if not published.duplicates:
        assert published.offset is not None
        return (AckRange(first, first + published.count - 1, published.offset),)
    return tuple(
        AckRange(sequence, sequence, UNKNOWN_OFFSET if offset is None else offset, duplicate)
        for sequence, (offset, _, duplicate) in enumerate(published.row_acks(), start=first)
    )
