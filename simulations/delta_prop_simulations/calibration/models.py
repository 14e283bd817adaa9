"""Common parts of real and modelled set-ups: how applied deltas are observed, and how a model draws times.

A model is the production pipeline in virtual time, with a sink whose calls take times drawn from
distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from delta_prop.platform.ports import Threads, Timer
from delta_prop_simulations.calibration.busy_loop import NO_CONTENTION, BusyTime, Contention
from delta_prop_simulations.calibration.driving import Stopwatch
from delta_prop_simulations.calibration.machine_times import BUSY, SEND, SEND_CONTENDED, SEND_UNCONTENDED
from delta_prop_simulations.rng import Random
from delta_prop_sinks.sink import Delivery, SinkContext

if TYPE_CHECKING:
    from delta_prop_simulations.calibration.distributions import Distribution

    T = TypeVar("T")

THREAD, THREAD_CONTENDED = "thread", "thread beside"
"""Times of a thread's call, alone and while the loop is busy half of the time; keyed by its deltas."""


def observe(sink: Any, watch: Stopwatch) -> None:
    """Notify the stopwatch whenever a call of this sink returns."""
    apply = sink.apply

    async def observed_apply(deliveries: Sequence[Delivery]) -> None:
        await apply(deliveries)
        watch.note_applied(deliveries[-1].next_offset)

    sink.apply = observed_apply


class TimedThreads:
    """Wraps threads, and appends the duration of each call to a list, with the hand-over and back."""

    def __init__(self, threads: Threads, timer: Timer, durations_s: list[float]) -> None:
        self._threads = threads
        self._timer = timer
        self._durations_s = durations_s

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread, and note its duration."""
        start = self._timer.now()
        try:
            return await self._threads.run(function)
        finally:
            self._durations_s.append(self._timer.now() - start)


class Draws:
    """The distributions of one prediction, and the random stream to draw from them."""

    def __init__(self, distributions: Mapping[str, Distribution], time: BusyTime, random: Random) -> None:
        self.time = time
        self._distributions = distributions
        self._random = random
        self._contention = contention_by_size(distributions)

    def draw_s(self, kind: str, delta_count: int) -> float:
        """Draw a duration, in seconds."""
        return self._distributions[kind].draw(self._random, delta_count)

    def compute(self, kind: str, delta_count: int) -> None:
        """Draw a duration, and spend it computing on the loop."""
        self.time.spend(self.draw_s(kind, delta_count))

    def compute_publish(self, delta_count: int) -> None:
        """Spend the time that a publish of this many deltas takes on the loop."""
        self.compute(SEND, delta_count)

    async def run_on_thread(self, kind: str, delta_count: int, more_s: float = 0.0) -> None:
        """Draw a duration, and wait for it and for `more_s`, as for a call on a thread."""
        await self.time.wait_outside_loop(
            self.draw_s(kind, delta_count) + more_s, self.contention(delta_count)
        )

    def median(self, kind: str, delta_count: int) -> float:
        """Return the median duration, in seconds."""
        return self._distributions[kind].quantile(0.5, delta_count)

    def contention(self, delta_count: int) -> Contention:
        """Return the contention that was measured for the nearest size of a call."""
        if not self._contention:
            return NO_CONTENTION
        return self._contention[min(self._contention, key=lambda size: abs(log(size / max(delta_count, 1))))]


def contention_by_size(distributions: Mapping[str, Distribution]) -> dict[int, Contention]:
    """Return the contention of loop and thread for each measured size of a call, computed from medians."""
    if THREAD_CONTENDED not in distributions:
        return {}
    by_size: dict[int, Contention] = {}
    for size, times in zip(
        distributions[THREAD_CONTENDED].sizes, distributions[THREAD_CONTENDED].times_s, strict=True
    ):
        uncontended_s, contended_s = distributions[THREAD].quantile(0.5, size), median(times)
        loop_slower = distributions[SEND_CONTENDED].quantile(0.5, size) / distributions[
            SEND_UNCONTENDED
        ].quantile(0.5, size)
        computed_s = contended_s * distributions[BUSY].quantile(0.5, size)
        by_size[size] = Contention(max(loop_slower, 1.0), max(contended_s - uncontended_s, 0.0) / computed_s)
    return by_size


class ModelSink:
    """A sink whose calls take time, and do nothing else."""

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

    async def work(self, delta_count: int) -> None:
        """Take the time of one call with this many deltas."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    def statistics(self) -> None:
        """Return None: the sink has no statistics."""
