"""The set-up of a storage sink (SQLite) that commits and syncs each call before it returns
(`mode="through"`).

A call has two parts: it folds on the event loop, and runs the transaction on a thread. Loop and thread slow
each other down, since they share the interpreter; this is measured, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

from delta_prop.api.propagator import Propagator
from delta_prop.platform.ports import Timer
from delta_prop.platform.world import real_world
from delta_prop.testing.world import virtual_world
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.calibration_file import CALL
from delta_prop_simulations.calibration.distributions import Samples
from delta_prop_simulations.calibration.driving import RealRig, Rig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import BATCHES, Contender, batches, measure_machine
from delta_prop_simulations.calibration.models import (
    THREAD,
    THREAD_CONTENDED,
    Draws,
    ModelSink,
    TimedThreads,
    observe,
)
from delta_prop_simulations.calibration.rounds import SetUp
from delta_prop_simulations.rng import Random
from delta_prop_sinks.sink import Delivery
from delta_prop_sinks.storage import StorageSink
from delta_prop_sinks.storage_file import WAL_ROWS

LOOP = "loop"
THREAD_TRUNCATING = "thread, cutting off the write-ahead log"
"""A call on the thread that also truncates the write-ahead log."""
WAL_BYTES = "bytes written to the write-ahead log"
"""A distribution of bytes, not of times: small commits write more bytes per row than large ones."""
WAL_BYTES_MAX = 64 << 20
"""The default of the sink."""
KEYS, DIMENSION = 5_000, 32
"""Number of vectors, and of numbers per vector."""
CALLS_BY_SIZE = {1: 12, 10: 12, 30: 12, 100: 10, 300: 6, 1_000: 3}
"""For each number of deltas per call, the number of calls in one slice of calibration."""
CONTENDED_CALLS_BY_SIZE = {10: 10, 100: 8, 1_000: 3}
"""For each number of deltas per call, the number of calls in one slice that run while the loop is busy."""
TRUNCATING_DELTAS, CALLS_TO_TRUNCATE_MAX = 300, 400
"""Calls of this many deltas are repeated, at most this often, until one truncates the write-ahead log."""
DELTAS_PER_PUBLISH = 20
"""Deltas per publish of the measured runs."""

_batches = partial(batches, keys=KEYS, dimension=DIMENSION)


class StorageRig(RealRig):
    """The real set-up, while it is open: calibration and measurements use it in turns.

    `other`: a propagator without sinks, whose publishes keep the loop busy. `thread_times`: gets the
    durations of calls on the sink's thread, and is cleared before each measured call.
    """

    def __init__(
        self, propagator: Propagator, other: Propagator, sink: StorageSink, thread_times: list[float]
    ) -> None:
        self.thread_times = thread_times
        watch = Stopwatch(system.PreciseTimer())
        observe(sink, watch)
        self._watch_wal(sink)
        super().__init__(Source(propagator, cycle(_batches(DELTAS_PER_PUBLISH, BATCHES)), watch), watch)
        self._propagator = propagator
        self._contender = Contender(other, cycle(_batches(DELTAS_PER_PUBLISH, BATCHES)))
        self._calls = {size: _batches(size, 12, name="calls") for size in CALLS_BY_SIZE}
        self._publishes = {size: cycle(_batches(size, 40)) for size in (1, DELTAS_PER_PUBLISH, 100)}

    def _watch_wal(self, sink: StorageSink) -> None:
        """Note after each call if it truncated the write-ahead log, or how many bytes it wrote there."""
        apply = sink.apply
        self._wal_bytes = self._grown_bytes = 0
        self._has_truncated = False

        async def observed_apply(deliveries: Sequence[Delivery]) -> None:
            await apply(deliveries)
            wal_bytes = sink.statistics().wal_bytes
            self._grown_bytes = wal_bytes - self._wal_bytes
            self._has_truncated = self._grown_bytes < -WAL_BYTES_MAX // 2
            self._wal_bytes = wal_bytes

        sink.apply = observed_apply  # type: ignore[method-assign]

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Run one slice: calls of each size, until one truncates the log, and while the loop is busy."""
        for size, count in CALLS_BY_SIZE.items():
            for _ in range(count):
                await self._timed_call(samples, random, size)
        for _ in range(CALLS_TO_TRUNCATE_MAX):
            await self._timed_call(samples, random, TRUNCATING_DELTAS)
            if self._has_truncated:
                break
        for size, count in CONTENDED_CALLS_BY_SIZE.items():
            for _ in range(count):
                await self._contender.publish_uncontended(samples, size)
                self.thread_times.clear()
                receipt = self._propagator.offer(*random.choice(self._calls[size]))
                await self._contender.publish_during_call(
                    samples, size, partial(self._has_applied, receipt.result().next_offset)
                )
                if not self._has_truncated:
                    samples.add(THREAD_CONTENDED, size, sum(self.thread_times))
        await measure_machine(samples, random, self._publishes)

    async def _timed_call(self, samples: Samples, random: Random, size: int) -> None:
        self.thread_times.clear()
        lag_s = await self.call(self._propagator, random.choice(self._calls[size]))
        thread_s = sum(self.thread_times)
        samples.add(CALL, size, lag_s)
        samples.add(THREAD_TRUNCATING if self._has_truncated else THREAD, size, thread_s)
        samples.add(LOOP, size, lag_s - thread_s)
        if self._grown_bytes > 0:
            samples.add(WAL_BYTES, size, self._grown_bytes)

    def _has_applied(self, next_offset: int) -> bool:
        return self.watch.applied_offset >= next_offset


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[StorageRig]:
    """Open a propagator with its log in memory, and a sink with its file in `folder`."""
    world = real_world()
    timer, thread_times = system.PreciseTimer(), list[float]()
    timed_world = replace(world, new_threads=lambda: TimedThreads(world.new_threads(), timer, thread_times))
    async with Propagator(world=timed_world) as propagator, Propagator(world=world) as other:
        sink = await propagator.attach(StorageSink(folder / "storage.db", mode="through"))
        rig = StorageRig(propagator, other, sink, thread_times)
        for deltas in _batches(1_000, 2 * KEYS // 1_000):
            await propagator.wait_visible(await propagator.publish(*deltas), timeout_s=60)
        yield rig


@asynccontextmanager
async def model(draws: Draws, timer: Timer) -> AsyncIterator[Rig]:
    """Open the model of the set-up, in virtual time."""
    watch = Stopwatch(timer)
    async with Propagator(world=virtual_world()) as propagator:
        await propagator.attach(_Model("storage", draws, watch))
        yield Rig(Source(propagator, cycle(_batches(DELTAS_PER_PUBLISH, BATCHES)), watch, draws), watch)


class _Model(ModelSink):
    def __init__(self, name: str, draws: Draws, watch: Stopwatch) -> None:
        super().__init__(name, draws, watch)
        self._wal = _Wal()

    async def work(self, delta_count: int) -> None:
        self.draws.compute(LOOP, delta_count)
        truncation_s = 0.0
        if self._wal.write(delta_count, self.draws.draw_s(WAL_BYTES, delta_count)):
            truncation_s = max(
                self.draws.draw_s(THREAD_TRUNCATING, TRUNCATING_DELTAS)
                - self.draws.median(THREAD, TRUNCATING_DELTAS),
                0.0,
            )
        await self.draws.run_on_thread(THREAD, delta_count, truncation_s)


class _Wal:
    """Models the size of the write-ahead log, which decides when it is truncated."""

    def __init__(self) -> None:
        self._rows = 0
        self._position = self._size = 0.0  # of the next write, and of the file, in bytes

    def write(self, rows: int, size: float) -> bool:
        """Write rows of `size` bytes in total. Return True if the log has become so large that this call
        truncates it. After many rows the log is only copied into the database, which is fast, and then
        overwritten from its start.
        """
        self._rows += rows
        self._position += size
        self._size = max(self._size, self._position)
        is_large = self._size > WAL_BYTES_MAX
        if is_large or self._rows >= WAL_ROWS:
            self._rows, self._position = 0, 0.0
        if is_large:
            self._size = 0.0
        return is_large


SET_UP = SetUp(
    "storage",
    f"SQLite, committed and synced before each call returns; {DELTAS_PER_PUBLISH} vectors of {DIMENSION} "
    "per publish",
    deltas_per_publish=DELTAS_PER_PUBLISH,
    unapplied_max=4_000,
    peak_share=0.4,
    settle_s=0.5,
    real=real,
    model=model,
)
