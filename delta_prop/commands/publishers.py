"""Sends the lines of `publish` to a data directory or a server, and reports each outcome once.

A retryable refusal is retried until the line is appended, or until there is no progress for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import anyio

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.client import Producer as RemoteProducer
from delta_prop.client.errors import Reconnect
from delta_prop.client.offer import Offer
from delta_prop.client.producer_state import ProducerState
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop.partition.order.orphans import check_and_note
from delta_prop.platform import system
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop.server.outcome_collector import make_ack_ranges
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, Source, producer_id_of
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import Ack, Nack, OriginGrant, Welcome
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.partition.ingest.origins import Grant

STALL_TIMEOUT_S = 60.0
"""Seconds without progress after which the run ends with the refusal that blocks it; it can be repeated."""
_RETRY_S = 0.02
_POLL_S = 0.1


class LineAck(NamedTuple):
    """The acknowledgement of a line: its offset in the log; `duplicate`: True if it was there before.

    `partition`: that of the log, if the lines go to several.
    """

    offset: int
    duplicate: bool
    partition: int | None = None


OutcomeCallback: TypeAlias = "Callable[[LineAck | Refused], None]"


class LocalPublisher:
    """Publishes into a propagator of this process, with the producer state that a client has."""

    def __init__(self, propagator: Propagator, name: str, level: AckLevel | None = None) -> None:
        """Raises Refused."""
        internals = propagator.internals()
        partition = self._partition = internals.partition
        self._pipeline, self._now = partition.pipeline, partition.world.clock.now
        self._name = name
        self._producer_state = ProducerState(name, ack_level=level, can_split=True)
        self._producer_state.bind(partition.name)
        self._random = partition.world.randomness.fork("publish").random
        self._wakeup = Wakeup()
        self._failure: Refused | None = None
        self._blocked_line: tuple[int, Refused] | None = None  # a refused line that is retried
        self._progress_at = system.now()
        self._generation = 0  # of the hello: outcomes of earlier generations are ignored
        grants = self._pipeline.hello(producer_id_of(name, partition.name.stream), name, self._now())
        self._apply_welcome(grants)

    def waits_for(self) -> Exception | None:
        """Return the refusal of the first open line, or the reason why the log takes nothing."""
        return self._producer_state.waits_for

    def log_end(self) -> int:
        """Return the next offset of the log."""
        return self._partition.log.next_offset

    async def send(self, number: int, delta: Delta, on_outcome: OutcomeCallback) -> None:
        """Send a line once there is capacity; call `on_outcome` once, now or later. Raises Refused."""
        priority = check_and_note([delta], self._pipeline.note_refused)
        if delta.source is Source.REPLICA:
            raise InvalidDelta("source", "replica is reserved for services that forward: give another source")
        offer = Offer(priority, [delta], _LineListener(on_outcome), counter=number)
        while True:
            if self._producer_state.has_capacity:
                self._producer_state.offer(offer, self._now())
                self._wakeup.notify()
                return
            await anyio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Send queued lines until cancelled. Raises Refused after STALL_TIMEOUT_S without progress."""
        while True:
            wait_s = self._send_all()
            if self._failure is not None:
                raise self._failure
            self._check_stalled()
            with anyio.move_on_after(_POLL_S if wait_s is None else min(wait_s, _POLL_S)):
                await self._wakeup.wait()

    def _send_all(self) -> float | None:
        """Send the batches that may be sent now; return the seconds until the next retry."""
        if self._pipeline.recoveries != self._recoveries and self._pipeline.stop_refusal is None:
            self._retry_hello()
        with self._partition.tick_callbacks:
            while (unacked := self._producer_state.next_batch(self._now())) is not None:
                sender = Sender(self._name, unacked.source, can_split=True)
                receipt = Receipt()
                receipt.add_done_callback(
                    partial(self._on_outcome, self._generation, unacked.sequence, unacked.batch.base)
                )
                self._pipeline.offer(SequencedBatch(unacked.batch, sender, receipt), self._now())
        return self._producer_state.wait_s(self._now())

    def _on_outcome(self, generation: int, sequence: int, number: int, receipt: Receipt) -> None:
        """Note that a batch was acknowledged or refused, maybe during the call that sent it."""
        if generation != self._generation:
            return
        refusal = receipt.refusal()
        self._wakeup.notify()
        if refusal is None:
            self._note_progress()
            self._producer_state.on_ack(Ack(0, ranges=make_ack_ranges(sequence, receipt.result())))
            return
        if refusal.retryable:
            self._blocked_line = self._blocked_line or (number, refusal)
        else:
            self._note_progress()
        try:
            self._producer_state.on_nack(Nack.of_frame(sequence, refusal), self._now(), self._random())
        except Reconnect:
            self._retry_hello()
        except Refused as failure:
            self._failure = with_line_number(number, failure)

    def _retry_hello(self) -> None:
        """Say hello again and resend open batches, after the log was recovered or an answer was unclear."""
        self._generation += 1
        self._producer_state.on_disconnect()
        try:
            grants = self._pipeline.claim(
                self._producer_state.claim_origins(), self._name, self._now(), bounded=False
            )
            self._apply_welcome(grants)
        except Refused as refusal:
            self._failure = refusal

    def _apply_welcome(self, grants: Sequence[Grant]) -> None:
        self._recoveries = self._pipeline.recoveries
        log = self._partition.log
        welcome = Welcome(
            origins=tuple(OriginGrant(grant.origin, grant.epoch, grant.watermark) for grant in grants),
            log=Cursor(log.log_id, log.epoch, log.next_offset),
            level=log.ack_level,
            default_level=log.default_level,
        )
        self._producer_state.on_welcome(welcome, same_address=True)

    def _note_progress(self) -> None:
        self._blocked_line, self._progress_at = None, system.now()

    def _check_stalled(self) -> None:
        if self._blocked_line is None:
            self._progress_at = system.now()
            return
        number, refusal = self._blocked_line
        is_permanent = refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is None
        if is_permanent or system.now() - self._progress_at > STALL_TIMEOUT_S:
            raise with_line_number(number, refusal)


class RemotePublisher:
    """Publishes to a server with a client, which reconnects and resends."""

    def __init__(self, producer: RemoteProducer) -> None:
        self._producer = producer

    def waits_for(self) -> Exception | None:
        """Return the reason why there is no connection, or the refusal that blocks the first line."""
        return self._producer.waits_for

    async def send(self, number: int, delta: Delta, on_outcome: OutcomeCallback) -> None:
        """Send a line once there is capacity. Raises Refused."""

        def note(receipt: Receipt) -> None:
            _report(receipt.refusal() or receipt.result(), on_outcome)

        while True:
            try:
                return self._producer.offer_numbered(number, delta, note)
            except Refused as refusal:
                if refusal.code is not ErrorCode.QUEUE_FULL:
                    raise
            await anyio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Sleep until cancelled: the client has tasks of its own."""
        await anyio.sleep_forever()

    def log_end(self) -> int | None:
        """Return None: a producer learns only the offsets of its own deltas."""
        return None


class PartitionedPublisher:
    """Publishes each line to the partition of its vector."""

    def __init__(self, publishers: Sequence[LocalPublisher | RemotePublisher]) -> None:
        """`publishers`: one for each partition, in order."""
        self._publishers = publishers

    def waits_for(self) -> Exception | None:
        """Return the reason why the first partition that is held up makes no progress."""
        causes = (publisher.waits_for() for publisher in self._publishers)
        return next((cause for cause in causes if cause is not None), None)

    async def send(self, number: int, delta: Delta, on_outcome: OutcomeCallback) -> None:
        """Send a line once there is capacity. Raises Refused."""
        partition = partition_of(delta.namespace, delta.vector_id, len(self._publishers))

        def note(outcome: LineAck | Refused) -> None:
            if isinstance(outcome, LineAck):
                outcome = outcome._replace(partition=partition)
            on_outcome(outcome)

        await self._publishers[partition].send(number, delta, note)

    async def run(self) -> None:
        """Run all publishers until cancelled. Raises Refused."""
        failures: list[Refused] = []

        async def run_one(publisher: LocalPublisher | RemotePublisher) -> None:
            try:
                await publisher.run()
            except Refused as failure:  # a task group would wrap it
                failures.append(failure)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for publisher in self._publishers:
                tasks.start_soon(run_one, publisher)
        if failures:
            raise failures[0]

    def log_end(self) -> int | None:
        """Return None: each partition has offsets of its own."""
        return None


Publisher: TypeAlias = LocalPublisher | RemotePublisher | PartitionedPublisher


class _LineListener:
    """Listener of a line's offer."""

    def __init__(self, on_line_outcome: OutcomeCallback) -> None:
        self._on_line_outcome = on_line_outcome

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        """Report the outcome of the line."""
        _report(outcome, self._on_line_outcome)


def _report(outcome: PublishAck | Refused, on_outcome: OutcomeCallback) -> None:
    if isinstance(outcome, PublishAck):
        offset = outcome.duplicates.get(0, outcome.offset)
        assert offset is not None, "a duplicate at an unknown offset is not an acknowledgement"
        on_outcome(LineAck(offset, outcome.duplicate))
    else:
        on_outcome(_earlier_refusal(outcome.code) if outcome.code is ErrorCode.DOT_REUSED else outcome)


def _earlier_refusal(code: ErrorCode) -> Refused:
    """Return the refusal of a line whose number was used in an earlier run: the line was skipped then
    (DOT_REUSED), or refused, or the log no longer holds its outcome.
    """
    if code is ErrorCode.OUTCOME_UNKNOWN:
        return Refused(code, "sent when this producer published before; the log no longer holds its outcome")
    outcome = "skipped" if code is ErrorCode.DOT_REUSED else "refused for good"
    fix = "publish it under another producer name, or as another line"
    return Refused(code, f"{outcome} when this producer published before: {fix}")


def with_line_number(number: int, refusal: Refused) -> Refused:
    """Return the refusal with the line's number in its message."""
    return Refused(refusal.code, f"line {number}: {refusal.message}")
