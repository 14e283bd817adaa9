"""Sources that are clients: named producers on hosts of their own, which publish over the network.

Each goes on trying by itself, through lost connections and restarts; what it was told is kept for the end.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

import anyio

from delta_prop import AckLevel
from delta_prop.client import ClientSettings, Producer
from delta_prop_simulations.laboratory.deltas import Maker
from delta_prop_simulations.laboratory.offering import CALLS_OPEN_MAX
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from anyio.abc import TaskGroup

    from delta_prop.ports import World
    from delta_prop.published import Published
    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.laboratory.offering import Outcomes
    from delta_prop_simulations.laboratory.scenario import SourceSpec
    from delta_prop_simulations.laboratory.sources import Arrival
    from delta_prop_wire.delta import Delta

PATIENCE_S = 86_000.0
"""How long a source tries that does not give up."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Rows that a service has said to stand in its log from an offset on. `producer`: whose they are."""

    producer: str
    offset: int
    count: int


class Client:
    """One source with its producers. `acknowledged`: all that they were told stands in the log."""

    def __init__(
        self, spec: SourceSpec, random: Random, outcomes: Outcomes, on_ack: Callable[[], None]
    ) -> None:
        # Named producers take deltas one by one, as a source with writers makes them.
        self._spec = replace(spec, writers=max(spec.writers, 1))
        self._maker = Maker(
            self._spec, random, AckLevel.DURABLE if spec.ack_level is None else spec.ack_level
        )
        self._outcomes = outcomes
        self._on_ack = on_ack
        self.acknowledged: list[Acknowledged] = []
        self.failures: list[str] = []
        self.reconnects = 0
        self.open_calls = 0

    async def run(
        self, world: World, address: str, arrivals: Iterable[Arrival], level: AckLevel | None
    ) -> None:
        """Publish every arrival in its time; end when all have their outcome."""
        spec = self._spec
        patient = ClientSettings(
            open_s_max=PATIENCE_S,
            offline_s_max=PATIENCE_S,
            delivery_s_max=PATIENCE_S,
            publish_s_max=PATIENCE_S,
        )
        settings = patient if spec.retry else ClientSettings()
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

    async def _publish_all(self, arrivals: Iterable[Arrival], turns: Iterator[Producer]) -> None:
        async with anyio.create_task_group() as calls:
            for arrival in arrivals:
                await anyio.sleep_until(arrival.at_s)
                self._outcomes.offered += arrival.deltas
                self._begin(calls, next(turns), arrival)

    def _begin(self, calls: TaskGroup, producer: Producer, arrival: Arrival) -> None:
        if self.open_calls >= CALLS_OPEN_MAX:
            self._outcomes.given_up += arrival.deltas
            return
        rows = self._maker.make(arrival)
        assert isinstance(rows, list), "who has writers makes deltas"
        self.open_calls += 1
        calls.start_soon(self._publish, producer, rows, arrival.at_s)

    async def _publish(self, producer: Producer, rows: list[Delta], at_s: float) -> None:
        outcomes = self._outcomes
        try:
            published = await producer.publish(*rows)
        except Refused as refusal:
            outcomes.note_refusal(len(rows), refusal)
            outcomes.refused += len(rows)
        except (TimeoutError, UsageError) as failure:  # the client has ended, or its patience has
            self.failures.append(str(failure))
            outcomes.given_up += len(rows)
        else:
            outcomes.note_acknowledged(len(rows), anyio.current_time() - at_s, rows[0].priority)
            self._keep(producer.name, published)
            self._on_ack()
        finally:
            self.open_calls -= 1

    def _keep(self, name: str, published: Published) -> None:
        if not published.duplicates and published.offset is not None:
            self.acknowledged.append(Acknowledged(name, published.offset, published.count))
            return
        for offset, _, _ in published.places():
            if offset is not None:
                self.acknowledged.append(Acknowledged(name, offset, 1))
