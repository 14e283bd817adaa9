"""Open-loop load in real time, with the latencies, CPU time and memory of the service under it.

The times of calls are fixed in advance and do not depend on answers: a call that starts late counts as late.
So a service that stalls for a moment cannot hide this by delaying its callers.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import numpy as np

from delta_prop import Propagator, Settings
from delta_prop.sinks import CacheSink, CallbackSink, StorageSink
from delta_prop_sinks.sink import TryAgain
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from numpy.typing import NDArray

    from delta_prop_sinks.sink import Delivery, SinkContext

T = TypeVar("T")

MIB = 1 << 20
ROWS, DIMENSION, KEYS = 10, 64, 1_000
"""Rows of each call; the dimension and the number of the vectors."""
LOGGED_BYTES_PER_CALL = 8_000
"""Log bytes of one call of `ROWS` rows, rounded up."""
SINKS_OWN_BYTES = 2 * (KEYS * (DIMENSION * 4 + 500) + 8 * MIB)
"""Storage and cache each hold every vector once, with their tables, SQLite's pages, and a pending flush."""
FLOOR_BYTES = 8 * MIB
"""Freed memory that the interpreter and the allocator may retain; threads' stacks."""


class Calls(NamedTuple):
    """The ids and the matrices of calls that are published repeatedly.

    Together the calls have every vector once.
    """

    ids: list[list[str]]
    matrices: list[NDArray[np.float32]]

    @classmethod
    def draw(cls, seed: int) -> Calls:
        rng = np.random.default_rng(seed)
        keys = [f"vector-{number}" for number in range(KEYS)]
        order = rng.permutation(KEYS).reshape(-1, ROWS)
        return cls(
            [[keys[index] for index in indices] for indices in order],
            [rng.random((ROWS, DIMENSION), np.float32) for _ in order],
        )

    async def publish(self, p: Propagator, number: int, kind: Kind = Kind.DENSE) -> int:
        """Publish call `number`; return the offset after its last row."""
        index = number % len(self.ids)
        published = await p.publish_many(self.ids[index], self.matrices[index], kind=kind)
        return published.next_offset


class ApplyTimes:
    """The times at which a sink had applied everything below an offset."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.times: list[float] = []

    def note(self, deliveries: Sequence[Delivery]) -> None:
        self.ends.append(deliveries[-1].next_offset)
        self.times.append(time.perf_counter())

    def latencies_s(self, due: NDArray[np.float64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the latency of each call: from the time it was due until this sink had applied it."""
        deliveries = np.searchsorted(np.array(self.ends), ends)
        return np.array(self.times)[deliveries] - due


class TimedStorage(StorageSink):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.apply_times = ApplyTimes()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.apply_times.note(deliveries)


class TimedCache(CacheSink):
    def __init__(self) -> None:
        super().__init__(bytes_max=8 * MIB)
        self.apply_times = ApplyTimes()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.apply_times.note(deliveries)


class TimedCallback(CallbackSink):
    def __init__(self) -> None:
        super().__init__(self.take, per="delivery", nonblocking=True)
        self.apply_times = ApplyTimes()
        self.total = 0.0

    def take(self, delivery: Delivery) -> None:
        self.total += delivery.count

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.apply_times.note(deliveries)


class FaultySink:
    """A sink that stalls until released, or fails a share of its calls, and records applied ranges."""

    def __init__(self, name: str, *, stalls: bool = False, failure_share: float = 0.0) -> None:
        self.name = name
        self.applied: list[tuple[int, int]] = []
        self.failures = 0
        self.released = anyio.Event()
        if not stalls:
            self.released.set()
        self._failure_share = failure_share
        self._rng = random.Random(name)

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await self.released.wait()
        if self._rng.random() >= self._failure_share:
            self._note(deliveries, deliveries[-1].next_offset)
            return
        self.failures += 1
        done_offset = None
        if self._rng.random() < 0.5:
            done_offset = self._rng.randint(deliveries[0].first_offset, deliveries[-1].next_offset - 1)
            self._note(deliveries, done_offset)
        raise TryAgain("it fails now and then", done_offset=done_offset)

    def has_all(self, end: int) -> bool:
        """Return True if each row below `end` came once, in order."""
        edges = [(0, 0), *self.applied, (end, end)]
        return all(left[1] == right[0] for left, right in pairwise(edges))

    def _note(self, deliveries: Sequence[Delivery], end: int) -> None:
        for delivery in deliveries:
            first = delivery.first_offset + (0 if delivery.rows is None else int(delivery.rows[0]))
            if first < min(end, delivery.next_offset):
                self.applied.append((first, min(end, delivery.next_offset)))

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    def statistics(self) -> int:
        """Return the number of failures."""
        return self.failures


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run: calls per second, duration, number of slices; and settings large enough for it."""

    calls_per_s: float
    seconds: float
    slices: int = 1

    @property
    def calls_per_slice(self) -> int:
        return round(self.calls_per_s * self.seconds / self.slices)

    @property
    def calls(self) -> int:
        return self.calls_per_slice * self.slices

    def schedule(self, seed: int) -> NDArray[np.float64]:
        """Return when each call of a slice is due, in seconds from its start; callers are independent."""
        gaps = np.random.default_rng(seed).exponential(1 / self.calls_per_s, self.calls_per_slice)
        return np.cumsum(gaps)

    def settings(self) -> Settings:
        """Return small bounds, except for a log that holds the complete run although a sink stalls."""
        # 1.5 times the run, so that the log stays below the mark at which a required sink paces
        calls_held = round(1.5 * (self.calls + KEYS // ROWS))
        return Settings(
            queue_bytes_max=4 * MIB,
            pending_bytes_max=MIB,
            pending_deltas_max=100,
            log_deltas_max=calls_held * ROWS,
            log_bytes_max=max(16 * MIB, calls_held * LOGGED_BYTES_PER_CALL),
            ids_per_generation=1,
            id_generations_max=1,
            heads_max=2 * KEYS,
            origins_max=100,
            origins_per_owner_max=100,
            mailbox_bytes_max=2 * MIB,
            quarantine_deltas_max=100,
            quarantine_bytes_max=MIB,
        )


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of one run: seconds, microseconds of CPU time, bytes."""

    latencies_s: dict[str, NDArray[np.float64]]
    deltas: int
    cpu_us_per_delta: float
    rss_bytes_max: int
    log_bytes: int
    disturbing_sinks: dict[str, tuple[int, int]]
    """Per sink: its largest lag in deltas at the end of a slice, when the others had caught up; its number of
    failures."""


async def peak_calls_per_s(calls: Calls, path: Path, seconds: float) -> float:
    """Return how many calls per second one sequential caller makes and the healthy sinks apply."""
    load = Load(20_000, seconds)
    async with Propagator(load.settings()) as p:
        await _attach_healthy(p, path)
        await _fill(p, calls)
        start, number = time.perf_counter(), 0
        while time.perf_counter() - start < seconds and number < load.calls:
            end = await calls.publish(p, number)
            number += 1
        await p.wait_visible(end)
        return number / (time.perf_counter() - start)


class Side:
    """One of the two services that are compared, with its measurements of each slice."""

    def __init__(
        self,
        p: Propagator,
        calls: Calls,
        healthy: dict[str, ApplyTimes],
        disturbing_sinks: list[FaultySink],
    ) -> None:
        self.p = p
        self._calls = calls
        self._healthy = healthy
        self._disturbing_sinks = disturbing_sinks
        self._due: list[NDArray[np.float64]] = []
        self._ends: list[NDArray[np.int64]] = []
        self._cpu_s = 0.0
        self._rss_bytes_max = 0
        self._lags = {sink.name: 0 for sink in disturbing_sinks}

    @classmethod
    @asynccontextmanager
    async def open(cls, load: Load, calls: Calls, path: Path, *, is_disturbed: bool) -> AsyncIterator[Side]:
        """Open a service that holds every vector, with or without the stalled and the failing sink."""
        disturbing_sinks = (
            [FaultySink("stalled", stalls=True), FaultySink("failing", failure_share=0.3)]
            if is_disturbed
            else []
        )
        async with Propagator(load.settings()) as p:
            healthy = await _attach_healthy(p, path)
            for sink in disturbing_sinks:
                await p.attach(sink)
            await _fill(p, calls)
            yield cls(p, calls, healthy, disturbing_sinks)

    async def collect_garbage(self) -> None:
        """Collect the garbage of earlier runs."""
        gc.collect()

    async def slice(self, due: NDArray[np.float64]) -> None:
        """Run a slice: measure until the healthy sinks have applied it, then wait for the failing one."""
        cpu_before_s = time.process_time()
        start = time.perf_counter() + 0.005
        ends, rss = await _offer_load(self.p, self._calls, due, start)
        await self.p.wait_visible(int(ends[-1]), sinks=list(self._healthy))
        self._cpu_s += time.process_time() - cpu_before_s
        self._rss_bytes_max = max(self._rss_bytes_max, rss, rss_bytes())
        self._due.append(start + due)
        self._ends.append(ends)
        sinks = self.p.statistics().sinks
        assert not any(sink.pacing for sink in sinks.values())
        for sink in self._disturbing_sinks:
            self._lags[sink.name] = max(self._lags[sink.name], sinks[sink.name].lag)
            if sink.released.is_set():
                await self.p.wait_visible(int(ends[-1]), sinks=[sink.name])

    async def finish(self) -> Measurements:
        """Release the stalled sink, wait until every sink has everything, and return the measurements."""
        due, ends = np.concatenate(self._due), np.concatenate(self._ends)
        log_statistics = self.p.statistics().log
        assert log_statistics.dropped == log_statistics.refused == 0
        for sink in self._disturbing_sinks:
            sink.released.set()
        await self.p.wait_visible(int(ends[-1]))
        assert all(sink.has_all(int(ends[-1])) for sink in self._disturbing_sinks)
        return Measurements(
            {name: apply_times.latencies_s(due, ends) for name, apply_times in self._healthy.items()},
            len(due) * ROWS,
            self._cpu_s * 1e6 / (len(due) * ROWS),
            self._rss_bytes_max,
            log_statistics.bytes,
            {sink.name: (self._lags[sink.name], sink.failures) for sink in self._disturbing_sinks},
        )


class SteppedLoop:
    """A service in an event loop of its own, which is paused while the other service runs its slice.

    So the work of one service between its slices does not count as work of the other.
    """

    def __init__(self, load: Load, calls: Calls, path: Path, *, is_disturbed: bool) -> None:
        self._loop = asyncio.new_event_loop()
        self._steps: asyncio.Queue[tuple[Callable[[Side], Awaitable[Any]] | None, asyncio.Future[Any]]]
        self._steps = asyncio.Queue()
        self._task = self._loop.create_task(
            self._serve(Side.open(load, calls, path, is_disturbed=is_disturbed))
        )

    def run(self, step: Callable[[Side], Awaitable[T]]) -> T:
        """Run the loop until the step is done."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def on_end(task: asyncio.Task[None]) -> None:
            if not answer.done():
                answer.set_exception(task.exception() or RuntimeError("the service has ended"))

        self._steps.put_nowait((step, answer))
        self._task.add_done_callback(on_end)
        try:
            # `answer` is a future: a coroutine would become anyio's root task, whose end stops the threads.
            return self._loop.run_until_complete(answer)
        finally:
            self._task.remove_done_callback(on_end)

    def close(self) -> None:
        """Close the service, if it is still open, and its loop."""
        if not self._task.done():
            self._steps.put_nowait((None, self._loop.create_future()))
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _serve(self, opened: AbstractAsyncContextManager[Side]) -> None:
        async with opened as side:
            while True:
                step, answer = await self._steps.get()
                if step is None:
                    return
                try:
                    answer.set_result(await step(side))
                except Exception as failure:
                    answer.set_exception(failure)


def measure_pair(load: Load, calls: Calls, path: Path, number: int) -> tuple[Measurements, Measurements]:
    """Run service A without the disturbing sinks and B with them, in alternating slices (ABBA…).

    So other work on the machine disturbs both equally.
    """
    a = SteppedLoop(load, calls, path / f"{number}-a.db", is_disturbed=False)
    b = SteppedLoop(load, calls, path / f"{number}-b.db", is_disturbed=True)
    try:
        for side in (a, b):
            side.run(Side.collect_garbage)
        for slice_number in range(load.slices):
            due = load.schedule(number * load.slices + slice_number)
            for side in (b, a) if (slice_number + number) % 2 else (a, b):
                side.run(partial(Side.slice, due=due))
        return a.run(Side.finish), b.run(Side.finish)
    finally:
        a.close()
        b.close()


def memory_bytes_max(load: Load) -> int:
    """Return the memory bound of a pair: the bounds of both settings, plus the memory of the sinks."""
    settings = load.settings()
    return settings.memory_bytes_max(3) + settings.memory_bytes_max(5) + 2 * SINKS_OWN_BYTES + FLOOR_BYTES


def rss_bytes() -> int:
    """Return the process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def _attach_healthy(p: Propagator, path: Path) -> dict[str, ApplyTimes]:
    storage, cache, callback = TimedStorage(path), TimedCache(), TimedCallback()
    for sink in (storage, cache, callback):
        await p.attach(sink)
    return {sink.name: sink.apply_times for sink in (storage, cache, callback)}


async def _fill(p: Propagator, calls: Calls) -> None:
    """Publish every vector once, so that no run measures the first write of a key."""
    for number in range(len(calls.ids)):
        end = await calls.publish(p, number, Kind.CREATE)
    names = [name for name in p.statistics().sinks if name not in ("stalled", "failing")]
    await p.wait_visible(end, sinks=names, committed=True)


async def _offer_load(
    p: Propagator, calls: Calls, due: NDArray[np.float64], start: float
) -> tuple[NDArray[np.int64], int]:
    ends, rss, sampled_at = np.empty(len(due), np.int64), 0, 0.0
    for number, due_s in enumerate(due.tolist()):
        wait_s = start + due_s - time.perf_counter()
        if wait_s > 0:
            await anyio.sleep(wait_s)
        ends[number] = await calls.publish(p, number)
        if due_s - sampled_at > 0.2:
            sampled_at, rss = due_s, max(rss, rss_bytes())
    return ends, rss
