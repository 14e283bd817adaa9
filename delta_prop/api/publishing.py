"""The way from calls of an open propagator to its pipeline: drafts, and waiting for capacity around them.

The calls of `publish` and `offer` in one event loop tick become one draft. A draft costs the pipeline some
ten µs whatever its size, and the log a frame; deltas published one by one would mostly pay for that. A single
caller does not wait for others. Each call has its own receipt and outcome: a coalesced draft that exceeds the
capacity or is refused is halved, down to single calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

from delta_prop.calls.argument_checks import Dependency, with_parents
from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop.calls.refusals import timed_out
from delta_prop.partition.admission_queue import can_wait_out
from delta_prop.partition.core.coalesced_draft import ROWS_MAX, Call, CoalescedDraft, group_calls
from delta_prop.partition.ingest.work import Draft, MatrixDraft
from delta_prop.partition.order.orphans import check_and_note
from delta_prop.platform.one_shot import OneShot, one_shot_factory
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop_wire.bounds import check_ack_level
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import AckLevel, Delta, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.api.lifecycle import Lifecycle
    from delta_prop.partition.partition import Partition

AfterItem: TypeAlias = Receipt | Dependency
"""Item of `after=`: a receipt, an acknowledgement, a dot, a 16-byte id."""

_RETRYABLE_CODES = {ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED}
"""Codes of refusals after which `publish` sleeps and retries, without a turn in the admission queue."""
_YIELD_S = 0.0005
"""Time after which a busy publisher yields to the sinks' tasks."""
SINGLE_CALLER_S = 0.002
"""Seconds for which calls are sent at once after a tick with a single caller, however close together."""
_NO_RECEIPT = Receipt()
_ACKNOWLEDGED = OfferState.ACKNOWLEDGED


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
        return self._partition.log.default_level if requested is None else check_ack_level(requested)

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

    def pack_call(
        self, deltas: Sequence[Delta], after: Sequence[AfterItem], ack_level: AckLevel | str | None
    ) -> Draft | None:
        """Return the call of a single delta that the core packs, and so has checked."""
        if len(deltas) != 1 or after:
            return None
        packed = core_mode.core.pack_delta(deltas[0])
        if packed is None:
            return None
        level = ack_level if type(ack_level) is AckLevel else self.resolve_level(ack_level)
        return Draft(deltas, Receipt(), deltas[0].priority, level, Source.LOCAL, (), packed)

    async def publish_call(self, call: Call, timeout_s: float | None) -> PublishAck:
        """Publish a checked call, coalesced or at once; then wait as `offer_until_done` does."""
        receipt, accumulator = call.receipt, self.accumulator

        def renew() -> Call:
            return replace(call, receipt=Receipt())

        queue = self._partition.admission_queue
        if queue.waiter_count and queue.has_waiters(call.priority):
            return await self.offer_until_done(renew, call.priority, timeout_s)
        accumulator.caller_count += 1
        try:
            if accumulator.caller_count > 1 or accumulator.should_wait():
                try:
                    await accumulator.add(call)
                except anyio.get_cancelled_exc_class():
                    if accumulator.withdraw(call) or await receipt.is_cancelled():
                        raise
            else:
                now = self.now()
                accumulator.send_now(call, now)
                if now - accumulator.tick_began >= _YIELD_S:
                    await anyio.lowlevel.cancel_shielded_checkpoint()  # see `_yield_to_sinks`
            if receipt.state is _ACKNOWLEDGED:
                return receipt.result()
            return await self.offer_until_done(renew, call.priority, timeout_s, receipt)
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


class RecordAccumulator:
    """Collects the calls of this tick, and sends them at its end; `run` does if the world cannot."""

    def __init__(self, partition: Partition) -> None:
        self._pipeline = partition.pipeline
        self._tick_callbacks = partition.tick_callbacks
        self._now = partition.world.clock.now
        self._call_soon = partition.world.call_soon
        # Calls to send at the end of the tick, each with the one-shot that wakes its caller, if it waits.
        self._calls: dict[Call, OneShot | None] = {}
        self._make_one_shot = one_shot_factory()
        self._wakeup = Wakeup()
        self.caller_count = 0
        """Number of callers whose call has not returned; each counts itself."""
        self._has_sent = False  # True once a call was sent at once in this tick
        self._is_scheduled = False  # True if `_end_tick` is due at the end of this tick
        self.tick_began = -math.inf
        """Time of the first call in the latest tick with calls; other tasks have run since its end."""
        self._single_until = -math.inf  # until then, calls are sent at once

    def should_wait(self) -> bool:
        """True if a single caller's call is to be coalesced, since others have called in this tick."""
        return self._has_sent and self._now() >= self._single_until

    def add(self, call: Call) -> OneShot:
        """Add a call; the returned one-shot wakes its caller once it has been sent."""
        if not self._is_scheduled:
            self._schedule_end_of_tick(self._now())
        self._calls[call] = one_shot = self._make_one_shot()
        return one_shot

    def offer(self, call: Draft) -> None:
        """Send a call whose caller does not wait: the first of a tick at once, the others together."""
        if not self._has_sent:
            self.send_now(call, self._now())
            return
        if not self._is_scheduled:
            self._schedule_end_of_tick(self._now())
        self._calls[call] = None
        call.receipt.mark_waiting(OfferState.QUEUED, partial(self.withdraw, call))
        if len(self._calls) >= ROWS_MAX:
            self.send()

    async def run(self) -> None:
        """Send at each tick, until cancelled."""
        while True:
            await self._wakeup.wait()
            self._end_tick()

    def _schedule_end_of_tick(self, now: float) -> None:
        self._is_scheduled, self.tick_began = True, now
        if self._call_soon is None:
            self._wakeup.notify()
        else:
            self._call_soon(self._end_tick)

    def _end_tick(self) -> None:
        self._is_scheduled = self._has_sent = False
        if len(self._calls) == 1 and self.caller_count == 1:
            self._single_until = self._now() + SINGLE_CALLER_S
        self.send()

    def send_now(self, call: Call, now: float) -> None:
        """Send a call that need not wait for others."""
        self.send()
        self._has_sent = True
        if not self._is_scheduled:
            self._schedule_end_of_tick(now)
        with self._tick_callbacks:
            self._send_coalesced(CoalescedDraft([call], [call.count], call.size), now)
            self._tick_callbacks.flush_now()

    def send(self) -> None:
        """Send the coalesced calls, in order. Work that must come after them calls this first."""
        calls, self._calls = self._calls, {}
        if not calls:
            return
        now = self._now()
        with self._tick_callbacks:
            for draft in group_calls(calls):
                self._send_coalesced(draft, now)
            self._tick_callbacks.flush_now()
        for one_shot in calls.values():
            if one_shot is not None and not one_shot.done():
                one_shot.set_result(None)

    def _send_coalesced(self, draft: CoalescedDraft, now: float) -> None:
        """Send a draft; if refused, halve it, so that a refused call separates few others."""
        pipeline = self._pipeline
        if pipeline.offer_coalesced(draft, now):
            return
        if not draft.is_single and pipeline.can_take_coalesced:
            for half in draft.halves():
                self._send_coalesced(half, now)
        else:
            for call in draft.calls:
                pipeline.offer(call, now)

    def withdraw(self, call: Call) -> bool:
        """Remove a call that was not sent yet, which then has no effect."""
        if call not in self._calls:
            return False
        del self._calls[call]
        return True
