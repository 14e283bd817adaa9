"""One origin of a producer: its offers without dots, and its batches without an outcome, in order.

Pure. Dots are drawn when a batch is made, and a batch is the same bytes each time it is sent. Only a service
that grants another epoch, or has lost what it once acknowledged, gets the same dots in other bytes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.argument_checks import with_parents
from delta_prop.client.backoff import Backoff
from delta_prop.client.offer import Columns
from delta_prop_wire.block import Block
from delta_prop_wire.delta import Delta, Dot, Kind, Operation
from delta_prop_wire.encode import encode_batch, encode_opaque, encode_vectors
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delta_prop.client.offer import Offer
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel, Priority

QUERY_EPOCH = 0
"""The epoch of a batch that is never appended: it queries if these deltas have its dots."""
_NOT_FINITE = Operation(Kind.OFFSET, np.array([np.nan], np.float32))


class UnackedBatch:
    """A batch without an outcome. `offers`: (first row, offer) in order.

    `sequence`: its number on this connection, 0 while not in flight. `is_maybe_stored`: the service may have
    it. `is_withdrawn`: it was dropped, and is sent as a batch that is finally refused. `is_outcome_query`:
    an earlier run of the producer sent its dots, and it queries their outcome. `is_origin_unknown`: the
    service did not know its origin once, in spite of a hello. `send_order`: batches first sent before it.
    `split_count`: how often the batch that it is a part of was split.
    """

    __slots__ = (
        "acked_ranges",
        "base",
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
        "source",
        "split_count",
    )

    def __init__(self, sender: SequenceSender, batch: Batch, offers: list[tuple[int, Offer]]) -> None:
        self.sender = sender
        self.base = batch.base
        self.batch = batch
        self.offers = offers
        self.sequence = 0
        self.send_count = 0
        self.is_maybe_stored = False
        self.is_withdrawn = False
        self.is_outcome_query = False
        self.is_origin_unknown = False
        self.split_count = 0
        self.source = offers[0][1].source
        self.send_order = 0
        self.acked_ranges: list[tuple[int, int, int | None, bool]] = []

    @property
    def previous_counter(self) -> int:
        """The counter after which its first row follows."""
        return self.batch.previous if self.batch.has_gaps else self.batch.base - 1

    def replace_offer(self, offer: Offer, parts: Sequence[Offer]) -> None:
        """Replace one of its offers by `parts`, one per row."""
        found: list[tuple[int, Offer]] = []
        for row, one in self.offers:
            if one is offer:
                found += ((row + at, part) for at, part in enumerate(parts))
            else:
                found.append((row, one))
        self.offers = found

    def withdraw(self) -> None:
        """Turn its rows into ones that are finally refused: they were dropped and are not in the log."""
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
            clock=[dot for dot in _highest_dots(clock) if not is_lost(dot)],
            previous=0 if counters is None else previous,
            counters=counters,
            ack_level=batch.ack_level,
            priority=batch.priority,
        )

    def make_outcome_query(self) -> None:
        """Turn it into an outcome query, as an earlier run of the producer sent its rows."""
        self.is_outcome_query = True
        self.batch = _slice(self.batch, range(self.batch.count), self.previous_counter, epoch=QUERY_EPOCH)

    def split_at(self, rows: int) -> tuple[UnackedBatch, UnackedBatch]:
        """Split it into its first rows and the others. No offer may have rows on both sides."""
        batch = self.batch
        before = [one for one in self.offers if one[0] < rows]
        after = [(row - rows, offer) for row, offer in self.offers if row >= rows]
        first = UnackedBatch(self.sender, _slice(batch, range(rows), self.previous_counter), before)
        last = batch.counter(rows - 1)
        second = UnackedBatch(self.sender, _slice(batch, range(rows, batch.count), last), after)
        for frame in (first, second):
            for _, offer in frame.offers:
                offer.unacked_batch = frame
        return first, second


def _slice(batch: Batch, rows: range, previous: int, *, epoch: int | None = None) -> Batch:
    """Return rows of a batch under their own dots, the first after `previous`, under `epoch` or its own."""
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


class SequenceSender:
    """One origin. `next_counter`: the next to draw; `previous_counter`: the last before it in the log."""

    def __init__(self, origin: int, priority: Priority, *, can_split: bool = False) -> None:
        """`can_split`: numbered offers share batches, as a refused batch is split."""
        self.origin = origin
        self._can_split = can_split
        self.priority = priority
        self.epoch = 0
        self.was_granted = False  # a hello was answered once
        self.is_claimed = False  # on this connection
        self.is_granted = False  # granted on this connection
        self.next_counter = 1
        self.previous_counter = 0
        self.former_watermark = 0  # at the first grant: an earlier run sent what is not above it
        self.queried_counter = 0
        self.watermark = 0
        self.last_numbered: int | None = None  # the last counter of the caller's; None: counters are drawn
        self.sent_clock: dict[int, int] = {}
        self.waiting: deque[Offer] = deque()
        self.unencodable: list[tuple[Offer, Refused]] = []
        self.unacked: dict[int, UnackedBatch] = {}
        self.retries: list[UnackedBatch] = []
        self.retry_at = 0.0
        self.backoff = Backoff(first_s=0.005, max_s=1.0)
        self.is_used = False
        self.virtual_time = 0.0
        self._processed_clock: dict[int, int] = {}
        self._owed_clock: dict[int, int] = {}

    @property
    def is_busy(self) -> bool:
        """True while something waits to be sent."""
        return bool(self.waiting or self.retries)

    # --- granted

    def on_grant(self, epoch: int, watermark: int) -> tuple[int, int]:
        """Note a grant; return the counters that the service has lost: above the first, up to the second.

        Call `requeue_all` once all senders are granted.
        """
        first, self.was_granted = not self.was_granted, True  # the epoch of a staged part is 0 throughout
        self.epoch, self.watermark, self.is_granted = epoch, watermark, True
        if first:
            self.former_watermark = self.previous_counter = watermark
            self.next_counter = watermark + 1
            return (0, 0)
        self.next_counter = max(self.next_counter, watermark + 1)
        above = next(
            (
                one.base
                for one in self.unacked.values()
                if one.batch.last > watermark and not one.is_outcome_query
            ),
            self.next_counter,
        )
        return (watermark, max(above - 1, watermark))

    def requeue_all(self, *, lost: bool, is_lost: Callable[[Dot], bool]) -> None:
        """Requeue all open batches, in order.

        Batches that are in the log are resent unchanged; the others are made to follow on the watermark.
        """
        if lost:
            self._owed_clock = dict(self._processed_clock)
        previous = self.watermark
        self.retries = sorted(self.unacked.values(), key=_base)
        self.retry_at = 0.0
        for frame in self.retries:
            frame.sequence = 0
            frame.acked_ranges.clear()
            batch = frame.batch
            frame.is_maybe_stored = batch.base <= self.watermark and not frame.is_outcome_query
            if frame.is_maybe_stored or frame.is_outcome_query:
                continue
            if batch.epoch != self.epoch or frame.previous_counter != previous or lost:
                frame.re_encode(self.epoch, previous, [*batch.clock, *self._take_owed_dots()], is_lost)
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
        rows = _first_rows(offers)
        clock = self._make_clock(offers, is_lost)
        base, previous = self.next_counter, self.previous_counter
        is_outcome_query = (
            first.counter is not None and first.counter + first.count - 1 <= self.former_watermark
        )
        if first.counter is not None:
            base = first.counter
            if is_outcome_query:
                previous = self.queried_counter
            elif base <= previous:  # the watermark lies within a block: it is refused (OVERLAP) and split
                previous = base - 1
        epoch = QUERY_EPOCH if is_outcome_query else self.epoch
        try:
            batch = self._encode(offers, base, previous, epoch=epoch, clock=clock, level=level)
        except Refused as refusal:
            self._isolate_oversized(offers, refusal)
            return None
        for dot in clock:
            self.sent_clock[dot.origin] = dot.counter
        self._owed_clock.clear()
        frame = UnackedBatch(self, batch, rows)
        frame.is_outcome_query = is_outcome_query
        if is_outcome_query:
            self.queried_counter = batch.last
        else:
            self.previous_counter, self.next_counter = batch.last, batch.last + 1
        self.unacked[batch.base] = frame
        for row, offer in rows:
            offer.mark_encoded(frame)
            offer.pending_dot.counter = batch.counter(row + offer.count - 1)
        return frame

    def replace_offer(self, offer: Offer, parts: Iterable[Offer]) -> None:
        """Replace a waiting offer by `parts`."""
        place = self.waiting.index(offer)
        self.waiting.rotate(-place)
        self.waiting.popleft()
        self.waiting.extendleft(reversed(list(parts)))
        self.waiting.rotate(place)

    def requeue_offers(self, offers: Iterable[Offer]) -> None:
        """Queue offers before all that wait, to get new dots: their dots are used up."""
        for offer in reversed(list(offers)):
            offer.unacked_batch = None
            offer.pending_dot.counter = 0
            self.waiting.appendleft(offer)

    def schedule_retry(self, frame: UnackedBatch, at: float) -> None:
        """Resend a batch, not before `at`, and nothing new before it."""
        frame.sequence, frame.is_maybe_stored = 0, False
        frame.acked_ranges.clear()
        insort(self.retries, frame, key=_base)
        self.retry_at = max(self.retry_at, at)

    def replace_batch(self, frame: UnackedBatch, parts: Iterable[UnackedBatch]) -> None:
        """Replace a batch without an outcome by `parts`, which have its rows."""
        del self.unacked[frame.base]
        self.unacked.update((one.base, one) for one in parts)
        self.unacked = dict(sorted(self.unacked.items()))

    def settle_batch(self, frame: UnackedBatch) -> None:
        """Remove a batch that has its outcome, or whose dots are used up."""
        del self.unacked[frame.base]
        for dot in frame.batch.clock:
            if dot.counter > self._processed_clock.get(dot.origin, 0):
                self._processed_clock[dot.origin] = dot.counter

    # --- helpers

    def _take_offers(self, deltas_max: int, bytes_max: int) -> list[Offer]:
        """Take the offers for the next batch: at least one, if the first is ready."""
        waiting = self.waiting
        if not waiting or not waiting[0].is_ready:
            return []
        first = waiting.popleft()
        offers, rows, size = [first], first.count, first.size
        while not self._must_be_single(first) and waiting:
            one = waiting[0]
            rows, size = rows + one.count, size + one.size
            fits = rows <= deltas_max and size <= bytes_max
            uniform = one.has_ids == first.has_ids and one.source is first.source
            if not fits or self._must_be_single(one) or not uniform or not one.is_ready:
                break
            offers.append(waiting.popleft())
        return offers

    def _must_be_single(self, offer: Offer) -> bool:
        """True if it shares a batch with no other, as a counter that an earlier run sent does."""
        number = offer.counter
        return offer.is_single or (
            number is not None and (number <= self.former_watermark or not self._can_split)
        )

    def _isolate_oversized(self, offers: Sequence[Offer], refusal: Refused) -> None:
        """Retry each offer by itself, as one exceeds a frame; a single one moves to `unencodable`."""
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
            return encode_opaque(
                [delta for offer in offers for delta in offer.deltas]
                if len(offers) > 1
                else offers[0].deltas,
                origin=self.origin,
                base=base,
                epoch=epoch,
                ack_level=level,
                priority=self.priority,
            )
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

    def _make_clock(self, offers: Sequence[Offer], is_lost: Callable[[Dot], bool]) -> list[Dot]:
        """Return the last dots of these vectors from other senders, unless a clock named them before."""
        named = [
            dot
            for offer in offers
            for place in offer.predecessors
            if place.counter > self.sent_clock.get(place.origin, 0)
            and not is_lost(dot := Dot(place.origin, place.counter))
        ]
        owed = [Dot(*one) for one in self._owed_clock.items()]
        return _highest_dots([*named, *(dot for dot in owed if not is_lost(dot))]) if named or owed else []

    def _take_owed_dots(self) -> list[Dot]:
        owed = [Dot(*one) for one in self._owed_clock.items()]
        self._owed_clock.clear()
        return owed


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


def _first_rows(offers: Sequence[Offer]) -> list[tuple[int, Offer]]:
    rows, at = [], 0
    for offer in offers:
        rows.append((at, offer))
        at += offer.count
    return rows


def _collect_deltas(offers: Sequence[Offer]) -> Sequence[Delta]:
    if len(offers) == 1 and not offers[0].after:
        return offers[0].rows
    found: list[Delta] = []
    for offer in offers:
        deltas = offer.rows
        found += with_parents(deltas, offer.parents()) if offer.after else deltas
    return found


def _highest_dots(dots: Iterable[Dot]) -> list[Dot]:
    highest: dict[int, int] = {}
    for origin, counter in dots:
        highest[origin] = max(counter, highest.get(origin, 0))
    return [Dot(*one) for one in sorted(highest.items())]


def _drop_lost_parents(delta: Delta, is_lost: Callable[[Dot], bool]) -> Delta:
    if not any(isinstance(parent, Dot) and is_lost(parent) for parent in delta.parents):
        return delta
    parents = (one for one in delta.parents if isinstance(one, bytes) or not is_lost(one))
    return replace(delta, parents=tuple(parents))


def _never_lost(_dot: Dot) -> bool:
    return False


def _base(frame: UnackedBatch) -> int:
    return frame.base
