"""A producer in this process: a named handle that draws dots of its own, as a connection would.

It checks each delta before it draws a dot, keeps every batch until it is dealt with, and sends the
same bytes again, in order, where a refusal may pass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio

from delta_prop.checks import Cause, cause_of, check_timeout, with_parents
from delta_prop.ingest.work import Sequenced, Session
from delta_prop.orphans import checked
from delta_prop.outcome_query import kept_watermark, outcome_of
from delta_prop.receipt import Receipt, State
from delta_prop.refusals import late, withdrawn
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import AckLevel, Dot, Priority, Source, producer_id_of
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX, ErrorCode

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


@dataclass(slots=True, eq=False)
class _Open:
    """A batch whose dots are not dealt with yet. `void`: its caller has given it up."""

    batch: Batch
    session: Session
    receipt: Receipt = field(default_factory=Receipt)
    void: bool = False
    woken: anyio.Event | None = None
    then: Callable[[Receipt], None] | None = None

    @property
    def refused(self) -> bool:
        """Whether it is to be sent again."""
        return self.receipt.done and not self.receipt.acknowledged


class _Lane:
    """One origin: its next counter, what it said of others' clocks, its open batches in order."""

    def __init__(self, grant: Grant) -> None:
        self.origin = grant.origin
        self.epoch = grant.epoch
        self.next = grant.watermark + 1
        self.said: dict[int, int] = {}
        self.open: OrderedDict[int, _Open] = OrderedDict()
        self.any_refused = False  # whether some of them may have to be sent again


class Producer:
    """Deltas under dots (name, counter): sent any number of times, each has one effect.

    Opening a name again fences the handle that held it: its next publish is refused with FENCED.
    """

    def __init__(
        self,
        name: str,
        chain: Chain,
        *,
        now: Callable[[], float],
        ack_level: AckLevel,
        source: Source,
        send_before: Callable[[], None],
    ) -> None:
        """`send_before`: sends what others have offered in this turn, which comes first."""
        check_name("producer", name, VECTOR_ID_BYTES_MAX)
        self.name = name
        self._chain = chain
        self._now = now
        self._send_before = send_before
        self._ack_level = ack_level
        self._session = Session(owner=name, source=source)
        grants = chain.hello(producer_id_of(name), name, now())
        self._lanes = {Priority(lane): _Lane(grant) for lane, grant in enumerate(grants)}
        self._heads: OrderedDict[tuple[str, str], Dot] = OrderedDict()
        self._open_bytes = 0
        self._rebuilt = chain.rebuilt

    @property
    def open_batches(self) -> int:
        """Batches sent and not dealt with yet."""
        for lane in self._lanes.values():
            self._forget_done(lane)
        return sum(len(lane.open) for lane in self._lanes.values())

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """The counter up to which the service has dealt with this producer's deltas of a priority, and keeps
        what came of that. Raises Refused (LOG_FAILED) while the log has failed.
        """
        return kept_watermark(self._chain, self._lanes[priority].origin)

    def offer(self, *deltas: Delta, after: Sequence[Receipt | Cause] = ()) -> Receipt:
        """Send deltas of one priority as one batch. Never waits; the outcome stands in the receipt.

        Raises InvalidDelta, UsageError; Refused (QUEUE_FULL) where too much is open, or with the refusal
        that still keeps an earlier batch open. No dot is drawn then.
        """
        return self._begin(checked(deltas, self._chain.note_refused), deltas, after).receipt

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Receipt | Cause] = (),
        timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> Published:
        """Send and wait for the acknowledgement, again and again while the refusal may pass.

        Raises Refused; after `timeout_s` with the last refusal. What raises has not happened and will not:
        its dots become void. So does what is cancelled, unless it had its place already. Where the code is
        OUTCOME_UNKNOWN it had its place in a log that had failed: `outcome` tells once that is recovered.
        """
        deadline = self._now() + check_timeout(timeout_s)
        priority = checked(deltas, self._chain.note_refused)
        entry: _Open | None = None
        while True:
            try:
                if entry is None:
                    entry = self._begin(priority, deltas, after)
                elif entry.refused:
                    self._go_on()
                    self._resend(self._lanes[priority], entry)
                with anyio.move_on_after(max(deadline - self._now(), 0)):
                    return await entry.receipt.wait()
                raise late(timeout_s, None if entry.receipt.done else entry.receipt.place)
            except anyio.get_cancelled_exc_class():
                _give_up(entry)
                raise
            except Refused as refusal:
                wait_s = max((refusal.retry_after_ms or 0) / 1000, _RETRY_S_MIN)
                final = refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is None
                if final or not refusal.retryable or self._now() + wait_s >= deadline:
                    _give_up(entry)
                    raise
            await _pause(entry, wait_s)

    def offer_numbered(self, counter: int, delta: Delta, then: Callable[[Receipt], None]) -> bool:
        """Send a delta under a counter of the caller's, which rises within a priority and may leave gaps.

        False where the counter is not above the watermark: `outcome` tells what became of it. Else `then` is
        called with the receipt whenever there is an outcome; after a refusal that may pass `resend` sends the
        same again, and `then` is called again. Never waits. Raises as `offer` does, and sends nothing then.
        """
        priority = checked([delta], self._chain.note_refused)
        lane = self._lanes[priority]
        if counter < lane.next:
            return False
        if delta.source is Source.REPLICA:
            raise InvalidDelta("source", "replica is what a service says that forwards: give another one")
        session = replace(self._session, source=delta.source)
        self._begin(priority, [delta], (), counter=counter, session=session, then=then)
        return True

    async def outcome(
        self,
        counter: int,
        priority: Priority = Priority.NORMAL,
        *,
        timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> int | ErrorCode | None:
        """Return what became of a counter: its offset, the code if its dot is void, None if it has not
        happened. See `Propagator.outcome`.
        """
        origin = self._lanes[priority].origin
        return await outcome_of(self._chain, Dot(origin, counter), check_timeout(timeout_s))

    def send_frame(self, batch: Batch, lamport: int | None = None) -> Receipt:
        """Send a batch as it is: a repeat of one's own, or a forwarder's under its first origin."""
        self._send_before()
        work = Sequenced(batch, self._session, Receipt(), lamport)
        return self._chain.offer(work, self._now())

    def resend(self, priority: Priority | None = None) -> None:
        """Send open batches again that were refused, in order. Raises the first refusal that stays."""
        self._go_on()
        for lane in self._lanes.values() if priority is None else (self._lanes[priority],):
            self._resend(lane)

    @property
    def waits_for(self) -> Refused | None:
        """The refusal that stands in the way of what is open, and may pass; None: there is none."""
        if self._chain.stopped is not None:
            return self._chain.stopped
        open_ = (entry for lane in self._lanes.values() for entry in lane.open.values() if entry.refused)
        refusals = (entry.receipt.refusal() for entry in open_)
        return next((one for one in refusals if one is not None and one.retryable), None)

    def abandon(self) -> None:
        """Give up what is open and refused: its dots become void, what comes later goes on."""
        for lane in self._lanes.values():
            for entry in lane.open.values():
                entry.void = entry.void or entry.refused
        self.resend()

    # --- helpers

    def _begin(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Cause],
        *,
        counter: int | None = None,
        session: Session | None = None,
        then: Callable[[Receipt], None] | None = None,
    ) -> _Open:
        """Draw the dots and send for the first time."""
        lane = self._lanes[priority]
        self._send_before()
        self.resend(priority)
        self._check_room()
        batch = self._encode(lane, priority, deltas, after, counter)
        lane.next = batch.last + 1
        entry = lane.open[batch.base] = _Open(batch, session or self._session, then=then)
        self._open_bytes += batch.size
        self._send(lane, entry)
        return entry

    def _go_on(self) -> None:
        """After a failure of the log the grants hold, and what is open is sent again.

        What was acknowledged at a lower level may be gone: its counters are filled. Raises Refused.
        """
        rebuilt = self._chain.rebuilt
        if self._rebuilt == rebuilt:
            return
        for lane in self._lanes.values():
            first = next(iter(lane.open.values()), None)
            before = lane.next - 1 if first is None else _before(first.batch)
            if before > self._chain.orderer.have.get(lane.origin, 0):
                self._chain.leap(lane.origin, before, self.name)
                lane.said.clear()  # what the lost ones said of others' clocks is to be said again
        self._rebuilt = rebuilt

    def _resend(self, lane: _Lane, last: _Open | None = None) -> None:
        """Up to `last`, or all. Raises the first refusal that stays."""
        self._forget_done(lane)
        if not lane.any_refused:
            return
        for entry in list(lane.open.values()):
            if entry.refused:
                self._send(lane, entry)
                refusal = entry.receipt.refusal()
                if refusal is not None and not refusal.voids:
                    raise refusal
            if entry is last:
                return
        lane.any_refused = any(entry.refused for entry in lane.open.values())

    def _send(self, lane: _Lane, entry: _Open) -> None:
        entry.receipt = receipt = Receipt()
        void = withdrawn() if entry.void else None
        receipt.when_done(lambda told: self._settled(lane, entry, told))
        self._chain.offer(Sequenced(entry.batch, entry.session, receipt, void=void), self._now())

    def _settled(self, lane: _Lane, entry: _Open, told: Receipt) -> None:
        entry.void = entry.void or told.state is State.WITHDRAWN
        lane.any_refused = lane.any_refused or not told.acknowledged
        if entry.woken is not None and told.acknowledged:
            entry.woken.set()
        self._forget_done(lane)
        if entry.then is not None:
            entry.then(told)

    def _forget_done(self, lane: _Lane) -> None:
        """Drop what has its place, voids too, which may get theirs after their receipts were settled."""
        watermark = self._chain.orderer.have.get(lane.origin, 0)
        while lane.open and (first := next(iter(lane.open.values()))).batch.last <= watermark:
            refusal = first.receipt.refusal()
            if first.receipt.state in (State.PLACED, State.IN_DOUBT) or (
                refusal is not None and refusal.code is ErrorCode.LOG_FAILED
            ):
                break  # should the log fail, or has it, it has to be sent again
            del lane.open[first.batch.base]
            self._open_bytes -= first.batch.size

    def _encode(
        self,
        lane: _Lane,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Cause],
        counter: int | None,
    ) -> Batch:
        deltas = with_parents(deltas, [_parent(one) for one in after])
        clock = self._changed_clock(lane, deltas)
        leaps = counter is not None and counter > lane.next
        batch = encode_batch(
            deltas,
            origin=lane.origin,
            base=lane.next if counter is None else counter,
            epoch=lane.epoch,
            clock=clock,
            previous=lane.next - 1 if leaps else 0,
            counters=[counter] if leaps and counter is not None else None,
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

    def _check_room(self) -> None:
        if self.open_batches >= OPEN_BATCHES_MAX or self._open_bytes >= OPEN_BYTES_MAX:
            raise Refused(
                ErrorCode.QUEUE_FULL,
                f"producer {self.name!r} has {self.open_batches} of {OPEN_BATCHES_MAX} batches and "
                f"{self._open_bytes} of {OPEN_BYTES_MAX} bytes unacknowledged: await some receipts first",
                retry_after_ms=10,
                details={"depth": self.open_batches, "capacity": OPEN_BATCHES_MAX},
            )


async def _pause(entry: _Open | None, wait_s: float) -> None:
    """Wait before the next try, or until somebody else's try has settled it."""
    woken = anyio.Event()
    if entry is not None:
        entry.woken = woken
    try:
        with anyio.move_on_after(wait_s):
            await woken.wait()
    except anyio.get_cancelled_exc_class():
        _give_up(entry)
        raise


def _give_up(entry: _Open | None) -> None:
    """Withdraw it; where it was refused, or is found to be lost with the log, let it be sent again as a void.
    It takes effect only if it is in the log by now.
    """
    if entry is not None and not entry.receipt.withdraw():
        entry.void = entry.void or not entry.receipt.acknowledged


def _before(batch: Batch) -> int:
    """The counter that its origin has to have come to; numbers in between went to other lanes."""
    return batch.previous if batch.leaps else batch.base - 1


def _parent(one: Receipt | Cause) -> Dot | bytes:
    """The dot or id that a caller names. Raises UsageError where a receipt has no dot yet."""
    if isinstance(one, Receipt):
        work = getattr(one.item, "payload", None) or getattr(one.item, "item", None)
        if isinstance(work, Sequenced):
            return work.batch.dot(work.batch.count - 1)
        one = one.result()
    return cause_of(one)
