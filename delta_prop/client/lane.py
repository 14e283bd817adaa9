"""One origin of a producer: what waits for dots, what has them and no outcome yet, in order.

Pure. A dot is drawn when a batch is cut, and a batch is the same bytes at each sending; only a service that
grants another epoch, or has lost what it once acknowledged, is sent the same dots in other bytes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.checks import with_parents
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

ASKS = 0
"""The epoch of a batch that is never placed: it asks whether these deltas have its dots."""
_NOT_FINITE = Operation(Kind.OFFSET, np.array([np.nan], np.float32))


class OpenFrame:
    """A batch without an outcome. `offers`: (first row, offer) in order.

    `sequence`: its number on this connection, 0 while it is not under way. `doubt`: the service may have it.
    `void`: it was given up, and is sent as a batch that is refused for good. `question`: its dots were dealt
    with in a former life of the producer, and it asks what became of them. `unknown`: its origin was not
    known once, though a hello had been said. `number`: batches that were sent before it for the first time.
    `splits`: how often what it is a part of was split.
    """

    __slots__ = (
        "base",
        "batch",
        "doubt",
        "lane",
        "number",
        "offers",
        "question",
        "sent",
        "sequence",
        "source",
        "splits",
        "told",
        "unknown",
        "void",
    )

    def __init__(self, lane: Lane, batch: Batch, offers: list[tuple[int, Offer]]) -> None:
        self.lane = lane
        self.base = batch.base
        self.batch = batch
        self.offers = offers
        self.sequence = 0
        self.sent = 0
        self.doubt = False
        self.void = False
        self.question = False
        self.unknown = False
        self.splits = 0
        self.source = offers[0][1].source
        self.number = 0
        self.told: list[tuple[int, int, int | None, bool]] = []

    @property
    def stands_behind(self) -> int:
        """The counter that its first row follows on."""
        return self.batch.previous if self.batch.leaps else self.batch.base - 1

    def replace(self, offer: Offer, parts: Sequence[Offer]) -> None:
        """These stand for one of its offers, row by row."""
        found: list[tuple[int, Offer]] = []
        for row, one in self.offers:
            if one is offer:
                found += ((row + at, part) for at, part in enumerate(parts))
            else:
                found.append((row, one))
        self.offers = found

    def withdraw(self) -> None:
        """Its rows were given up, and the service does not have them: it becomes what is refused for good."""
        self.void = True
        self.re_encode(self.batch.epoch, self.stands_behind, self.batch.clock, _none)

    def re_encode(
        self, epoch: int, previous: int, clock: Iterable[Dot], is_lost: Callable[[Dot], bool]
    ) -> None:
        """The same dots in other bytes: under another epoch, behind another counter."""
        batch = self.batch
        deltas = [batch.delta(row) for row in range(batch.count)]
        if self.void:
            namespace = batch.namespaces[0]
            deltas = [Delta("withdrawn", _NOT_FINITE, namespace)] * batch.count
        counters = None
        if batch.leaps or batch.base != previous + 1:
            counters = [batch.counter(row) for row in range(batch.count)]
        deltas = [_without_lost(delta, is_lost) for delta in deltas]
        self.batch = encode_batch(
            deltas,
            origin=batch.origin,
            base=batch.base,
            epoch=epoch,
            clock=[dot for dot in _highest(clock) if not is_lost(dot)],
            previous=0 if counters is None else previous,
            counters=counters,
            ack_level=batch.ack_level,
            priority=batch.priority,
        )

    def ask(self) -> None:
        """Turn it into a question, as its rows were sent in a former life of the producer."""
        self.question = True
        self.batch = _piece(self.batch, range(self.batch.count), self.stands_behind, epoch=ASKS)

    def cut(self, rows: int) -> tuple[OpenFrame, OpenFrame]:
        """Make two of it: of its first rows, and of the others. No offer may have rows on both sides."""
        batch = self.batch
        before = [one for one in self.offers if one[0] < rows]
        after = [(row - rows, offer) for row, offer in self.offers if row >= rows]
        first = OpenFrame(self.lane, _piece(batch, range(rows), self.stands_behind), before)
        last = batch.counter(rows - 1)
        second = OpenFrame(self.lane, _piece(batch, range(rows, batch.count), last), after)
        for frame in (first, second):
            for _, offer in frame.offers:
                offer.frame = frame
        return first, second


def _piece(batch: Batch, rows: range, previous: int, *, epoch: int | None = None) -> Batch:
    """Some rows of a batch under their own dots, the first behind a counter; under its epoch or another."""
    counters = [batch.counter(row) for row in rows]
    leaps = batch.leaps or counters[0] != previous + 1
    return encode_batch(
        [batch.delta(row) for row in rows],
        origin=batch.origin,
        base=counters[0],
        epoch=batch.epoch if epoch is None else epoch,
        clock=batch.clock,
        previous=previous if leaps else 0,
        counters=counters if leaps else None,
        ack_level=batch.ack_level,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )


class Lane:
    """One origin. `next`: the counter to draw; `previous`: the one before it, as the service knows it."""

    def __init__(self, origin: int, priority: Priority, *, splits: bool = False) -> None:
        """`splits`: numbered offers share batches, as one that is refused is split."""
        self.origin = origin
        self._splits = splits
        self.priority = priority
        self.epoch = 0
        self.known_before = False  # a hello was answered once
        self.claimed = False  # on this connection
        self.live = False  # granted on this connection
        self.next = 1
        self.previous = 0
        self.known = 0  # the watermark at the first grant: below it lies a former life
        self.asked = 0
        self.watermark = 0
        self.numbered: int | None = None  # the last counter that a caller gave; None: the producer draws
        self.said: dict[int, int] = {}
        self.waiting: deque[Offer] = deque()
        self.unfit: list[tuple[Offer, Refused]] = []
        self.open: dict[int, OpenFrame] = {}
        self.again: list[OpenFrame] = []
        self.again_at = 0.0
        self.backoff = Backoff(first_s=0.005, max_s=1.0)
        self.used = False
        self.turn = 0.0
        self._dealt_with_said: dict[int, int] = {}
        self._owed: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether something waits here to be sent."""
        return bool(self.waiting or self.again)

    # --- granted

    def granted(self, epoch: int, watermark: int) -> tuple[int, int]:
        """A hello was answered. Returns the counters that the service has lost: above the first, up to the
        second. Ask `line_up` next, when all lanes were granted.
        """
        first, self.known_before = not self.known_before, True  # the epoch of a staged part is 0 throughout
        self.epoch, self.watermark, self.live = epoch, watermark, True
        if first:
            self.known = self.previous = watermark
            self.next = watermark + 1
            return (0, 0)
        self.next = max(self.next, watermark + 1)
        above = next(
            (one.base for one in self.open.values() if one.batch.last > watermark and not one.question),
            self.next,
        )
        return (watermark, max(above - 1, watermark))

    def line_up(self, *, lost: bool, is_lost: Callable[[Dot], bool]) -> None:
        """Have everything open sent again, in order. What has its place is repeated byte by byte, what the
        service does not have follows on what it has.
        """
        if lost:
            self._owed = dict(self._dealt_with_said)
        previous = self.watermark
        self.again = sorted(self.open.values(), key=_base)
        self.again_at = 0.0
        for frame in self.again:
            frame.sequence = 0
            frame.told.clear()
            batch = frame.batch
            frame.doubt = batch.base <= self.watermark and not frame.question
            if frame.doubt or frame.question:
                continue
            if batch.epoch != self.epoch or frame.stands_behind != previous or lost:
                frame.re_encode(self.epoch, previous, [*batch.clock, *self._take_owed()], is_lost)
            previous = batch.last
        self.previous = max(previous, self.watermark)

    # --- cut

    def cut(
        self, *, level: AckLevel, deltas_max: int, bytes_max: int, is_lost: Callable[[Dot], bool]
    ) -> OpenFrame | None:
        """Draw dots for what waits, as one batch; None where nothing may go yet. What cannot be encoded is
        found in `unfit`, out of the line, and no dot was drawn for it.
        """
        offers = self._take(deltas_max, bytes_max)
        if not offers:
            return None
        first = offers[0]
        rows = _rows(offers)
        clock = self._clock(offers, is_lost)
        base, previous = self.next, self.previous
        question = first.counter is not None and first.counter + first.count - 1 <= self.known
        if first.counter is not None:
            base = first.counter
            if question:
                previous = self.asked
            elif base <= previous:  # the watermark lies within a block: the service says so, and it is cut
                previous = base - 1
        epoch = ASKS if question else self.epoch
        try:
            batch = self._encode(offers, base, previous, epoch=epoch, clock=clock, level=level)
        except Refused as refusal:
            self._set_aside(offers, refusal)
            return None
        for dot in clock:
            self.said[dot.origin] = dot.counter
        self._owed.clear()
        frame = OpenFrame(self, batch, rows)
        frame.question = question
        if question:
            self.asked = batch.last
        else:
            self.previous, self.next = batch.last, batch.last + 1
        self.open[batch.base] = frame
        for row, offer in rows:
            offer.encoded(frame)
            offer.place.counter = batch.counter(row + offer.count - 1)
        return frame

    def replace(self, offer: Offer, parts: Iterable[Offer]) -> None:
        """These stand for one that waits."""
        place = self.waiting.index(offer)
        self.waiting.rotate(-place)
        self.waiting.popleft()
        self.waiting.extendleft(reversed(list(parts)))
        self.waiting.rotate(place)

    def put_back(self, offers: Iterable[Offer]) -> None:
        """Their dots are void: they are to get new ones, before what still waits."""
        for offer in reversed(list(offers)):
            offer.frame = None
            offer.place.counter = 0
            self.waiting.appendleft(offer)

    def refused(self, frame: OpenFrame, at: float) -> None:
        """A batch is to be sent again, not before `at`, and nothing new before it."""
        frame.sequence, frame.doubt = 0, False
        frame.told.clear()
        insort(self.again, frame, key=_base)
        self.again_at = max(self.again_at, at)

    def exchange(self, frame: OpenFrame, parts: Iterable[OpenFrame]) -> None:
        """These stand for a batch without an outcome, whose rows they have."""
        del self.open[frame.base]
        self.open.update((one.base, one) for one in parts)
        self.open = dict(sorted(self.open.items()))

    def done(self, frame: OpenFrame) -> None:
        """A batch has its outcome, or is void."""
        del self.open[frame.base]
        for dot in frame.batch.clock:
            if dot.counter > self._dealt_with_said.get(dot.origin, 0):
                self._dealt_with_said[dot.origin] = dot.counter

    # --- helpers

    def _take(self, deltas_max: int, bytes_max: int) -> list[Offer]:
        """What the next batch holds: at least one offer, if the first may go."""
        waiting = self.waiting
        if not waiting or not waiting[0].ready:
            return []
        first = waiting.popleft()
        offers, rows, size = [first], first.count, first.size
        while not self._goes_alone(first) and waiting:
            one = waiting[0]
            rows, size = rows + one.count, size + one.size
            fits = rows <= deltas_max and size <= bytes_max
            alike = one.has_ids == first.has_ids and one.source is first.source
            if not fits or self._goes_alone(one) or not alike or not one.ready:
                break
            offers.append(waiting.popleft())
        return offers

    def _goes_alone(self, offer: Offer) -> bool:
        """True if it shares a batch with no other, as a number that was dealt with in a former life."""
        number = offer.counter
        return offer.alone or (number is not None and (number <= self.known or not self._splits))

    def _set_aside(self, offers: Sequence[Offer], refusal: Refused) -> None:
        """One of these is more than a frame holds: each is tried by itself, and what still is, goes."""
        if len(offers) > 1:
            for offer in offers:
                offer.alone = True
            self.put_back(offers)
        else:
            self.unfit.append((offers[0], refusal))

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
        columns, counters = offers[0].columns, _numbers(offers, base, previous)
        leaps = counters is not None
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
        if isinstance(columns, Columns) and not leaps:
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
        if not leaps and not clock and all(offer.simple for offer in offers):
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
        deltas = _deltas(offers)
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

    def _clock(self, offers: Sequence[Offer], is_lost: Callable[[Dot], bool]) -> list[Dot]:
        """The last deltas of these vectors in other lanes, where they were not said before."""
        named = [
            dot
            for offer in offers
            for place in offer.behind
            if place.counter > self.said.get(place.origin, 0)
            and not is_lost(dot := Dot(place.origin, place.counter))
        ]
        owed = [Dot(*one) for one in self._owed.items()]
        return _highest([*named, *(dot for dot in owed if not is_lost(dot))]) if named or owed else []

    def _take_owed(self) -> list[Dot]:
        owed = [Dot(*one) for one in self._owed.items()]
        self._owed.clear()
        return owed


def _numbers(offers: Sequence[Offer], base: int, previous: int) -> list[int] | None:
    """The counters of a batch that leaps; None where they go on from the one before, and by 1."""
    if offers[0].counter is None:
        count = sum(offer.count for offer in offers)
        return None if base == previous + 1 else [*range(base, base + count)]
    counters = [
        offer.counter + row for offer in offers if offer.counter is not None for row in range(offer.count)
    ]
    goes_on = base == previous + 1 and counters[-1] - base == len(counters) - 1
    return None if goes_on else counters


def _rows(offers: Sequence[Offer]) -> list[tuple[int, Offer]]:
    rows, at = [], 0
    for offer in offers:
        rows.append((at, offer))
        at += offer.count
    return rows


def _deltas(offers: Sequence[Offer]) -> Sequence[Delta]:
    if len(offers) == 1 and not offers[0].after:
        return offers[0].rows
    found: list[Delta] = []
    for offer in offers:
        deltas = offer.rows
        found += with_parents(deltas, offer.parents()) if offer.after else deltas
    return found


def _highest(dots: Iterable[Dot]) -> list[Dot]:
    highest: dict[int, int] = {}
    for origin, counter in dots:
        highest[origin] = max(counter, highest.get(origin, 0))
    return [Dot(*one) for one in sorted(highest.items())]


def _without_lost(delta: Delta, is_lost: Callable[[Dot], bool]) -> Delta:
    if not any(isinstance(parent, Dot) and is_lost(parent) for parent in delta.parents):
        return delta
    kept = (one for one in delta.parents if isinstance(one, bytes) or not is_lost(one))
    return replace(delta, parents=tuple(kept))


def _none(_dot: Dot) -> bool:
    return False


def _base(frame: OpenFrame) -> int:
    return frame.base
