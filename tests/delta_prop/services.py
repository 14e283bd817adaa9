"""Services in one process, each with all kinds of sinks, that forward their logs to each other.

The oracle uses neither log nor sink: it folds the accepted deltas; of deltas with one id on one vector it
folds only the first.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import anyio.lowlevel

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.testing import virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CacheSink, IndexSink, StorageSink
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.delta import (
    Delta,
    Dot,
    Source,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)
from delta_prop_wire.errors import Refused
from tests.delta_prop.support import offer_now

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from delta_prop_wire.batch import LoggedBatch

Name = tuple[str, str]
VECTORS = ("a", "b", "c")
FORWARDER = Sender("forwarder", Source.REPLICA)


class Service:
    """A service, and the offset up to which it has forwarded its log to each of the others.

    Its log is on a simulated disk or in memory, in virtual time; a given `propagator` is used unchanged.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        random: Random,
        *,
        durable: bool = False,
        propagator: Propagator | None = None,
    ) -> None:
        self.number = number
        self.random = random
        self.forwarded_below: dict[int, int] = {}  # offset by number of the other service
        path = folder / f"{number}.db"
        self.storage = StorageSink(path, flush_s=0.5)
        self.shared = IndexSink(name="shared", resident=self.storage.resident)
        self.index = IndexSink(name="index")
        self.cache = CacheSink(loader=self._load, loader_offset=self._applied_offset)
        disk = SimDisk(number) if durable else None
        log = (
            LogSettings(segment_bytes_max=4096, bytes_max=1 << 24, retention_bytes=1 << 24)
            if durable
            else None
        )
        world = virtual_world(random.getrandbits(32), disk=disk)
        self.p = propagator or Propagator(
            Settings(close_timeout_s=5), data="x" if durable else None, log=log, world=world
        )
        self._stack = AsyncExitStack()

    async def _load(self, namespace: str, vector_id: str) -> VectorState | None:
        return await self.storage.get(namespace, vector_id)

    def _applied_offset(self) -> int:
        return self.storage.statistics().applied_offset

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.p)
        for sink in (self.storage, self.shared, self.index, self.cache):
            await self.p.attach(sink)
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._stack.aclose()

    def new_delta_of_own_dimension(self) -> Delta:
        """Return a vector of this service's dimension in a namespace that all services use."""
        return Delta(f"own-{self.number}", create([1.0] * (2 + self.number)), "odd")

    def batches(self, start: int = 0) -> list[LoggedBatch]:
        """Return the batches of its log from an offset on."""
        return self.p.internals().partition.log.read(start, rows_max=1 << 20, bytes_max=1 << 30)

    async def forward_to(self, other: Service, batches_max: int) -> int:
        """Forward up to `batches_max` batches, most of which the other service lacks; return how many."""
        watermarks, forwarded_count = other.p.internals().partition.pipeline.orderer.watermarks, 0
        receipts = []
        for logged in self.batches(self.forwarded_below.get(other.number, 0))[:batches_max]:
            self.forwarded_below[other.number] = logged.next_offset
            if logged.batch.last > watermarks.get(logged.batch.origin, 0) or self.random.random() < 0.1:
                work = SequencedBatch(logged.batch, FORWARDER, Receipt(), logged.lamport)
                receipts.append(offer_now(other.p, work))
                forwarded_count += 1
        for receipt in receipts:
            await receipt
        return forwarded_count

    async def settle(self) -> None:
        """Wait until every sink has processed the log."""
        await self.p.wait_visible(self.p.statistics().log.next_offset)

    async def contents(self, names: set[Name]) -> dict[str, dict[Name, Any]]:
        """Return the state of these vectors by sink."""
        await self.settle()
        await self.storage.flush()
        file = {(space, name): summarize_state(state) async for space, name, state in self.storage.rows()}
        return {
            "file": file,
            "storage": {name: summarize_state(await self.storage.get(*name)) for name in names},
            "cache": {
                name: summarize_state(await self.cache.get(*name), with_counts=False) for name in names
            },
            "shared": {(space, name): summarize_state(state) for space, name, state in self.shared.rows()},
            "index": {(space, name): summarize_state(state) for space, name, state in self.index.rows()},
        }

    def dots(self) -> list[Dot]:
        """Return every dot of its log, in log order."""
        return [logged.batch.dot(row) for logged in self.batches() for row in range(logged.count)]


def summarize_state(state: VectorState | None, *, with_counts: bool = True) -> Any:
    """Return the parts of a state that are equal at all services.

    `with_counts`: False for a cache, which counts only the deltas without effect that it got itself.
    """
    assert state is not None
    return (*state.content, state.key, state.ignored if with_counts else None)


def fold_accepted(services: list[Service]) -> dict[Name, VectorState]:
    """Fold all deltas that any service has accepted."""
    rows: dict[Name, dict[Any, Any]] = {}
    ids: dict[Name, dict[Any, bytes]] = {}
    for logged in (logged for service in services for logged in service.batches()):
        batch = logged.batch
        for row in () if batch.is_control else range(batch.count):
            name, key = (batch.namespaces[row], batch.keys[row]), logged.key(row)
            rows.setdefault(name, {})[key] = (key, batch.operation(row), batch.metadata(row))
            if batch.ids is not None:
                ids.setdefault(name, {})[key] = batch.ids[row]
    return {
        name: fold(changes.values(), without_effect=_later_keys(ids.get(name, {})))
        for name, changes in rows.items()
    }


def _later_keys(ids: dict[Any, bytes]) -> set[Any]:
    first: dict[bytes, Any] = {}
    for key in sorted(ids):
        first.setdefault(ids[key], key)
    return ids.keys() - first.values()


@dataclass
class Writer:
    """A writer that publishes to any service, some deltas to several services under one id."""

    random: Random
    id_count: int = 0
    recent_deltas: list[Delta] = field(default_factory=list)

    async def write(self, service: Service) -> None:
        """Make one publish call; ignore a refusal."""
        random = self.random
        if self.recent_deltas and random.random() < 0.3:  # a client resends after a failover
            deltas = [random.choice(self.recent_deltas)]
        else:
            deltas = [self._draw_delta(service) for _ in range(random.choice((1, 1, 2, 6)))]
            if random.random() < 0.5:
                deltas = [self._with_new_id(delta) for delta in deltas]
        with suppress(Refused):
            if random.random() < 0.5:
                await service.p.publish(*deltas)
            else:
                name = f"{random.choice('xy')}{service.number}"
                await service.p.producer(name).publish(*deltas)

    def _with_new_id(self, delta: Delta) -> Delta:
        self.id_count += 1
        identified = Delta(
            delta.vector_id,
            delta.operation,
            delta.namespace,
            id=self.id_count.to_bytes(16, "big"),
            metadata=delta.metadata,
        )
        self.recent_deltas = [*self.recent_deltas, identified][-6:]
        return identified

    def _draw_delta(self, service: Service) -> Delta:
        random = self.random
        namespace = random.choice(("n", "n", "odd"))
        dimension = 2 + service.number if namespace == "odd" else 2  # each service has its own dimension here
        numbers = [random.choice((0.0, 1.0, -1.5, 3e38)) for _ in range(dimension)]
        operation = random.choice(
            (
                lambda: create(numbers),
                lambda: dense(numbers),
                lambda: sparse([1], numbers[:1]),
                lambda: sparse_add([0, 1], numbers[:2]),
                lambda: sparse_add([0], [1.0]),
                lambda: scale(-2.0),
                lambda: offset(1.0),
                delete,
                lambda: opaque(bytes([service.number])),
                metadata_only,
            )
        )()
        patch = {random.choice("pq"): random.choice((None, 1, service.number))}
        has_patch = random.random() < 0.3 or operation.kind == metadata_only().kind
        return Delta(random.choice(VECTORS), operation, namespace, metadata=patch if has_patch else None)


async def heal(services: list[Service], links: list[tuple[int, int]]) -> None:
    """Forward all batches until no service has a new one."""
    while sum([await services[a].forward_to(services[b], 1 << 20) for a, b in links]):
        await anyio.lowlevel.checkpoint()
