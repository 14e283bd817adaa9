"""What the benchmarks of the service inside a program share: calls made beforehand, a service, how both meet.

A delta sets 16 of the 128 numbers of one of 20,000 vectors: 128 bytes of payload. Dots, dedup, order, all
checks and the log in a directory are as the product has them; keys are drawn at random.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
import time
from bisect import bisect_left
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop.client import ForwardLink
from delta_prop.config import Settings
from delta_prop.embedded import Propagator
from delta_prop_broker.log.settings import MIB, LogSettings
from delta_prop_sinks import CacheSink, CallbackSink, Delivery, ForwardSink, IndexSink, Linked, StorageSink
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Delta, sparse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from delta_prop.receipt import Published
    from delta_prop_sinks import Sink

KEYS, DIMENSION, NUMBERS = 20_000, 128, 16
NAMES = [f"key-{number}" for number in range(KEYS)]
UNLINKED_ROWS_MAX = KEYS
"""The bound on rows that wait to be linked into the index: each search scores these exactly."""
WAIT_S = 60.0
REMOVE_S_MAX = 5.0
_PREPARED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Columns:
    """What one call publishes: many rows."""

    ids: list[str]
    values: NDArray[np.float32]
    indices: NDArray[np.uint32]


def prepared(size: int, seed: int = 1) -> list[Delta] | list[Columns]:
    """What calls of so many deltas publish, in turn."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    calls = min(max(200_000 // size, 50), _PREPARED_MAX)
    columns = [
        Columns(
            [NAMES[draw.randrange(KEYS)] for _ in range(size)],
            numbers.random((size, NUMBERS), np.float32),
            numbers.integers(0, DIMENSION, (size, NUMBERS)).astype(np.uint32),
        )
        for _ in range(calls)
    ]
    if size > 1:
        return columns
    return [Delta(one.ids[0], sparse(one.indices[0], one.values[0])) for one in columns]


def bare_rate(size: int, seconds: float, folder: Path) -> float:
    """Deltas a second of a loop without a service, for the limit of this machine in this minute: the same
    numbers with their checksum into the page cache, and into their places in memory, one call after another.
    """
    calls, places = prepared(size), {name: number for number, name in enumerate(NAMES)}
    rows = [one if isinstance(one, Columns) else Columns([one.vector_id], *_numbers_of(one)) for one in calls]
    numbers = np.zeros(KEYS * DIMENSION, np.float32)
    begun = now = time.perf_counter()
    done = 0
    with (folder / "bare").open("wb", buffering=0) as file:
        while now < begun + seconds:
            one = rows[done // size % len(rows)]
            body = b"".join((*map(str.encode, one.ids), one.indices.data, one.values.data))
            file.write(crc32c(body).to_bytes(4, "little") + body)
            slots = np.fromiter(map(places.__getitem__, one.ids), np.intp, size)
            numbers.put((one.indices + (slots * DIMENSION)[:, None]).reshape(-1), one.values.reshape(-1))
            done += size
            now = time.perf_counter()
    return done / (now - begun)


def _numbers_of(delta: Delta) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    operation = delta.operation
    assert operation.values is not None
    assert operation.indices is not None
    return operation.values[None, :], operation.indices[None, :]


class Noting:
    """A sink that notes up to which offset it has applied, and when."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)
        self.offsets: list[int] = []
        self.times: list[float] = []

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """As the sink does."""
        await super().apply(deliveries)  # type: ignore[misc]
        self.note(deliveries)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Likewise, where the sink applies without waiting."""
        at_once = getattr(super(), "apply_now", None)
        if at_once is None or not at_once(deliveries):
            return False
        self.note(deliveries)
        return True

    def note(self, deliveries: Sequence[Delivery]) -> None:
        """Applied, just now."""
        self.offsets.append(deliveries[-1].next_offset)
        self.times.append(time.perf_counter())

    def applied_at(self, offset: int) -> float:
        """When all below an offset had been applied."""
        return self.times[bisect_left(self.offsets, offset)]

    def forget(self) -> None:
        """Begin anew."""
        self.offsets.clear()
        self.times.clear()


class NotingStorage(Noting, StorageSink):
    """See Noting."""


class NotingIndex(Noting, IndexSink):
    """See Noting."""


class NotingCache(Noting, CacheSink):
    """See Noting."""


class NotingForward(Noting, ForwardSink):
    """See Noting: another service has acknowledged it."""


class NotingCallback(Noting, CallbackSink):
    """See Noting."""


@dataclass(slots=True)
class Sent:
    """What one run of calls took. Latencies in seconds, one a call: until the acknowledgement, until all
    sinks had applied it. `cpu_s`: of this process, all its threads.
    """

    deltas: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    acknowledged: list[float] = field(default_factory=list)
    visible: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Deltas a second, until the last one was applied by every sink."""
        return self.deltas / self.seconds


def _remove(folder: Path) -> None:
    """Remove a folder and all in it, in which a thread that a signal has left alone may still make files."""
    end = time.monotonic() + REMOVE_S_MAX
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


class Bench:
    """A propagator with its log in a directory, sinks by name, and all vectors made."""

    def __init__(self, *sinks: str, replica: str | None = None, linger_ms: float | None = None) -> None:
        """`sinks`: of callback, storage, index, linked, cache; `replica`: the address of another service."""
        self._wanted, self._replica = sinks, replica
        self._settings = Settings() if linger_ms is None else Settings(linger_ms_max=linger_ms)
        self._exit = AsyncExitStack()
        self.sinks: dict[str, Noting] = {}
        self._count = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._fill(stack)
            self._exit = stack.pop_all()
        return self

    async def _fill(self, stack: AsyncExitStack) -> None:
        folder = Path(tempfile.mkdtemp(prefix="delta-prop-bench-"))
        stack.callback(_remove, folder)
        # A thread that a signal left alone may make the folder again: no thread runs when this does.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        log = LogSettings(level=AckLevel.LOGGED, keep_bytes_max=256 * MIB, compact=False)
        self.propagator = await stack.enter_async_context(
            Propagator(self._settings, data=folder / "log", log=log)
        )
        for name in self._wanted:
            await self._attach(name, folder)
        if self._replica is not None:
            await self._add("replica", NotingForward(ForwardLink(self._replica)))
        published = None
        for at in range(0, KEYS, 2_000):
            names = NAMES[at : at + 2_000]
            published = await self.propagator.publish_many(
                names, np.zeros((len(names), DIMENSION), np.float32), ack_level=AckLevel.LOGGED
            )
        assert published is not None
        # On disk first: else the first second measures how the store swallows all vectors at once.
        await self.propagator.wait_visible(published, committed=True, timeout_s=WAIT_S)

    async def __aexit__(self, *failure: object) -> None:
        await self._exit.aclose()

    async def _attach(self, name: str, folder: Path) -> None:
        if name == "callback":
            await self._add(name, NotingCallback(self._take, per="delivery", nonblocking=True))
        elif name == "storage":
            await self._add(name, NotingStorage(folder / "storage.db"))
        elif name in ("index", "linked"):
            linked = Linked(unlinked_rows_max=UNLINKED_ROWS_MAX) if name == "linked" else False
            storage = self.sinks.get("storage")
            resident = storage.resident if isinstance(storage, StorageSink) else None
            await self._add(name, NotingIndex(resident=resident, linked=linked))
        elif name == "cache":
            await self._add(name, NotingCache())

    async def _add(self, name: str, sink: Sink) -> None:
        assert isinstance(sink, Noting)
        await self.propagator.attach(sink)
        self.sinks[name] = sink

    def _take(self, delivery: Delivery) -> None:
        self._count += delivery.count

    # --- sending

    def call(self, size: int, level: AckLevel) -> Callable[[], Awaitable[Published]]:
        """What publishes the next so many deltas, in one call."""
        publish, publish_many = self.propagator.publish, self.propagator.publish_many
        turns = _forever(prepared(size))

        def single() -> Awaitable[Published]:
            return publish(next(turns), ack_level=level)  # type: ignore[arg-type]

        def many() -> Awaitable[Published]:
            columns = next(turns)
            assert isinstance(columns, Columns)
            return publish_many(columns.ids, columns.values, indices=columns.indices, ack_level=level)

        return single if size == 1 else many

    async def closed_loop(self, size: int, level: AckLevel, *, flight: int, seconds: float) -> Sent:
        """So many callers, each of which calls again as soon as its last call is acknowledged."""
        call, sent, begun = self.call(size, level), Sent(), {}
        self._forget()
        start, cpu_s = time.perf_counter(), time.process_time()
        end = start + seconds

        async def caller() -> None:
            at = time.perf_counter()
            while True:
                published = await call()
                begun[published.next_offset] = at
                sent.deltas += size
                now = time.perf_counter()
                sent.acknowledged.append(now - at)
                at = now
                if now >= end:
                    return

        async with anyio.create_task_group() as tasks:
            for _ in range(flight):
                tasks.start_soon(caller)
        await self.settle()
        sent.seconds, sent.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
        sent.visible = self._visible(begun)
        return sent

    async def open_loop(self, size: int, level: AckLevel, *, rate: float, calls: int, flight: int) -> Sent:
        """Calls that are due at a steady rate, in deltas a second, whatever became of those before.

        At most `flight` are under way; latencies count from when a call was due, so nothing is left out.
        """
        call, sent, begun = self.call(size, level), Sent(), {}
        self._forget()
        start, cpu_s = time.perf_counter() + 0.01, time.process_time()
        turn = iter(range(calls))

        async def caller() -> None:
            for number in turn:
                due = start + number * size / rate
                # Timers are a millisecond coarse, so the last stretch is turns of the event loop.
                while (wait_s := due - time.perf_counter()) > 0:  # noqa: ASYNC110
                    await anyio.sleep(wait_s - 0.0015 if wait_s > 0.003 else 0)
                published = await call()
                sent.acknowledged.append(time.perf_counter() - due)
                begun[published.next_offset] = due
                sent.deltas += size

        async with anyio.create_task_group() as tasks:
            for _ in range(flight):
                tasks.start_soon(caller)
        await self.settle()
        sent.seconds, sent.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
        sent.visible = self._visible(begun)
        return sent

    async def settle(self) -> None:
        """Wait until every sink has applied all there is."""
        visible = self.propagator.statistics().log.next_offset
        await self.propagator.wait_visible(visible, timeout_s=WAIT_S)

    def _forget(self) -> None:
        for sink in self.sinks.values():
            sink.forget()

    def _visible(self, begun: dict[int, float]) -> list[float]:
        sinks = list(self.sinks.values())
        return [max(sink.applied_at(offset) for sink in sinks) - at for offset, at in begun.items()]


def _forever(calls: list[Delta] | list[Columns]) -> Iterator[Delta | Columns]:
    while True:
        yield from calls
