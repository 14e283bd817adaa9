"""Readers over the network: subscribers of the package, each on a host of its own and with a group of its
own.

A reader takes time for each batch, acknowledges it, and records its deltas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.client import ClientSettings, Subscriber
from delta_prop_simulations.scenarios.agreement import DeliveredDelta
from delta_prop_simulations.scenarios.clients import PATIENCE_S
from delta_prop_simulations.scenarios.measures import Histogram
from delta_prop_simulations.scenarios.sinks import LAG_S_MAX
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.client.delivered_batch import DeliveredBatch
    from delta_prop.platform.ports import World
    from delta_prop_simulations.scenarios.measures import OffsetTimes
    from delta_prop_simulations.scenarios.topology import ReaderSpec

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
        self.row_count = self.within_1s = 0
        """Numbers of rows that the reader got, and that it got within `LAG_S_MAX` after they became visible.
        """
        self.out_of_order = 0
        """The number of batches that came out of the log's order."""
        self.reconnects = 0
        self.next_offset = 0
        """All rows below this offset were delivered, or do not match the topics."""
        self.failure: str | None = None
        self._offset_times = offset_times

    async def run(self, world: World, address: str) -> None:
        """Read until cancelled or refused."""
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
        self.row_count += batch.count
        visible_at = self._offset_times.at(batch.offset)
        lag_s = 0.0 if visible_at is None else max(anyio.current_time() - visible_at, 0.0)
        self.lag.add(lag_s, batch.count)
        if lag_s <= LAG_S_MAX:
            self.within_1s += batch.count
