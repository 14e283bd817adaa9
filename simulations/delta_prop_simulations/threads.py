"""Simulated threads: calls run on the event loop, one at a time, and take virtual time.

A call has its effect at its start or at its end, as drawn; the caller cannot tell which.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable

    from delta_prop.platform.ports import Threads
    from delta_prop_simulations.rng import Random

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ThreadFaults:
    """`delay_s_max`: the maximum of a call's delay, which is drawn from 0 on. `early`: the probability that a
    call has its effect before its delay, not after it. `stalls`: the probability that a call stalls;
    `stall_s`: the additional delay of such a call.
    """

    delay_s_max: float = 0.002
    early: float = 0.5
    stall_s: float = 0.5
    stalls: float = 0.0

    def __post_init__(self) -> None:
        for name in ("early", "stalls"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)}: out of range: give 0 to 1")
        if self.delay_s_max < 0 or self.stall_s < 0:
            raise UsageError(
                f"delay_s_max {self.delay_s_max}, stall_s {self.stall_s}: negative: give 0 or more"
            )


class ThreadHost(Protocol):
    """The machine of threads, with its present faults, and its counts of events that happened."""

    thread_faults: ThreadFaults
    event_counts: Counter[str]


class SimThreads:
    """The threads of one process."""

    def __init__(self, rng: Random, host: ThreadHost) -> None:
        self._rng = rng
        self._host = host

    def new_thread(self) -> SimThread:
        """Return one more worker."""
        return SimThread(self)

    @asynccontextmanager
    async def thread(self) -> AsyncIterator[SimThread]:
        """Yield one worker for the duration of the scope."""
        yield self.new_thread()

    def draw_call(self) -> tuple[float, bool]:
        """Draw a call's delay, and True if the effect comes before the delay."""
        rng, faults = self._rng, self._host.thread_faults
        delay_s = rng.uniform(0, faults.delay_s_max)
        if rng.random() < faults.stalls:
            delay_s += faults.stall_s
            self._host.event_counts["thread stalled"] += 1
        is_early = rng.random() < faults.early
        if delay_s:
            self._host.event_counts["thread early" if is_early else "thread late"] += 1
        return delay_s, is_early


class SimThread:
    """One worker: runs calls in their order, one at a time."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` and return its result. A cancelled caller waits until the call ends, as with a
        thread.
        """
        with anyio.CancelScope(shield=True):
            async with self._limiter:
                delay_s, is_early = self._threads.draw_call()
                if not is_early:
                    await anyio.sleep(delay_s)
                try:
                    result = function()
                finally:
                    if is_early:
                        await anyio.sleep(delay_s)
        return result


if TYPE_CHECKING:

    def _conforms(thread: SimThread) -> Threads:
        return thread
