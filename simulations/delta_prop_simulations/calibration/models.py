"""What real and modelled set-ups share: who sees that a delta is applied, and what a model draws from.

A model is the production pipeline in virtual time with a sink that takes the time which its laws say.
"""

from __future__ import annotations

from math import log
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from delta_prop_simulations.calibration.busy_loop import Speeds
from delta_prop_simulations.calibration.machine_times import SEND, SEND_ALONE, SEND_BESIDE

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
"""A call on a thread, and the same beside a loop that never rests; by deltas."""


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
        self._speeds = speeds_of(laws)

    def drawn(self, of: str, deltas: int) -> float:
        """How long it takes, in seconds."""
        return self._laws[of].draw(self._random, deltas)

    def compute(self, of: str, deltas: int) -> None:
        """Do it on the loop."""
        self.time.spend(self.drawn(of, deltas))

    def pay(self, deltas: int) -> None:
        """Publish so many."""
        self.compute(SEND, deltas)

    async def on_thread(self, of: str, deltas: int) -> None:
        """Do it on a thread."""
        await self.time.elsewhere(self.drawn(of, deltas), self.speeds(deltas))

    def speeds(self, deltas: int) -> Speeds:
        """How fast loop and thread are beside each other, as for the nearest size that was measured."""
        if not self._speeds:
            return Speeds()
        return self._speeds[min(self._speeds, key=lambda size: abs(log(size / max(deltas, 1))))]


def speeds_of(laws: Mapping[str, Law]) -> dict[int, Speeds]:
    """By the size of a call: what loop and thread take from each other. Medians: shares have no tail."""
    if THREAD_BESIDE not in laws:
        return {}
    speeds: dict[int, Speeds] = {}
    for size, beside in zip(laws[THREAD_BESIDE].sizes, laws[THREAD_BESIDE].times_s, strict=True):
        loop = laws[SEND_ALONE].quantile(0.5, size) / laws[SEND_BESIDE].quantile(0.5, size)
        thread = laws[THREAD].quantile(0.5, size) / median(beside)
        speeds[size] = Speeds(_share(loop), _share(thread))
    return speeds


def _share(speed: float) -> float:
    """Noise may say that something is faster beside something else, or stands still; neither is so."""
    return min(max(speed, 0.05), 1.0)


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
