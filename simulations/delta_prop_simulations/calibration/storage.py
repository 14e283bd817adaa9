"""The set-up of a storage sink: SQLite, each call committed and synced before it returns (`through`).

Its call has two parts: folding, on the event loop, and the transaction, on a thread of its own. Beside each
other loop and thread are slower than alone, for they share the interpreter; that is measured too.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from delta_prop.embedded import Propagator
from delta_prop.testing.world import virtual_world
from delta_prop.world import real_world
from delta_prop_simulations.calibration import edge
from delta_prop_simulations.calibration.driving import RealRig, Rig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import BATCHES, Crowd, batches, measure_machine
from delta_prop_simulations.calibration.models import (
    THREAD,
    THREAD_BESIDE,
    Draws,
    ModelSink,
    TimedThreads,
    observe,
)
from delta_prop_simulations.calibration.record import CALL
from delta_prop_simulations.calibration.rounds import SetUp
from delta_prop_sinks.storage import StorageSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from delta_prop_simulations.calibration.laws import Samples
    from delta_prop_simulations.chance import Random

LOOP = "loop"
KEYS, DIMENSION = 5_000, 32
SIZES = {1: 12, 10: 12, 30: 12, 100: 10, 300: 6, 1000: 3}
"""Deltas a call, and how many calls of each one slice of calibration makes."""
CROWDED = {10: 6, 100: 4, 1000: 2}
SENT = 20
"""Deltas a publish of the runs."""

_batches = partial(batches, keys=KEYS, dimension=DIMENSION)


class StorageRig(RealRig):
    """The real one, open: calibration and what is measured share it, in turns."""

    def __init__(self, propagator: Propagator, other: Propagator, sink: StorageSink) -> None:
        self.timed: list[float] = []
        watch = Stopwatch(edge.now_s)
        observe(sink, watch)
        super().__init__(Source(propagator, cycle(_batches(SENT, BATCHES)), watch), watch)
        self._propagator = propagator
        self._crowd = Crowd(other, cycle(_batches(SENT, BATCHES)))
        self._calls = {size: _batches(size, 12, name="calls") for size in SIZES}

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """One slice: some calls of each size, alone and beside a busy loop."""
        for size, count in SIZES.items():
            for _ in range(count):
                self.timed.clear()
                lag_s = await self.call(self._propagator, random.choice(self._calls[size]))
                samples.add(CALL, size, lag_s)
                samples.add(THREAD, size, sum(self.timed))
                samples.add(LOOP, size, lag_s - sum(self.timed))
        for size, count in CROWDED.items():
            for _ in range(count):
                await self._crowd.alone(samples, size)
                self.timed.clear()
                receipt = self._propagator.offer(*random.choice(self._calls[size]))
                await self._crowd.beside(samples, size, partial(self._has, receipt.result().next_offset))
                samples.add(THREAD_BESIDE, size, sum(self.timed))
        await measure_machine(samples, random, {size: cycle(_batches(size, 40)) for size in (1, SENT, 100)})

    def _has(self, next_offset: int) -> bool:
        return self.watch.reached >= next_offset


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[StorageRig]:
    """A propagator with its log in memory, the sink's file in this folder."""
    world = real_world()
    rigs: list[StorageRig] = []

    def note(seconds: float) -> None:
        if rigs:
            rigs[0].timed.append(seconds)

    timed = replace(world, new_threads=lambda: TimedThreads(world.new_threads(), edge.now_s, note))
    async with Propagator(world=timed) as propagator, Propagator(world=world) as other:
        sink = await propagator.attach(StorageSink(folder / "storage.db", mode="through"))
        rigs.append(StorageRig(propagator, other, sink))
        for some in _batches(1_000, 2 * KEYS // 1_000):
            await propagator.wait_visible(await propagator.publish(*some), timeout_s=60)
        yield rigs[0]


@asynccontextmanager
async def model(draws: Draws, now_s: Callable[[], float]) -> AsyncIterator[Rig]:
    """The same in virtual time."""
    watch = Stopwatch(now_s)
    async with Propagator(world=virtual_world()) as propagator:
        await propagator.attach(_Model("storage", draws, watch))
        yield Rig(Source(propagator, cycle(_batches(SENT, BATCHES)), watch, draws.pay), watch)


class _Model(ModelSink):
    async def work(self, deltas: int) -> None:
        self.draws.compute(LOOP, deltas)
        await self.draws.on_thread(THREAD, deltas)


SET_UP = SetUp(
    "storage",
    f"SQLite, committed and synced before each call returns; {SENT} vectors of {DIMENSION} a publish",
    sent=SENT,
    ahead_max=4_000,
    share=0.4,
    settle_s=0.5,
    real=real,
    model=model,
)
