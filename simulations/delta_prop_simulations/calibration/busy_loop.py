"""Virtual time in which computing takes time: a predicted event loop is busy where the real one would be.

While a task computes nobody else runs on the loop, so time is set on in the middle of a turn: what became
due meanwhile runs late, as on the machine. A thread beside it goes on, as fast as the interpreter lets it.
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
"""What is nearer is no timer on the machine, but bytes of the network, which wake a real loop."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What a loop and a call on a thread cost each other while both have work.

    `loop_slower`: how many times as long the loop computes. `thread_loses_s`: what each second of that adds
    to the call: 0 with a processor and an interpreter for each, 1 where the thread stands still meanwhile,
    more where it is slow to get the interpreter back.
    """

    loop_slower: float = 1.0
    thread_loses_s: float = 0.0


ALONE = Contention()


@dataclass(slots=True)
class _Call:
    """What goes on outside of the loop, and when it ends if the loop rests from here on."""

    ends_at: float
    contention: Contention


class BusyLoop(VirtualLoop):
    """A virtual loop whose tasks spend time, and whose timers go off as late as the machine's do."""

    def __init__(self, late_s: Callable[[], float], seed: int) -> None:
        super().__init__(seed, HORIZON_S)
        self._late_s = late_s

    def set_on(self, seconds: float) -> None:
        """Time goes on while the running task has the loop."""
        self._now += seconds

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """As usual; the timer goes off as much later as is drawn. What is so near is no timer's business."""
        late_s = self._late_s() if when - self._now >= TIMER_S_MIN else 0.0
        return super().call_at(when + late_s, callback, *args, **options)

    def call_exactly_at(self, when: float, callback: Callable[[], object]) -> None:
        """What comes from outside at a time of its own, as a thread's end does: no timer makes it late."""
        super().call_at(when, callback)


class BusyTime:
    """The time of one prediction: who computes says so here."""

    def __init__(self, late_s: Callable[[], float]) -> None:
        """`late_s`: how much later than asked a timer goes off, drawn for each."""
        self._late_s = late_s
        self._calls: list[_Call] = []
        self._loop: BusyLoop | None = None

    def run(self, main: Callable[[], Awaitable[T]], seed: int) -> T:
        """Run `main` in this time. Raises Stuck, as every virtual run."""
        options = {"loop_factory": partial(self._make, seed)}
        return anyio.run(main, backend="asyncio", backend_options=options)

    def spend(self, seconds: float) -> None:
        """Compute on the loop what alone takes so long; threads at work make it longer, and wait for it."""
        loop = self._running()
        for call in self._calls:
            seconds *= call.contention.loop_slower
        for call in self._calls:
            call.ends_at += seconds * call.contention.thread_loses_s
        loop.set_on(seconds)

    async def elsewhere(self, seconds: float, contention: Contention = ALONE) -> None:
        """Wait for what takes so long outside of the loop while that rests. Nobody breaks it off."""
        loop = self._running()
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

    def _running(self) -> BusyLoop:
        assert self._loop is not None, "there is no time outside of `run`"
        return self._loop

    def _make(self, seed: int) -> BusyLoop:
        self._loop = BusyLoop(self._late_s, seed)
        return self._loop
