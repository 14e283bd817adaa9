"""Shared parts of the benchmarks of the embedded service: prepared calls, a service, and loops that drive it.

A delta sets 16 of the 128 numbers of one of 20,000 vectors: 128 bytes of payload. Dots, dedup, order, all
checks and the log in a directory are those of the product; keys are drawn at random.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import anyio
import numpy as np
from numpy.typing import NDArray

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import PublishAck
from delta_prop.client import ForwardLink
from delta_prop_broker.log.settings import MIB, LogSettings
from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    Delivery,
    ForwardSink,
    Hnsw,
    IndexSink,
    Sink,
    StorageSink,
)
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Delta, sparse

KEYS, DIMENSION, NUMBERS = 20_000, 128, 16
NAMES = [f"key-{number}" for number in range(KEYS)]
UNINDEXED_ROWS_MAX = KEYS
"""Maximum number of rows that wait to be linked into the index graph; each search scores them exactly."""
WAIT_S = 60.0
REMOVE_S_MAX = 5.0
_PREPARED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Columns:
    """The rows that one call publishes."""

    ids: list[str]
    values: NDArray[np.float32]
    indices: NDArray[np.uint32]


def prepare_calls(size: int, seed: int = 1) -> list[Delta] | list[Columns]:
    """Return the arguments of calls of `size` deltas each, to be published in turn."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    calls = min(max(200_000 // size, 50), _PREPARED_MAX)
    columns = [
        Columns(
            [NAMES[rng.randrange(KEYS)] for _ in range(size)],
            numbers.random((size, NUMBERS), np.float32),
            numbers.integers(0, DIMENSION, (size, NUMBERS)).astype(np.uint32),
        )
        for _ in range(calls)
    ]
    if size > 1:
        return columns
    return [Delta(call.ids[0], sparse(call.indices[0], call.values[0])) for call in columns]


def bare_rate(size: int, seconds: float, folder: Path) -> float:
    """Measure the deltas per second of a loop without a service, as the present limit of this machine.

    For each call the loop writes the numbers that a service would get, with a checksum, into the page cache,
    and sets them in the vectors in memory.
    """
    calls, slot_of = prepare_calls(size), {name: number for number, name in enumerate(NAMES)}
    all_columns = [
        call if isinstance(call, Columns) else Columns([call.vector_id], *_numbers_of(call)) for call in calls
    ]
    numbers = np.zeros(KEYS * DIMENSION, np.float32)
    started_at = now = time.perf_counter()
    deltas_done = 0
    with (folder / "bare").open("wb", buffering=0) as file:
        while now < started_at + seconds:
            columns = all_columns[deltas_done // size % len(all_columns)]
            body = b"".join((*map(str.encode, columns.ids), columns.indices.data, columns.values.data))
            file.write(crc32c(body).to_bytes(4, "little") + body)
            slots = np.fromiter(map(slot_of.__getitem__, columns.ids), np.intp, size)
            places = (columns.indices + (slots * DIMENSION)[:, None]).reshape(-1)
            numbers.put(places, columns.values.reshape(-1))
            deltas_done += size
            now = time.perf_counter()
    return deltas_done / (now - started_at)


def _numbers_of(delta: Delta) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    operation = delta.operation
    assert operation.values is not None
    assert operation.indices is not None
    return operation.values[None, :], operation.indices[None, :]


class AppliedRecorder:
    """A mixin for sinks that records each applied offset and its time."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.offsets: list[int] = []
        self.times: list[float] = []

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply as the sink does, then record it."""
        await super().apply(deliveries)  # type: ignore[misc]
        self.note(deliveries)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Apply at once if the sink can, then record it."""
        at_once = getattr(super(), "apply_now", None)
        if at_once is None or not at_once(deliveries):
            return False
        self.note(deliveries)
        return True

    def note(self, deliveries: Sequence[Delivery]) -> None:
        """Record that the sink has just applied these deliveries."""
        self.offsets.append(deliveries[-1].next_offset)
        self.times.append(time.perf_counter())

    def applied_at(self, offset: int) -> float:
        """Return the time at which all deltas below an offset had been applied."""
        return self.times[bisect_left(self.offsets, offset)]

    def clear(self) -> None:
        """Clear the record."""
        self.offsets.clear()
        self.times.clear()


class RecordingStorage(AppliedRecorder, StorageSink):
    """See `AppliedRecorder`."""


class RecordingIndex(AppliedRecorder, IndexSink):
    """See `AppliedRecorder`."""


class RecordingCache(AppliedRecorder, CacheSink):
    """See `AppliedRecorder`."""


class RecordingForward(AppliedRecorder, ForwardSink):
    """See `AppliedRecorder`. A row counts as applied once the other service has acknowledged it."""


class RecordingCallback(AppliedRecorder, CallbackSink):
    """See `AppliedRecorder`."""


@dataclass(slots=True)
class CallTimings:
    """The timings of one run of calls. `seconds`: until every sink had applied the last delta.

    `acknowledged`, `visible`: one latency per call, in seconds, until the acknowledgement, and until all
    sinks had applied the call. `cpu_s`: CPU seconds of this process, all its threads.
    """

    deltas: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    acknowledged: list[float] = field(default_factory=list)
    visible: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Deltas per second, until every sink had applied the last one."""
        return self.deltas / self.seconds


def _remove(folder: Path) -> None:
    """Remove a folder; retry, as a thread that outlived a signal may still create files in it."""
    end = time.monotonic() + REMOVE_S_MAX
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


class Bench:
    """A propagator with its log in a directory, its sinks by name, and all vectors created."""

    def __init__(self, *sinks: str, replica: str | None = None, linger_ms: float | None = None) -> None:
        """`sinks`: names among callback, storage, index (exact), linked (with an HNSW graph), and cache;
        `replica`: the address of a service to forward to.
        """
        self._sink_names, self._replica = sinks, replica
        self._settings = Settings() if linger_ms is None else Settings(linger_ms=linger_ms)
        self._exit = AsyncExitStack()
        self.sinks: dict[str, AppliedRecorder] = {}
        self._count = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            self._exit = stack.pop_all()
        return self

    async def _set_up(self, stack: AsyncExitStack) -> None:
        folder = Path(tempfile.mkdtemp(prefix="delta-prop-bench-"))
        stack.callback(_remove, folder)
        # A thread that outlived a signal may create the folder again; no thread runs at exit.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        log = LogSettings(read_level=AckLevel.LOGGED, retention_bytes=256 * MIB, compact=False)
        self.propagator = await stack.enter_async_context(
            Propagator(self._settings, data=folder / "log", log=log)
        )
        for name in self._sink_names:
            await self._attach(name, folder)
        if self._replica is not None:
            await self._add("replica", RecordingForward(ForwardLink(self._replica)))
        published = None
        for first in range(0, KEYS, 2_000):
            names = NAMES[first : first + 2_000]
            published = await self.propagator.publish_many(
                names, np.zeros((len(names), DIMENSION), np.float32), ack_level=AckLevel.LOGGED
            )
        assert published is not None
        # The vectors are committed first, so that the first second does not measure how storage writes them.
        await self.propagator.wait_visible(published, committed=True, timeout_s=WAIT_S)

    async def __aexit__(self, *failure: object) -> None:
        await self._exit.aclose()

    async def _attach(self, name: str, folder: Path) -> None:
        if name == "callback":
            await self._add(name, RecordingCallback(self._take, per="delivery", nonblocking=True))
        elif name == "storage":
            await self._add(name, RecordingStorage(folder / "storage.db"))
        elif name in ("index", "linked"):
            hnsw = Hnsw(unindexed_rows_max=UNINDEXED_ROWS_MAX) if name == "linked" else False
            storage = self.sinks.get("storage")
            resident = storage.resident if isinstance(storage, StorageSink) else None
            await self._add(name, RecordingIndex(resident=resident, hnsw=hnsw))
        elif name == "cache":
            await self._add(name, RecordingCache())

    async def _add(self, name: str, sink: Sink) -> None:
        assert isinstance(sink, AppliedRecorder)
        await self.propagator.attach(sink)
        self.sinks[name] = sink

    def _take(self, delivery: Delivery) -> None:
        self._count += delivery.count

    # --- sending

    def publisher(self, size: int, level: AckLevel) -> Callable[[], Awaitable[PublishAck]]:
        """Return a function that publishes the next `size` deltas in one call."""
        publish, publish_many = self.propagator.publish, self.propagator.publish_many
        prepared = _cycle(prepare_calls(size))

        def single() -> Awaitable[PublishAck]:
            return publish(next(prepared), ack_level=level)  # type: ignore[arg-type]

        def many() -> Awaitable[PublishAck]:
            columns = next(prepared)
            assert isinstance(columns, Columns)
            return publish_many(columns.ids, columns.values, indices=columns.indices, ack_level=level)

        return single if size == 1 else many

    async def closed_loop(self, size: int, level: AckLevel, *, in_flight: int, seconds: float) -> CallTimings:
        """Run `in_flight` callers; each makes its next call as soon as its last one is acknowledged."""
        call, timings, called_at = self.publisher(size, level), CallTimings(), {}
        end = time.perf_counter() + seconds

        async def caller() -> None:
            begin = time.perf_counter()
            while True:
                published = await call()
                called_at[published.next_offset] = begin
                timings.deltas += size
                now = time.perf_counter()
                timings.acknowledged.append(now - begin)
                begin = now
                if now >= end:
                    return

        return await self._run_callers(caller, in_flight, timings, called_at, end - seconds)

    async def open_loop(
        self, size: int, level: AckLevel, *, rate: float, calls: int, in_flight: int
    ) -> CallTimings:
        """Make calls that are due at a steady rate, in deltas per second.

        Up to `in_flight` calls are open at a time; while so many are, due calls are delayed. Latencies count
        from the time a call was due, so they include this delay.
        """
        call, timings, called_at = self.publisher(size, level), CallTimings(), {}
        start = time.perf_counter() + 0.01
        numbers = iter(range(calls))

        async def caller() -> None:
            for number in numbers:
                due = start + number * size / rate
                # Timers have a resolution of 1 ms, so the last part of the wait polls the event loop.
                while (wait_s := due - time.perf_counter()) > 0:  # noqa: ASYNC110
                    await anyio.sleep(wait_s - 0.0015 if wait_s > 0.003 else 0)
                published = await call()
                timings.acknowledged.append(time.perf_counter() - due)
                called_at[published.next_offset] = due
                timings.deltas += size

        return await self._run_callers(caller, in_flight, timings, called_at, start)

    async def _run_callers(
        self,
        caller: Callable[[], Coroutine[Any, Any, None]],
        count: int,
        timings: CallTimings,
        called_at: dict[int, float],
        start: float,
    ) -> CallTimings:
        """Run the callers until every sink has their deltas; fill in the timings."""
        for sink in self.sinks.values():
            sink.clear()
        cpu_s = time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(caller)
        await self.settle()
        timings.seconds, timings.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
        sinks = list(self.sinks.values())
        timings.visible = [
            max(sink.applied_at(offset) for sink in sinks) - called for offset, called in called_at.items()
        ]
        return timings

    async def settle(self) -> None:
        """Wait until every sink has applied the whole log."""
        visible = self.propagator.statistics().log.next_offset
        await self.propagator.wait_visible(visible, timeout_s=WAIT_S)


def _cycle(calls: list[Delta] | list[Columns]) -> Iterator[Delta | Columns]:
    while True:
        yield from calls
