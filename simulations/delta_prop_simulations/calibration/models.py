"""What real and modelled set-ups share: who sees that a delta is applied, and what a model draws from.

A model is the production pipeline in virtual time with a sink that takes the time which its laws say.
"""

from __future__ import annotations

from math import log
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from delta_prop_simulations.calibration.busy_loop import ALONE, Contention
from delta_prop_simulations.calibration.machine_times import BUSY, SEND, SEND_ALONE, SEND_BESIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from delta_prop.ports import Threads
    from delta_prop_simulations.calibration.busy_loop import BusyTime
    from delta_prop_simulations.calibration.driving import Stopwatch
    from delta_prop_simulations.calibration.laws import Law
    from delta_prop_simulations.chance import Random
    from delta_prop_sinks.sink import Delivery, SinkContext

    T = TypeVar("T")

THREAD, THREAD_BESIDE = "thread", "thread beside"
"""A call on a thread, and the same beside a loop that is busy half of the time; by deltas."""


def observe(sink: Any, watch: Stopwatch) -> None:
    """Have the stopwatch told whenever a call of this sink returns."""
    apply = sink.apply

    async def applied(deliveries: Sequence[Delivery]) -> None:
        await apply(deliveries)
        watch.applied(deliveries[-1].next_offset)

    sink.apply = applied


class TimedThreads:
    """Threads, and how long each call there took, the way there and back included."""

    def __init__(self, threads: Threads, now: Callable[[], float], note: Callable[[float], None]) -> None:
        self._threads = threads
        self._now = now
        self._note = note

    async def run(self, function: Callable[[], T]) -> T:
        """As the thread does."""
        begin = self._now()
        try:
            return await self._threads.run(function)
        finally:
            self._note(self._now() - begin)


class Draws:
    """The laws of one prediction, and chance to draw from them."""

    def __init__(self, laws: Mapping[str, Law], time: BusyTime, random: Random) -> None:
        self.time = time
        self._laws = laws
        self._random = random
        self._contention = contention_of(laws)

    def drawn(self, of: str, deltas: int) -> float:
        """How long it takes, in seconds."""
        return self._laws[of].draw(self._random, deltas)

    def compute(self, of: str, deltas: int) -> None:
        """Do it on the loop."""
        self.time.spend(self.drawn(of, deltas))

    def pay(self, deltas: int) -> None:
        """Publish so many."""
        self.compute(SEND, deltas)

    async def on_thread(self, of: str, deltas: int, more_s: float = 0.0) -> None:
        """Do it on a thread, and something more."""
        await self.time.elsewhere(self.drawn(of, deltas) + more_s, self.contention(deltas))

    def median(self, of: str, deltas: int) -> float:
        """How long it usually takes, in seconds."""
        return self._laws[of].quantile(0.5, deltas)

    def contention(self, deltas: int) -> Contention:
        """What loop and thread cost each other, as for the nearest size that was measured."""
        if not self._contention:
            return ALONE
        return self._contention[min(self._contention, key=lambda size: abs(log(size / max(deltas, 1))))]


def contention_of(laws: Mapping[str, Law]) -> dict[int, Contention]:
    """By the size of a call: what loop and thread cost each other. Medians, as these are shares."""
    if THREAD_BESIDE not in laws:
        return {}
    found: dict[int, Contention] = {}
    for size, times in zip(laws[THREAD_BESIDE].sizes, laws[THREAD_BESIDE].times_s, strict=True):
        alone, beside = laws[THREAD].quantile(0.5, size), median(times)
        slower = laws[SEND_BESIDE].quantile(0.5, size) / laws[SEND_ALONE].quantile(0.5, size)
        computed_s = beside * laws[BUSY].quantile(0.5, size)
        found[size] = Contention(max(slower, 1.0), max(beside - alone, 0.0) / computed_s)
    return found


class ModelSink:
    """A sink that takes time, and does nothing else."""

    def __init__(self, name: str, draws: Draws, watch: Stopwatch) -> None:
        self.name = name
        self.draws = draws
        self._watch = watch

    async def open(self, context: SinkContext) -> None:
        """The service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Take as long as it is drawn."""
        await self.work(sum(delivery.count for delivery in deliveries))
        self._watch.applied(deliveries[-1].next_offset)

    async def work(self, deltas: int) -> None:
        """What one call takes."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """There is nothing to let go of."""

    def statistics(self) -> None:
        """It has none."""
