"""Random causal graphs: batches of several services, their dependencies, and their order of arrival.

All is drawn from one `Random`, so a seed determines a graph and its order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_wire import delta as d
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Dot, Operation, Priority, Source, make_origin
from delta_prop_wire.encode import encode_batch

if TYPE_CHECKING:
    from random import Random

    from delta_prop_wire.batch import Batch

ORIGINS = tuple(make_origin(producer, Priority.NORMAL) for producer in (3, 1, 1 << 43, 2))
VECTORS = ("a", "b", "c", "d", "e")
DIMENSION = 3
NUMBERS = (0.0, 1.0, -1.0, 0.5, 0.1, -7.3, 3e38, -3e38)
REORDERED_SHARE, DUPLICATE_SHARE, LATE_SHARE = 0.30, 0.05, 0.01


@dataclass(frozen=True, slots=True, eq=False)
class SentBatch:
    """A batch, the Lamport number that its service gave it, and the dots that it depends on."""

    batch: Batch
    lamport: int
    causes: frozenset[Dot]


@dataclass(slots=True)
class Arrivals:
    """An order of arrival: `batches`, and after them the `late` ones."""

    batches: list[SentBatch]
    late: list[SentBatch]
    reordered_count: int
    duplicate_count: int


def draw_graph(random: Random, batch_count: int) -> list[SentBatch]:
    """Draw batches in causal order: each depends on its origin's last one, and on some of other origins."""
    sent_batches: list[SentBatch] = []
    watermarks = dict.fromkeys(ORIGINS, 0)
    announced: dict[int, dict[int, int]] = {origin: {} for origin in ORIGINS}
    lamports: dict[Dot, int] = {}
    ids: dict[Dot, bytes] = {}
    for number in range(batch_count):
        origin = random.choice(ORIGINS)
        base = watermarks[origin] + 1
        causes = {Dot(origin, base - 1)} if base > 1 else set()
        clock = []
        for other_origin in ORIGINS:
            counter = random.randint(0, watermarks[other_origin])
            if (
                other_origin != origin
                and random.random() < 0.3
                and counter > announced[origin].get(other_origin, 0)
            ):
                clock.append(Dot(other_origin, counter))
                announced[origin][other_origin] = counter
        causes.update(clock)
        parents: list[Dot | bytes] = []
        if lamports and random.random() < 0.3:
            dot = random.choice(list(lamports))
            parents.append(ids.get(dot, dot))
            causes.add(dot)
        rows = _draw_rows(random, number, tuple(parents))
        batch = encode_batch(rows, origin=origin, base=base, clock=tuple(sorted(clock)))
        # The Lamport numbers of idle and busy services diverge, so late rows sort far before others.
        lamport = max((lamports[cause] for cause in causes), default=0) + random.choice((1, 1, 1, 40))
        for row, delta in enumerate(rows):
            lamports[batch.dot(row)] = lamport + row
            if delta.id is not None:
                ids[batch.dot(row)] = delta.id
        watermarks[origin] = batch.last
        sent_batches.append(SentBatch(batch, lamport, frozenset(causes)))
    return sent_batches


def draw_arrivals(random: Random, sent_batches: list[SentBatch]) -> Arrivals:
    """Draw an order of arrival: 30 % reordered, 5 % duplicated, 1 % after all others."""
    order = list(sent_batches)
    positions = random.sample(range(len(order)), round(REORDERED_SHARE * len(order)))
    moved = [order[position] for position in positions]
    random.shuffle(moved)
    for position, sent in zip(positions, moved, strict=True):
        order[position] = sent
    reordered_count = sum(arriving is not sent for arriving, sent in zip(order, sent_batches, strict=True))
    late = random.sample(order, max(1, round(LATE_SHARE * len(order))))
    order = [sent for sent in order if sent not in late]
    duplicates = random.sample(order, max(1, round(DUPLICATE_SHARE * len(order))))
    for sent in duplicates:
        order.insert(random.randint(order.index(sent) + 1, len(order)), sent)
    return Arrivals(order, late, reordered_count, len(duplicates))


def fold_all(sent_batches: list[SentBatch]) -> dict[tuple[str, str], VectorState]:
    """Fold all sent batches in canonical order."""
    changes: dict[tuple[str, str], list[tuple[tuple[int, int, int], Operation, object]]] = {}
    for sent in sent_batches:
        logged, batch = LoggedBatch(sent.batch, 0, sent.lamport, Source.REPLICA), sent.batch
        for row in range(batch.count):
            change = (logged.key(row), batch.operation(row), batch.metadata(row))
            changes.setdefault((batch.namespaces[row], batch.keys[row]), []).append(change)
    return {ref: fold(rows) for ref, rows in changes.items()}  # type: ignore[arg-type]


def _draw_rows(random: Random, number: int, parents: tuple[Dot | bytes, ...]) -> list[Delta]:
    with_ids = random.random() < 0.2
    return [
        Delta(
            random.choice(VECTORS),
            _draw_operation(random),
            namespace=random.choice(("default", "default", "other")),
            id=bytes([number >> 8, number & 255, row]) + bytes(13) if with_ids else None,
            parents=parents if row == 0 else (),
            metadata=_draw_patch(random),
        )
        for row in range(random.choice((1, 1, 2, 3, 9)))
    ]


def _draw_operation(random: Random) -> Operation:
    numbers = random.choices(NUMBERS, k=DIMENSION)
    indices = random.choices(range(DIMENSION + 1), k=2)  # index 3 has no effect
    return random.choice(
        (
            lambda: d.create(numbers),
            lambda: d.dense(numbers),
            lambda: d.sparse(indices, numbers[:2]),
            lambda: d.sparse_add(indices, numbers[:2]),
            lambda: d.scale(numbers[0]),
            lambda: d.offset(numbers[0]),
            d.delete,
            lambda: d.opaque(b"bytes"),
            d.metadata_only,
        )
    )()


def _draw_patch(random: Random) -> dict[str, object] | None:
    if random.random() < 0.6:
        return None
    return {random.choice("xyz"): random.choice((None, 1, 2, {"p": 1}, {"p": None, "q": 2}))}
