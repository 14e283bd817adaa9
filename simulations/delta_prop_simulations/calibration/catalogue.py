"""Lists the sinks to calibrate and the set-ups to compare, and runs the calibration and the comparison."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop_simulations.calibration import index, storage, subscriber, system
from delta_prop_simulations.calibration.calibration_file import CALL
from delta_prop_simulations.calibration.distributions import Distribution, Samples
from delta_prop_simulations.calibration.driving import RealRig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import batches
from delta_prop_simulations.calibration.models import observe
from delta_prop_simulations.calibration.rounds import Comparison, Round, SetUp, compare, run_round
from delta_prop_simulations.rng import Random, Seed
from delta_prop_sinks.cache import CacheSink
from delta_prop_sinks.index import IndexSink
from delta_prop_sinks.jsonlines import JsonLinesSink
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.errors import UsageError

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


SET_UPS: dict[str, SetUp] = {one.name: one for one in (storage.SET_UP, index.SET_UP, subscriber.SET_UP)}
SINKS: dict[str, Callable[[Path], AbstractAsyncContextManager[RealRig]]] = {
    **{name: one.real for name, one in SET_UPS.items()},
    **SINK_RIGS,
}
"""The sinks that can be calibrated, by name: each function opens the sink's rig in a directory."""


def select_names(names: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list; all known ones if `names` is None. Raises UsageError."""
    known = list(known)
    selected = known if names is None else [name.strip() for name in names.split(",")]
    for name in selected:
        if name not in known:
            raise UsageError(f"--sinks {name}: unknown sink: give one of {', '.join(known)}")
    return selected


def calibrate(name: str, seed: Seed, seconds: float) -> Mapping[str, Distribution]:
    """Return the distributions of one sink, measured for about `seconds`."""

    async def measure() -> Mapping[str, Distribution]:
        samples, random = Samples(), seed.stream(name)
        with system.folder() as folder:
            async with SINKS[name](folder) as rig:
                with system.without_gc():
                    until = system.now_s() + seconds
                    await rig.calibrate(samples, random)
                    while system.now_s() < until:
                        await rig.calibrate(samples, random)
        return samples.distributions()

    return anyio.run(measure)


def compare_all(
    names: Sequence[str], seed: Seed, rounds: int, seconds: float, report: Callable[[str], None]
) -> list[Comparison]:
    """Run rounds of all set-ups in turns, so that other load of the machine affects all set-ups."""
    results: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            report(f"round {number + 1} of {rounds}: {name}")
            results[name].append(run_round(SET_UPS[name], seed.child(f"{name} {number}"), seconds))
    return [compare(name, SET_UPS[name].about, results[name]) for name in names]
