"""A service without a network: the real pipeline, and the frames with which a server answers a producer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Kind
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, AckRange, BatchFrame, Nack, OriginGrant, Welcome
from tests.delta_prop.partition.pipeline_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.calls.outcomes import PublishAck
    from delta_prop_wire.frames import OriginClaim

OWN_PRODUCER_ID = 1
"""The id of the pipeline's own producer, whose origins no client claims."""


class PipelineService:
    """A pipeline, and up to one connection of a producer to it."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.log_id = bytes(15) + b"\1"
        self.checksums: dict[tuple[int, int, int], int] = {}  # (origin, epoch, base) -> checksum
        self.connect()

    def connect(self) -> None:
        """Replace the connection: its unsent answers are dropped; deltas in the pipeline stay."""
        self.answers: deque[Ack | Nack] = deque()
        self._answered: set[int] = set()
        self._cumulative = 0
        self._connection = object()

    def hello(self, claims: Sequence[OriginClaim]) -> Welcome:
        grants = self.bench.pipeline.claim(claims, "owner", self.bench.now)
        return Welcome(
            origins=tuple(OriginGrant(one.origin, one.epoch, one.watermark) for one in grants),
            log=Cursor(self.log_id, 0, self.bench.log.next_offset),
            level=AckLevel.MEMORY,
        )

    def lose_tail(self, offset: int) -> None:
        """Remove the rows from an offset on, as after a failure of the log."""
        remaining = [logged for logged in self.bench.routed if logged.next_offset <= offset]
        epochs = {state.origin: state.epoch for state in self._grants()}
        self.bench = Bench()
        for logged in remaining:
            relogged = self.bench.log.append(logged.batch, lamport=logged.lamport, source=logged.source)
            self.bench.pipeline.restore(relogged, 0.0)
            self.bench.routed.append(relogged)
        for origin, epoch in epochs.items():
            self.bench.pipeline.origins.restore(origin, epoch, 0.0)

    def _grants(self) -> list[OriginGrant]:
        active, _ = self.bench.pipeline.origins.list_all()
        states = [(origin, self.bench.pipeline.origins.get(origin)) for origin in active]
        return [
            OriginGrant(origin, state.epoch, 0)
            for origin, state in states
            if state is not None and origin >> 20 != OWN_PRODUCER_ID
        ]

    def receive(self, frame: BatchFrame, refuse: Refused | None = None) -> None:
        """Process a frame and queue its answer; with `refuse`, refuse it before the pipeline sees it."""
        batch = frame.batch
        # A producer sends a withdrawn batch again under its dots, with rows that are finally refused.
        is_withdrawn = batch.kind == Kind.OFFSET and batch.keys[0] == "withdrawn"
        if not is_withdrawn:
            key = (batch.origin, batch.epoch, batch.base)
            assert self.checksums.setdefault(key, batch.crc) == batch.crc or self.allows_dot_reuse, (
                "the same dot must have the same bytes"
            )
        if refuse is not None:
            self.answer(frame, None, refuse)
            return
        receipt = Receipt()
        connection = self._connection

        def answer(receipt_done: Receipt) -> None:
            if connection is self._connection:
                refusal = receipt_done.refusal()
                self.answer(frame, None if refusal else receipt_done.result(), refusal)

        receipt.add_done_callback(answer)
        self.bench.pipeline.offer(SequencedBatch(batch, Sender("owner"), receipt), self.bench.now)

    allows_dot_reuse = False
    """True if a dot may be reused with other bytes, as in batches rebuilt after a lost tail."""

    def answer(self, frame: BatchFrame, published: PublishAck | None, refusal: Refused | None) -> None:
        self._answered.update(range(frame.sequence, frame.sequence + frame.batch.count))
        while self._cumulative + 1 in self._answered:
            self._cumulative += 1
            self._answered.remove(self._cumulative)
        if refusal is not None:
            self.answers.append(Nack.of(frame.sequence, refusal))
            self.answers.append(Ack(self._cumulative))
        elif published is not None:
            self.answers.append(Ack(self._cumulative, ranges=_ranges(frame.sequence, published)))


def _ranges(sequence: int, published: PublishAck) -> tuple[AckRange, ...]:
    if not published.duplicates:
        assert published.offset is not None
        return (AckRange(sequence, sequence + published.count - 1, published.offset),)
    return tuple(
        AckRange(number, number, offset, duplicate)
        for number, (offset, _, duplicate) in enumerate(published.row_acks(), start=sequence)
        if offset is not None
    )
