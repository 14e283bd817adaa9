"""A producer in this process: a named handle that draws dots of its own, as a connection would.

It checks each delta before it draws a dot, keeps every batch until it is dealt with, and sends the
same bytes again, in order, where a refusal may pass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import anyio
from delta_prop_wire.validate import validate_delta

from delta_prop.ingest.work import Sequenced, Session
from delta_prop.pipeline import withdrawn
from delta_prop.receipt import Receipt, State
from delta_prop_wire.delta import AckLevel, Dot, Priority, Source
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import BATCH_ROWS_MAX, PRODUCER_ID_BITS, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.ingest.origins import Grant
    from delta_prop.pipeline import Chain
    from delta_prop.receipt import Published
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta

OPEN_BATCHES_MAX = 10_000
OPEN_BYTES_MAX = 64 * 1024 * 1024
HEADS_MAX = 100_000
PUBLISH_TIMEOUT_S = 30.0
_RETRY_S_MIN = 0.001


def producer_id_of(name: str) -> int:
    """The 44-bit producer id that a name stands for."""
    digest = blake2b(name.encode(), digest_size=8, person=b"delta-prop").digest()
    return int.from_bytes(digest, "big") >> (64 - PRODUCER_ID_BITS)


@dataclass(slots=True, eq=False)
class _Open:
    """A batch whose dots are not dealt with yet."""

    batch: Batch
    receipt: Receipt


class _Lane:
    """One origin: its next counter, what it said of others' clocks, its open batches in order."""

    def __init__(self, grant: Grant) -> None:
        self.origin = grant.origin
        self.epoch = grant.epoch
        self.next = grant.watermark + 1
        self.said: dict[int, int] = {}
        self.open: OrderedDict[int, _Open] = OrderedDict()


class Producer:
    """Deltas under dots (name, counter): sent any number of times, each has one effect.

    Opening a name again fences the handle that held it: its next publish is refused with FENCED.
    """

    def __init__(
        self, name: str, chain: Chain, *, now: Callable[[], float], ack_level: AckLevel, source: Source
    ) -> None:
        self.name = name
        self._chain = chain
        self._now = now
        self._ack_level = ack_level
        self._session = Session(owner=name, source=source)
        grants = chain.hello(producer_id_of(name), name, now())
        self._lanes = {Priority(lane): _Lane(grant) for lane, grant in enumerate(grants)}
        self._heads: OrderedDict[tuple[str, str], Dot] = OrderedDict()
        self._open_bytes = 0

    @property
    def open_batches(self) -> int:
        """Batches sent and not dealt with yet."""
        return sum(len(lane.open) for lane in self._lanes.values())

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """The counter up to which the service has dealt with this producer's deltas of a priority."""
        return self._chain.orderer.have.get(self._lanes[priority].origin, 0)

    def offer(self, *deltas: Delta, after: Sequence[Receipt | Published | Dot | bytes] = ()) -> Receipt:
        """Send deltas of one priority as one batch. Never waits; the outcome stands in the receipt.

        Raises InvalidDelta before a dot is drawn; Refused (QUEUE_FULL) where too much is open, or with
        the refusal of an earlier batch that may pass and has not yet.
        """
        priority = _check(deltas)
        lane = self._lanes[priority]
        self.resend(priority)
        self._check_room(lane)
        batch = self._encode(lane, priority, deltas, after)
        lane.next = batch.last + 1
        return self._send(lane, batch)

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Receipt | Published | Dot | bytes] = (),
        timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> Published:
        """Send and wait for the acknowledgement, again and again while the refusal may pass.

        Raises Refused; after `timeout_s` with the last refusal, and the dots stay open: the next call
        sends them first. Cancelled: the delta is withdrawn, unless it had its place already.
        """
        priority = _check(deltas)
        lane = self._lanes[priority]
        deadline = self._now() + timeout_s
        batch: Batch | None = None
        while True:
            try:
                if batch is None:
                    receipt = self.offer(*deltas, after=after)
                    batch = next(reversed(lane.open.values())).batch if lane.open else None
                else:
                    receipt = self._again(lane, batch)
                with anyio.move_on_after(max(deadline - self._now(), 0)):
                    return await receipt.wait()
                raise _late(receipt, timeout_s)
            except Refused as refusal:
                wait_s = max((refusal.retry_after_ms or 0) / 1000, _RETRY_S_MIN)
                if not refusal.retryable or self._now() + wait_s >= deadline:
                    raise
                await anyio.sleep(wait_s)

    def send_frame(self, batch: Batch, lamport: int | None = None) -> Receipt:
        """Send a batch as it is: a repeat of one's own, or a forwarder's under its first origin."""
        work = Sequenced(batch, self._session, Receipt(), lamport)
        return self._chain.offer(work, self._now())

    def resend(self, priority: Priority | None = None) -> None:
        """Send open batches again that were refused for now, in order. Raises the refusal that stays."""
        for lane in self._lanes.values() if priority is None else (self._lanes[priority],):
            for entry in list(lane.open.values()):
                if not entry.receipt.done:
                    continue
                receipt = self._again(lane, entry.batch)
                refusal = receipt.refusal()
                if refusal is not None and refusal.retryable:
                    raise refusal

    def abandon(self) -> None:
        """Give up what is open and refused: its dots become void, what comes later goes on."""
        for lane in self._lanes.values():
            for entry in lane.open.values():
                if entry.receipt.refusal() is not None:
                    entry.receipt.state = State.WITHDRAWN
        self.resend()

    # --- helpers

    def _encode(
        self,
        lane: _Lane,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Published | Dot | bytes],
    ) -> Batch:
        named = [_parent(one) for one in after]
        if named:
            deltas = [_with_parents(delta, named) for delta in deltas]
        clock = self._changed_clock(lane, deltas)
        batch = encode_batch(
            deltas,
            origin=lane.origin,
            base=lane.next,
            epoch=lane.epoch,
            clock=clock,
            ack_level=self._ack_level,
            priority=priority,
        )
        for entry in clock:
            lane.said[entry.origin] = entry.counter
        for row, delta in enumerate(deltas):
            self._heads[delta.namespace, delta.vector_id] = batch.dot(row)
            self._heads.move_to_end((delta.namespace, delta.vector_id))
        while len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)
        return batch

    def _changed_clock(self, lane: _Lane, deltas: Sequence[Delta]) -> list[Dot]:
        """The last deltas of these vectors that this producer sent in other lanes, if not said before."""
        changed: dict[int, int] = {}
        for delta in deltas:
            head = self._heads.get((delta.namespace, delta.vector_id))
            if head is None or head.origin == lane.origin:
                continue
            if head.counter > changed.get(head.origin, lane.said.get(head.origin, 0)):
                changed[head.origin] = head.counter
        return [Dot(*entry) for entry in changed.items()]

    def _check_room(self, lane: _Lane) -> None:
        if self.open_batches >= OPEN_BATCHES_MAX or self._open_bytes >= OPEN_BYTES_MAX:
            raise Refused(
                ErrorCode.QUEUE_FULL,
                f"producer {self.name!r} has {self.open_batches} of {OPEN_BATCHES_MAX} batches and "
                f"{self._open_bytes} of {OPEN_BYTES_MAX} bytes unacknowledged: await some receipts first",
                retry_after_ms=10,
                details={"depth": self.open_batches, "capacity": OPEN_BATCHES_MAX},
            )

    def _send(self, lane: _Lane, batch: Batch, *, void: bool = False) -> Receipt:
        receipt = Receipt()
        work = Sequenced(batch, self._session, receipt, void=withdrawn() if void else None)
        if batch.base not in lane.open:
            self._open_bytes += batch.size
        lane.open[batch.base] = _Open(batch, receipt)
        receipt.when_done(lambda told: self._settled(lane, batch, told))
        return self._chain.offer(work, self._now())

    def _again(self, lane: _Lane, batch: Batch) -> Receipt:
        entry = lane.open.get(batch.base)
        if entry is None or not entry.receipt.done:
            raise UsageError("only an open batch with a known outcome is sent again")
        return self._send(lane, batch, void=entry.receipt.state is State.WITHDRAWN)

    def _settled(self, lane: _Lane, batch: Batch, told: Receipt) -> None:
        refusal = told.refusal()
        stays = told.state is State.WITHDRAWN or (refusal is not None and not refusal.voids)
        if batch.last <= self._chain.orderer.have.get(lane.origin, 0):
            stays = False
        if not stays and lane.open.pop(batch.base, None) is not None:
            self._open_bytes -= batch.size


def _check(deltas: Sequence[Delta]) -> Priority:
    if not 1 <= len(deltas) <= BATCH_ROWS_MAX:
        raise UsageError(f"{len(deltas)} deltas in one call: give 1 to {BATCH_ROWS_MAX}")
    priority = deltas[0].priority
    for delta in deltas:
        validate_delta(delta)
        if delta.priority != priority:
            raise UsageError(
                f"deltas of priority {priority.name} and {delta.priority.name} in one call: "
                "each priority is an order of its own, so send them in separate calls"
            )
    return priority


def _parent(one: Receipt | Published | Dot | bytes) -> Dot | bytes:
    """The dot or id that a caller names. Raises UsageError where a receipt has no dot yet."""
    if isinstance(one, Dot | bytes):
        return one
    if isinstance(one, Receipt):
        work = getattr(one.item, "payload", None) or getattr(one.item, "item", None)
        if isinstance(work, Sequenced):
            return work.batch.dot(work.batch.count - 1)
        one = one.result()
    if one.dot is None:
        raise UsageError("the named delta was a duplicate by id: name it by its id")
    return Dot(one.dot.origin, one.dot.counter + max(one.count - len(one.duplicates), 1) - 1)


def _with_parents(delta: Delta, named: Sequence[Dot | bytes]) -> Delta:
    from dataclasses import replace

    return replace(delta, parents=tuple(dict.fromkeys((*delta.parents, *named))))


def _late(receipt: Receipt, timeout_s: float) -> Refused:
    return Refused(
        ErrorCode.DEP_TIMEOUT if receipt.state is State.WITHDRAWN else ErrorCode.QUEUE_FULL,
        f"no acknowledgement within {timeout_s} s: the delta was withdrawn; send it again, or wait longer",
        retry_after_ms=1000,
    )
