"""Offers a source's deltas at their times, even if the service is full, and records their outcomes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import cycle
from math import inf
from typing import Any

import anyio

from delta_prop import Propagator
from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Draft
from delta_prop.partition.pipeline import Pipeline
from delta_prop_simulations.scenarios.measures import Histogram
from delta_prop_simulations.scenarios.scenario import SourceSpec
from delta_prop_simulations.scenarios.sources import Arrival, DeltaGenerator, EncodedDraft, Rows, Template
from delta_prop_wire.delta import AckLevel, Delta, Priority
from delta_prop_wire.errors import Refused

CALLS_IN_FLIGHT_MAX = 10_000
"""Maximum number of one source's calls that wait for a retry or an outcome; further calls are dropped."""
RETRY_S_MIN = 0.001
_POLL_S = 0.1


class Outcomes:
    """The outcomes of all offered deltas, and the codes of refusals."""

    def __init__(self) -> None:
        self.offered = self.acknowledged = self.refused = self.dropped = self.retried = 0
        """Numbers of deltas."""
        self.codes: Counter[str] = Counter()
        self.unexplained: list[str] = []
        """The codes of refusals without a reason, and of retryable refusals without a delay."""
        self.ack_times: dict[Priority, Histogram] = {}

    @property
    def unsettled(self) -> int:
        """The number of offered deltas without an outcome."""
        return self.offered - self.acknowledged - self.refused - self.dropped

    @property
    def acks(self) -> Histogram:
        """The times from first offer to acknowledgement, of all priorities."""
        total = Histogram()
        for times in self.ack_times.values():
            total.merge(times)
        return total

    def note_acknowledged(self, count: int, ack_s: float, priority: Priority) -> None:
        """Note `count` acknowledged deltas, and the time since their first offer."""
        self.acknowledged += count
        times = self.ack_times.get(priority)
        if times is None:
            times = self.ack_times[priority] = Histogram()
        times.add(ack_s, count)

    def note_refusal(self, count: int, refusal: Refused) -> None:
        """Note a refusal of `count` deltas, final or retryable."""
        self.codes[refusal.code.name] += count
        if (not refusal.message or (refusal.retryable and refusal.retry_after_ms is None)) and len(
            self.unexplained
        ) < CALLS_IN_FLIGHT_MAX:
            self.unexplained.append(refusal.code.name)


class Offer(Receipt):
    """The receipt of one call, with its deltas and the time of its first offer."""

    __slots__ = ("count", "offered_at_s", "priority", "rows")

    def __init__(self, rows: Rows, count: int, priority: Priority, offered_at_s: float) -> None:
        super().__init__()
        self.rows, self.count, self.priority, self.offered_at_s = rows, count, priority, offered_at_s


class Source:
    """Offers arrivals in calls without a named producer."""

    def __init__(self, spec: SourceSpec, generator: DeltaGenerator, outcomes: Outcomes) -> None:
        self._spec, self._generator, self._outcomes = spec, generator, outcomes
        self._retries: deque[Offer] = deque()
        self._retry_at_s = inf
        self._open_call_count = 0
        self._pipeline: Pipeline
        self._now: Callable[[], float]

    async def run(self, propagator: Propagator, arrivals: Iterable[Arrival], ack_level: AckLevel) -> None:
        """Offer every arrival at its time, and retry refused ones until all are settled."""
        internals = propagator.internals()
        self._pipeline, self._now = internals.partition.pipeline, internals.partition.world.clock.now
        for arrival in arrivals:
            while self._retry_at_s < arrival.at_s:
                await anyio.sleep_until(self._retry_at_s)
                self._retry(ack_level)
            if arrival.at_s > self._now():
                await anyio.sleep_until(arrival.at_s)
            self._start_offer(arrival, ack_level)
        while self._open_call_count:
            await anyio.sleep_until(min(self._retry_at_s, self._now() + _POLL_S))
            if self._retry_at_s <= self._now():
                self._retry(ack_level)

    def _start_offer(self, arrival: Arrival, ack_level: AckLevel) -> None:
        priority = self._spec.priority if arrival.recorded is None else arrival.recorded.priority
        offer = Offer(self._generator.make(arrival), arrival.deltas, priority, self._now())
        self._outcomes.offered += arrival.deltas
        self._open_call_count += 1
        if self._retries:  # calls stay in order, so this one follows those that wait for a retry
            self._queue_retry(offer, self._retry_at_s)
        else:
            self._offer(offer, ack_level)

    def _offer(self, offer: Offer, ack_level: AckLevel) -> None:
        rows = offer.rows
        work: EncodedDraft | Draft
        if isinstance(rows, Template):
            work = EncodedDraft(rows, offer, offer.priority, ack_level)
        else:
            work = Draft(rows, offer, offer.priority, ack_level)
        self._pipeline.offer(work, self._now())
        offer.add_done_callback(self._note_outcome)

    def _note_outcome(self, offer: Receipt) -> None:
        assert isinstance(offer, Offer)
        now, refusal, outcomes = self._now(), offer.refusal(), self._outcomes
        if refusal is None:
            self._open_call_count -= 1
            outcomes.note_acknowledged(offer.count, now - offer.offered_at_s, offer.priority)
            return
        outcomes.note_refusal(offer.count, refusal)
        if self._spec.retry and refusal.retry_after_ms is not None:
            self._queue_retry(offer, now + max(refusal.retry_after_ms / 1000, RETRY_S_MIN))
        else:
            self._open_call_count -= 1
            outcomes.refused += offer.count

    def _queue_retry(self, offer: Offer, until_s: float) -> None:
        if len(self._retries) >= CALLS_IN_FLIGHT_MAX:
            self._open_call_count -= 1
            self._outcomes.dropped += offer.count
            return
        self._retries.append(offer)
        self._retry_at_s = until_s

    def _retry(self, ack_level: AckLevel) -> None:
        """Retry the refused calls in order, until one is refused again."""
        waiting, self._retries, self._retry_at_s = self._retries, deque(), inf
        while waiting and not self._retries:
            offer = waiting.popleft()
            self._outcomes.retried += offer.count
            self._offer(Offer(offer.rows, offer.count, offer.priority, offer.offered_at_s), ack_level)
        self._retries.extend(waiting)


class Publisher:
    """Publishes arrivals by producers, in turn; each producer retries by itself."""

    lost_errors: tuple[type[Exception], ...] = ()
    """Errors of a call that is lost, such as one that timed out."""

    def __init__(self, spec: SourceSpec, generator: DeltaGenerator, outcomes: Outcomes) -> None:
        self._spec, self._generator, self._outcomes = spec, generator, outcomes
        self.in_flight_calls = 0

    def names(self) -> list[str]:
        """Return the names of the producers."""
        return [f"{self._spec.name}-{number}" for number in range(self._spec.writers)]

    async def publish_all(self, arrivals: Iterable[Arrival], producers: Iterable[Any]) -> None:
        """Publish every arrival at its time, by the next producer; return when all calls have an outcome."""
        turns = cycle(producers)
        async with anyio.create_task_group() as calls:
            for arrival in arrivals:
                await anyio.sleep_until(arrival.at_s)
                self._outcomes.offered += arrival.deltas
                producer = next(turns)
                if self.in_flight_calls >= CALLS_IN_FLIGHT_MAX:
                    self._outcomes.dropped += arrival.deltas
                    continue
                rows = self._generator.make(arrival)
                assert isinstance(rows, list), "a source with writers generates deltas"
                self.in_flight_calls += 1
                calls.start_soon(self._publish, producer, rows, arrival.at_s)

    async def _publish(self, producer: Any, rows: list[Delta], at_s: float) -> None:
        outcomes = self._outcomes
        try:
            publish_ack = await producer.publish(*rows)
        except Refused as refusal:
            outcomes.note_refusal(len(rows), refusal)
            outcomes.refused += len(rows)
        except self.lost_errors:
            outcomes.dropped += len(rows)
        else:
            outcomes.note_acknowledged(len(rows), anyio.current_time() - at_s, rows[0].priority)
            self.note_ack(producer.name, publish_ack)
        finally:
            self.in_flight_calls -= 1

    def note_ack(self, name: str, publish_ack: PublishAck) -> None:
        """Called for each acknowledgement."""


class Writers(Publisher):
    """Publishes by producers in the process of the service."""

    async def run(self, propagator: Propagator, arrivals: Iterable[Arrival], ack_level: AckLevel) -> None:
        """Publish every arrival at its time; return when all calls have an outcome."""
        producers = [propagator.producer(name, ack_level=ack_level) for name in self.names()]
        await self.publish_all(arrivals, producers)

    async def _publish(self, producer: Any, rows: list[Delta], at_s: float) -> None:
        """Publish, and measure from the start of the call, not from the arrival."""
        await super()._publish(producer, rows, anyio.current_time())
