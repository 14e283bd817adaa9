"""One origin of a producer: its offers without dots, and its batches without an outcome, in order.

Pure. Dots are drawn when a batch is made, and a batch is the same bytes each time it is sent. Only a service
that grants another epoch, or has lost acknowledged deltas, gets the same dots in other bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from delta_prop.calls.argument_checks import with_parents
from delta_prop.client.backoff import Backoff
from delta_prop.client.offer import Columns, Offer
from delta_prop.producing.origin_sequence import OriginSequence, SentBatch
from delta_prop.producing.sent_clocks import highest_dots
from delta_prop_wire.batch import Batch
from delta_prop_wire.block import Block
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Operation, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_opaque, encode_vectors
from delta_prop_wire.errors import Refused

QUERY_EPOCH = 0
"""The epoch of an outcome query: a batch that is never appended, but asks for the outcome of its dots."""
_NOT_FINITE = Operation(Kind.OFFSET, np.array([np.nan], np.float32))


class UnackedBatch(SentBatch):
    """A batch of a client without an outcome. `offers`: (first row, offer) in order.

    `sequence`: that of its first row on this connection, 0 while not in flight. `is_maybe_stored`: the
    service may have it. A withdrawn batch is sent with rows that are finally refused. `is_origin_unknown`:
    the service once did not know its origin, in spite of a hello. `send_order`: the number of batches sent
    before its first send. `split_count`: the number of splits that led to it. `acked_ranges`: of each
    acknowledged range (first row, last row, offset of the first row or None, True if duplicate).
    """

    __slots__ = (
        "acked_ranges",
        "is_maybe_stored",
        "is_origin_unknown",
        "is_outcome_query",
        "offers",
        "send_count",
        "send_order",
        "sender",
        "sequence",
        "split_count",
    )

    def __init__(self, sender: SequenceSender, batch: Batch, offers: list[tuple[int, Offer]]) -> None:
        super().__init__(batch)
        self.sender = sender
        self.offers = offers
        self.sequence = 0
        self.send_count = 0
        self.is_maybe_stored = False
        self.is_outcome_query = False
        self.is_origin_unknown = False
        self.split_count = 0
        self.send_order = 0
        self.acked_ranges: list[tuple[int, int, int | None, bool]] = []

    @property
    def source(self) -> Source:
        """The source of the deltas, where no hello names it."""
        return self.offers[0][1].source

    def replace_offer(self, offer: Offer, parts: Sequence[Offer]) -> None:
        """Replace one of the offers by `parts`, one per row."""
        offers: list[tuple[int, Offer]] = []
        for row, present in self.offers:
            if present is offer:
                offers += ((row + index, part) for index, part in enumerate(parts))
            else:
                offers.append((row, present))
        self.offers = offers

    def withdraw(self) -> None:
        """Make the rows invalid, so that the service finally refuses them: they were dropped, not logged."""
        self.is_withdrawn = True
        self.re_encode(self.batch.epoch, self.previous_counter, self.batch.clock, lambda _dot: False)

    def re_encode(
        self, epoch: int, previous: int, clock: Iterable[Dot], is_lost: Callable[[Dot], bool]
    ) -> None:
        """Encode the same dots in other bytes: under another epoch, after another counter."""
        batch = self.batch
        deltas = [batch.delta(row) for row in range(batch.count)]
        if self.is_withdrawn:
            namespace = batch.namespaces[0]
            deltas = [Delta("withdrawn", _NOT_FINITE, namespace)] * batch.count
        counters = None
        if batch.has_gaps or batch.base != previous + 1:
            counters = [batch.counter(row) for row in range(batch.count)]
        deltas = [_drop_lost_parents(delta, is_lost) for delta in deltas]
        self.batch = encode_batch(
            deltas,
            origin=batch.origin,
            base=batch.base,
            epoch=epoch,
            clock=[dot for dot in highest_dots(clock) if not is_lost(dot)],
            previous=0 if counters is None else previous,
            counters=counters,
            ack_level=batch.ack_level,
            priority=batch.priority,
        )

    def make_outcome_query(self) -> None:
        """Turn the batch into an outcome query, since an earlier run of the producer sent its rows."""
        self.is_outcome_query = True
        self.batch = _slice(self.batch, range(self.batch.count), self.previous_counter, epoch=QUERY_EPOCH)

    def split_at(self, rows: int) -> tuple[UnackedBatch, UnackedBatch]:
        """Split the batch into its first `rows` rows and the others. No offer may have rows on both sides."""
        batch = self.batch
        before = [(row, offer) for row, offer in self.offers if row < rows]
        after = [(row - rows, offer) for row, offer in self.offers if row >= rows]
        first = UnackedBatch(self.sender, _slice(batch, range(rows), self.previous_counter), before)
        last = batch.counter(rows - 1)
        second = UnackedBatch(self.sender, _slice(batch, range(rows, batch.count), last), after)
        for part in (first, second):
            for _, offer in part.offers:
                offer.unacked_batch = part
        return first, second


def _slice(batch: Batch, rows: range, previous: int, *, epoch: int | None = None) -> Batch:
    """Encode some rows of a batch again, under their own dots.

    `previous`: the counter before the first row. `epoch`: None for the batch's own.
    """
    counters = [batch.counter(row) for row in rows]
    has_gaps = batch.has_gaps or counters[0] != previous + 1
    return encode_batch(
        [batch.delta(row) for row in rows],
        origin=batch.origin,
        base=counters[0],
        epoch=batch.epoch if epoch is None else epoch,
        clock=batch.clock,
        previous=previous if has_gaps else 0,
        counters=counters if has_gaps else None,
        ack_level=batch.ack_level,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )


class SequenceSender(OriginSequence[UnackedBatch]):
    """One origin on the network: also the offers that have no dots yet, and the right to the origin.

    `queried`: the last counter of the newest outcome query. `last_numbered`: the last counter of the
    caller's; None: counters are drawn. `retry_at`: until then no batch is sent again.
    """

    def __init__(self, origin: int, priority: Priority, *, can_split: bool = False) -> None:
        """`can_split`: numbered offers may share batches, because a refused batch is split."""
        super().__init__(origin, priority)
        self._can_split = can_split
        self.is_claimed = False  # on this connection
        self.is_granted = False  # on this connection
        self.queried = 0
        self.last_numbered: int | None = None
        self.waiting: deque[Offer] = deque()
        self.unencodable: list[tuple[Offer, Refused]] = []
        self.retry_at = 0.0
        self.backoff = Backoff(first_s=0.005, max_s=1.0)
        self.virtual_time = 0.0  # rows sent, divided by the priority's weight; the least sends first

    @property
    def is_busy(self) -> bool:
        """True while something waits to be sent."""
        return bool(self.waiting or self.retries)

    # --- granted

    def requeue_all(self, *, lost: bool, is_lost: Callable[[Dot], bool]) -> None:
        """Requeue all batches without an outcome, in order.

        Batches that may be in the log are resent unchanged; the others are re-encoded, if necessary, so that
        they follow the watermark.
        """
        if lost:
            self.clocks.owe_processed()
        previous = self.watermark
        self.retry_at = 0.0
        for unacked in self.requeue():
            unacked.sequence = 0
            unacked.acked_ranges.clear()
            batch = unacked.batch
            unacked.is_maybe_stored = batch.base <= self.watermark and not unacked.is_outcome_query
            if unacked.is_maybe_stored or unacked.is_outcome_query:
                continue
            if batch.epoch != self.epoch or unacked.previous_counter != previous or lost:
                clock = [*batch.clock, *self.clocks.take_owed()]
                unacked.re_encode(self.epoch, previous, clock, is_lost)
            previous = batch.last
        self.previous_counter = max(previous, self.watermark)

    # --- batches

    def draw_batch(
        self, *, level: AckLevel, deltas_max: int, bytes_max: int, is_lost: Callable[[Dot], bool]
    ) -> UnackedBatch | None:
        """Draw dots for waiting offers, as one batch; None if nothing may be sent yet.

        An offer that cannot be encoded moves to `unencodable`, and no dot is drawn for it.
        """
        offers = self._take_offers(deltas_max, bytes_max)
        if not offers:
            return None
        first = offers[0]
        offers_by_row = _with_first_rows(offers)
        predecessors = (dot for offer in offers for dot in offer.predecessors)
        clock = self.clocks.make(predecessors, is_lost)
        base, previous, epoch, is_outcome_query = self.next_counter, self.previous_counter, self.epoch, False
        if first.counter is not None:
            base = first.counter
            is_outcome_query = base + first.count - 1 <= self.former_watermark
            if is_outcome_query:
                previous, epoch = self.queried, QUERY_EPOCH
            elif base <= previous:
                # The watermark is inside a block, which is then refused with OVERLAP and split.
                previous = base - 1
        try:
            batch = self._encode(offers, base, previous, epoch=epoch, clock=clock, level=level)
        except Refused as refusal:
            self._isolate_oversized(offers, refusal)
            return None
        unacked = UnackedBatch(self, batch, offers_by_row)
        if is_outcome_query:
            unacked.is_outcome_query = True
            self.queried = batch.last
        self.draw(unacked, clock)
        for row, offer in offers_by_row:
            offer.mark_encoded(unacked)
            offer.pending_dot.counter = batch.counter(row + offer.count - 1)
        return unacked

    def replace_offer(self, offer: Offer, parts: Iterable[Offer]) -> None:
        """Replace a waiting offer by `parts`."""
        index = self.waiting.index(offer)
        self.waiting.rotate(-index)
        self.waiting.popleft()
        self.waiting.extendleft(reversed(list(parts)))
        self.waiting.rotate(index)

    def requeue_offers(self, offers: Iterable[Offer]) -> None:
        """Queue offers before all waiting ones, to get new dots: their old dots are used up."""
        for offer in reversed(list(offers)):
            offer.unacked_batch = None
            offer.pending_dot.counter = 0
            self.waiting.appendleft(offer)

    def schedule_retry(self, unacked: UnackedBatch, not_before: float) -> None:
        """Resend a batch at `not_before` or later, and nothing new before it."""
        unacked.sequence, unacked.is_maybe_stored = 0, False
        unacked.acked_ranges.clear()
        self.add_retry(unacked)
        self.retry_at = max(self.retry_at, not_before)

    def replace_batch(self, unacked: UnackedBatch, parts: Iterable[UnackedBatch]) -> None:
        """Replace a batch without an outcome by `parts`, which have its rows."""
        del self.unacked[unacked.batch.base]
        self.unacked.update((part.batch.base, part) for part in parts)
        self.unacked = dict(sorted(self.unacked.items()))

    # --- helpers

    def _take_offers(self, deltas_max: int, bytes_max: int) -> list[Offer]:
        """Take the offers for the next batch: at least one, if the first is ready."""
        waiting = self.waiting
        if not waiting or not waiting[0].is_ready:
            return []
        first = waiting.popleft()
        offers, row_count, size = [first], first.count, first.size
        while not self._must_be_single(first) and waiting:
            offer = waiting[0]
            row_count, size = row_count + offer.count, size + offer.size
            fits = row_count <= deltas_max and size <= bytes_max
            is_uniform = offer.has_ids == first.has_ids and offer.source is first.source
            if not fits or self._must_be_single(offer) or not is_uniform or not offer.is_ready:
                break
            offers.append(waiting.popleft())
        return offers

    def _must_be_single(self, offer: Offer) -> bool:
        """True if the offer must have its own batch, for instance if an earlier run sent its counter."""
        counter = offer.counter
        return offer.is_single or (
            counter is not None and (counter <= self.former_watermark or not self._can_split)
        )

    def _isolate_oversized(self, offers: Sequence[Offer], refusal: Refused) -> None:
        """Retry each offer in its own batch, since they exceed a frame; a single one is unencodable."""
        if len(offers) > 1:
            for offer in offers:
                offer.is_single = True
            self.requeue_offers(offers)
        else:
            self.unencodable.append((offers[0], refusal))

    def _encode(
        self,
        offers: Sequence[Offer],
        base: int,
        previous: int,
        *,
        epoch: int,
        clock: Sequence[Dot],
        level: AckLevel,
    ) -> Batch:
        columns, counters = offers[0].columns, _gap_counters(offers, base, previous)
        has_gaps = counters is not None
        if offers[0].is_block and not clock and not offers[0].after:
            assert isinstance(columns, Block)
            return columns.encode(
                origin=self.origin,
                base=base,
                previous=previous,
                epoch=epoch,
                ack_level=level,
                priority=self.priority,
            )
        if isinstance(columns, Columns) and not has_gaps:
            return encode_vectors(
                columns.ids,
                columns.matrix,
                namespace=columns.namespace,
                kind=columns.kind,
                origin=self.origin,
                base=base,
                epoch=epoch,
                clock=clock,
                ack_level=level,
                priority=self.priority,
            )
        if not has_gaps and not clock and all(offer.is_opaque_only for offer in offers):
            batch = encode_opaque(
                [delta for offer in offers for delta in offer.deltas]
                if len(offers) > 1
                else offers[0].deltas,
                origin=self.origin,
                base=base,
                epoch=epoch,
                ack_level=level,
                priority=self.priority,
            )
            if batch is not None:
                return batch
        return self.encode(
            _collect_deltas(offers),
            base=base,
            clock=clock,
            level=level,
            epoch=epoch,
            previous=previous,
            counters=counters,
        )


def _gap_counters(offers: Sequence[Offer], base: int, previous: int) -> list[int] | None:
    """Return the counters of a batch with gaps; None if they follow `previous` and rise by 1."""
    if offers[0].counter is None:
        count = sum(offer.count for offer in offers)
        return None if base == previous + 1 else [*range(base, base + count)]
    counters = [
        offer.counter + row for offer in offers if offer.counter is not None for row in range(offer.count)
    ]
    is_contiguous = base == previous + 1 and counters[-1] - base == len(counters) - 1
    return None if is_contiguous else counters


def _with_first_rows(offers: Sequence[Offer]) -> list[tuple[int, Offer]]:
    first_rows, row = [], 0
    for offer in offers:
        first_rows.append((row, offer))
        row += offer.count
    return first_rows


def _collect_deltas(offers: Sequence[Offer]) -> Sequence[Delta]:
    if len(offers) == 1 and not offers[0].after:
        return offers[0].decoded_deltas
    collected: list[Delta] = []
    for offer in offers:
        deltas = offer.decoded_deltas
        collected += with_parents(deltas, offer.parents()) if offer.after else deltas
    return collected


def _drop_lost_parents(delta: Delta, is_lost: Callable[[Dot], bool]) -> Delta:
    if not any(isinstance(parent, Dot) and is_lost(parent) for parent in delta.parents):
        return delta
    parents = (parent for parent in delta.parents if isinstance(parent, bytes) or not is_lost(parent))
    return replace(delta, parents=tuple(parents))
