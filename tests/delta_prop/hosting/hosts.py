"""Streams on a simulated disk, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from delta_prop.hosting.streams import Streams
from delta_prop.testing import virtual_world
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import Delta, opaque
from tests.full_log import read_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delta_prop.api.propagator import Propagator
    from delta_prop_simulations.disk import SimDisk

NO_RESERVE = LogSettings(free_bytes_min=0, reserve_bytes=0)


@asynccontextmanager
async def hosting(
    disk: SimDisk, seed: int = 1, log: LogSettings = NO_RESERVE, **more: Any
) -> AsyncIterator[Streams]:
    async with Streams(data="data", log=log, world=virtual_world(seed, disk=disk), **more) as streams:
        yield streams


async def publish(p: Propagator, *keys: str) -> None:
    await p.publish(*(Delta(key, opaque(key.encode())) for key in keys))


def keys_in(p: Propagator) -> list[str]:
    """Return the vector ids in the log of a partition, in order."""
    batches = read_all(p.internals().partition.log)
    return [key for one in batches if not one.batch.is_control for key in one.batch.keys]
