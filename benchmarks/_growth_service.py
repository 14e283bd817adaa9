"""A service in a process of its own that holds many things, or few, and measures the cost of a delta.

Its parent requests each measurement through a pipe, so that several services are measured in turn; a service
keeps everything that it holds.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from benchmarks._processes import PROCESSES, end_forked, end_on_sigterm, fork, send_errors
from benchmarks.sustained import private_mb
from delta_prop.api.producer import Producer
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks import Delivery
from delta_prop_sinks.sink import SinkContext
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Priority, make_origin, opaque, producer_id_of
from delta_prop_wire.encode import encode_batch, encode_vectors

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

DIMENSION, CHANGED = 16, 8
"""Numbers of a vector, and those that a sparse change sets."""
ROWS, BUILD_ROWS = 100, 1_000
"""Rows of a batch of changes, and of a batch that creates vectors."""
IN_FLIGHT_BATCHES = 20
NAMESPACE = "vectors"
ORIGIN = make_origin(producer_id_of("growth"), Priority.NORMAL)
PENDING_ROWS = 10
"""Rows of a batch that waits."""
WAIT_S = 600.0
_INDICES = np.arange(CHANGED, dtype=np.uint32) * 2


@dataclass(frozen=True, slots=True)
class Holdings:
    """The content of the service when it is measured."""

    name: str
    vectors: int = 10_000
    subscriptions: int = 1
    """Subscriptions of one vector each."""
    sinks: int = 1
    """Sinks that get every delta."""
    logged: int = 0
    """Deltas in the log besides those that created the vectors."""
    pending: int = 0
    """Deltas that wait for others that never arrive."""
    heads_max: int = 0
    """Maximum number of vectors whose last dot is held; 0: the default."""


class Service:
    """The parent's handle of the process."""

    def __init__(self, holdings: Holdings) -> None:
        """Start the process; return when the service holds everything.

        `built_s`: the seconds that this took; `held_bytes`: the anonymous memory of the process then.
        """
        self.built_s: float
        self.held_bytes: float
        self._pipe, child_pipe = PROCESSES.Pipe()
        self._process = fork(_run, holdings, child_pipe)
        try:
            self.built_s, self.held_bytes = self._receive()
        except BaseException:
            self.stop()
            raise

    def cpu_us(self, kind: Kind, delta_count: int) -> float:
        """Measure the CPU µs per delta, of all threads."""
        self._pipe.send((kind, delta_count))
        return float(self._receive())

    def stop(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(None)  # the process's reader thread blocks on the pipe
        end_forked(self._process)

    def _receive(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"a service has sent nothing for {WAIT_S} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


class CountingSink:
    """A sink that only counts."""

    def __init__(self, name: str = "taken") -> None:
        self.count = 0
        self._name = name

    @property
    def name(self) -> str:
        """The name of the sink in statistics."""
        return self._name

    def statistics(self) -> int:
        """Return the number of rows that it got."""
        return self.count

    async def open(self, context: SinkContext) -> None:
        """Do nothing."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Count the rows."""
        for delivery in deliveries:
            self.count += delivery.count

    async def aclose(self) -> None:
        """Do nothing."""


class Load:
    """One producer, which creates all vectors, and then publishes changes of them."""

    def __init__(self, propagator: Propagator, vectors: int) -> None:
        self._producer = propagator.producer("growth", ack_level=AckLevel.LOGGED)
        self._propagator = propagator
        self._vectors = vectors
        self._next = 1
        self._rng = np.random.default_rng(1)

    async def build(self) -> None:
        """Create every vector."""
        matrix = np.zeros((BUILD_ROWS, DIMENSION), np.float32)
        for group in range(0, self._vectors, BUILD_ROWS * IN_FLIGHT_BATCHES):
            batches = [
                self._encode(
                    [vector_id(number) for number in range(first, min(first + BUILD_ROWS, self._vectors))],
                    matrix[: min(BUILD_ROWS, self._vectors - first)],
                    Kind.CREATE,
                )
                for first in range(
                    group, min(group + BUILD_ROWS * IN_FLIGHT_BATCHES, self._vectors), BUILD_ROWS
                )
            ]
            await send(self._producer, batches)

    def batches(self, kind: Kind, delta_count: int) -> list[Batch]:
        """Return batches with `delta_count` deltas in all, each of a vector drawn at random."""
        batches = []
        matrix = np.ones((ROWS, DIMENSION if kind == Kind.DENSE else CHANGED), np.float32)
        for _ in range(delta_count // ROWS):
            drawn = self._rng.integers(self._vectors, size=ROWS).tolist()
            batches.append(self._encode([vector_id(number) for number in drawn], matrix, kind))
        return batches

    async def measure(self, kind: Kind, delta_count: int) -> float:
        """Measure the CPU µs per delta until all are acknowledged and every sink has them."""
        batches = self.batches(kind, delta_count)
        gc.collect()
        began = time.process_time()
        await self._propagator.wait_visible(await send(self._producer, batches), timeout_s=WAIT_S)
        return (time.process_time() - began) / (len(batches) * ROWS) * 1e6

    def _encode(self, keys: list[str], matrix: Any, kind: Kind) -> Batch:
        indices = np.tile(_INDICES, (len(keys), 1)) if kind == Kind.SPARSE else None
        batch = encode_vectors(
            keys, matrix, indices=indices, namespace=NAMESPACE, origin=ORIGIN, base=self._next,
            kind=kind, ack_level=AckLevel.LOGGED,
        )  # fmt: skip
        self._next += len(keys)
        return batch


async def send(producer: Producer, batches: Sequence[Batch]) -> int:
    """Send all batches, up to IN_FLIGHT_BATCHES at a time; return the offset after the last, once all are
    acknowledged.
    """
    end = 0
    for at in range(0, len(batches), IN_FLIGHT_BATCHES):
        receipts = [producer.send_frame(batch) for batch in batches[at : at + IN_FLIGHT_BATCHES]]
        for receipt in receipts:
            ack = await receipt.wait()
            end = (ack.offset or 0) + ack.count
    return end


def vector_id(number: int) -> str:
    """Return a vector id of typical length."""
    return f"vector-{number:08d}"


def settings_of(holdings: Holdings) -> Settings:
    """Return the default settings, with capacity for the holdings and without a rate limit."""
    return Settings(
        heads_max=holdings.heads_max or Settings().heads_max,
        pending_deltas_max=max(10_000, 2 * holdings.pending),
        pending_timeout_s=3_600.0,
        rate_initial=1e9,
        rate_max=1e9,
    )


def _run(holdings: Holdings, pipe: Connection) -> None:
    end_on_sigterm()
    with send_errors(pipe, f"{holdings.name}: "):
        anyio.run(_serve, holdings, pipe)


async def _serve(holdings: Holdings, pipe: Connection) -> None:
    began = time.monotonic()
    log = LogSettings(bytes_max=64 << 30, retention_bytes=32 << 30)
    async with AsyncExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="growth-"))
        propagator = await exits.enter_async_context(Propagator(settings_of(holdings), data=folder, log=log))
        load = Load(propagator, holdings.vectors)
        await load.build()
        tasks = await exits.enter_async_context(anyio.create_task_group())
        exits.callback(tasks.cancel_scope.cancel)
        await hold(propagator, holdings, tasks)
        if holdings.logged:
            await load.measure(Kind.DENSE, holdings.logged)  # only fills the log
        gc.freeze()
        gc.collect()
        pipe.send((time.monotonic() - began, private_mb(os.getpid()) * (1 << 20)))
        while (request := await anyio.to_thread.run_sync(pipe.recv)) is not None:
            pipe.send(await load.measure(*request))


async def hold(propagator: Propagator, holdings: Holdings, tasks: Any) -> None:
    """Add subscriptions, sinks, and pending deltas."""
    for number in range(holdings.subscriptions):
        topic = f"v:{vector_id(number * holdings.vectors // holdings.subscriptions)}"
        tasks.start_soon(_read, propagator, topic)
    for number in range(holdings.sinks):
        await propagator.attach(CountingSink(f"taken-{number}"), start="latest")
    for number in range(holdings.pending // PENDING_ROWS):
        waiting_for = Dot(make_origin(producer_id_of("never"), Priority.NORMAL), number + 1)
        producer = propagator.producer(f"waits-{number}")
        origin = make_origin(producer_id_of(producer.name), Priority.NORMAL)
        deltas = [
            Delta(f"waits-{row}", opaque(b"x"), namespace=NAMESPACE, parents=(waiting_for,))
            for row in range(PENDING_ROWS)
        ]
        producer.send_frame(encode_batch(deltas, origin=origin, base=1, ack_level=AckLevel.LOGGED))
    with anyio.fail_after(60):
        # All readers and pending deltas must be in place before anything is measured.
        while propagator.statistics().pending.pending_deltas < holdings.pending:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        while len(propagator.statistics().sinks) < holdings.sinks + holdings.subscriptions:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def _read(propagator: Propagator, topic: str) -> None:
    async with propagator.subscribe(topic) as deltas:
        async for _ in deltas:
            pass
