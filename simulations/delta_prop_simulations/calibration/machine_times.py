"""The machine's own times, besides any sink's: of a publish on the event loop, and of timer delays.

Every prediction needs these parts. A publish is measured in CPU time, which excludes other programs on the
machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop.embedded import Propagator
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.driving import Source, Stopwatch
from delta_prop_simulations.rng import Seed
from delta_prop_wire.delta import Delta, dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from delta_prop_simulations.calibration.distributions import Samples
    from delta_prop_simulations.rng import Random

SEND = "send"
"""A publish with all its work on the loop, including the timer before it; by the deltas of a publish."""
TIMER_DELAY = "late"
"""The delay of a timer on an idle loop."""
SEND_UNCONTENDED, SEND_CONTENDED = "send alone", "send beside"
"""A publish directly after another, and the same beside a thread's call; by the deltas of that call."""
BUSY = "busy"
"""The share of each second that the loop computed beside such a call."""

BATCHES = 100
TIMERS, SENDS = 40, 40
_TIMER_S_MIN, _TIMER_S_MAX = 0.0003, 0.012
_BETWEEN_S = 0.001
_BURST = 3


def batches(sent: int, count: int, *, keys: int, dimension: int, name: str = "source") -> list[list[Delta]]:
    """Return `count` publishes of `sent` full vectors each, of different keys within one publish."""
    random = Seed(1).stream(name)
    return [
        [Delta(f"vector-{key}", dense(noise(random, dimension))) for key in random.sample(range(keys), sent)]
        for _ in range(count)
    ]


def noise(random: Random, dimension: int) -> NDArray[np.float32]:
    """Return numbers from -1 to 1, quickly."""
    return np.frombuffer(random.randbytes(dimension), np.int8).astype(np.float32) / np.float32(128)


async def measure_machine(
    samples: Samples, random: Random, publishes: Mapping[int, Iterator[Sequence[Delta]]]
) -> None:
    """Measure timer delays on an idle loop, and the cost of publishes of each size, without sinks."""
    for _ in range(TIMERS):
        asked = random.uniform(_TIMER_S_MIN, _TIMER_S_MAX)
        begin = system.now_s()
        await anyio.sleep(asked)
        samples.add(TIMER_DELAY, 1, system.now_s() - begin - asked)
    for deltas, some in publishes.items():
        async with Propagator() as propagator:
            await _measure_sends(samples, deltas, Source(propagator, some, Stopwatch(system.now_s)))


async def _measure_sends(samples: Samples, deltas: int, source: Source) -> None:
    before: float | None = None
    for _ in range(SENDS):
        await anyio.sleep(_BETWEEN_S)
        at = system.computed_s()
        if before is not None:
            samples.add(SEND, deltas, at - before)
        before = at
        source.send()


class Contender:
    """A loop that is busy half of the time, to measure how it and a call on a thread slow each other down.

    Not all of the time: beside a loop that is never idle, a thread hardly gets the interpreter, so that would
    be the only result.
    """

    def __init__(self, propagator: Propagator, some: Iterator[Sequence[Delta]]) -> None:
        """`propagator`: one without sinks."""
        self._source = Source(propagator, some, Stopwatch(system.now_s))

    async def publish_during_call(self, samples: Samples, deltas: int, ended: Callable[[], bool]) -> None:
        """Publish until the call, with this many deltas, has ended."""
        begin, busy_s = system.now_s(), 0.0
        while not ended():
            busy_s += await self._burst(samples, SEND_CONTENDED, deltas)
        samples.add(BUSY, deltas, busy_s / (system.now_s() - begin))

    async def publish_uncontended(self, samples: Samples, deltas: int, count: int = 5) -> None:
        """Publish without a call beside it."""
        for _ in range(count):
            await self._burst(samples, SEND_UNCONTENDED, deltas)

    async def _burst(self, samples: Samples, of: str, deltas: int) -> float:
        begin = system.now_s()
        for _ in range(_BURST):
            self._source.send()
        took_s = system.now_s() - begin
        samples.add(of, deltas, took_s / _BURST)
        await anyio.sleep(_BETWEEN_S / 2)
        return took_s
