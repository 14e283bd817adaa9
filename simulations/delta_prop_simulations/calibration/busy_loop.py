"""Virtual time in which computing takes time: a predicted event loop is busy when the real one would be.

While a task computes, no other runs on the loop, so time advances in the middle of a turn: callbacks that
became due meanwhile run late, as on the machine. A thread continues beside it, if slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from delta_prop.testing.loop import HORIZON_S, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

TIMER_S_MIN = 0.0001
"""A shorter wait is not a timer on the machine, but network input, which wakes a real loop."""


@dataclass(frozen=True, slots=True)
class Contention:
    """The slowdown of a loop and a call on a thread while both have work.

    `loop_slower`: the factor of the loop's computing time. `thread_loses_s`: the seconds that each second of
    that adds to the call: 0 with a processor and an interpreter for each, 1 if the thread stands still
    meanwhile, more if it is slow to get the interpreter back.
    """

    loop_slower: float = 1.0
    thread_loses_s: float = 0.0


NO_CONTENTION = Contention()


@dataclass(slots=True)
class _Call:
    """A call outside of the loop, and its end if the loop stays idle."""

    ends_at: float
    contention: Contention


class BusyLoop(VirtualLoop):
    """A virtual loop whose tasks spend time, and whose timers fire as late as the machine's."""

    def __init__(self, timer_delay_s: Callable[[], float], seed: int) -> None:
        super().__init__(seed, HORIZON_S)
        self._timer_delay_s = timer_delay_s

    def advance(self, seconds: float) -> None:
        """Advance the time while the running task has the loop."""
        self._now += seconds

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Schedule a callback with a drawn timer delay; without one if it is due too soon for a timer."""
        late_s = self._timer_delay_s() if when - self._now >= TIMER_S_MIN else 0.0
        return super().call_at(when + late_s, callback, *args, **options)

    def call_exactly_at(self, when: float, callback: Callable[[], object]) -> None:
        """Schedule an external event, such as the end of a thread's call, without a timer delay."""
        super().call_at(when, callback)


class BusyTime:
    """The time of one prediction: tasks that compute spend it here."""

    def __init__(self, timer_delay_s: Callable[[], float]) -> None:
        """`timer_delay_s`: draws the delay of each timer."""
        self._timer_delay_s = timer_delay_s
        self._calls: list[_Call] = []
        self._loop: BusyLoop | None = None

    def run(self, main: Callable[[], Awaitable[T]], seed: int) -> T:
        """Run `main` in this time. Raises Stuck, as every virtual run."""
        options = {"loop_factory": partial(self._make, seed)}
        return anyio.run(main, backend="asyncio", backend_options=options)

    def spend(self, seconds: float) -> None:
        """Compute on the loop for `seconds`; calls on threads prolong it, and are prolonged by it."""
        loop = self._running_loop()
        for call in self._calls:
            seconds *= call.contention.loop_slower
        for call in self._calls:
            call.ends_at += seconds * call.contention.thread_loses_s
        loop.advance(seconds)

    async def wait_outside_loop(self, seconds: float, contention: Contention = NO_CONTENTION) -> None:
        """Wait for work of `seconds` outside of the idle loop. Cancellation does not interrupt it."""
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
        assert self._loop is not None, "there is no time outside of `run`"
        return self._loop

    def _make(self, seed: int) -> BusyLoop:
        self._loop = BusyLoop(self._timer_delay_s, seed)
        return self._loop
