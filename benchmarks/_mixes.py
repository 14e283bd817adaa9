"""Traffic of one namespace and one kind of operation, and traffic that interleaves many of both.

All rows have the same size. By row: each delta of a batch differs from its predecessor in namespace or kind.
By batch: a batch has one namespace and one kind, and the next batch differs in one of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._peers_ours import Ours, RawConsumer, RawPublisher, number_frame
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import Delta, Kind, dense, opaque, sparse, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks._peers_contract import Consumer, Publisher
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel, Operation
    from delta_prop_wire.frames import OriginGrant
    from delta_prop_wire.topics import Topic

DIMENSION, CHANGED = 16, 8
KEYS = 1_000
"""Vectors of all namespaces together."""
NAMESPACES = 10
KINDS = (Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD, Kind.OPAQUE)
TEMPLATES = 40
"""Batches of one traffic, which are published in turn."""
_INDICES = np.arange(CHANGED, dtype=np.uint32) * 2
_NUMBERS = np.arange(DIMENSION, dtype=np.float32) / 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """Deltas of these kinds, in `namespaces` namespaces. `by_row`: kind and namespace change from row to row,
    else from batch to batch.
    """

    name: str
    namespaces: int
    kinds: tuple[Kind, ...]
    by_row: bool = False

    def batches(self, topic: str, rows: int, origin: int, level: AckLevel, epoch: int) -> Iterator[Batch]:
        """Yield `TEMPLATES` batches of `rows` rows, which use every namespace and kind.

        Each starts at counter 1.
        """
        rng = random.Random(rows)
        for number in range(TEMPLATES):
            deltas = [
                self._delta(topic, number * rows + row if self.by_row else number, rng) for row in range(rows)
            ]
            yield encode_batch(deltas, origin=origin, base=1, epoch=epoch, ack_level=level)

    def create_deltas(self, topic: str) -> list[Delta]:
        """Return the deltas that create the vectors."""
        return [
            Delta(f"key-{key}", dense(_NUMBERS), namespace=f"{topic}-{namespace_number}")
            for namespace_number in range(self.namespaces)
            for key in range(KEYS // self.namespaces)
        ]

    def _delta(self, topic: str, turn: int, rng: random.Random) -> Delta:
        kind = self.kinds[turn % len(self.kinds)]
        namespace_number = turn // len(self.kinds) % self.namespaces
        key = rng.randrange(KEYS // self.namespaces)
        name = f"fact-{key}" if kind is Kind.OPAQUE else f"key-{key}"
        return Delta(name, _operation(kind), namespace=f"{topic}-{namespace_number}")


ONE_KIND = tuple(Traffic(f"one namespace, {kind.name.lower()}", 1, (kind,)) for kind in KINDS)
BY_BATCH = Traffic(f"{NAMESPACES} namespaces, {len(KINDS)} operations, by batch", NAMESPACES, KINDS)
BY_ROW = Traffic(f"{NAMESPACES} namespaces, {len(KINDS)} operations, by row", NAMESPACES, KINDS, by_row=True)


def _operation(kind: Kind) -> Operation:
    if kind is Kind.DENSE:
        return dense(_NUMBERS)
    if kind is Kind.SPARSE:
        return sparse(_INDICES, _NUMBERS[:CHANGED])
    if kind is Kind.SPARSE_ADD:
        return sparse_add(_INDICES, _NUMBERS[:CHANGED])
    return opaque(_NUMBERS.tobytes())


class OursWithTraffic(Ours):
    """A running server, with clients of one traffic."""

    def __init__(self, server: Ours, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.port, self.http_port, self.processes = server.port, server.http_port, server.processes

    def publisher(self, topic: str) -> Publisher:
        """See `Peer`."""
        return _Publisher(self.port, topic, self.level, self.traffic)

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """See `Peer`. The consumer takes every topic."""
        return _Consumer(self.port, topic, f"{topic}-{number}", size)


class _Frames:
    """Frames made from encoded batches."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._templates = [encode(BatchFrame(1, batch, ack_wanted=True)) for batch in batches]
        self._turn = 0

    def frame(self, counter: int, payloads: bytes) -> bytearray:
        """See `FrameMaker`. The batch is encoded already, so `payloads` is not used."""
        frame = bytearray(self._templates[self._turn])
        self._turn = (self._turn + 1) % TEMPLATES
        number_frame(frame, counter)
        return frame


class _Publisher(RawPublisher):
    def __init__(self, port: int, topic: str, level: AckLevel, traffic: Traffic) -> None:
        super().__init__(port, topic, level)
        self._traffic = traffic

    def frames_of(self, topic: str, grant: OriginGrant, level: AckLevel, shape: tuple[int, int]) -> _Frames:
        """Return frames of the traffic; of `shape` only the number of rows is used."""
        return _Frames(self._traffic.batches(topic, shape[0], grant.origin, level, grant.epoch))


class _Consumer(RawConsumer):
    def topic_of(self, topic: str) -> Topic:
        """Return the topic of everything."""
        return ALL

    def stamps_of(self, batch: Batch, size: int, counter: int) -> bytes:
        """Check the rows by their counters; return zeros, as they carry no times."""
        if batch.base != counter:
            raise RuntimeError(f"delta-prop: a batch from {batch.base}, expected {counter}")
        return bytes(8 * batch.count)
