"""Sources as clients: each is a host of its own, whose named producers publish over the network.

Producers reconnect and retry by themselves; the client stores the acknowledgements.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

import anyio

from delta_prop import AckLevel
from delta_prop.client import ClientSettings, Producer
from delta_prop_simulations.scenarios.deltas import DeltaGenerator
from delta_prop_simulations.scenarios.offering import CALLS_IN_FLIGHT_MAX
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anyio.abc import TaskGroup

    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.platform.ports import World
    from delta_prop.testing.virtual_streams import Broadcast
    from delta_prop_simulations.rng import Random
    from delta_prop_simulations.scenarios.offering import Outcomes
    from delta_prop_simulations.scenarios.scenario import SourceSpec
    from delta_prop_simulations.scenarios.sources import Arrival
    from delta_prop_wire.delta import Delta

PATIENCE_S = 86_000.0
"""The timeout of a source that retries: longer than any run."""


@dataclass(frozen=True, slots=True)
class AckedRows:
    """`count` rows of one producer that a service acknowledged, from `offset` on."""

    producer: str
    offset: int
    count: int


class Client:
    """One source with its producers. `acknowledged`: all rows that the service acknowledged to them.
    `acks`: notified of each acknowledgement.
    """

    def __init__(self, spec: SourceSpec, random: Random, outcomes: Outcomes, acks: Broadcast) -> None:
        # The producers need Delta objects, not templates; the generator makes these for a source with
        # writers.
        self._spec = replace(spec, writers=max(spec.writers, 1))
        self._generator = DeltaGenerator(
            self._spec, random, AckLevel.DURABLE if spec.ack_level is None else spec.ack_level
        )
        self._outcomes = outcomes
        self._acks = acks
        self.acknowledged: list[AckedRows] = []
        self.reconnects = 0
        self.in_flight_calls = 0

    async def run(
        self, world: World, address: str, arrivals: Iterable[Arrival], level: AckLevel | None
    ) -> None:
        """Publish every arrival at its time; return when all have their outcome."""
        spec = self._spec
        without_timeouts = ClientSettings(
            open_timeout_s=PATIENCE_S,
            reconnect_timeout_s=PATIENCE_S,
            delivery_timeout_s=PATIENCE_S,
            publish_timeout_s=PATIENCE_S,
        )
        settings = without_timeouts if spec.retry else ClientSettings()
        names = [f"{spec.name}-{number}" for number in range(spec.writers)]
        async with AsyncExitStack() as exits:
            producers = [
                Producer(address, name=name, ack_level=level, settings=settings, world=world)
                for name in names
            ]
            for producer in producers:
                await exits.enter_async_context(producer)
            await self._publish_all(arrivals, cycle(producers))
            self.reconnects = sum(producer.reconnects for producer in producers)

    async def _publish_all(self, arrivals: Iterable[Arrival], producers: Iterator[Producer]) -> None:
        async with anyio.create_task_group() as calls:
            for arrival in arrivals:
                await anyio.sleep_until(arrival.at_s)
                self._outcomes.offered += arrival.deltas
                self._start_publish(calls, next(producers), arrival)

    def _start_publish(self, calls: TaskGroup, producer: Producer, arrival: Arrival) -> None:
        if self.in_flight_calls >= CALLS_IN_FLIGHT_MAX:
            self._outcomes.dropped += arrival.deltas
            return
        rows = self._generator.make(arrival)
        assert isinstance(rows, list), "a source with writers generates deltas"
        self.in_flight_calls += 1
        calls.start_soon(self._publish, producer, rows, arrival.at_s)

    async def _publish(self, producer: Producer, rows: list[Delta], at_s: float) -> None:
        outcomes = self._outcomes
        try:
            publish_ack = await producer.publish(*rows)
        except Refused as refusal:
            outcomes.note_refusal(len(rows), refusal)
            outcomes.refused += len(rows)
        except (TimeoutError, UsageError):  # the call timed out, or the client has ended
            outcomes.dropped += len(rows)
        else:
            outcomes.note_acknowledged(len(rows), anyio.current_time() - at_s, rows[0].priority)
            self._note_ack(producer.name, publish_ack)
            self._acks.notify()
        finally:
            self.in_flight_calls -= 1

    def _note_ack(self, name: str, publish_ack: PublishAck) -> None:
        if not publish_ack.duplicates and publish_ack.offset is not None:
            self.acknowledged.append(AckedRows(name, publish_ack.offset, publish_ack.count))
            return
        for offset, _, _ in publish_ack.row_acks():
            if offset is not None:
                self.acknowledged.append(AckedRows(name, offset, 1))
