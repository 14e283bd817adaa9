"""Measures what the machine costs without any sink: a publish, in CPU time, and the delay of a timer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import numpy as np
from numpy.typing import NDArray

from delta_prop.api.propagator import Propagator
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.driving import Source, Stopwatch
from delta_prop_simulations.rng import Random, Seed
from delta_prop_wire.delta import Delta, dense

if TYPE_CHECKING:
    from delta_prop_simulations.calibration.distributions import Samples

SEND = "send"
"""A publish with all its work on the loop, and the timer before it; keyed by the deltas per publish."""
TIMER_DELAY = "late"
"""The delay of a timer on an idle loop."""
SEND_UNCONTENDED, SEND_CONTENDED = "send alone", "send beside"
"""A publish right after another: while no thread works, and during a thread's call; keyed by its deltas."""
BUSY = "busy"
"""The share of time for which the loop was busy during a call on a thread."""

BATCHES = 100
"""Number of batches that a source sends again and again."""
TIMERS, SENDS = 40, 40
"""Number of timers, and of publishes of each size, that one call of `measure_machine` measures."""
_TIMER_S_MIN, _TIMER_S_MAX = 0.0003, 0.012
_BETWEEN_S = 0.001
_BURST_PUBLISHES = 3


def batches(
    deltas_per_publish: int, count: int, *, keys: int, dimension: int, name: str = "source"
) -> list[list[Delta]]:
    """Return the deltas of `count` publishes: full vectors, each of another key within one publish."""
    random = Seed(1).stream(name)
    return [
        [
            Delta(f"vector-{key}", dense(noise(random, dimension)))
            for key in random.sample(range(keys), deltas_per_publish)
        ]
        for _ in range(count)
    ]


def noise(random: Random, dimension: int) -> NDArray[np.float32]:
    """Return random numbers from -1 to 1. Cheap, so that it can be called during a measurement."""
    return np.frombuffer(random.randbytes(dimension), np.int8).astype(np.float32) / np.float32(128)


async def measure_machine(
    samples: Samples, random: Random, publishes: Mapping[int, Iterator[Sequence[Delta]]]
) -> None:
    """Measure timer delays on an idle loop, and the cost of publishes of each size, without sinks."""
    for _ in range(TIMERS):
        delay_s = random.uniform(_TIMER_S_MIN, _TIMER_S_MAX)
        start = system.now_s()
        await anyio.sleep(delay_s)
        samples.add(TIMER_DELAY, 1, system.now_s() - start - delay_s)
    for size, size_batches in publishes.items():
        async with Propagator() as propagator:
            await _measure_sends(
                samples, size, Source(propagator, size_batches, Stopwatch(system.PreciseTimer()))
            )


async def _measure_sends(samples: Samples, deltas_per_publish: int, source: Source) -> None:
    previous: float | None = None
    for _ in range(SENDS):
        await anyio.sleep(_BETWEEN_S)
        now = system.cpu_s()
        if previous is not None:
            samples.add(SEND, deltas_per_publish, now - previous)
        previous = now
        source.send()


class Contender:
    """Keeps the loop busy half of the time, to measure how the loop and a call on a thread slow each other
    down.

    If the loop were busy all the time, the thread would hardly get the interpreter, and nothing else could be
    measured.
    """

    def __init__(self, propagator: Propagator, batches: Iterator[Sequence[Delta]]) -> None:
        """`propagator`: must have no sinks."""
        self._source = Source(propagator, batches, Stopwatch(system.PreciseTimer()))

    async def publish_during_call(
        self, samples: Samples, call_deltas: int, has_ended: Callable[[], bool]
    ) -> None:
        """Publish until a call with `call_deltas` deltas has ended on a thread."""
        start, busy_s = system.now_s(), 0.0
        while not has_ended():
            busy_s += await self._burst(samples, SEND_CONTENDED, call_deltas)
        samples.add(BUSY, call_deltas, busy_s / (system.now_s() - start))

    async def publish_uncontended(self, samples: Samples, call_deltas: int, count: int = 5) -> None:
        """Publish `count` bursts while no call runs on a thread; note them for calls of this size."""
        for _ in range(count):
            await self._burst(samples, SEND_UNCONTENDED, call_deltas)

    async def _burst(self, samples: Samples, kind: str, call_deltas: int) -> float:
        start = system.now_s()
        for _ in range(_BURST_PUBLISHES):
            self._source.send()
        took_s = system.now_s() - start
        samples.add(kind, call_deltas, took_s / _BURST_PUBLISHES)
        await anyio.sleep(_BETWEEN_S / 2)
        return took_s
