"""A pipeline without a service, with a clock that the test sets and a log that can refuse appends."""

from __future__ import annotations

from typing import Any

from delta_prop.api.producer import Producer
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.core.make_heads import make_vector_heads
from delta_prop.partition.ingest.fair_queue import FairQueue
from delta_prop.partition.ingest.origins import Origins
from delta_prop.partition.ingest.seen_ids import SeenIds
from delta_prop.partition.ingest.work import Draft, Sender, SequencedBatch
from delta_prop.partition.order.orderer import Orderer
from delta_prop.partition.partition import PipelineParts
from delta_prop.partition.pipeline import Pipeline
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import AckLevel, Delta, Priority, Source, make_origin, producer_id_of
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused


class OneTime:
    """A clock that stands still."""

    def now(self) -> float:
        return 0.0

    def wall_us(self) -> int:
        return 1_000_000


class OpenGate:
    """A gate that is always open."""

    def admits(self, count: int, size: int, now: float) -> bool:
        return True

    def note(self, count: int, size: int, now: float) -> None:
        pass

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        return 0.0


class BenchPublisher:
    """The publisher of a service that is always open, without other callers."""

    def __init__(self, bench: Bench) -> None:
        self.pipeline = bench.pipeline
        self.now = lambda: bench.now

    def check_producer(self, name: str) -> None:
        pass

    def flush(self) -> None:
        pass


class Recorder:
    """A listener that adds the batches to a list."""

    def __init__(self, routed: list[LoggedBatch]) -> None:
        self.route = routed.append

    def note_moved(self) -> None:
        pass

    note_recovered = note_restored = note_moved

    def note_failed(self, refusal: Refused) -> None:
        pass

    def load_head(self, namespace: str, vector_id: str) -> None:
        return None


class GatedLog(MemoryLog):
    """A log whose `is_accepting` the test sets."""

    is_accepting = True


class Bench:
    """A pipeline, the batches that it routed, and a clock that the test sets."""

    def __init__(
        self,
        *,
        pending_deltas_max: int = 10_000,
        queue_deltas_max: int = 100_000,
        log_deltas_max: int = 1_000_000,
    ) -> None:
        self.now = 0.0
        self.log = GatedLog(bytes(16), deltas_max=log_deltas_max)
        self.owners: dict[int, str] = {}  # producer names by origin
        self.routed: list[LoggedBatch] = []
        ids = SeenIds(generation_ids=1000)
        self.vectors = make_vector_heads()
        parts = PipelineParts(
            queue=FairQueue(capacity_deltas=queue_deltas_max),
            orderer=Orderer(ids, pending_deltas_max=pending_deltas_max),
            ids=ids,
            origins=Origins(),
            vectors=self.vectors,
        )
        self.pipeline = Pipeline(
            self.log, parts, Recorder(self.routed), own_producer_id=1, clock=OneTime(), gate=OpenGate()
        )

    def publish(self, *deltas: Delta, after: tuple[Receipt, ...] = ()) -> Receipt:
        draft = Draft(deltas, Receipt(), deltas[0].priority, AckLevel.MEMORY, after=after)
        return self.pipeline.offer(draft, self.now)

    def producer(self, name: str) -> Producer:
        publisher: Any = BenchPublisher(self)
        return Producer(name, publisher, ack_level=AckLevel.MEMORY, source=Source.LOCAL)

    def send(
        self,
        batch: Batch,
        *,
        owner: str | None = None,
        source: Source = Source.LOCAL,
        lamport: int | None = None,
    ) -> Receipt:
        sender = Sender(self.owners.get(batch.origin, "x") if owner is None else owner, source)
        return self.pipeline.offer(SequencedBatch(batch, sender, Receipt(), lamport), self.now)

    def hello(self, name: str) -> int:
        """Open a producer; return its origin in the normal lane."""
        self.pipeline.hello(producer_id_of(name), name, self.now)
        origin = make_origin(producer_id_of(name), Priority.NORMAL)
        self.owners[origin] = name
        return origin

    def keys(self) -> list[str]:
        """Return the vector ids in log order, without control rows."""
        return [key for logged in self.routed if not logged.batch.is_control for key in logged.batch.keys]


def batch_of(origin: int, base: int, *deltas: Delta, epoch: int = 1, **options: object) -> Batch:
    """Return a batch whose dots start at (origin, base)."""
    return encode_batch(deltas, origin=origin, base=base, epoch=epoch, **options)  # type: ignore[arg-type]
