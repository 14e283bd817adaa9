"""A node that serves streams: the run's work is in one partition, beside others that get rows, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from delta_prop.hosting.streams import Streams
from delta_prop_simulations.chaos.plan import PARTITIONS_MAX
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from delta_prop import LogSettings, Propagator, Settings
    from delta_prop.platform.ports import World
    from delta_prop_simulations.rng import Random

STREAM = "work"
_PAUSE_S_MAX = 1.5
_RETENTIONS_S = (1e6, 2e6)


@asynccontextmanager
async def serve_partition(
    number: int, settings: Settings, log: LogSettings, world: World, rng: Random
) -> AsyncIterator[tuple[Propagator, Streams]]:
    """Open the streams of the machine's disk; yield the propagator of a partition, and the streams."""
    async with Streams(settings, data="data", log=log, world=world) as streams:
        await streams.create(STREAM, PARTITIONS_MAX, if_not_exists=True)
        propagator = await streams.open(STREAM, number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_disturb, streams, number, rng)
            yield propagator, streams
            tasks.cancel_scope.cancel()


async def _disturb(streams: Streams, number: int, rng: Random) -> None:
    """Use the other partitions and the catalogue, until cancelled; whatever fails is tried again."""
    others = [other for other in range(PARTITIONS_MAX) if other != number]
    count = 0
    while True:
        await anyio.sleep(rng.uniform(0.05, _PAUSE_S_MAX))
        count += 1
        with suppress(Refused, UsageError, OSError):
            action = rng.random()
            if action < 0.7:
                p = await streams.open_partition(streams.catalogue.require(STREAM), rng.choice(others))
                p.offer(Delta(f"n{count % 7}", opaque(b"%d" % count)))
            elif action < 0.8:
                await streams.alter(STREAM, {"retention_s": rng.choice(_RETENTIONS_S)})
            elif action < 0.9:
                await streams.create("passing", 2, if_not_exists=True)
            else:
                await streams.delete("passing")
