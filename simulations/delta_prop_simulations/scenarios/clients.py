"""Sources and readers as clients: each is a host of its own, which publishes or reads over the network.

Producers and subscribers reconnect and retry by themselves; a client stores the acknowledgements, a reader
the deltas that it got.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from delta_prop import AckLevel
from delta_prop.calls.outcomes import PublishAck
from delta_prop.client import ClientSettings, Producer, Subscriber
from delta_prop.platform.ports import World
from delta_prop_simulations.scenarios.agreement import DeliveredDelta
from delta_prop_simulations.scenarios.measures import Histogram, OffsetTimes
from delta_prop_simulations.scenarios.offering import Outcomes, Publisher
from delta_prop_simulations.scenarios.scenario import ReaderSpec, SourceSpec
from delta_prop_simulations.scenarios.sources import Arrival, DeltaGenerator
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from delta_prop.client.delivered_batch import DeliveredBatch
    from delta_prop.testing.virtual_streams import Broadcast
    from delta_prop_simulations.rng import Random

PATIENCE_S = 86_000.0
"""The timeout of a source that retries: longer than any run."""


@dataclass(frozen=True, slots=True)
class AckedRows:
    """`count` rows of one producer that a service acknowledged, from `offset` on."""

    producer: str
    offset: int
    count: int


class Client(Publisher):
    """One source. `acknowledged`: the rows acknowledged to it; `acks`: notified of each of these."""

    lost_errors = (TimeoutError, UsageError)  # the call timed out, or the client has ended

    def __init__(self, spec: SourceSpec, random: Random, outcomes: Outcomes, acks: Broadcast) -> None:
        # Producers need Delta objects, not templates; the generator makes these for a source with writers.
        spec = replace(spec, writers=max(spec.writers, 1))
        level = AckLevel.DURABLE if spec.ack_level is None else spec.ack_level
        super().__init__(spec, DeltaGenerator(spec, random, level), outcomes)
        self._acks = acks
        self.acknowledged: list[AckedRows] = []
        self.reconnects = 0

    async def run(
        self, world: World, address: str, arrivals: Iterable[Arrival], level: AckLevel | None
    ) -> None:
        """Publish every arrival at its time; return when all have their outcome."""
        without_timeouts = ClientSettings(
            open_timeout_s=PATIENCE_S,
            reconnect_timeout_s=PATIENCE_S,
            delivery_timeout_s=PATIENCE_S,
            publish_timeout_s=PATIENCE_S,
        )
        settings = without_timeouts if self._spec.retry else ClientSettings()
        async with AsyncExitStack() as exits:
            producers = [
                Producer(address, name=name, ack_level=level, settings=settings, world=world)
                for name in self.names()
            ]
            for producer in producers:
                await exits.enter_async_context(producer)
            await self.publish_all(arrivals, producers)
            self.reconnects = sum(producer.reconnects for producer in producers)

    def note_ack(self, name: str, publish_ack: PublishAck) -> None:
        """Store the acknowledged rows, and notify of them."""
        if not publish_ack.duplicates and publish_ack.offset is not None:
            self.acknowledged.append(AckedRows(name, publish_ack.offset, publish_ack.count))
        else:
            offsets = [offset for offset, _, _ in publish_ack.row_acks() if offset is not None]
            self.acknowledged += [AckedRows(name, offset, 1) for offset in offsets]
        self._acks.notify()


CLIENT = ClientSettings(open_timeout_s=PATIENCE_S, reconnect_timeout_s=PATIENCE_S)
_QUIET_S = 0.5
"""If nothing arrives for this time, the reader is at the end of what it has received."""


class Reader:
    """One reader. `delivered`: all deltas that it got, in order; `failure`: the refusal that ended it."""

    def __init__(self, spec: ReaderSpec, offset_times: OffsetTimes) -> None:
        """`offset_times`: the times at which offsets became visible at the service."""
        self.spec = spec
        self.lag = Histogram()
        self.delivered: list[DeliveredDelta] = []
        self.out_of_order = 0
        """The number of batches that came out of the log's order."""
        self.reconnects = 0
        self.next_offset = 0
        """All rows below this offset were delivered, or do not match the topics."""
        self.failure: str | None = None
        self._offset_times = offset_times

    async def run(self, world: World, address: str) -> None:
        spec = self.spec
        await anyio.sleep_until(spec.begin)
        try:
            async with Subscriber(
                address,
                *spec.topics,
                start="earliest",
                group=spec.name,
                ack="manual",
                name=spec.name,
                settings=CLIENT,
                world=world,
            ) as subscriber:
                await self._read(subscriber)
        except Refused as refusal:
            self.failure = str(refusal)

    async def _read(self, subscriber: Subscriber) -> None:
        while True:
            batch: DeliveredBatch | None = None
            with anyio.move_on_after(_QUIET_S):
                batch = await subscriber.next_batch()
            self.reconnects = subscriber.reconnects
            if batch is None:
                self.next_offset = max(self.next_offset, subscriber.received)
                continue
            await self._take_time(batch.count)
            self._note_batch(batch)
            subscriber.ack(batch.next_offset - 1)

    async def _take_time(self, delta_count: int) -> None:
        spec, now = self.spec, anyio.current_time()
        for stall in spec.stall:
            if stall.begin <= now < stall.begin + stall.lasts:
                await anyio.sleep_until(stall.begin + stall.lasts)
        await anyio.sleep(spec.per_call_ms / 1e3 + delta_count * spec.per_delta_us / 1e6)

    def _note_batch(self, batch: DeliveredBatch) -> None:
        source = batch.batch
        assert source is not None, "the reader subscribes to batches"
        self.out_of_order += batch.offset < self.next_offset
        self.next_offset = batch.next_offset
        self.delivered += [
            DeliveredDelta(batch.offset_of(row), source.origin, source.counter(batch.first + row))
            for row in range(batch.count)
        ]
        visible_at = self._offset_times.at(batch.offset)
        lag_s = 0.0 if visible_at is None else max(anyio.current_time() - visible_at, 0.0)
        self.lag.add(lag_s, batch.count)
