"""Threads without threads: calls run on the loop, one at a time, and take virtual time.

A call has its effect when it begins or when it ends, as drawn; the caller cannot tell.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import anyio

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable

    from delta_prop.ports import Threads
    from delta_prop_simulations.chance import Random

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ThreadFaults:
    """`delay_s_max`: what a call takes is drawn from 0 to this. `early`: how likely a call has its effect
    before that time, instead of after it. `stall_s`, `stalls`: what a call takes that is held up, and how
    likely that is.
    """

    delay_s_max: float = 0.002
    early: float = 0.5
    stall_s: float = 0.5
    stalls: float = 0.0

    def __post_init__(self) -> None:
        for name in ("early", "stalls"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)}: it is from 0 to 1")
        if self.delay_s_max < 0 or self.stall_s < 0:
            raise UsageError(f"delay_s_max {self.delay_s_max}, stall_s {self.stall_s}: they are 0 or more")


class SimThreads:
    """The executor of one process. `faults`: those of the moment."""

    def __init__(self, chance: Random, faults: Callable[[], ThreadFaults], struck: Counter[str]) -> None:
        self._chance = chance
        self._faults = faults
        self._struck = struck

    def new_thread(self) -> SimThread:
        """One more worker."""
        return SimThread(self)

    @asynccontextmanager
    async def thread(self) -> AsyncIterator[SimThread]:
        """A worker for as long as the scope lasts."""
        yield self.new_thread()

    def draw_call(self) -> tuple[float, bool]:
        """How long a call takes, and whether its effect comes before that."""
        chance, faults = self._chance, self._faults()
        delay_s = chance.uniform(0, faults.delay_s_max)
        if chance.random() < faults.stalls:
            delay_s += faults.stall_s
            self._struck["thread stalled"] += 1
        early = chance.random() < faults.early
        if delay_s:
            self._struck["thread early" if early else "thread late"] += 1
        return delay_s, early


class SimThread:
    """One worker: calls in their order, one at a time."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` and return what it returns; a cancelled caller waits for its end, as on a thread."""
        with anyio.CancelScope(shield=True):
            async with self._limiter:
                delay_s, early = self._threads.draw_call()
                if not early:
                    await anyio.sleep(delay_s)
                try:
                    result = function()
                finally:
                    if early:
                        await anyio.sleep(delay_s)
        return result


if TYPE_CHECKING:

    def _conforms(thread: SimThread) -> Threads:
        return thread
