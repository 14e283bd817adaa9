"""A producer in this process: a named handle that draws its own dots, like a producer connection.

It checks each delta before it draws a dot, holds every batch until it is processed, and after a retryable
refusal resends the same bytes, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio

from delta_prop.calls.argument_checks import Dependency, check_timeout, dependency_key, with_parents
from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.calls.refusals import timed_out, withdrawn
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.partition.order.orphans import check_and_note
from delta_prop.partition.outcome_query import find_outcome, stored_watermark
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import AckLevel, Dot, Priority, Source, producer_id_of
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.api.publishing import Publisher
    from delta_prop.calls.receipt import PublishAck
    from delta_prop.partition.ingest.origins import Grant
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta

IN_FLIGHT_BATCHES_MAX = 10_000
IN_FLIGHT_BYTES_MAX = 64 * 1024 * 1024
HEADS_MAX = 100_000
"""Maximum vectors of which a producer remembers the last dot."""
PUBLISH_TIMEOUT_S = 30.0
_RETRY_S_MIN = 0.001


@dataclass(slots=True, eq=False)
class _UnackedBatch:
    """A batch whose dots are not processed yet.

    `withdrawn`: True once its caller has withdrawn it. `wake_event`: ends the wait before a retry.
    `callback`: called with the receipt at each outcome.
    """

    batch: Batch
    sender: Sender
    receipt: Receipt = field(default_factory=Receipt)
    withdrawn: bool = False
    wake_event: anyio.Event | None = None
    callback: Callable[[Receipt], None] | None = None

    @property
    def is_refused(self) -> bool:
        """True if it must be sent again."""
        return self.receipt.done and not self.receipt.acknowledged


class _Lane:
    """One origin: its next counter, the clock entries it has sent, its unacknowledged batches in order."""

    def __init__(self, grant: Grant) -> None:
        self.origin = grant.origin
        self.epoch = grant.epoch
        self.next_counter = grant.watermark + 1
        self.sent_clock: dict[int, int] = {}
        self.in_flight: OrderedDict[int, _UnackedBatch] = OrderedDict()
        self.has_refused = False  # True if some batches in flight may have to be sent again


class Producer:
    """Handle that publishes deltas under dots (name, counter): sent any number of times, each has one effect.

    Opening a name again fences the handle that held it: its next publish is refused with FENCED.
    """

    def __init__(
        self,
        name: str,
        publisher: Publisher,
        *,
        ack_level: AckLevel,
        source: Source,
    ) -> None:
        check_name("producer", name, VECTOR_ID_BYTES_MAX)
        self.name = name
        self._publisher = publisher
        self._pipeline = pipeline = publisher.pipeline
        self._now = publisher.now
        self._ack_level = ack_level
        self._sender = Sender(owner=name, source=source)
        grants = pipeline.hello(producer_id_of(name), name, self._now())
        self._lanes = {Priority(lane): _Lane(grant) for lane, grant in enumerate(grants)}
        self._heads: OrderedDict[tuple[str, str], Dot] = OrderedDict()
        self._in_flight_bytes = 0
        self._seen_recoveries = pipeline.recoveries

    @property
    def in_flight_batches(self) -> int:
        """Number of batches sent and not processed yet."""
        for lane in self._lanes.values():
            self._drop_done(lane)
        return sum(len(lane.in_flight) for lane in self._lanes.values())

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """Return the counter up to which the service has processed this producer's deltas of a priority and
        stored their outcomes. Raises Refused (LOG_FAILED) while the log has failed.
        """
        return stored_watermark(self._pipeline, self._lanes[priority].origin)

    def offer(self, *deltas: Delta, after: Sequence[Receipt | Dependency] = ()) -> Receipt:
        """Send deltas of one priority as one batch. Never waits; the receipt gets the outcome.

        Raises InvalidDelta, UsageError; Refused (QUEUE_FULL) if too much is unacknowledged, or with the
        refusal that keeps an earlier batch unacknowledged. No dot is drawn then.
        """
        return self._send_first(check_and_note(deltas, self._pipeline.note_refused), deltas, after).receipt

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Receipt | Dependency] = (),
        timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> PublishAck:
        """Send and wait for the acknowledgement; retry while the refusal is retryable.

        Raises Refused; after `timeout_s` with the last refusal. A publish that raises never takes effect: its
        dots become no-ops. Neither does a cancelled one, unless it was appended already. If the code is
        OUTCOME_UNKNOWN, it was appended to a log that then failed: `outcome` returns the result once the log
        is recovered.
        """
        deadline = self._now() + check_timeout(timeout_s)
        priority = check_and_note(deltas, self._pipeline.note_refused)
        entry: _UnackedBatch | None = None
        while True:
            try:
                if entry is None:
                    entry = self._send_first(priority, deltas, after)
                elif entry.is_refused:
                    self._publisher.check_producer(self.name)
                    self._continue_after_recovery()
                    self._resend(self._lanes[priority], entry)
                with anyio.move_on_after(max(deadline - self._now(), 0)):
                    return await entry.receipt.wait()
                raise timed_out(timeout_s, None if entry.receipt.done else entry.receipt.place)
            except anyio.get_cancelled_exc_class():
                _withdraw(entry)
                raise
            except Refused as refusal:
                wait_s = max((refusal.retry_after_ms or 0) / 1000, _RETRY_S_MIN)
                is_permanent = refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is None
                is_permanent |= refusal.code is ErrorCode.SHUTTING_DOWN  # this handle ends with its service
                if is_permanent or not refusal.retryable or self._now() + wait_s >= deadline:
                    _withdraw(entry)
                    raise
            await _wait_before_retry(entry, wait_s)

    def offer_numbered(self, counter: int, delta: Delta, then: Callable[[Receipt], None]) -> bool:
        """Send a delta under a counter of the caller's, which rises within a priority and may leave gaps.

        Return False if the counter is not above the watermark: `outcome` returns its result. Else `then` is
        called with the receipt at each outcome; after a retryable refusal `resend` sends the same again, and
        `then` is called again. Never waits. Raises as `offer` does, and sends nothing then.
        """
        priority = check_and_note([delta], self._pipeline.note_refused)
        lane = self._lanes[priority]
        if counter < lane.next_counter:
            return False
        if delta.source is Source.REPLICA:
            raise InvalidDelta("source", "replica is reserved for services that forward: give another source")
        sender = replace(self._sender, source=delta.source)
        self._send_first(priority, [delta], (), counter=counter, sender=sender, callback=then)
        return True

    async def outcome(
        self,
        counter: int,
        priority: Priority = Priority.NORMAL,
        *,
        timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> int | ErrorCode | None:
        """Return the outcome of a counter: its offset, the code if its dot is a no-op, None if it was not
        appended. See `Propagator.outcome`.
        """
        origin = self._lanes[priority].origin
        return await find_outcome(self._pipeline, Dot(origin, counter), check_timeout(timeout_s))

    def send_frame(self, batch: Batch, lamport: int | None = None) -> Receipt:
        """Send a batch unchanged: a duplicate of this producer's, or a forwarded one under its origin."""
        self._publisher.check_producer(self.name)
        self._publisher.flush()
        work = SequencedBatch(batch, self._sender, Receipt(), lamport)
        return self._pipeline.offer(work, self._now())

    def resend(self, priority: Priority | None = None) -> None:
        """Send refused unacknowledged batches again, in order. Raises the first refusal that recurs."""
        self._publisher.check_producer(self.name)
        self._continue_after_recovery()
        for lane in self._lanes.values() if priority is None else (self._lanes[priority],):
            self._resend(lane)

    @property
    def waits_for(self) -> Refused | None:
        """Retryable refusal that blocks unacknowledged batches; None: there is none."""
        if self._pipeline.stop_refusal is not None:
            return self._pipeline.stop_refusal
        refused = (
            entry for lane in self._lanes.values() for entry in lane.in_flight.values() if entry.is_refused
        )
        refusals = (entry.receipt.refusal() for entry in refused)
        return next((refusal for refusal in refusals if refusal is not None and refusal.retryable), None)

    # --- helpers

    def _send_first(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Dependency],
        *,
        counter: int | None = None,
        sender: Sender | None = None,
        callback: Callable[[Receipt], None] | None = None,
    ) -> _UnackedBatch:
        """Draw the dots and send for the first time."""
        lane = self._lanes[priority]
        self._publisher.check_producer(self.name)
        self._publisher.flush()
        self.resend(priority)
        self._check_capacity()
        batch = self._encode(lane, priority, deltas, after, counter)
        lane.next_counter = batch.last + 1
        entry = lane.in_flight[batch.base] = _UnackedBatch(batch, sender or self._sender, callback=callback)
        self._in_flight_bytes += batch.size
        self._send(lane, entry)
        return entry

    def _continue_after_recovery(self) -> None:
        """Continue after a recovery of the log: the grants hold, and unacknowledged batches are sent again.

        Counters of deltas acknowledged at a lower level and lost are filled with no-ops. Raises Refused.
        """
        recoveries = self._pipeline.recoveries
        if self._seen_recoveries == recoveries:
            return
        for lane in self._lanes.values():
            first = next(iter(lane.in_flight.values()), None)
            previous = lane.next_counter - 1 if first is None else _previous_counter(first.batch)
            if previous > self._pipeline.orderer.watermarks.get(lane.origin, 0):
                self._pipeline.skip_to(lane.origin, previous, self.name)
                lane.sent_clock.clear()  # the lost batches' clock entries must be sent again
        self._seen_recoveries = recoveries

    def _resend(self, lane: _Lane, last: _UnackedBatch | None = None) -> None:
        """Send refused batches again, up to `last`, or all. Raises the first refusal that recurs."""
        self._drop_done(lane)
        if not lane.has_refused:
            return
        for entry in list(lane.in_flight.values()):
            if entry.is_refused:
                self._send(lane, entry)
                refusal = entry.receipt.refusal()
                if refusal is not None and not refusal.is_final:
                    raise refusal
            if entry is last:
                return
        lane.has_refused = any(entry.is_refused for entry in lane.in_flight.values())

    def _send(self, lane: _Lane, entry: _UnackedBatch) -> None:
        entry.receipt = receipt = Receipt()
        final_refusal = withdrawn() if entry.withdrawn else None
        receipt.add_done_callback(lambda settled: self._on_settled(lane, entry, settled))
        self._pipeline.offer(
            SequencedBatch(entry.batch, entry.sender, receipt, final_refusal=final_refusal), self._now()
        )

    def _on_settled(self, lane: _Lane, entry: _UnackedBatch, receipt: Receipt) -> None:
        entry.withdrawn = entry.withdrawn or receipt.state is OfferState.WITHDRAWN
        lane.has_refused = lane.has_refused or not receipt.acknowledged
        if entry.wake_event is not None and receipt.acknowledged:
            entry.wake_event.set()
        self._drop_done(lane)
        if entry.callback is not None:
            entry.callback(receipt)

    def _drop_done(self, lane: _Lane) -> None:
        """Drop appended batches, no-ops too, which may be appended after their receipts were settled."""
        watermark = self._pipeline.orderer.watermarks.get(lane.origin, 0)
        while lane.in_flight and (first := next(iter(lane.in_flight.values()))).batch.last <= watermark:
            refusal = first.receipt.refusal()
            if first.receipt.state in (OfferState.APPENDED, OfferState.IN_DOUBT) or (
                refusal is not None and refusal.code is ErrorCode.LOG_FAILED
            ):
                break  # it must be sent again if the log fails, or has failed
            del lane.in_flight[first.batch.base]
            self._in_flight_bytes -= first.batch.size

    def _encode(
        self,
        lane: _Lane,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Dependency],
        counter: int | None,
    ) -> Batch:
        deltas = with_parents(deltas, [_parent_key(dependency) for dependency in after])
        clock = self._find_clock_changes(lane, deltas)
        has_gap = counter is not None and counter > lane.next_counter
        batch = encode_batch(
            deltas,
            origin=lane.origin,
            base=lane.next_counter if counter is None else counter,
            epoch=lane.epoch,
            clock=clock,
            previous=lane.next_counter - 1 if has_gap else 0,
            counters=[counter] if has_gap and counter is not None else None,
            ack_level=self._ack_level,
            priority=priority,
        )
        for dot in clock:
            lane.sent_clock[dot.origin] = dot.counter
        for row, delta in enumerate(deltas):
            self._heads[delta.namespace, delta.vector_id] = batch.dot(row)
            self._heads.move_to_end((delta.namespace, delta.vector_id))
        while len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)
        return batch

    def _find_clock_changes(self, lane: _Lane, deltas: Sequence[Delta]) -> list[Dot]:
        """Return the last deltas of these vectors under other priorities, unless a clock has named them."""
        changed: dict[int, int] = {}
        for delta in deltas:
            head = self._heads.get((delta.namespace, delta.vector_id))
            if head is None or head.origin == lane.origin:
                continue
            if head.counter > changed.get(head.origin, lane.sent_clock.get(head.origin, 0)):
                changed[head.origin] = head.counter
        return [Dot(origin, counter) for origin, counter in changed.items()]

    def _check_capacity(self) -> None:
        if self.in_flight_batches >= IN_FLIGHT_BATCHES_MAX or self._in_flight_bytes >= IN_FLIGHT_BYTES_MAX:
            raise Refused(
                ErrorCode.QUEUE_FULL,
                f"producer {self.name!r} has {self.in_flight_batches} of {IN_FLIGHT_BATCHES_MAX} batches and "
                f"{self._in_flight_bytes} of {IN_FLIGHT_BYTES_MAX} bytes unacknowledged: await some receipts "
                "first",
                retry_after_ms=10,
                details={"depth": self.in_flight_batches, "capacity": IN_FLIGHT_BATCHES_MAX},
            )


async def _wait_before_retry(entry: _UnackedBatch | None, wait_s: float) -> None:
    """Wait before the next try, or until another task's try has settled the batch."""
    wake_event = anyio.Event()
    if entry is not None:
        entry.wake_event = wake_event
    try:
        with anyio.move_on_after(wait_s):
            await wake_event.wait()
    except anyio.get_cancelled_exc_class():
        _withdraw(entry)
        raise


def _withdraw(entry: _UnackedBatch | None) -> None:
    """Withdraw a batch; if it was refused, or turns out to be lost with the log, it is sent again as a no-op.
    It takes effect only if it is in the log by now.
    """
    if entry is not None and not entry.receipt.withdraw():
        entry.withdrawn = entry.withdrawn or not entry.receipt.acknowledged


def _previous_counter(batch: Batch) -> int:
    """Return the counter of its origin before a batch; counters in between went to other priorities."""
    return batch.previous if batch.has_gaps else batch.base - 1


def _parent_key(dependency: Receipt | Dependency) -> Dot | bytes:
    """Return the dot or id that a caller names. Raises UsageError if a receipt has no dot yet."""
    if isinstance(dependency, Receipt):
        work = getattr(dependency.item, "payload", None) or getattr(dependency.item, "item", None)
        if isinstance(work, SequencedBatch):
            return work.batch.dot(work.batch.count - 1)
        dependency = dependency.result()
    return dependency_key(dependency)
