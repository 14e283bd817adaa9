"""Common parts of real and modelled set-ups: the observation of applied deltas, and a model's draws.

A model is the production pipeline in virtual time, with a sink that takes the time drawn from its
distributions.
"""

from __future__ import annotations

from math import log
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from delta_prop_simulations.calibration.busy_loop import NO_CONTENTION, Contention
from delta_prop_simulations.calibration.machine_times import BUSY, SEND, SEND_CONTENDED, SEND_UNCONTENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from delta_prop.ports import Threads
    from delta_prop_simulations.calibration.busy_loop import BusyTime
    from delta_prop_simulations.calibration.distributions import Distribution
    from delta_prop_simulations.calibration.driving import Stopwatch
    from delta_prop_simulations.rng import Random
    from delta_prop_sinks.sink import Delivery, SinkContext

    T = TypeVar("T")

THREAD, THREAD_CONTENDED = "thread", "thread beside"
"""A call on a thread, and the same beside a loop that is busy half of the time; by deltas."""


def observe(sink: Any, watch: Stopwatch) -> None:
    """Notify the stopwatch whenever a call of this sink returns."""
    apply = sink.apply

    async def applied(deliveries: Sequence[Delivery]) -> None:
        await apply(deliveries)
        watch.note_applied(deliveries[-1].next_offset)

    sink.apply = applied


class TimedThreads:
    """Threads, with the duration of each call there, including the hand-over to the thread and back."""

    def __init__(self, threads: Threads, now: Callable[[], float], note: Callable[[float], None]) -> None:
        self._threads = threads
        self._now = now
        self._note = note

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread, and note its duration."""
        begin = self._now()
        try:
            return await self._threads.run(function)
        finally:
            self._note(self._now() - begin)


class Draws:
    """The distributions of one prediction, and the random stream to draw from them."""

    def __init__(self, distributions: Mapping[str, Distribution], time: BusyTime, random: Random) -> None:
        self.time = time
        self._distributions = distributions
        self._random = random
        self._contention = contention_of(distributions)

    def draw_s(self, of: str, deltas: int) -> float:
        """Draw a duration, in seconds."""
        return self._distributions[of].draw(self._random, deltas)

    def compute(self, of: str, deltas: int) -> None:
        """Draw a duration and compute for it on the loop."""
        self.time.spend(self.draw_s(of, deltas))

    def pay(self, deltas: int) -> None:
        """Compute the publish of this many deltas."""
        self.compute(SEND, deltas)

    async def run_on_thread(self, of: str, deltas: int, more_s: float = 0.0) -> None:
        """Draw a duration and wait for it on a thread, with `more_s` in addition."""
        await self.time.wait_outside_loop(self.draw_s(of, deltas) + more_s, self.contention(deltas))

    def median(self, of: str, deltas: int) -> float:
        """Return the median duration, in seconds."""
        return self._distributions[of].quantile(0.5, deltas)

    def contention(self, deltas: int) -> Contention:
        """Return the slowdown of loop and thread, of the nearest measured size."""
        if not self._contention:
            return NO_CONTENTION
        return self._contention[min(self._contention, key=lambda size: abs(log(size / max(deltas, 1))))]


def contention_of(distributions: Mapping[str, Distribution]) -> dict[int, Contention]:
    """Return the slowdown of loop and thread, by the size of a call. Medians, as these are shares."""
    if THREAD_CONTENDED not in distributions:
        return {}
    found: dict[int, Contention] = {}
    for size, times in zip(
        distributions[THREAD_CONTENDED].sizes, distributions[THREAD_CONTENDED].times_s, strict=True
    ):
        uncontended_s, contended_s = distributions[THREAD].quantile(0.5, size), median(times)
        slower = distributions[SEND_CONTENDED].quantile(0.5, size) / distributions[SEND_UNCONTENDED].quantile(
            0.5, size
        )
        computed_s = contended_s * distributions[BUSY].quantile(0.5, size)
        found[size] = Contention(max(slower, 1.0), max(contended_s - uncontended_s, 0.0) / computed_s)
    return found


class ModelSink:
    """A sink that takes time, and does nothing else."""

    def __init__(self, name: str, draws: Draws, watch: Stopwatch) -> None:
        self.name = name
        self.draws = draws
        self._watch = watch

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service stores the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Take the drawn time."""
        await self.work(sum(delivery.count for delivery in deliveries))
        self._watch.note_applied(deliveries[-1].next_offset)

    async def work(self, deltas: int) -> None:
        """Take the time of one call."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Do nothing: it holds nothing."""

    def statistics(self) -> None:
        """Return nothing: it has no statistics."""
