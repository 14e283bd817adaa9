"""A producer in this process: a named handle that draws its own dots, like a producer connection.

It checks each delta before it draws a dot, holds every batch until it is processed, and after a retryable
refusal resends the same bytes, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import anyio

from delta_prop.calls.argument_checks import Dependency, check_timeout, dependency_key, with_parents
from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop.calls.refusals import timed_out, withdrawn
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.partition.order.orphans import check_and_note
from delta_prop.partition.outcome_query import find_outcome, stored_watermark
from delta_prop.producing.last_dots import LastDots
from delta_prop.producing.origin_sequence import (
    IN_FLIGHT_BYTES_MAX,
    OriginSequence,
    SentBatch,
    check_in_flight,
)
from delta_prop_wire.batch import Batch
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, Source, producer_id_of
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import COUNTER_MAX, VECTOR_ID_BYTES_MAX, ErrorCode

if TYPE_CHECKING:
    from delta_prop.api.publishing import Publisher

IN_FLIGHT_BATCHES_MAX = 10_000
PUBLISH_TIMEOUT_S = 30.0
_RETRY_S_MIN = 0.001


class _UnackedBatch(SentBatch):
    """A batch whose dots are not processed yet. `wake_event`: ends the wait before a retry. `callback`:
    called with the receipt at each outcome.
    """

    __slots__ = ("callback", "receipt", "sender", "wake_event")

    def __init__(self, batch: Batch, sender: Sender, callback: Callable[[Receipt], None] | None) -> None:
        super().__init__(batch)
        self.sender = sender
        self.callback = callback
        self.receipt = Receipt()
        self.wake_event: anyio.Event | None = None

    @property
    def is_refused(self) -> bool:
        """True if it must be sent again."""
        return self.receipt.done and not self.receipt.acknowledged


_Lane: TypeAlias = OriginSequence[_UnackedBatch]


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
        self._lanes = {priority: _Lane(grants[priority].origin, priority) for priority in Priority}
        for lane, grant in zip(self._lanes.values(), grants, strict=True):
            lane.grant(grant.epoch, grant.watermark)
        self._last_dots = LastDots[Dot]()
        self._in_flight_bytes = 0
        self._seen_recoveries = pipeline.recoveries

    @property
    def in_flight_batches(self) -> int:
        """Number of batches sent and not processed yet."""
        for lane in self._lanes.values():
            self._drop_done(lane)
        return sum(len(lane.unacked) for lane in self._lanes.values())

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
        refused = (entry for lane in self._lanes.values() for entry in lane.retries if _is_open(lane, entry))
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
        deltas = with_parents(deltas, [_parent_key(dependency) for dependency in after])
        vectors = [(delta.namespace, delta.vector_id) for delta in deltas]
        clock = lane.clocks.make(self._last_dots.of_others(vectors, lane.origin))
        has_gap = counter is not None and counter > lane.next_counter
        batch = lane.encode(
            deltas,
            base=lane.next_counter if counter is None else counter,
            clock=clock,
            level=self._ack_level,
            previous=lane.previous_counter,
            counters=[counter] if has_gap and counter is not None else None,
        )
        entry = _UnackedBatch(batch, sender or self._sender, callback)
        lane.draw(entry, clock)
        self._last_dots.note(vectors, Dot(lane.origin, batch.last))
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
            watermark = self._pipeline.orderer.watermarks.get(lane.origin, 0)
            lost_until = lane.grant(lane.epoch, watermark)
            if lost_until > watermark:
                self._pipeline.skip_to(lane.origin, lost_until, self.name)
                lane.clocks.forget_sent()
        self._seen_recoveries = recoveries

    def _resend(self, lane: _Lane, last: _UnackedBatch | None = None) -> None:
        """Send refused batches again, up to `last`, or all. Raises the first refusal that recurs."""
        self._drop_done(lane)
        counter = 0
        while entry := lane.take_retry(counter, COUNTER_MAX if last is None else last.batch.base):
            counter = entry.batch.base
            if _is_open(lane, entry):
                self._send(lane, entry)
                refusal = entry.receipt.refusal()
                if refusal is not None and not refusal.is_final:
                    raise refusal

    def _send(self, lane: _Lane, entry: _UnackedBatch) -> None:
        entry.receipt = receipt = Receipt()
        final_refusal = withdrawn() if entry.is_withdrawn else None
        receipt.add_done_callback(lambda settled: self._on_settled(lane, entry, settled))
        self._pipeline.offer(
            SequencedBatch(entry.batch, entry.sender, receipt, final_refusal=final_refusal), self._now()
        )

    def _on_settled(self, lane: _Lane, entry: _UnackedBatch, receipt: Receipt) -> None:
        entry.is_withdrawn = entry.is_withdrawn or receipt.state is OfferState.WITHDRAWN
        if not receipt.acknowledged:
            lane.add_retry(entry)
        elif entry.wake_event is not None:
            entry.wake_event.set()
        self._drop_done(lane)
        if entry.callback is not None:
            entry.callback(receipt)

    def _drop_done(self, lane: _Lane) -> None:
        """Drop appended batches, no-ops too, which may be appended after their receipts were settled."""
        watermark = self._pipeline.orderer.watermarks.get(lane.origin, 0)
        unacked = lane.unacked
        while unacked and (first := next(iter(unacked.values()))).batch.last <= watermark:
            refusal = first.receipt.refusal()
            if first.receipt.state in (OfferState.APPENDED, OfferState.IN_DOUBT) or (
                refusal is not None and refusal.code is ErrorCode.LOG_FAILED
            ):
                break  # it must be sent again if the log fails, or has failed
            lane.remove(first)
            self._in_flight_bytes -= first.batch.size

    def _check_capacity(self) -> None:
        count = sum([len(lane.unacked) for lane in self._lanes.values()])
        if count >= IN_FLIGHT_BATCHES_MAX or self._in_flight_bytes >= IN_FLIGHT_BYTES_MAX:
            check_in_flight(
                self.name,
                "batches",
                count=self.in_flight_batches,
                count_max=IN_FLIGHT_BATCHES_MAX,
                size=self._in_flight_bytes,
                size_max=IN_FLIGHT_BYTES_MAX,
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
        entry.is_withdrawn = entry.is_withdrawn or not entry.receipt.acknowledged


def _is_open(lane: _Lane, entry: _UnackedBatch) -> bool:
    """True unless the dots of a refused batch were processed since, for instance as no-ops."""
    return lane.unacked.get(entry.batch.base) is entry


def _parent_key(dependency: Receipt | Dependency) -> Dot | bytes:
    """Return the dot or id that a caller names. Raises UsageError if a receipt has no dot yet."""
    if isinstance(dependency, Receipt):
        work = getattr(dependency.item, "payload", None) or getattr(dependency.item, "item", None)
        if isinstance(work, SequencedBatch):
            return work.batch.dot(work.batch.count - 1)
        dependency = dependency.result()
    return dependency_key(dependency)
