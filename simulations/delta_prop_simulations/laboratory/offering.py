"""Who offers a source's deltas, and what became of them: at once, in time, however full the service is.

An arrival does not wait for the one before it. What is refused for now comes again when the refusal says.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import cycle
from math import inf
from typing import TYPE_CHECKING

import anyio

from delta_prop.ingest.work import Draft
from delta_prop.receipt import Receipt
from delta_prop_simulations.laboratory.measures import Histogram
from delta_prop_simulations.laboratory.ready import Ready, Template
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from anyio.abc import TaskGroup

    from delta_prop import Producer, Propagator
    from delta_prop.pipeline import Chain
    from delta_prop_simulations.laboratory.deltas import Maker, Rows
    from delta_prop_simulations.laboratory.scenario import SourceSpec
    from delta_prop_simulations.laboratory.sources import Arrival
    from delta_prop_wire.delta import AckLevel, Delta, Priority

CALLS_OPEN_MAX = 10_000
"""Calls of one source that wait to be offered again, or for their outcome; more are given up."""
RETRY_S_MIN = 0.001
_LOOK_S = 0.1


class Outcomes:
    """What became of everything that was offered, in deltas, and what refusals said."""

    def __init__(self) -> None:
        self.offered = self.acknowledged = self.refused = self.given_up = self.retried = 0
        self.codes: Counter[str] = Counter()
        self.unexplained: list[str] = []
        """Refusals without a reason, or that may pass and say not when."""
        self.waits: dict[Priority, Histogram] = {}

    @property
    def unsettled(self) -> int:
        """Offered, and nothing said."""
        return self.offered - self.acknowledged - self.refused - self.given_up

    @property
    def acks(self) -> Histogram:
        """How long all acknowledgements took."""
        whole = Histogram()
        for waits in self.waits.values():
            whole.merge(waits)
        return whole

    def note_acknowledged(self, count: int, took_s: float, priority: Priority) -> None:
        """So many are acknowledged, so long after they were offered first."""
        self.acknowledged += count
        waits = self.waits.get(priority)
        if waits is None:
            waits = self.waits[priority] = Histogram()
        waits.add(took_s, count)

    def note_refusal(self, count: int, refusal: Refused) -> None:
        """So many were refused, for now or for good."""
        self.codes[refusal.code.name] += count
        if (not refusal.message or (refusal.retryable and refusal.retry_after_ms is None)) and len(
            self.unexplained
        ) < CALLS_OPEN_MAX:
            self.unexplained.append(refusal.code.name)


class Offer(Receipt):
    """The receipt of one call, with what it was and when it was offered first."""

    __slots__ = ("count", "offered_s", "priority", "rows")

    def __init__(self, rows: Rows, count: int, priority: Priority, offered_s: float) -> None:
        super().__init__()
        self.rows, self.count, self.priority, self.offered_s = rows, count, priority, offered_s


class Source:
    """Offers what arrives, by calls of the service that have no name."""

    def __init__(self, spec: SourceSpec, maker: Maker, outcomes: Outcomes) -> None:
        self._spec, self._maker, self._outcomes = spec, maker, outcomes
        self._again: deque[Offer] = deque()
        self._again_s = inf
        self._open = 0
        self._chain: Chain
        self._now: Callable[[], float]

    async def run(self, p: Propagator, arrivals: Iterable[Arrival], ack_level: AckLevel) -> None:
        """Offer every arrival in its time, and what was refused again until all is settled."""
        inside = p.inside()
        self._chain, self._now = inside.chain, inside.now
        for arrival in arrivals:
            while self._again_s < arrival.at_s:
                await anyio.sleep_until(self._again_s)
                self._offer_again(ack_level)
            if arrival.at_s > self._now():
                await anyio.sleep_until(arrival.at_s)
            self._take(arrival, ack_level)
        while self._open:
            await anyio.sleep_until(min(self._again_s, self._now() + _LOOK_S))
            if self._again_s <= self._now():
                self._offer_again(ack_level)

    # --- within

    def _take(self, arrival: Arrival, ack_level: AckLevel) -> None:
        priority = self._spec.priority if arrival.recorded is None else arrival.recorded.priority
        offer = Offer(self._maker.make(arrival), arrival.deltas, priority, self._now())
        self._outcomes.offered += arrival.deltas
        self._open += 1
        if self._again:  # behind what came before it
            self._wait(offer, self._again_s)
        else:
            self._offer(offer, ack_level)

    def _offer(self, offer: Offer, ack_level: AckLevel) -> None:
        rows = offer.rows
        work: Ready | Draft
        if isinstance(rows, Template):
            work = Ready(rows, offer, offer.priority, ack_level)
        else:
            work = Draft(rows, offer, offer.priority, ack_level)
        self._chain.offer(work, self._now())
        offer.when_done(self._settled)

    def _settled(self, offer: Receipt) -> None:
        assert isinstance(offer, Offer)
        now, refusal, outcomes = self._now(), offer.refusal(), self._outcomes
        if refusal is None:
            self._open -= 1
            outcomes.note_acknowledged(offer.count, now - offer.offered_s, offer.priority)
            return
        outcomes.note_refusal(offer.count, refusal)
        if self._spec.retry and refusal.retry_after_ms is not None:
            self._wait(offer, now + max(refusal.retry_after_ms / 1000, RETRY_S_MIN))
        else:
            self._open -= 1
            outcomes.refused += offer.count

    def _wait(self, offer: Offer, until_s: float) -> None:
        if len(self._again) >= CALLS_OPEN_MAX:
            self._open -= 1
            self._outcomes.given_up += offer.count
            return
        self._again.append(offer)
        self._again_s = until_s

    def _offer_again(self, ack_level: AckLevel) -> None:
        """In their order, until one is refused."""
        waiting, self._again, self._again_s = self._again, deque(), inf
        while waiting and not self._again:
            one = waiting.popleft()
            self._outcomes.retried += one.count
            self._offer(Offer(one.rows, one.count, one.priority, one.offered_s), ack_level)
        self._again.extend(waiting)


class Writers:
    """Offers what arrives by named producers in turn, each of which goes on trying by itself."""

    def __init__(self, spec: SourceSpec, maker: Maker, outcomes: Outcomes) -> None:
        self._spec, self._maker, self._outcomes = spec, maker, outcomes
        self._open = 0

    async def run(self, p: Propagator, arrivals: Iterable[Arrival], ack_level: AckLevel) -> None:
        """Give every arrival in its time to the next producer; end when all have their outcome."""
        names = [f"{self._spec.name}-{number}" for number in range(self._spec.writers)]
        turns: Iterator[Producer] = cycle([p.producer(name, ack_level=ack_level) for name in names])
        async with anyio.create_task_group() as calls:
            for arrival in arrivals:
                await anyio.sleep_until(arrival.at_s)
                self._outcomes.offered += arrival.deltas
                self._take(calls, next(turns), arrival)

    def _take(self, calls: TaskGroup, producer: Producer, arrival: Arrival) -> None:
        if self._open >= CALLS_OPEN_MAX:
            self._outcomes.given_up += arrival.deltas
            return
        rows = self._maker.make(arrival)
        assert isinstance(rows, list)
        self._open += 1
        calls.start_soon(self._publish, producer, rows)

    async def _publish(self, producer: Producer, rows: list[Delta]) -> None:
        offered_s, outcomes = anyio.current_time(), self._outcomes
        try:
            await producer.publish(*rows)
        except Refused as refusal:
            outcomes.note_refusal(len(rows), refusal)
            outcomes.refused += len(rows)
        else:
            took_s = anyio.current_time() - offered_s
            outcomes.note_acknowledged(len(rows), took_s, self._spec.priority)
        finally:
            self._open -= 1
