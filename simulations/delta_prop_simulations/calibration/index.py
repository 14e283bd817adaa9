"""The set-up of a linked index at its bound of unlinked rows: it paces its source to what linking takes.

New vectors come as fast as they are let in. Applying them is work of the event loop; linking goes on behind,
on a thread, and is the slower of the two. The graph grows all the while, as it does when an index is filled.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop.embedded import Propagator
from delta_prop.testing.world import virtual_world
from delta_prop.world import real_world
from delta_prop_simulations.calibration import edge
from delta_prop_simulations.calibration.driving import RealRig, Rig, Source, Stopwatch
from delta_prop_simulations.calibration.machine_times import Crowd, measure_machine, noise
from delta_prop_simulations.calibration.models import THREAD, THREAD_BESIDE, Draws, ModelSink, observe
from delta_prop_simulations.calibration.record import CALL
from delta_prop_simulations.calibration.rounds import SetUp
from delta_prop_simulations.chance import Seed
from delta_prop_sinks.index import IndexSink
from delta_prop_sinks.linking import Linked
from delta_prop_sinks.sink import Backlog, TryAgain
from delta_prop_wire.delta import Delta, dense

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path
    from typing import TypeVar

    from delta_prop.ports import Threads
    from delta_prop_simulations.calibration.laws import Samples
    from delta_prop_simulations.chance import Random

    T = TypeVar("T")

DIMENSION, SPREAD = 64, 0.5
CENTRES, WAYS, STRIDE = 499, 4_099, 1_009
"""Primes, so that it takes two million vectors until one comes again."""
FILLED = 6_000
"""Rows that are linked before anything is measured."""
LINKED = Linked(unlinked_rows_max=4_000, graph_rows_min=1_000)
CHUNK = 512
"""Rows that the linker takes at a time, of 64 numbers."""
SIZES = {1: 10, 10: 10, 100: 8, 500: 3}
FILLS = 2
"""How often a slice of calibration lets the linker work off a backlog: alone, and beside a busy loop."""
BACKLOG = 3_072
SENT = 10


def vectors(sent: int, name: str) -> Iterator[list[Delta]]:
    """Publishes without an end, every vector a new one, near one of the centres. Cheap to make: the event
    loop makes them while it is measured.
    """
    random = Seed(1).stream(name)
    centres = [noise(random, DIMENSION) for _ in range(CENTRES)]
    ways = [np.float32(SPREAD) * noise(random, DIMENSION) for _ in range(WAYS)]
    numbers = count()
    while True:
        chosen = [next(numbers) for _ in range(sent)]
        yield [
            Delta(f"{name}-{at}", dense(centres[at % CENTRES] + ways[at * STRIDE % WAYS])) for at in chosen
        ]


class _Marks:
    """When each call on the linker's thread began, and how many rows were linked by then."""

    def __init__(self) -> None:
        self.sink: IndexSink | None = None
        self.marks: list[tuple[float, int]] = []

    def note(self) -> None:
        if self.sink is not None and (linked := self.sink.statistics().linked) is not None:
            self.marks.append((edge.now_s(), linked.links_done))

    def whole_chunks(self) -> list[float]:
        """Seconds from one call to the next, of calls that linked all that they take at most."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [after - before for (before, done), (after, more) in pairs if more - done == CHUNK]


class _MarkedThread:
    def __init__(self, thread: Threads, marks: _Marks) -> None:
        self._thread = thread
        self._marks = marks

    async def run(self, function: Callable[[], T]) -> T:
        self._marks.note()
        return await self._thread.run(function)


class IndexRig(RealRig):
    """The real one, open."""

    def __init__(self, propagator: Propagator, other: Propagator, sink: IndexSink, marks: _Marks) -> None:
        watch = Stopwatch(edge.now_s)
        observe(sink, watch)
        super().__init__(Source(propagator, vectors(SENT, "source"), watch), watch)
        self._propagator = propagator
        self._sink = sink
        self._marks = marks
        self._crowd = Crowd(other, vectors(SENT, "crowd"))
        self._calls = {size: vectors(size, f"calls of {size}") for size in SIZES}
        self._publishes = {size: vectors(size, f"sends of {size}") for size in (1, SENT, 100)}
        for some in (*self._calls.values(), *self._publishes.values()):
            next(some)  # makes what it draws from

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """One slice: calls of each size; then linking alone, and beside a busy loop."""
        await self.linked()
        for size, calls in SIZES.items():
            for _ in range(calls):
                samples.add(CALL, size, await self.call(self._propagator, next(self._calls[size])))
            await self.linked()
        for _ in range(FILLS):
            await self._fill()
            await self.linked()
            samples.add(THREAD, CHUNK, *self._marks.whole_chunks())
            await self._fill()
            await self._crowd.beside(samples, CHUNK, lambda: not self._sink.backlog().rows)
            samples.add(THREAD_BESIDE, CHUNK, *self._marks.whole_chunks())
            await self._crowd.alone(samples, CHUNK, 50)
        await measure_machine(samples, random, self._publishes)

    async def linked(self) -> None:
        """Wait until nothing waits to be linked."""
        with anyio.fail_after(60):
            while self._sink.backlog().rows:  # noqa: ASYNC110 - nothing tells it
                await anyio.sleep(0.002)

    async def _fill(self) -> None:
        """Let a backlog come, far from the bound of the first pace."""
        for _ in range(BACKLOG // 500):
            receipt = self._propagator.offer(*next(self._calls[500]))
        done = await receipt.wait()
        await self._propagator.wait_visible(done, timeout_s=60)
        self._marks.marks.clear()


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[IndexRig]:
    """A propagator with its log in memory, and an index with some thousand rows linked."""
    world, marks = real_world(), _Marks()

    @asynccontextmanager
    async def marked_thread() -> AsyncIterator[_MarkedThread]:
        async with world.background_thread() as thread:
            yield _MarkedThread(thread, marks)

    marked = replace(world, background_thread=marked_thread)
    async with Propagator(world=marked) as propagator, Propagator(world=world) as other:
        marks.sink = await propagator.attach(IndexSink(linked=LINKED))
        rig = IndexRig(propagator, other, marks.sink, marks)
        first = vectors(500, "first")
        for _ in range(FILLED // 500):
            await propagator.wait_visible(await propagator.publish(*next(first)), timeout_s=60)
            await rig.linked()
        yield rig


@asynccontextmanager
async def model(draws: Draws, now_s: Callable[[], float]) -> AsyncIterator[Rig]:
    """The same in virtual time."""
    watch = Stopwatch(now_s)
    async with Propagator(world=virtual_world()) as propagator:
        await propagator.attach(_Model("index", draws, watch))
        yield Rig(Source(propagator, vectors(SENT, "source"), watch, draws.pay), watch)


class _Model(ModelSink):
    """Rows that wait to be linked, their bound, and the time that linking takes."""

    def __init__(self, name: str, draws: Draws, watch: Stopwatch) -> None:
        super().__init__(name, draws, watch)
        self._unlinked = 0
        self._work, self._room = anyio.Event(), anyio.Event()

    async def work(self, deltas: int) -> None:
        for at in range(0, deltas, LINKED.piece_rows):
            await self._apply(min(deltas - at, LINKED.piece_rows))

    async def _apply(self, rows: int) -> None:
        with anyio.move_on_after(LINKED.room_s_max):
            while self._unlinked + rows > LINKED.unlinked_rows_max:
                self._room = anyio.Event()
                await self._room.wait()
        if self._unlinked + rows > LINKED.unlinked_rows_max:
            raise TryAgain("linking does not keep up")
        self.draws.compute(CALL, rows)
        self._unlinked += rows
        self._work.set()

    async def background(self) -> None:
        while True:
            if not self._unlinked:
                self._work = anyio.Event()
                await self._work.wait()
            rows = min(self._unlinked, CHUNK)
            seconds = self.draws.drawn(THREAD, CHUNK) * rows / CHUNK
            await self.draws.time.elsewhere(seconds, self.draws.contention(CHUNK))
            self._unlinked -= rows
            self._room.set()

    def backlog(self) -> Backlog:
        return Backlog(self._unlinked, LINKED.unlinked_rows_max)


SET_UP = SetUp(
    "index",
    f"HNSW index at its bound of {LINKED.unlinked_rows_max:,} unlinked rows, filled with new vectors of "
    f"{DIMENSION}, {SENT} a publish, as fast as it lets them in",
    sent=SENT,
    ahead_max=4_000,
    share=None,
    settle_s=2.0,
    real=real,
    model=model,
)
