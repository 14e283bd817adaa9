"""One origin of a producer: its offers without dots, and its batches without an outcome, in order.

Pure. Dots are drawn when a batch is made, and a batch is the same bytes each time it is sent. Only a service
that grants another epoch, or has lost acknowledged deltas, gets the same dots in other bytes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.calls.argument_checks import with_parents
from delta_prop.client.backoff import Backoff
from delta_prop.client.offer import Columns
from delta_prop.client.sent_clocks import SentClocks, highest_dots
from delta_prop_wire.block import Block
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import Delta, Dot, Kind, Operation
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delta_prop.client.offer import Offer
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel, Priority, Source

QUERY_EPOCH = 0
"""The epoch of an outcome query: a batch that is never appended, but asks for the outcome of its dots."""
_NOT_FINITE = Operation(Kind.OFFSET, np.array([np.nan], np.float32))


class UnackedBatch:
    """A batch without an outcome. `offers`: (first row, offer) in order.

    `sequence`: that of its first row on this connection, 0 while not in flight. `is_maybe_stored`: the
    service may have it. `is_withdrawn`: its offers were dropped, so it is sent with rows that are finally
    refused. `is_outcome_query`: an earlier run of the producer sent its dots; the batch queries their
    outcome. `is_origin_unknown`: the service once did not know its origin, in spite of a hello.
    `send_order`: the number of batches sent before its first send. `split_count`: the number of splits that
    led to it. `acked_ranges`: of each acknowledged range (first row, last row, offset of the first row or
    None, True if duplicate).
    """

    __slots__ = (
        "acked_ranges",
        "batch",
        "is_maybe_stored",
        "is_origin_unknown",
        "is_outcome_query",
        "is_withdrawn",
        "offers",
        "send_count",
        "send_order",
        "sender",
        "sequence",
        "split_count",
    )

    def __init__(self, sender: SequenceSender, batch: Batch, offers: list[tuple[int, Offer]]) -> None:
        self.sender = sender
        self.batch = batch
        self.offers = offers
        self.sequence = 0
        self.send_count = 0
        self.is_maybe_stored = False
        self.is_withdrawn = False
        self.is_outcome_query = False
        self.is_origin_unknown = False
        self.split_count = 0
        self.send_order = 0
        self.acked_ranges: list[tuple[int, int, int | None, bool]] = []

    @property
    def source(self) -> Source:
        """The source of the deltas, where no hello names it."""
        return self.offers[0][1].source

    @property
    def previous_counter(self) -> int:
        """The counter that precedes the first row in its origin."""
        return self.batch.previous if self.batch.has_gaps else self.batch.base - 1

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
        self.re_encode(self.batch.epoch, self.previous_counter, self.batch.clock, _never_lost)

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


class Claim:
    """A producer's right to an origin. `watermark`: the service has processed the counters up to it."""

    __slots__ = ("epoch", "former_watermark", "is_claimed", "is_granted", "was_granted", "watermark")

    def __init__(self) -> None:
        self.epoch = 0
        self.watermark = 0
        self.former_watermark = 0  # that of the first grant; an earlier run sent the counters up to it
        self.was_granted = False  # a hello was answered once
        self.is_claimed = False  # on this connection
        self.is_granted = False  # granted on this connection


class Counters:
    """The counters of an origin. `next`: the next one to draw; `previous`: the last one in use before it.

    `queried`: the last counter of the newest outcome query. `last_numbered`: the last counter of the
    caller's; None: counters are drawn.
    """

    __slots__ = ("last_numbered", "next", "previous", "queried")

    def __init__(self) -> None:
        self.next = 1
        self.previous = 0
        self.queried = 0
        self.last_numbered: int | None = None


class RetryQueue:
    """Batches to send again at `not_before`, in the order of their counters, before anything new."""

    __slots__ = ("backoff", "batches", "not_before")

    def __init__(self) -> None:
        self.batches: list[UnackedBatch] = []
        self.not_before = 0.0
        self.backoff = Backoff(first_s=0.005, max_s=1.0)

    def add(self, unacked: UnackedBatch, not_before: float) -> None:
        """Add a batch; the queue waits until the latest time given."""
        insort(self.batches, unacked, key=_base)
        self.not_before = max(self.not_before, not_before)


class SequenceSender:
    """One origin: what waits to be sent under its dots, and what has no outcome yet."""

    def __init__(self, origin: int, priority: Priority, *, can_split: bool = False) -> None:
        """`can_split`: numbered offers may share batches, because a refused batch is split."""
        self.origin = origin
        self.priority = priority
        self._can_split = can_split
        self.claim = Claim()
        self.counters = Counters()
        self.clocks = SentClocks()
        self.waiting: deque[Offer] = deque()
        self.unencodable: list[tuple[Offer, Refused]] = []
        self.unacked: dict[int, UnackedBatch] = {}  # by the counter of the first row
        self.retries = RetryQueue()
        self.is_used = False
        self.virtual_time = 0.0  # rows sent, divided by the priority's weight; the least sends first

    @property
    def is_busy(self) -> bool:
        """True while something waits to be sent."""
        return bool(self.waiting or self.retries.batches)

    # --- granted

    def on_grant(self, epoch: int, watermark: int) -> tuple[int, int]:
        """Note a grant; return the lost counters as (after, until): those above `after`, up to `until`.

        Call `requeue_all` once all senders are granted.
        """
        claim, counters = self.claim, self.counters
        is_first = not claim.was_granted  # the epoch of a staged part is always 0
        claim.was_granted = claim.is_granted = True
        claim.epoch, claim.watermark = epoch, watermark
        if is_first:
            claim.former_watermark = counters.previous = watermark
            counters.next = watermark + 1
            return (0, 0)
        counters.next = max(counters.next, watermark + 1)
        first_unacked = next(
            (
                unacked.batch.base
                for unacked in self.unacked.values()
                if unacked.batch.last > watermark and not unacked.is_outcome_query
            ),
            counters.next,
        )
        return (watermark, max(first_unacked - 1, watermark))

    def requeue_all(self, *, lost: bool, is_lost: Callable[[Dot], bool]) -> None:
        """Requeue all batches without an outcome, in order.

        Batches that may be in the log are resent unchanged; the others are re-encoded, if necessary, so that
        they follow the watermark.
        """
        if lost:
            self.clocks.owe_processed()
        watermark, epoch = self.claim.watermark, self.claim.epoch
        previous = watermark
        self.retries.batches = sorted(self.unacked.values(), key=_base)
        self.retries.not_before = 0.0
        for unacked in self.retries.batches:
            unacked.sequence = 0
            unacked.acked_ranges.clear()
            batch = unacked.batch
            unacked.is_maybe_stored = batch.base <= watermark and not unacked.is_outcome_query
            if unacked.is_maybe_stored or unacked.is_outcome_query:
                continue
            if batch.epoch != epoch or unacked.previous_counter != previous or lost:
                unacked.re_encode(epoch, previous, [*batch.clock, *self.clocks.take_owed()], is_lost)
            previous = batch.last
        self.counters.previous = max(previous, watermark)

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
        clock = self.clocks.make(offers, is_lost)
        claim, counters = self.claim, self.counters
        base, previous = counters.next, counters.previous
        is_outcome_query = (
            first.counter is not None and first.counter + first.count - 1 <= claim.former_watermark
        )
        if first.counter is not None:
            base = first.counter
            if is_outcome_query:
                previous = counters.queried
            elif base <= previous:
                # The watermark is inside a block, which is then refused with OVERLAP and split.
                previous = base - 1
        epoch = QUERY_EPOCH if is_outcome_query else claim.epoch
        try:
            batch = self._encode(offers, base, previous, epoch=epoch, clock=clock, level=level)
        except Refused as refusal:
            self._isolate_oversized(offers, refusal)
            return None
        self.clocks.on_drawn(clock)
        unacked = UnackedBatch(self, batch, offers_by_row)
        unacked.is_outcome_query = is_outcome_query
        if is_outcome_query:
            counters.queried = batch.last
        else:
            counters.previous, counters.next = batch.last, batch.last + 1
        self.unacked[batch.base] = unacked
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
        self.retries.add(unacked, not_before)

    def replace_batch(self, unacked: UnackedBatch, parts: Iterable[UnackedBatch]) -> None:
        """Replace a batch without an outcome by `parts`, which have its rows."""
        del self.unacked[unacked.batch.base]
        self.unacked.update((part.batch.base, part) for part in parts)
        self.unacked = dict(sorted(self.unacked.items()))

    def settle_batch(self, unacked: UnackedBatch) -> None:
        """Remove a batch that has its outcome, or whose dots are used up."""
        del self.unacked[unacked.batch.base]
        if unacked.batch.clock:
            self.clocks.on_processed(unacked.batch.clock)

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
            counter is not None and (counter <= self.claim.former_watermark or not self._can_split)
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
            batch = core_mode.core.encode_opaque(
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
        deltas = _collect_deltas(offers)
        return encode_batch(
            deltas,
            origin=self.origin,
            base=base,
            epoch=epoch,
            clock=clock,
            previous=previous if counters is not None else 0,
            counters=counters,
            ack_level=level,
            priority=self.priority,
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


def _never_lost(_dot: Dot) -> bool:
    return False


def _base(unacked: UnackedBatch) -> int:
    return unacked.batch.base
