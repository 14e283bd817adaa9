"""A service inside a process of its own that holds much, or little, and tells what a delta costs it then.

It is told by its pipe when to measure, so that several can be measured in turn; all it holds stays held.
"""

from __future__ import annotations

import gc
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from benchmarks._processes import PROCESSES, end_forked, end_when_told, forked
from delta_prop.config import Settings
from delta_prop.embedded import Propagator
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Priority, make_origin, opaque, producer_id_of
from delta_prop_wire.encode import encode_batch, encode_vectors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from delta_prop.producer import Producer
    from delta_prop_sinks import Delivery
    from delta_prop_sinks.sink import SinkContext
    from delta_prop_wire.batch import Batch

DIMENSION, CHANGED = 16, 8
ROWS, BUILD_ROWS = 100, 1_000
FLIGHT_BATCHES = 20
NAMESPACE = "vectors"
ORIGIN = make_origin(producer_id_of("growth"), Priority.NORMAL)
PENDING_ROWS = 10
WAIT_S = 600.0
_INDICES = np.arange(CHANGED, dtype=np.uint32) * 2


@dataclass(frozen=True, slots=True)
class Held:
    """What the service holds when it is measured."""

    name: str
    vectors: int = 10_000
    subscriptions: int = 1
    """Each of one vector."""
    sinks: int = 1
    """Each takes everything."""
    logged: int = 0
    """Deltas in the log besides those that made the vectors."""
    pending: int = 0
    """Deltas that wait for others, which do not come."""
    heads_max: int = 0
    """Vectors whose last dot is held; 0: as many as by default."""


class Service:
    """The process, as its parent sees it."""

    def __init__(self, held: Held) -> None:
        """Build; returns when it is built."""
        self._pipe, there = PROCESSES.Pipe()
        self._process = forked(_run, held, there)
        try:
            self.built_s: float = self._hear()
        except BaseException:
            self.stop()
            raise

    def cpu_us(self, kind: Kind, deltas: int) -> float:
        """CPU µs a delta, of all threads."""
        self._pipe.send((kind, deltas))
        return float(self._hear())

    def stop(self) -> None:
        """End it."""
        with suppress(OSError):
            self._pipe.send(None)  # its thread that reads waits for a word
        end_forked(self._process)

    def _hear(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"a service says nothing for {WAIT_S} s")
        told = self._pipe.recv()
        if isinstance(told, str):
            raise RuntimeError(told)
        return told


class Taken:
    """A sink that only counts."""

    def __init__(self, name: str = "taken") -> None:
        self.count = 0
        self._name = name

    @property
    def name(self) -> str:
        """What statistics call it."""
        return self._name

    def statistics(self) -> int:
        """How many rows came."""
        return self.count

    async def open(self, context: SinkContext) -> None:
        """Nothing is kept."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Count."""
        for delivery in deliveries:
            self.count += delivery.count

    async def aclose(self) -> None:
        """Nothing is held."""


class Load:
    """One producer's batches, in order."""

    def __init__(self, propagator: Propagator, vectors: int) -> None:
        self._producer = propagator.producer("growth", ack_level=AckLevel.LOGGED)
        self._propagator = propagator
        self._vectors = vectors
        self._next = 1
        self._numbers = np.random.default_rng(1)

    async def build(self) -> None:
        """Every vector once."""
        matrix = np.zeros((BUILD_ROWS, DIMENSION), np.float32)
        for begin in range(0, self._vectors, BUILD_ROWS * FLIGHT_BATCHES):
            some = [
                self._encode(
                    [vector_id(number) for number in range(at, min(at + BUILD_ROWS, self._vectors))],
                    matrix[: min(BUILD_ROWS, self._vectors - at)],
                    Kind.CREATE,
                )
                for at in range(begin, min(begin + BUILD_ROWS * FLIGHT_BATCHES, self._vectors), BUILD_ROWS)
            ]
            await send(self._producer, some)

    def batches(self, kind: Kind, deltas: int) -> list[Batch]:
        """So many deltas of vectors drawn from all."""
        found = []
        matrix = np.ones((ROWS, DIMENSION if kind == Kind.DENSE else CHANGED), np.float32)
        for _ in range(deltas // ROWS):
            drawn = self._numbers.integers(self._vectors, size=ROWS).tolist()
            found.append(self._encode([vector_id(number) for number in drawn], matrix, kind))
        return found

    async def measure(self, kind: Kind, deltas: int) -> float:
        """CPU µs a delta until all are acknowledged and every sink has them."""
        batches = self.batches(kind, deltas)
        gc.collect()
        began = time.process_time()
        await send(self._producer, batches)
        await self._propagator.wait_visible(self._propagator.statistics().log.next_offset, timeout_s=WAIT_S)
        return (time.process_time() - began) / (len(batches) * ROWS) * 1e6

    def _encode(self, keys: list[str], matrix: Any, kind: Kind) -> Batch:
        indices = np.tile(_INDICES, (len(keys), 1)) if kind == Kind.SPARSE else None
        batch = encode_vectors(
            keys, matrix, indices=indices, namespace=NAMESPACE, origin=ORIGIN, base=self._next,
            kind=kind, ack_level=AckLevel.LOGGED,
        )  # fmt: skip
        self._next += len(keys)
        return batch


async def send(producer: Producer, batches: Sequence[Batch]) -> None:
    """Send all, few unacknowledged at a time; return when all are acknowledged."""
    for at in range(0, len(batches), FLIGHT_BATCHES):
        receipts = [producer.send_frame(batch) for batch in batches[at : at + FLIGHT_BATCHES]]
        for receipt in receipts:
            await receipt.wait()


def vector_id(number: int) -> str:
    """As long as most ids."""
    return f"vector-{number:08d}"


def settings_of(held: Held) -> Settings:
    """The product's own, with room for what is to be held, and no rate to slow it."""
    return Settings(
        heads_max=held.heads_max or Settings().heads_max,
        pending_deltas_max=max(10_000, 2 * held.pending),
        pending_time_s_max=3_600.0,
        rate_initial=1e9,
        rate_max=1e9,
    )


def _run(held: Held, pipe: Connection) -> None:
    end_when_told()
    try:
        anyio.run(_serve, held, pipe)
    except KeyboardInterrupt:
        return
    except Exception as error:
        pipe.send(f"{held.name}: {error!r}")


async def _serve(held: Held, pipe: Connection) -> None:
    began = time.monotonic()
    log = LogSettings(bytes_max=64 << 30, keep_bytes_max=32 << 30)
    async with AsyncExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="growth-"))
        propagator = await exits.enter_async_context(Propagator(settings_of(held), data=folder, log=log))
        load = Load(propagator, held.vectors)
        await load.build()
        tasks = await exits.enter_async_context(anyio.create_task_group())
        exits.callback(tasks.cancel_scope.cancel)
        await hold(propagator, held, tasks)
        if held.logged:
            await load.measure(Kind.DENSE, held.logged)
        gc.freeze()
        pipe.send(time.monotonic() - began)
        while (asked := await anyio.to_thread.run_sync(pipe.recv)) is not None:
            pipe.send(await load.measure(*asked))


async def hold(propagator: Propagator, held: Held, tasks: Any) -> None:
    """Subscriptions, sinks, and what waits."""
    for number in range(held.subscriptions):
        topic = f"v:{vector_id(number * held.vectors // held.subscriptions)}"
        tasks.start_soon(_read, propagator, topic)
    for number in range(held.sinks):
        await propagator.attach(Taken(f"taken-{number}"), start="latest")
    for number in range(held.pending // PENDING_ROWS):
        waiting_for = Dot(make_origin(producer_id_of("never"), Priority.NORMAL), number + 1)
        producer = propagator.producer(f"waits-{number}")
        origin = make_origin(producer_id_of(producer.name), Priority.NORMAL)
        deltas = [
            Delta(f"waits-{row}", opaque(b"x"), namespace=NAMESPACE, parents=(waiting_for,))
            for row in range(PENDING_ROWS)
        ]
        producer.send_frame(encode_batch(deltas, origin=origin, base=1, ack_level=AckLevel.LOGGED))
    with anyio.fail_after(60):
        # Every reader is to be there, and what waits, before anything is measured.
        while propagator.statistics().pending.pending_deltas < held.pending:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        while len(propagator.statistics().sinks) < held.sinks + held.subscriptions:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def _read(propagator: Propagator, topic: str) -> None:
    async with propagator.subscribe(topic) as deltas:
        async for _ in deltas:
            pass
