"""A fake world for virtual time: the loop's clock, randomness from a seed, threads run inline.

Nothing here waits in real time, so an hour takes milliseconds, and a run is repeatable.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from delta_prop.platform.ports import Network, World
from delta_prop_broker.disk import Disk
from delta_prop_wire.errors import UsageError

T = TypeVar("T")

EPOCH_US = 1_600_000_000_000_000
"""Wall clock at the start of virtual time."""


def virtual_world(
    seed: int = 0,
    *,
    thread_delay_s_max: float = 0.0,
    disk: Disk | None = None,
    network: Network | None = None,
) -> World:
    """Return all ports of one run; the same seed gives the same run. Call it inside `run_virtual`.

    `thread_delay_s_max`: calls on a thread take a virtual time drawn from 0 to this. `disk`: the disk of all
    directories; `network`: a `VirtualNetwork`, as the host of this world sees it. Without these
    arguments, the world has no disk and no network.
    """
    delays = random.Random(f"threads {seed}")

    def new_thread() -> InlineThread:
        return InlineThread(delays, thread_delay_s_max)

    @asynccontextmanager
    async def background_thread() -> AsyncIterator[InlineThread]:
        yield new_thread()

    def open_disk(path: str) -> Disk:
        if disk is None:
            raise UsageError(f"{path}: this world has no disk: give virtual_world one")
        return disk

    return World(
        clock=VirtualClock(),
        randomness=SeededRandomness(f"world {seed}"),
        new_threads=new_thread,
        own_thread=background_thread,
        background_thread=background_thread,
        open_disk=open_disk,
        network=network,
    )


class VirtualClock:
    """The running loop's time; the wall clock advances with it."""

    now = staticmethod(anyio.current_time)

    @staticmethod
    def wall_us() -> int:
        """Return microseconds since 1970, in virtual time."""
        return EPOCH_US + round(anyio.current_time() * 1_000_000)


class SeededRandomness:
    """Repeatable randomness."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._generator = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        """Return `count` random bytes."""
        return self._generator.randbytes(count)

    def random(self) -> float:
        """Return a number from 0 to 1."""
        return self._generator.random()

    def fork(self, name: str) -> SeededRandomness:
        """Return a source of its own for one purpose, repeatable, too."""
        return SeededRandomness(f"{self._seed} {name}")


class InlineThread:
    """Runs calls one at a time, in order, on the loop itself; each takes a delay drawn up to a maximum."""

    def __init__(self, rng: random.Random, delay_s_max: float) -> None:
        self._limiter = anyio.CapacityLimiter(1)
        self._rng, self._delay_s_max = rng, delay_s_max

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of `function`; a cancelled caller waits for its end, as on a thread."""
        with anyio.CancelScope(shield=True):
            async with self._limiter:
                await anyio.sleep(self._rng.uniform(0, self._delay_s_max))
                result = function()
        return result
