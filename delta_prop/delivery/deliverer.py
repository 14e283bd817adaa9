"""Delivers to one sink what its feed has taken: calls it until each row is applied, or quarantined."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio.lowlevel
import numpy as np

from delta_prop.delivery import reasons
from delta_prop.delivery.feed_state import FeedEvent
from delta_prop.delivery.redelivery import contains_offset, row_numbers
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain

if TYPE_CHECKING:
    from delta_prop.delivery.feed_control import FeedControl
    from delta_prop.delivery.quarantine import Quarantine
    from delta_prop.delivery.quarantines import QuarantineWriter
    from delta_prop.delivery.sink_invoker import SinkInvoker
    from delta_prop.platform.ports import Clock
    from delta_prop_sinks.sink import Delivery

logger = logging.getLogger("delta_prop")


class Deliverer:
    """Makes the calls of one delivery. `writer`: makes the quarantine durable before the cursor passes it."""

    def __init__(
        self,
        control: FeedControl,
        invoker: SinkInvoker,
        quarantine: Quarantine,
        writer: QuarantineWriter | None,
        clock: Clock,
    ) -> None:
        self.writer = writer
        self._control = control
        self._invoker = invoker
        self._quarantine = quarantine
        self._clock = clock
        # Offsets that were held from the present delivery before the cursor has reached them.
        self._held_ahead: list[int] = []
        self._recoveries = 0  # number of recoveries of the log

    @property
    def is_unwanted(self) -> bool:
        """True if the present delivery no longer matters: it ends, and its rows are read again."""
        status = self._control.status
        is_rebuilding = status.rebuild.reason is not None
        return status.has_ended or is_rebuilding or self._control.requests.is_resetting

    def count_held_ahead(self, applied: int) -> int:
        """Return how many deltas are held that the cursor has not reached."""
        return sum(offset >= applied for offset in self._held_ahead)

    def note_recovered(self) -> None:
        """Note that the log may have lost rows that are being delivered."""
        self._recoveries += 1

    def restart(self) -> None:
        """Forget the present delivery, since the cursor moves."""
        self._held_ahead = []

    async def deliver(self, deliveries: list[Delivery]) -> None:
        """Deliver until all deltas are applied, or quarantined if the sink rejects them."""
        control, invoker = self._control, self._invoker
        cursor, inbox = control.cursor, control.inbox
        end = deliveries[-1].next_offset if deliveries else 0
        recoveries = self._recoveries
        while deliveries and not self.is_unwanted:
            if self._quarantine.can_affect(deliveries[0].first_offset):
                deliveries = self._hold_dependents(deliveries)
                inbox.in_call = sum(delivery.count for delivery in deliveries)
            writer = self.writer
            if writer is not None and writer.is_dirty and not await self.wait_quarantine_written():
                break
            if not deliveries:
                break
            called, rest = invoker.call_size.split(deliveries)
            failure = await invoker.call(called, sum(delivery.count for delivery in rest))
            if failure is None:
                invoker.note_done(called)
                invoker.call_size.note_success(invoker.deltas_per_call)
                deliveries = rest
            else:
                deliveries = await self._handle_failure(deliveries, called, failure)
            if self._recoveries != recoveries:  # the log may have lost rows that are not delivered yet
                inbox.reread(cursor.noted_applied)
                end = 0
                break
            if deliveries:
                await anyio.lowlevel.checkpoint()  # a sink that only rejects must not block other tasks
        inbox.in_call = 0
        if not self.is_unwanted:
            cursor.advance_applied(end)
            if cursor.limit is not None:
                control.stop_full(reasons.quarantine_full(self._quarantine, cursor.limit))
        self.drop_held_ahead()

    async def _handle_failure(
        self, deliveries: list[Delivery], called: list[Delivery], failure: Exception
    ) -> list[Delivery]:
        """Handle the failure of a call with the first of these deliveries; return the remaining ones."""
        control, invoker = self._control, self._invoker
        if isinstance(failure, StopSink):
            control.stop_because(failure.reason)
            return deliveries
        if isinstance(failure, RejectDelta):
            if not any(contains_offset(delivery, failure.offset) for delivery in called):
                control.stop_because(reasons.rejected_unknown(failure))
                return deliveries
            control.backoff.breaker.note_progress()
            return await self._reject(self._drop_done(deliveries, failure.offset), failure)
        rest, before = deliveries, invoker.counters.applied_deltas
        if isinstance(failure, TryAgain) and failure.done_offset is not None:
            rest = self._drop_done(deliveries, min(failure.done_offset, called[-1].next_offset))
            if rest is not deliveries:
                control.backoff.breaker.note_progress()
        invoker.call_size.note_failure(called, invoker.counters.applied_deltas - before)
        await invoker.back_off(failure)
        return rest

    def _drop_done(self, deliveries: list[Delivery], done: int) -> list[Delivery]:
        """Count rows below offset `done` as applied; return the rest, or the same list if there are none."""
        finished = [delivery for delivery in deliveries if delivery.next_offset <= done]
        if finished:
            self._invoker.note_done(finished)
        rest = deliveries[len(finished) :]
        if rest:
            first, cursor = rest[0], self._control.cursor
            rows = row_numbers(first)
            count = int(np.searchsorted(rows, done - first.first_offset))
            if count:
                self._invoker.counters.applied_deltas += count
                end = first.first_offset + int(rows[count - 1]) + 1
                cursor.last_applied_end = max(cursor.last_applied_end, end)
                cursor.advance_applied(done)
                return [*([replace(first, rows=rows[count:])] if count < len(rows) else []), *rest[1:]]
        return rest if finished else deliveries

    # --- quarantine

    def _hold_dependents(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Hold the dependents of rejected deltas, within the capacity; return the deliveries of the rest."""
        passing: list[Delivery] = []
        at_us = self._clock.wall_us()
        for delivery in deliveries:
            split = self._quarantine.hold_dependents(delivery, at_us)
            self._invoker.counters.quarantined += len(split.held_dependents)
            self._held_ahead += split.held_dependents
            if split.passing is not None:
                passing.append(split.passing)
            if split.full_at is not None:
                self._control.cursor.limit = split.full_at
                break
        return passing

    async def wait_quarantine_written(self) -> bool:
        """Wait until the quarantine is on stable storage; return True if it is.

        Disk failures are retried; only the end of the feed ends the wait before that.
        """
        writer, status, breaker = self.writer, self._control.status, self._control.backoff.breaker
        while writer is not None and writer.is_dirty and not status.has_ended:
            status.move(FeedEvent.CALL)
            breaker.probe()
            try:
                await writer.write()
            except OSError as error:
                await self._invoker.back_off(reasons.quarantine_not_written(error))
            else:
                breaker.note_progress()
        return writer is None or not (status.has_ended or writer.is_dirty)

    async def _reject(self, rest: list[Delivery], failure: RejectDelta) -> list[Delivery]:
        """Quarantine the rejected delta; return the remaining deliveries."""
        control, quarantine = self._control, self._quarantine
        row, rows = failure.offset - rest[0].first_offset, row_numbers(rest[0])
        if not quarantine.reject(rest[0].logged, row, failure.reason, self._clock.wall_us()):
            control.cursor.advance_applied(failure.offset)  # rows before it are applied, or held
            control.stop_full(reasons.quarantine_full(quarantine, failure.offset))
            return rest
        self._invoker.counters.quarantined += 1
        level = logging.WARNING if len(quarantine) == 1 else logging.DEBUG  # one warning is enough
        logger.log(level, "sink %r rejected offset %d: %s", control.name, failure.offset, failure.reason)
        rest_rows = rows[rows > row]
        if await self.wait_quarantine_written():
            control.cursor.advance_applied(failure.offset + 1)
        return [*([replace(rest[0], rows=rest_rows)] if len(rest_rows) else []), *rest[1:]]

    def drop_held_ahead(self) -> None:
        """Forget the deltas that are held ahead of the cursor, after a delivery has ended.

        They are redelivered later. Otherwise a replay could apply them before the rows that precede them.
        """
        cursor = self._control.cursor
        cursor.limit = None
        ahead = [offset for offset in self._held_ahead if offset >= cursor.noted_applied]
        self._held_ahead = []
        self._invoker.counters.quarantined -= len(ahead)
        for offset in ahead:
            self._quarantine.forget(offset)
