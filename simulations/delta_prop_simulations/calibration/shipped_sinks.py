"""Measures how long calls of shipped sinks take, by number of deltas; for sinks without background work.

A call is measured through an idle propagator, from the append of its deltas to their application.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from delta_prop.api.propagator import Propagator
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.calibration_file import CALL
from delta_prop_simulations.calibration.driving import RealRig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import batches
from delta_prop_simulations.calibration.models import observe
from delta_prop_sinks.cache import CacheSink
from delta_prop_sinks.index import IndexSink
from delta_prop_sinks.jsonlines import JsonLinesSink
from delta_prop_sinks.storage import StorageSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from delta_prop_simulations.calibration.distributions import Samples
    from delta_prop_simulations.rng import Random

KEYS, DIMENSION = 5_000, 32
"""Number of vectors, and of numbers per vector."""
CALLS_BY_SIZE = {1: 20, 10: 20, 100: 15, 1_000: 5}
"""For each number of deltas per call, the number of calls in one slice of calibration."""
_BATCHES_PER_SIZE = 10


class SinkRig(RealRig):
    """One sink that is attached to a propagator."""

    def __init__(self, propagator: Propagator, watch: Stopwatch) -> None:
        self._calls = {
            size: cycle(batches(size, _BATCHES_PER_SIZE, keys=KEYS, dimension=DIMENSION))
            for size in CALLS_BY_SIZE
        }
        super().__init__(Source(propagator, self._calls[1], watch), watch)
        self._propagator = propagator

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Measure some calls of each size."""
        for size, count in CALLS_BY_SIZE.items():
            for _ in range(count):
                samples.add(CALL, size, await self.call(self._propagator, next(self._calls[size])))


@asynccontextmanager
async def _open_rig(make_sink: Callable[[Path], Any], folder: Path) -> AsyncIterator[SinkRig]:
    watch = Stopwatch(system.PreciseTimer())
    async with Propagator() as propagator:
        sink = make_sink(folder)
        # Before attach: with `apply` replaced, `apply_now` is not used, so the sink's task makes all calls,
        # and the watch measures them.
        observe(sink, watch)
        await propagator.attach(sink)
        yield SinkRig(propagator, watch)


SINK_RIGS: dict[str, Callable[[Path], AbstractAsyncContextManager[RealRig]]] = {
    "storage_behind": partial(_open_rig, lambda folder: StorageSink(folder / "storage.db")),
    "index_exact": partial(_open_rig, lambda _: IndexSink()),
    "cache": partial(_open_rig, lambda _: CacheSink()),
    "jsonlines": partial(_open_rig, lambda folder: JsonLinesSink(folder / "deltas.jsonl")),
}
"""The real set-ups, keyed by the name that a scenario gives as `sink`.

`storage_behind`: a storage sink in its default mode, `behind`: it commits after calls have returned.
"""
