"""The way from calls of an open propagator to its pipeline: drafts, and waiting for capacity around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

from delta_prop.api.record_accumulator import RecordAccumulator
from delta_prop.calls.argument_checks import (
    Dependency,
    with_parents,
)
from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop.calls.refusals import timed_out
from delta_prop.partition.admission_queue import can_wait_out
from delta_prop.partition.ingest.work import Draft, MatrixDraft
from delta_prop.partition.order.orphans import check_and_note
from delta_prop_wire.bounds import check_ack_level
from delta_prop_wire.delta import AckLevel, Delta, Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.api.lifecycle import Lifecycle
    from delta_prop.partition.coalesced_draft import Call
    from delta_prop.partition.partition import Partition

AfterItem: TypeAlias = Receipt | Dependency
"""Item of `after=`: a receipt, an acknowledgement, a dot, a 16-byte id."""

_RETRYABLE_CODES = {ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED}
"""Codes of refusals after which `publish` sleeps and retries, without a turn in the admission queue."""
_YIELD_S = 0.0005
"""Time after which a busy publisher yields to the sinks' tasks."""
_NO_RECEIPT = Receipt()


class Publisher:
    """Turns calls into drafts, and sends them; waits while there is no capacity. One per opening."""

    def __init__(self, partition: Partition, lifecycle: Lifecycle) -> None:
        self._partition = partition
        self.lifecycle = lifecycle
        self.pipeline = partition.pipeline
        self.accumulator = RecordAccumulator(partition)
        self.now = partition.world.clock.now
        self.has_ended = False
        """True once the propagator has closed; it may be open again, with another publisher."""
        self._yielded_at = 0.0

    def resolve_level(self, requested: AckLevel | str | None) -> AckLevel:
        """Return the ack level of a call. Raises UsageError."""
        if type(requested) is AckLevel:
            return requested
        return self._partition.log.ack_level if requested is None else check_ack_level(requested)

    def check_producer(self, name: str) -> None:
        """Raise as `Lifecycle.check` does; UsageError if the producer is of an earlier opening."""
        self.lifecycle.check()
        if self.has_ended:
            raise UsageError(
                f"producer {name!r} is of an earlier `async with` of this propagator: create it again"
            )

    def flush(self) -> None:
        """Send what callers offered earlier in this tick."""
        self.accumulator.send()

    def make_draft(
        self, deltas: Sequence[Delta], after: Sequence[AfterItem], ack_level: AckLevel | str | None
    ) -> Draft:
        """Return the draft of a call. Raises InvalidDelta, UsageError, Refused (SHUTTING_DOWN)."""
        self.lifecycle.check()
        check_and_note(deltas, self._partition.pipeline.note_refused)
        deltas = with_parents(deltas, [parent for parent in after if not isinstance(parent, Receipt)])
        return Draft(
            deltas=deltas,
            receipt=Receipt(),
            priority=deltas[0].priority,
            ack_level=self.resolve_level(ack_level),
            source=deltas[0].source,
            after=tuple(parent for parent in after if isinstance(parent, Receipt)),
        )

    def send(self, draft: Draft | MatrixDraft) -> Receipt:
        """Send a draft, after the calls that were made before it. Raises as `Lifecycle.check` does."""
        self.lifecycle.check()
        self.accumulator.send()
        return self._partition.pipeline.offer(draft, self.now())

    async def publish_call(
        self, call: Call, make_draft: Callable[[], Call], timeout_s: float | None
    ) -> PublishAck:
        """Publish a call of numbers only, coalesced or at once; then wait as `offer_until_done` does."""
        if self._partition.admission_queue.has_waiters(call.priority):
            return await self.offer_until_done(make_draft, call.priority, timeout_s)
        receipt, accumulator, now = call.receipt, self.accumulator, self.now()
        accumulator.caller_count += 1
        try:
            if accumulator.should_wait(now):
                await receipt.wait_for(accumulator.add(call))
            else:
                accumulator.send_now(call, now)
                if now - accumulator.tick_began >= _YIELD_S:
                    await anyio.lowlevel.cancel_shielded_checkpoint()  # see `_yield_to_sinks`
            if receipt.state is OfferState.ACKNOWLEDGED:
                return receipt.result()
            return await self.offer_until_done(make_draft, call.priority, timeout_s, receipt)
        finally:
            accumulator.caller_count -= 1

    async def offer_until_done(
        self,
        make_draft: Callable[[], Draft | MatrixDraft],
        priority: Priority,
        timeout_s: float | None,
        receipt: Receipt = _NO_RECEIPT,
    ) -> PublishAck:
        """Offer; while there is no capacity, or the log has failed, queue and offer again.

        `receipt`: the receipt of the first offer, if that was made.
        """

        def send() -> Receipt:
            nonlocal receipt
            receipt = self.send(make_draft())
            return receipt

        if receipt is _NO_RECEIPT and not self._partition.admission_queue.has_waiters(priority):
            with self._partition.tick_callbacks:
                send()
                self._partition.tick_callbacks.flush_now()
            await self._yield_to_sinks()
        if receipt.done and not _can_retry(receipt):
            return receipt.result()
        limit_s = self._partition.settings.publish_timeout_s if timeout_s is None else timeout_s
        with anyio.move_on_after(limit_s):
            while True:
                if receipt is _NO_RECEIPT or can_wait_out(receipt.refusal()):
                    await self._partition.admission_queue.send_when_admitted(send, priority)
                try:
                    return await receipt.wait()
                except Refused as refused:
                    if refused.code in (ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED):
                        await anyio.sleep((refused.retry_after_ms or 10) / 1000)
                        send()
                    elif not can_wait_out(refused):
                        raise
        if not receipt.done:
            raise timed_out(limit_s, receipt.place)
        raise receipt.refusal() or self._partition.log.capacity_refusal(1, 0) or timed_out(limit_s, None)

    async def _yield_to_sinks(self) -> None:
        """Yield to the sinks' tasks now and then, or a busy publisher would starve them.

        Shielded: a cancelled caller must not mistake an appended delta for one that is not.
        """
        now = self.now()
        if now - self._yielded_at >= _YIELD_S:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self._yielded_at = self.now()


def _can_retry(receipt: Receipt) -> bool:
    refusal = receipt.refusal()
    return refusal is not None and (refusal.code in _RETRYABLE_CODES or can_wait_out(refusal))
