"""The set-up of a subscriber over a socket, which reads at a fixed rate.

Service and subscriber share one event loop, so the entire path (framing, both ends of the socket, parsing) is
work of that loop. The subscriber's processing of a delta takes no CPU time: it waits, as for a call to
another service.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import anyio

from delta_prop.client import Subscriber
from delta_prop.embedded import Propagator
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing.network import VirtualNetwork
from delta_prop.testing.network_path import NetworkConditions
from delta_prop.testing.world import virtual_world
from delta_prop.world import real_world
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.calibration_file import CALL
from delta_prop_simulations.calibration.driving import RealRig, Rig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import BATCHES, batches, measure_machine
from delta_prop_simulations.calibration.rounds import SetUp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from delta_prop.ports import World
    from delta_prop_simulations.calibration.distributions import Samples
    from delta_prop_simulations.calibration.models import Draws
    from delta_prop_simulations.rng import Random

RATE_PER_S = 3_000.0
KEYS, DIMENSION = 5_000, 32
SIZES = {1: 20, 10: 20, 50: 15, 100: 15}
SENT = 10
AT_ONCE_S = 0.0002
"""A batch that comes this soon was there already, while a timer woke the reader late: the delay is made up.
"""
_CONDITIONS = NetworkConditions(latency_s=0.000_001)

_batches = partial(batches, keys=KEYS, dimension=DIMENSION)


class _Reader:
    """Reads batch after batch, each delta in its time. `pay`: called with the number of received deltas."""

    def __init__(
        self, subscriber: Subscriber, watch: Stopwatch, pay: Callable[[int], None] = lambda deltas: None
    ) -> None:
        self.rate_per_s = RATE_PER_S
        self._subscriber = subscriber
        self._watch = watch
        self._pay = pay

    async def run(self) -> None:
        """Read until cancelled."""
        now, free_at = self._watch.now, 0.0
        while True:
            asked_at = now()
            batch = await self._subscriber.next_batch()
            waited = now() - asked_at > AT_ONCE_S
            self._pay(batch.count)
            if waited:
                free_at = now()
            free_at += batch.count / self.rate_per_s
            if (left := free_at - now()) > 0:
                await anyio.sleep(left)
            self._watch.note_applied(batch.next_offset)


class SubscriberRig(RealRig):
    """The real set-up, open."""

    def __init__(self, propagator: Propagator, watch: Stopwatch, reader: _Reader) -> None:
        super().__init__(Source(propagator, cycle(_batches(SENT, BATCHES)), watch), watch)
        self._propagator = propagator
        self._reader = reader
        self._calls = {size: _batches(size, 20, name="calls") for size in SIZES}
        self._publishes = {size: cycle(_batches(size, 40)) for size in (1, SENT, 100)}

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Run one slice: measure the deltas' way to a reader that takes no time."""
        await anyio.sleep(0.1)
        self._reader.rate_per_s = 1e9
        for size, count in SIZES.items():
            for _ in range(count):
                samples.add(CALL, size, await self.call(self._propagator, random.choice(self._calls[size])))
        self._reader.rate_per_s = RATE_PER_S
        await measure_machine(samples, random, self._publishes)


@asynccontextmanager
async def _serve(
    world: World, read: World, settings: ServerSettings, reads: Callable[[Subscriber], _Reader]
) -> AsyncIterator[tuple[Propagator, _Reader]]:
    """Run a service, and a subscriber of it with its reader."""
    async with Propagator(world=world) as propagator, anyio.create_task_group() as tasks:
        address = await tasks.start(Service(propagator, settings).run)
        async with Subscriber(f"{address.host}:{address.port}", "*", world=read) as subscriber:
            reader = reads(subscriber)
            async with anyio.create_task_group() as reading:
                reading.start_soon(reader.run)
                yield propagator, reader
                reading.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[SubscriberRig]:
    """Open the set-up over a real socket of this machine; the log is in memory."""
    world, watch = real_world(), Stopwatch(system.now_s)
    settings = ServerSettings(port=0)
    async with _serve(world, world, settings, lambda one: _Reader(one, watch)) as (propagator, reader):
        yield SubscriberRig(propagator, watch, reader)


@asynccontextmanager
async def model(draws: Draws, now_s: Callable[[], float]) -> AsyncIterator[Rig]:
    """Open the set-up over a fake network without latency: the path's cost is drawn at its end."""
    watch = Stopwatch(now_s)
    network = VirtualNetwork(0, _CONDITIONS, host="service")
    world, read = virtual_world(network=network), virtual_world(network=network.at("reader"))
    settings = ServerSettings(host="service", allow_anonymous=True)
    reads = partial(_Reader, watch=watch, pay=partial(draws.compute, CALL))
    async with _serve(world, read, settings, reads) as (propagator, _):
        yield Rig(Source(propagator, cycle(_batches(SENT, BATCHES)), watch, draws.pay), watch)


SET_UP = SetUp(
    "subscriber",
    f"a subscriber over a socket that reads {RATE_PER_S:,.0f} deltas per second; {SENT} per publish",
    sent=SENT,
    unapplied_max=1_000,
    share=0.6,
    settle_s=0.5,
    real=real,
    model=model,
)
