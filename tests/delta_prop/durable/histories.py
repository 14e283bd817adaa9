"""Random histories of a service on a simulated disk, and the service's answers about them."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.testing import virtual_world
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Dot,
    Priority,
    Source,
    create,
    delete,
    make_origin,
    opaque,
    producer_id_of,
    scale,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from tests.delta_prop.support import claim_origins, offer_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.disk import SimDisk
    from delta_prop_wire.batch import Batch

NAMES = ("ann", "bob", "cyd")
FORWARDED = make_origin(77, Priority.NORMAL)
IDS = [bytes([number]) * 16 for number in range(60)]
NO_CHECKPOINTS = LogSettings(checkpoint_frames=1 << 40, checkpoint_bytes=1 << 40)


@dataclass
class History:
    """Batches sent under dots, each with its sender and its outcome."""

    rng: random.Random
    frames: list[tuple[Batch, Sender, str]] = field(default_factory=list)
    last_counters: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)

    def note_restart(self, p: Propagator) -> None:
        """Note a new process: origins need new epochs, and counters continue from the watermarks."""
        self.epochs.clear()
        self.last_counters = {
            origin: p.internals().partition.pipeline.orderer.watermarks.get(origin, 0)
            for origin in self.last_counters
        }


def service(disk: SimDisk, seed: int, log: LogSettings = NO_CHECKPOINTS) -> Propagator:
    settings = Settings(ids_per_generation=16, id_generations_max=2, close_timeout_s=5)
    world = virtual_world(seed, thread_delay_s_max=0.01, disk=disk)
    return Propagator(settings, data="x", log=log, world=world)


def origin_of(name: str) -> int:
    return make_origin(producer_id_of(name), Priority.NORMAL)


async def step(p: Propagator, history: History) -> None:
    """Run one random operation: a hello, an offer, or a batch of a producer or a forwarder."""
    rng = history.rng
    choice = rng.random()
    if choice < 0.1:
        greet(p, history, rng.choice(NAMES))
    elif choice < 0.35:
        deltas = random_deltas(rng)
        p.offer(*deltas)
    elif choice < 0.9:
        name = rng.choice(NAMES)
        if origin_of(name) not in history.epochs:
            greet(p, history, name)
        send(p, history, origin_of(name), Sender(name))
    else:
        send(p, history, FORWARDED, Sender("forwarder", Source.REPLICA))
    if rng.random() < 0.3:
        await anyio.sleep(rng.random() * 0.03)


def greet(p: Propagator, history: History, name: str) -> None:
    grants = claim_origins(p, producer_id_of(name), name)
    origin = origin_of(name)
    history.epochs[origin] = next(grant.epoch for grant in grants if grant.origin == origin)


def random_deltas(rng: random.Random) -> list[Delta]:
    """Draw deltas, some of them invalid: unknown vectors, wrong dimensions, ids seen before."""
    with_ids = rng.random() < 0.4
    return [
        Delta(
            f"v{rng.randrange(12)}",
            rng.choice(
                [
                    *(create([1.0, 2.0]), create([3.0, 4.0]), sparse_add([0], [1.0]), scale(2.0), delete()),
                    *(opaque(b"x"), create([1.0]))[: rng.randrange(3)],
                ]
            ),
            namespace=rng.choice(["a", "b", "c"]),
            id=rng.choice(IDS) if with_ids else None,
        )
        for _ in range(rng.choice([1, 1, 2, 5]))
    ]


def send(p: Propagator, history: History, origin: int, sender: Sender) -> None:
    """Send an origin's next batch under its dots, sometimes with gaps or with a vector clock."""
    rng = history.rng
    deltas = random_deltas(rng)
    previous = history.last_counters.get(origin, 0)
    has_gaps = rng.random() < 0.3
    counter = previous
    counters = []
    for _ in deltas:
        counter += rng.choice([1, 2, 7]) if has_gaps else 1
        counters.append(counter)
    known = [
        Dot(known_origin, last)
        for known_origin, last in history.last_counters.items()
        if known_origin != origin
    ]
    batch = encode_batch(
        deltas,
        origin=origin,
        base=counters[0],
        epoch=history.epochs.get(origin, 1),
        previous=previous if has_gaps else 0,
        counters=counters if has_gaps else None,
        clock=sorted(rng.sample(known, rng.randrange(len(known) + 1))),
        ack_level=AckLevel.DURABLE,
    )
    lamport = p.internals().partition.log.next_offset + 3 if sender.is_forwarder else None
    receipt = offer_now(p, SequencedBatch(batch, sender, Receipt(), lamport))
    history.last_counters[origin] = counters[-1]
    receipt.add_done_callback(lambda receipt: history.frames.append((batch, sender, outcome_of(receipt))))


def outcome_of(receipt: Receipt) -> str:
    """Return an outcome in comparable form."""
    refusal = receipt.refusal()
    if refusal is not None:
        return refusal.code.name
    published = receipt.result()
    first_offsets = published.duplicates or {row: published.offset + row for row in range(published.count)}
    return f"{sorted(first_offsets.items())}"


async def answers(p: Propagator, frames: Sequence[tuple[Batch, Sender, str]]) -> dict[str, Any]:
    """Return all that the pipeline knows of the history; `duplicates`: the outcomes of the same
    batches sent again; `reused`: of batches with other bytes under the same dots.
    """
    pipeline = p.internals().partition.pipeline
    vectors, appender = pipeline.appender.vectors, pipeline.appender
    watermarks = {origin: last for origin, last in pipeline.orderer.watermarks.items() if origin >= 0}
    known_state: dict[str, Any] = {
        "watermarks": watermarks,
        "clocks": appender._clocks.snapshot(),
        "lamport": appender.lamport,
        "ids": appender.ids.find(IDS),
        "kept since": appender.ids.kept_since,
        "heads": {
            (name, key): vectors.head(name, key)
            for name, known in vectors._namespaces.items()
            for key in known.heads
        },
        "dead": {name: sorted(known.dead) for name, known in vectors._namespaces.items()},
        "dimensions": {
            name: (known.dimension, known.complete) for name, known in vectors._namespaces.items()
        },
        "writers": vectors.writer_count,
        "outcomes": {
            (origin, counter): pipeline.outcome(origin, counter)
            for origin, last in watermarks.items()
            for counter in range(1, last + 1)
        },
    }
    for name in NAMES:
        claim_origins(p, producer_id_of(name), name)
    known_state["duplicates"] = [
        outcome_of(await resend_batch(p, batch, sender)) for batch, sender, _ in frames
    ]
    known_state["reused"] = [
        outcome_of(await resend_batch(p, with_other_bytes(batch), sender)) for batch, sender, _ in frames
    ]
    return known_state


async def resend_batch(p: Propagator, batch: Batch, sender: Sender) -> Receipt:
    receipt = offer_now(p, SequencedBatch(batch, sender, Receipt()))
    with anyio.fail_after(100), suppress(Refused):
        await receipt.wait()
    return receipt


def with_other_bytes(batch: Batch) -> Batch:
    """Return a batch of the same dots with other bytes."""
    return encode_batch(
        [Delta("other", create([9.0])) for _ in range(batch.count)],
        origin=batch.origin,
        base=batch.base,
        previous=batch.previous,
        counters=None if batch.counters is None else batch.counters.tolist(),
        epoch=batch.epoch,
    )
