"""The set-up of a subscriber that reads over a socket at a fixed rate.

Service and subscriber share one event loop, so that loop does all the work: framing, both ends of the socket,
parsing. The subscriber's processing of a delta takes no CPU time: it only waits, as if it called another
service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop.client import Subscriber
from delta_prop.platform.ports import Timer, World
from delta_prop.platform.world import real_world
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing.network import VirtualNetwork
from delta_prop.testing.network_path import NetworkConditions
from delta_prop.testing.world import virtual_world
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.calibration_file import CALL
from delta_prop_simulations.calibration.distributions import Samples
from delta_prop_simulations.calibration.driving import RealRig, Rig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import BATCHES, batches, measure_machine
from delta_prop_simulations.calibration.models import Draws
from delta_prop_simulations.calibration.rounds import SetUp
from delta_prop_simulations.rng import Random

RATE_PER_S = 3_000.0
KEYS, DIMENSION = 5_000, 32
"""Number of vectors, and of numbers per vector."""
CALLS_BY_SIZE = {1: 20, 10: 20, 50: 15, 100: 15}
"""For each number of deltas per call, the number of calls in one slice of calibration."""
DELTAS_PER_PUBLISH = 10
NO_WAIT_S_MAX = 0.0002
"""A batch that comes this quickly arrived earlier; the reader, whose timer was late, makes up for that."""
_CONDITIONS = NetworkConditions(latency_s=0.000_001)

_batches = partial(batches, keys=KEYS, dimension=DIMENSION)


class _Reader:
    """Reads batches, and waits `1 / rate_per_s` seconds per delta. `draws`: those of a model, if any."""

    def __init__(self, subscriber: Subscriber, watch: Stopwatch, draws: Draws | None = None) -> None:
        self.rate_per_s = RATE_PER_S
        self._subscriber = subscriber
        self._watch = watch
        self._draws = draws

    async def run(self) -> None:
        now, free_at = self._watch.now, 0.0
        while True:
            called_at = now()
            batch = await self._subscriber.next_batch()
            has_waited = now() - called_at > NO_WAIT_S_MAX
            if self._draws is not None:
                self._draws.compute(CALL, batch.count)
            if has_waited:
                free_at = now()
            free_at += batch.count / self.rate_per_s
            if (wait_s := free_at - now()) > 0:
                await anyio.sleep(wait_s)
            self._watch.note_applied(batch.next_offset)


class SubscriberRig(RealRig):
    """The set-up over a real socket, while it is open."""

    def __init__(self, propagator: Propagator, watch: Stopwatch, reader: _Reader) -> None:
        super().__init__(Source(propagator, cycle(_batches(DELTAS_PER_PUBLISH, BATCHES)), watch), watch)
        self._propagator = propagator
        self._reader = reader
        self._calls = {size: _batches(size, 20, name="calls") for size in CALLS_BY_SIZE}
        self._publishes = {size: cycle(_batches(size, 40)) for size in (1, DELTAS_PER_PUBLISH, 100)}

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Run one slice: measure how long deltas take to a reader that needs no time itself."""
        await anyio.sleep(0.1)
        self._reader.rate_per_s = 1e9
        for size, count in CALLS_BY_SIZE.items():
            for _ in range(count):
                samples.add(CALL, size, await self.call(self._propagator, random.choice(self._calls[size])))
        self._reader.rate_per_s = RATE_PER_S
        await measure_machine(samples, random, self._publishes)


@asynccontextmanager
async def _serve(
    world: World, reader_world: World, settings: ServerSettings, make_reader: Callable[[Subscriber], _Reader]
) -> AsyncIterator[tuple[Propagator, _Reader]]:
    """Run a service and a reader that subscribes to it; yield the propagator and the reader."""
    async with Propagator(world=world) as propagator, anyio.create_task_group() as tasks:
        address = await tasks.start(Service(propagator, settings).run)
        async with Subscriber(f"{address.host}:{address.port}", "*", world=reader_world) as subscriber:
            reader = make_reader(subscriber)
            async with anyio.create_task_group() as reading:
                reading.start_soon(reader.run)
                yield propagator, reader
                reading.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[SubscriberRig]:
    """Open the set-up over a real socket; the log is in memory, so `folder` is not used."""
    world, watch = real_world(), Stopwatch(system.PreciseTimer())
    settings = ServerSettings(port=0)
    async with _serve(world, world, settings, lambda subscriber: _Reader(subscriber, watch)) as (
        propagator,
        reader,
    ):
        yield SubscriberRig(propagator, watch, reader)


@asynccontextmanager
async def model(draws: Draws, timer: Timer) -> AsyncIterator[Rig]:
    """Open the model over a fake network without latency; a batch's arrival draws the cost of the path."""
    watch = Stopwatch(timer)
    network = VirtualNetwork(0, _CONDITIONS, host="service")
    world, reader_world = virtual_world(network=network), virtual_world(network=network.at("reader"))
    settings = ServerSettings(host="service", allow_anonymous=True)
    make_reader = partial(_Reader, watch=watch, draws=draws)
    async with _serve(world, reader_world, settings, make_reader) as (propagator, _):
        yield Rig(Source(propagator, cycle(_batches(DELTAS_PER_PUBLISH, BATCHES)), watch, draws), watch)


SET_UP = SetUp(
    "subscriber",
    f"a subscriber over a socket that reads {RATE_PER_S:,.0f} deltas per second; "
    f"{DELTAS_PER_PUBLISH} per publish",
    deltas_per_publish=DELTAS_PER_PUBLISH,
    unapplied_max=1_000,
    peak_share=0.6,
    settle_s=0.5,
    real=real,
    model=model,
)
