"""A false world for virtual time: the loop's clock, chance drawn from a seed, threads without threads.

Nothing here waits for real time, so an hour of it takes milliseconds and is the same at each run.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio

from delta_prop.ports import World
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delta_prop.ports import Network
    from delta_prop_broker.disk import Disk

T = TypeVar("T")

EPOCH_US = 1_600_000_000_000_000
"""What the wall clock shows when virtual time begins."""


def virtual_world(
    seed: int = 0,
    *,
    thread_delay_s_max: float = 0.0,
    disk: Disk | None = None,
    network: Network | None = None,
) -> World:
    """All ports of one run; the same seed gives the same run. Call it inside `run_virtual`.

    `thread_delay_s_max`: calls on a thread take a virtual time drawn from 0 to this. `disk`: what every
    directory is on; `network`: a `VirtualNetwork`, as the host of this world sees it. There is neither of
    itself.
    """
    delays = random.Random(f"threads {seed}")

    def new_thread() -> InlineThread:
        return InlineThread(lambda: delays.uniform(0, thread_delay_s_max))

    @asynccontextmanager
    async def background_thread() -> AsyncIterator[InlineThread]:
        yield new_thread()

    def open_disk(path: str) -> Disk:
        if disk is None:
            raise UsageError(f"{path}: this world has no disk; give virtual_world one")
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
    """The running loop's time; the wall clock goes with it."""

    now = staticmethod(anyio.current_time)

    @staticmethod
    def wall_us() -> int:
        """Microseconds since 1970, in virtual time."""
        return EPOCH_US + round(anyio.current_time() * 1_000_000)


class SeededRandomness:
    """Chance that can be repeated."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._generator = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        """That many random bytes."""
        return self._generator.randbytes(count)

    def random(self) -> float:
        """A number from 0 to 1."""
        return self._generator.random()

    def fork(self, name: str) -> SeededRandomness:
        """A source for one concern; it can be repeated too."""
        return SeededRandomness(f"{self._seed} {name}")


class InlineThread:
    """Calls one at a time, in order, on the loop itself, as long as they are said to take."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._limiter = anyio.CapacityLimiter(1)
        self._delay_s = delay_s

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` and return what it returns; a cancelled caller waits for its end, as on a thread."""
        with anyio.CancelScope(shield=True):
            async with self._limiter:
                await anyio.sleep(self._delay_s())
                result = function()
        return result
