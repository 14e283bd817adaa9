"""Virtual time in which computing takes time: a predicted event loop is busy when the real one would be.

While a task computes, no other task runs on the loop, so time advances in the middle of a turn, and callbacks
that become due meanwhile run late, as on the machine. A call on a thread continues meanwhile, but slowly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from delta_prop.testing.loop import HORIZON_S, VirtualLoop

if TYPE_CHECKING:
    from delta_prop_simulations.calibration.distributions import Distribution
    from delta_prop_simulations.rng import Random

T = TypeVar("T")

TIMER_S_MIN = 0.0001
"""The shortest wait for a timer; shorter ones are for network input, which wakes the loop without one."""


@dataclass(frozen=True, slots=True)
class Contention:
    """The factors by which the event loop and a call on a thread slow each other down while both work.

    `loop_slower`: the factor of the loop's computing time. `thread_loses_s`: the seconds by which each second
    of the loop's computing prolongs the call: 0 if each has a processor and an interpreter of its own, 1 if
    the thread makes no progress meanwhile, more if it is also slow to get the interpreter back.
    """

    loop_slower: float = 1.0
    thread_loses_s: float = 0.0


NO_CONTENTION = Contention()


@dataclass(slots=True)
class _Call:
    """A call outside of the loop. `ends_at`: its end if the loop stays idle."""

    ends_at: float
    contention: Contention


class BusyLoop(VirtualLoop):
    """A virtual loop whose tasks take time, and whose timers fire as late as those of the machine."""

    def __init__(self, timer_delay: Distribution, random: Random, seed: int) -> None:
        super().__init__(seed, HORIZON_S)
        self._timer_delay, self._random = timer_delay, random

    def advance(self, seconds: float) -> None:
        """Advance the time during the running task."""
        self._now += seconds

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Schedule a callback, with a drawn delay unless it is due too soon for a timer."""
        delay_s = self._timer_delay.draw(self._random, 1) if when - self._now >= TIMER_S_MIN else 0.0
        return super().call_at(when + delay_s, callback, *args, **options)

    def call_exactly_at(self, when: float, callback: Callable[[], object]) -> None:
        """Schedule an external event, such as the end of a thread's call, without a timer delay."""
        super().call_at(when, callback)


class BusyTime:
    """The time of one prediction, which its tasks spend when they compute."""

    def __init__(self, timer_delay: Distribution, random: Random) -> None:
        """`timer_delay`: the distribution of the delays of timers; `random`: the stream to draw them from."""
        self._timer_delay, self._random = timer_delay, random
        self._calls: list[_Call] = []
        self._loop: BusyLoop | None = None

    def run(self, main: Callable[[], Awaitable[T]], seed: int) -> T:
        """Run `main` in this time. Raises Stuck, as every virtual run does."""
        options = {"loop_factory": partial(self._make_loop, seed)}
        return anyio.run(main, backend="asyncio", backend_options=options)

    def spend(self, seconds: float) -> None:
        """Spend `seconds` computing on the loop: more while calls run on threads, which it prolongs."""
        loop = self._running_loop()
        for call in self._calls:
            seconds *= call.contention.loop_slower
        for call in self._calls:
            call.ends_at += seconds * call.contention.thread_loses_s
        loop.advance(seconds)

    async def wait_outside_loop(self, seconds: float, contention: Contention = NO_CONTENTION) -> None:
        """Wait for work outside of the loop, which takes `seconds` if the loop is idle; not cancellable."""
        loop = self._running_loop()
        call = _Call(loop.time() + seconds, contention)
        self._calls.append(call)
        try:
            with anyio.CancelScope(shield=True):
                while (ends_at := call.ends_at) > loop.time():
                    done = anyio.Event()
                    loop.call_exactly_at(ends_at, done.set)
                    await done.wait()
        finally:
            self._calls.remove(call)

    def _running_loop(self) -> BusyLoop:
        assert self._loop is not None, "the time is only available during `run`"
        return self._loop

    def _make_loop(self, seed: int) -> BusyLoop:
        self._loop = BusyLoop(self._timer_delay, self._random, seed)
        return self._loop
