"""The set-up of an HNSW index at its bound of unindexed rows, which paces its source to the speed of
indexing.

New vectors arrive as fast as pacing permits. The event loop applies them; a thread indexes them, which takes
longer. The graph grows meanwhile, as it does when an index is filled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import numpy as np

from delta_prop.api.propagator import Propagator
from delta_prop.platform.ports import Threads, Timer
from delta_prop.platform.world import real_world
from delta_prop.testing.world import virtual_world
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.calibration_file import CALL
from delta_prop_simulations.calibration.distributions import Samples
from delta_prop_simulations.calibration.driving import RealRig, Rig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import Contender, measure_machine, noise
from delta_prop_simulations.calibration.models import THREAD, THREAD_CONTENDED, Draws, ModelSink, observe
from delta_prop_simulations.calibration.rounds import SetUp
from delta_prop_simulations.rng import Random, Seed
from delta_prop_sinks.hnsw_builder import Hnsw
from delta_prop_sinks.index import IndexSink
from delta_prop_sinks.sink import Backlog, TryAgain
from delta_prop_wire.delta import Delta, dense

if TYPE_CHECKING:
    T = TypeVar("T")

DIMENSION, SPREAD = 64, 0.5
"""Numbers per vector, and the largest difference of a number from the centre's."""
CENTRES, DIRECTIONS, STRIDE = 499, 4_099, 1_009
"""Centres, directions from each, and the step between directions: primes, so that vectors recur late."""
INITIAL_ROWS = 6_000
"""The number of rows in the graph before the measurement starts."""
HNSW = Hnsw(unindexed_rows_max=4_000, graph_rows_min=1_000)
CHUNK = 512
"""The number of rows of this dimension that the builder indexes per call."""
CALLS_BY_SIZE = {1: 10, 10: 10, 100: 8, 500: 3}
"""For each number of deltas per call, the number of calls in one slice of calibration."""
FILLS = 2
"""The number of backlogs indexed in one slice of calibration, both while the loop is idle and busy."""
BACKLOG_ROWS = 3_072
DELTAS_PER_PUBLISH = 10


def generate_publishes(deltas_per_publish: int, name: str) -> Iterator[list[Delta]]:
    """Yield the deltas of one publish after the other, without end. Every vector is new, and near one of the
    centres. This is cheap, since the event loop generates them while it is measured.
    """
    random = Seed(1).stream(name)
    centres = [noise(random, DIMENSION) for _ in range(CENTRES)]
    directions = [np.float32(SPREAD) * noise(random, DIMENSION) for _ in range(DIRECTIONS)]
    numbers = count()
    while True:
        publish_numbers = [next(numbers) for _ in range(deltas_per_publish)]
        yield [
            Delta(f"{name}-{i}", dense(centres[i % CENTRES] + directions[i * STRIDE % DIRECTIONS]))
            for i in publish_numbers
        ]


class _ThreadCalls:
    """Records the start of each call on the builder's thread, and the number of indexed rows at that time."""

    def __init__(self) -> None:
        self.sink: IndexSink | None = None
        self.calls: list[tuple[float, int]] = []

    def note(self) -> None:
        if self.sink is not None and (hnsw := self.sink.statistics().hnsw) is not None:
            self.calls.append((system.now_s(), hnsw.added_rows))

    def full_chunk_times_s(self) -> list[float]:
        """Return, for each call that indexed a full chunk, the seconds until the next call."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return [end - start for (start, before), (end, after) in pairs if after - before == CHUNK]


class _RecordedThread:
    def __init__(self, thread: Threads, calls: _ThreadCalls) -> None:
        self._thread = thread
        self._calls = calls

    async def run(self, function: Callable[[], T]) -> T:
        self._calls.note()
        return await self._thread.run(function)


class IndexRig(RealRig):
    """The open, real set-up. `other`: a propagator without sinks, whose publishes keep the loop busy."""

    def __init__(
        self, propagator: Propagator, other: Propagator, sink: IndexSink, thread_calls: _ThreadCalls
    ) -> None:
        watch = Stopwatch(system.PreciseTimer())
        observe(sink, watch)
        super().__init__(Source(propagator, generate_publishes(DELTAS_PER_PUBLISH, "source"), watch), watch)
        self._propagator = propagator
        self._sink = sink
        self._thread_calls = thread_calls
        self._contender = Contender(other, generate_publishes(DELTAS_PER_PUBLISH, "crowd"))
        self._calls = {size: generate_publishes(size, f"calls of {size}") for size in CALLS_BY_SIZE}
        self._publishes = {
            size: generate_publishes(size, f"sends of {size}") for size in (1, DELTAS_PER_PUBLISH, 100)
        }
        for publishes in (*self._calls.values(), *self._publishes.values()):
            next(publishes)  # the first call creates the centres and directions

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Run one slice: calls of each size; then indexing, uncontended and while the loop is busy."""
        await self.wait_until_indexed()
        for size, calls in CALLS_BY_SIZE.items():
            for _ in range(calls):
                samples.add(CALL, size, await self.call(self._propagator, next(self._calls[size])))
            await self.wait_until_indexed()
        for _ in range(FILLS):
            await self._fill()
            await self.wait_until_indexed()
            samples.add(THREAD, CHUNK, *self._thread_calls.full_chunk_times_s())
            await self._fill()
            await self._contender.publish_during_call(samples, CHUNK, lambda: not self._sink.backlog().rows)
            samples.add(THREAD_CONTENDED, CHUNK, *self._thread_calls.full_chunk_times_s())
            await self._contender.publish_uncontended(samples, CHUNK, 50)
        await measure_machine(samples, random, self._publishes)

    async def wait_until_indexed(self) -> None:
        """Wait until no row waits to be indexed."""
        with anyio.fail_after(60):
            while self._sink.backlog().rows:  # noqa: ASYNC110 - no event reports the end of indexing
                await anyio.sleep(0.002)

    async def _fill(self) -> None:
        for _ in range(BACKLOG_ROWS // 500):
            receipt = self._propagator.offer(*next(self._calls[500]))
        ack = await receipt.wait()
        await self._propagator.wait_visible(ack, timeout_s=60)
        self._thread_calls.calls.clear()


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[IndexRig]:
    """Open a propagator with its log in memory, and an index with some thousand rows in the graph."""
    world, thread_calls = real_world(), _ThreadCalls()

    @asynccontextmanager
    async def recorded_thread() -> AsyncIterator[_RecordedThread]:
        async with world.background_thread() as thread:
            yield _RecordedThread(thread, thread_calls)

    recorded_world = replace(world, background_thread=recorded_thread)
    async with Propagator(world=recorded_world) as propagator, Propagator(world=world) as other:
        thread_calls.sink = await propagator.attach(IndexSink(hnsw=HNSW))
        rig = IndexRig(propagator, other, thread_calls.sink, thread_calls)
        initial = generate_publishes(500, "first")
        for _ in range(INITIAL_ROWS // 500):
            await propagator.wait_visible(await propagator.publish(*next(initial)), timeout_s=60)
            await rig.wait_until_indexed()
        yield rig


@asynccontextmanager
async def model(draws: Draws, timer: Timer) -> AsyncIterator[Rig]:
    """Open the model of the set-up, in virtual time."""
    watch = Stopwatch(timer)
    async with Propagator(world=virtual_world()) as propagator:
        await propagator.attach(_Model("index", draws, watch))
        yield Rig(Source(propagator, generate_publishes(DELTAS_PER_PUBLISH, "source"), watch, draws), watch)


class _Model(ModelSink):
    """Models the rows that wait to be indexed, their bound, and the time that indexing takes."""

    def __init__(self, name: str, draws: Draws, watch: Stopwatch) -> None:
        super().__init__(name, draws, watch)
        self._unindexed = 0
        self._work_ready, self._capacity_freed = anyio.Event(), anyio.Event()

    async def work(self, delta_count: int) -> None:
        for start in range(0, delta_count, HNSW.piece_rows):
            await self._apply(min(delta_count - start, HNSW.piece_rows))

    async def _apply(self, rows: int) -> None:
        with anyio.move_on_after(HNSW.capacity_timeout_s):
            while self._unindexed + rows > HNSW.unindexed_rows_max:
                self._capacity_freed = anyio.Event()
                await self._capacity_freed.wait()
        if self._unindexed + rows > HNSW.unindexed_rows_max:
            raise TryAgain("indexing does not keep up")
        self.draws.compute(CALL, rows)
        self._unindexed += rows
        self._work_ready.set()

    async def background(self) -> None:
        while True:
            if not self._unindexed:
                self._work_ready = anyio.Event()
                await self._work_ready.wait()
            rows = min(self._unindexed, CHUNK)
            seconds = self.draws.draw_s(THREAD, CHUNK) * rows / CHUNK
            await self.draws.time.wait_outside_loop(seconds, self.draws.contention(CHUNK))
            self._unindexed -= rows
            self._capacity_freed.set()

    def backlog(self) -> Backlog:
        return Backlog(self._unindexed, HNSW.unindexed_rows_max)


SET_UP = SetUp(
    "index",
    f"HNSW index at its bound of {HNSW.unindexed_rows_max:,} unindexed rows, filled with new vectors of "
    f"{DIMENSION}, {DELTAS_PER_PUBLISH} per publish, as fast as it paces",
    deltas_per_publish=DELTAS_PER_PUBLISH,
    unapplied_max=4_000,
    peak_share=None,
    settle_s=2.0,
    real=real,
    model=model,
)
