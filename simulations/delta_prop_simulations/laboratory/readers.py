"""Readers over the network: shipped subscribers on hosts of their own, each a member of a group.

They take their time for what comes, acknowledge it, and keep which deltas they were shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.client import ClientSettings, Subscriber
from delta_prop_simulations.laboratory.agreement import Shown
from delta_prop_simulations.laboratory.clients import PATIENCE_S
from delta_prop_simulations.laboratory.measures import Histogram
from delta_prop_simulations.laboratory.sinks import SOON_S
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.client.delivered import DeliveredBatch
    from delta_prop.ports import World
    from delta_prop_simulations.laboratory.measures import Stamps
    from delta_prop_simulations.laboratory.topology import ReaderSpec

PATIENT = ClientSettings(open_s_max=PATIENCE_S, offline_s_max=PATIENCE_S)
_QUIET_S = 0.5
"""When nothing has come for so long, what has come is all."""


class Reader:
    """One of them. `shown`: every delta that it got, in order; `failure`: why it was sent away."""

    def __init__(self, spec: ReaderSpec, stamps: Stamps) -> None:
        """`stamps`: when each offset could be read at its service."""
        self.spec = spec
        self.lag = Histogram()
        self.shown: list[Shown] = []
        self.rows = self.soon = self.out_of_order = self.reconnects = 0
        self.next_offset = 0
        """Everything below it came, or is none of its business."""
        self.failure: str | None = None
        self._stamps = stamps

    async def run(self, world: World, address: str) -> None:
        """Read until cancelled, or sent away."""
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
                settings=PATIENT,
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
            self._note(batch)
            subscriber.ack(batch.next_offset - 1)

    async def _take_time(self, deltas: int) -> None:
        spec, now = self.spec, anyio.current_time()
        for stall in spec.stall:
            if stall.begin <= now < stall.begin + stall.lasts:
                await anyio.sleep_until(stall.begin + stall.lasts)
        await anyio.sleep(spec.per_call_ms / 1e3 + deltas * spec.per_delta_us / 1e6)

    def _note(self, batch: DeliveredBatch) -> None:
        whole = batch.batch
        assert whole is not None, "it asks for batches"
        self.out_of_order += batch.offset < self.next_offset
        self.next_offset = batch.next_offset
        self.shown += [
            Shown(batch.offset_of(row), whole.origin, whole.counter(batch.first + row))
            for row in range(batch.count)
        ]
        self.rows += batch.count
        given = self._stamps.at(batch.offset)
        lag_s = 0.0 if given is None else max(anyio.current_time() - given, 0.0)
        self.lag.add(lag_s, batch.count)
        if lag_s <= SOON_S:
            self.soon += batch.count
