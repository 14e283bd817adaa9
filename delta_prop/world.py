"""The real world: the event loop's clock, the system's randomness, worker threads.

The only module of the service that touches them; everything else is handed a `World`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from delta_prop.ports import World

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LoopClock:
    """Time of the event loop that runs where this is made, so that virtual time is followed too."""

    def __init__(self) -> None:
        # anyio asks which loop is running at each call, which costs a microsecond; once is enough.
        self.now: Callable[[], float] = _loop_time()

    @staticmethod
    def wall_us() -> int:
        """Microseconds since 1970."""
        return time.time_ns() // 1000


class SystemRandomness:
    """The operating system's source for identifiers; an ordinary generator for jitter."""

    def __init__(self) -> None:
        self._generator = random.Random()

    @staticmethod
    def bytes(count: int) -> bytes:
        """That many random bytes."""
        return os.urandom(count)

    def random(self) -> float:
        """A number from 0 to 1."""
        return self._generator.random()


class WorkerThread:
    """Runs blocking calls one at a time, off the event loop."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on a thread; a cancelled caller waits for its end, so that the outcome is known."""
        with anyio.CancelScope(shield=True):
            result = await anyio.to_thread.run_sync(function, limiter=self._limiter)
        return result  # noqa: RET504 - a scope may swallow what is raised in it, so mypy wants this outside


def real_world() -> World:
    """The world of the running event loop. Call it inside one."""
    return World(clock=LoopClock(), randomness=SystemRandomness(), new_threads=WorkerThread)


def _loop_time() -> Callable[[], float]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # trio, whose clock anyio reads
        return anyio.current_time
    return loop.time
