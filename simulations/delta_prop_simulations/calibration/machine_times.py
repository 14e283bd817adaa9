"""What the machine takes beside any sink: for a publish on the event loop, and for a timer to go off.

The parts that every prediction needs. A publish is counted in computing time: what else runs on the machine
meanwhile does not belong to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop.embedded import Propagator
from delta_prop_simulations.calibration import edge
from delta_prop_simulations.calibration.driving import Source, Stopwatch
from delta_prop_simulations.chance import Seed
from delta_prop_wire.delta import Delta, dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from delta_prop_simulations.calibration.laws import Samples
    from delta_prop_simulations.chance import Random

SEND = "send"
"""A publish with all that the loop does about it, the timer before it too; by the deltas of a publish."""
LATE = "late"
"""How late a timer goes off on a loop at rest."""
SEND_ALONE, SEND_BESIDE = "send alone", "send beside"
"""A publish at once behind another, and the same beside a thread's call; by the deltas of that call."""
BUSY = "busy"
"""How long of each second the loop computed beside such a call."""

BATCHES = 100
TIMERS, SENDS = 40, 40
_TIMER_S_MIN, _TIMER_S_MAX = 0.0003, 0.012
_BETWEEN_S = 0.001
_BURST = 3


def batches(sent: int, count: int, *, keys: int, dimension: int, name: str = "source") -> list[list[Delta]]:
    """So many publishes of `sent` whole vectors each, of different keys within one publish."""
    random = Seed(1).stream(name)
    return [
        [Delta(f"vector-{key}", dense(noise(random, dimension))) for key in random.sample(range(keys), sent)]
        for _ in range(count)
    ]


def noise(random: Random, dimension: int) -> NDArray[np.float32]:
    """Numbers from -1 to 1, quickly."""
    return np.frombuffer(random.randbytes(dimension), np.int8).astype(np.float32) / np.float32(128)


async def measure_machine(
    samples: Samples, random: Random, publishes: Mapping[int, Iterator[Sequence[Delta]]]
) -> None:
    """How late timers are on an idle loop; what publishes of each size cost it, with nobody to deliver to."""
    for _ in range(TIMERS):
        asked = random.uniform(_TIMER_S_MIN, _TIMER_S_MAX)
        begin = edge.now_s()
        await anyio.sleep(asked)
        samples.add(LATE, 1, edge.now_s() - begin - asked)
    for deltas, some in publishes.items():
        async with Propagator() as propagator:
            await _measure_sends(samples, deltas, Source(propagator, some, Stopwatch(edge.now_s)))


async def _measure_sends(samples: Samples, deltas: int, source: Source) -> None:
    before: float | None = None
    for _ in range(SENDS):
        await anyio.sleep(_BETWEEN_S)
        at = edge.computed_s()
        if before is not None:
            samples.add(SEND, deltas, at - before)
        before = at
        source.send()


class Crowd:
    """A loop that is busy half of the time, to see what it and a call on a thread take from each other.

    Not all of the time: a thread gets next to nothing of the interpreter beside a loop that never rests, so
    nothing would be learnt but that.
    """

    def __init__(self, propagator: Propagator, some: Iterator[Sequence[Delta]]) -> None:
        """`propagator`: one without sinks."""
        self._source = Source(propagator, some, Stopwatch(edge.now_s))

    async def beside(self, samples: Samples, deltas: int, ended: Callable[[], bool]) -> None:
        """Publish until the call, of so many deltas, has ended."""
        begin, busy_s = edge.now_s(), 0.0
        while not ended():
            busy_s += await self._burst(samples, SEND_BESIDE, deltas)
        samples.add(BUSY, deltas, busy_s / (edge.now_s() - begin))

    async def alone(self, samples: Samples, deltas: int, count: int = 5) -> None:
        """The same with nothing beside it."""
        for _ in range(count):
            await self._burst(samples, SEND_ALONE, deltas)

    async def _burst(self, samples: Samples, of: str, deltas: int) -> float:
        begin = edge.now_s()
        for _ in range(_BURST):
            self._source.send()
        took_s = edge.now_s() - begin
        samples.add(of, deltas, took_s / _BURST)
        await anyio.sleep(_BETWEEN_S / 2)
        return took_s
