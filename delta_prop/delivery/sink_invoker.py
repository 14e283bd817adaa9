"""Delivers what a feed has taken: calls the sink until each row is applied, or quarantined.

An idle sink that never waits is called by `Feed.offer`, without its mailbox and its task. If that call fails,
the task redelivers the batch, so that failures are handled in one place.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.delivery import reasons
from delta_prop.delivery.feed_control import FeedControl
from delta_prop.delivery.feed_state import FeedEvent, FeedState
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantines import QuarantineWriter
from delta_prop.delivery.redelivery import contains_offset, row_numbers
from delta_prop.delivery.status import FailingDelta, FeedLimits, format_failure
from delta_prop.platform.ports import Clock
from delta_prop_sinks.sink import (
    BulkSink,
    ControlRowSink,
    Delivery,
    RejectDelta,
    Sink,
    SinkFailure,
    StopSink,
    TryAgain,
)

logger = logging.getLogger("delta_prop")

STUCK_S = 1.0
"""Time that a cancelled call may take to end before a warning is logged."""


@dataclass(slots=True)
class FeedCounters:
    """Numbers of calls, and of rows, since the feed began at the offset `start`."""

    start: int
    deliveries: int = 0  # calls that succeeded
    applied_deltas: int = 0
    errors: int = 0
    unexpected_errors: int = 0
    retries: int = 0
    quarantined: int = 0
    pulled: int = 0  # rows that were not pushed

    def restart_at(self, offset: int) -> None:
        """Count rows from an offset on."""
        self.start = offset
        self.applied_deltas = self.quarantined = 0


class SinkInvoker:
    """One sink and its calls, one at a time."""

    def __init__(
        self, sink: Sink, limits: FeedLimits, control: FeedControl, clock: Clock, counters: FeedCounters
    ) -> None:
        self.sink = sink
        self.limits = limits
        self.counters = counters
        self.last_failure: BaseException | None = None
        self.has_apply_now = has_apply_now(sink)
        self.called_at = inf  # inf: no call is running
        self.called_deliveries: Sequence[Delivery] = ()  # those of the running call
        # A sink of control rows takes whole batches, as they are in the log.
        self.call_size = CallSize(can_split=not isinstance(sink, ControlRowSink))
        self._takes_many = isinstance(sink, BulkSink)
        self._control = control
        self._clock = clock
        self._is_stuck = False  # True while the call was cancelled, but does not end

    @property
    def deltas_per_call(self) -> int:
        """Maximum number of deltas in a call."""
        default = self.limits.merge_deltas_max
        return max(default, self.sink.deltas_per_call) if self._takes_many else default  # type: ignore[attr-defined]

    async def call(self, deliveries: Sequence[Delivery], rows_waiting: int = 0) -> Exception | None:
        """Apply deliveries; return the failure, or None. `rows_waiting`: rows taken for later calls."""
        count = rows_waiting + sum(delivery.count for delivery in deliveries)
        self._control.inbox.in_call_end = deliveries[-1].next_offset
        self.called_deliveries = deliveries
        failure = await self.attempt(partial(self.sink.apply, deliveries), FeedEvent.CALL, count)
        self.called_deliveries = ()
        return failure

    async def attempt(
        self, call: Callable[[], Awaitable[None]], event: FeedEvent, count: int
    ) -> Exception | None:
        """Make one call of the sink, with `count` rows; return its failure, or None."""
        control = self._control
        control.status.move(event)
        control.inbox.in_call = count
        self.called_at = self._clock.now()
        control.backoff.breaker.probe()
        try:
            await call()
        except anyio.get_cancelled_exc_class() as stray:
            await anyio.lowlevel.checkpoint_if_cancelled()
            control.stop_because(
                f"its call leaked a cancellation ({stray!r}): detach it, and attach it again"
            )
            raise
        except Exception as failure:
            self.counters.errors += 1
            return reasons.unwrap_failure(failure)
        finally:
            self.called_at, self._is_stuck = inf, False
        control.backoff.breaker.note_success()
        return None

    def note_read(self, seconds: float) -> None:
        """Exclude the time of a log read from the running call."""
        self.called_at += seconds

    def is_overdue(self, now: float) -> bool:
        """Return True if the running call takes too long; log a warning if it does not end even so."""
        overdue_s = now - self.called_at - self.limits.apply_timeout_s
        if overdue_s > STUCK_S and not self._is_stuck:
            self._is_stuck = True
            logger.warning("sink %r: %s", self._control.name, self.format_reason())
        return overdue_s > 0

    def note_cancelled(self) -> TimeoutError:
        """Count the call that was cancelled because it took too long; return its failure."""
        if self.called_deliveries:
            self.call_size.note_failure(self.called_deliveries, 0)
        self.counters.errors += 1
        return TimeoutError(f"a call took over {self.limits.apply_timeout_s} s (apply_timeout_s)")

    async def back_off(self, failure: Exception) -> None:
        """Wait before the next call. An exception outside the contract counts as unexpected."""
        control, backoff = self._control, self._control.backoff
        self.counters.retries += 1
        self.counters.unexpected_errors += not isinstance(failure, SinkFailure)
        self.last_failure = failure
        if control.status.has_ended:  # stopped during the call
            return
        times_opened = backoff.breaker.times_opened
        wait_s = backoff.note_failure()
        if not backoff.is_open:
            control.status.move(FeedEvent.FAIL)
            await anyio.sleep(wait_s)
            return
        control.status.move(FeedEvent.TRIP)
        if backoff.breaker.times_opened > times_opened:
            fix = "" if self.failing is None else reasons.REJECT_FIX
            logger.warning(
                "sink %r keeps failing and is retried every %g s: %s%s",
                control.name,
                wait_s,
                self.format_reason(),
                fix,
            )
        backoff.prepare_probe()
        control.cursor.listener.note_progress()
        await backoff.wait_probe(wait_s)

    def note_done(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries as applied."""
        counters, cursor = self.counters, self._control.cursor
        counters.deliveries += 1
        for delivery in deliveries:
            rows = delivery.rows
            counters.applied_deltas += delivery.logged.count if rows is None else len(rows)
        last = deliveries[-1]
        logged, rows = last.logged, last.rows
        end = logged.next_offset if rows is None else logged.offset + int(rows[-1]) + 1
        cursor.last_applied_end = max(cursor.last_applied_end, end)
        self._control.inbox.in_call = 0
        cursor.advance_applied(logged.next_offset if last.end is None else last.end)

    @property
    def failing(self) -> FailingDelta | None:
        """The delta that blocks the sink, if any: calls with it alone have used up their retries."""
        failing = self.call_size.failing
        return failing if failing is not None and failing.failures > self.limits.retry.retries else None

    def format_reason(self) -> str | None:
        """Return why the sink gets nothing at the moment."""
        status = self._control.status
        if status.reason is not None:
            return status.reason.message
        if self._is_stuck:
            return reasons.call_stuck(self.limits.apply_timeout_s)
        failing = self.failing
        if status.state not in (FeedState.RETRYING, FeedState.BREAKER_OPEN) and failing is None:
            return None
        text = format_failure(self.last_failure)
        return text if failing is None else f"{text}; {failing}"


def has_apply_now(sink: Sink) -> bool:
    """Return True unless a subclass overrides `apply` alone, which `apply_now` must not bypass."""
    classes = type(sink).__mro__
    owners = [owner for owner in classes if "apply" in vars(owner) or "apply_now" in vars(owner)]
    return bool(owners) and "apply_now" in vars(owners[0]) and "apply" not in getattr(sink, "__dict__", ())


class CallSize:
    """One sink's call size. `failing`: a delta that was delivered alone, in calls that all failed."""

    def __init__(self, *, can_split: bool) -> None:
        """Create it; `can_split`: True if batches may be delivered in parts."""
        self.failing: FailingDelta | None = None
        self._can_split = can_split
        self._rows_max: int | None = None  # None: no bound, since no recent call failed

    def split(self, deliveries: list[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
        """Split deliveries into those of the next call, and the rest."""
        rows_left = self._rows_max
        if rows_left is None:
            return deliveries, []
        for index, delivery in enumerate(deliveries):
            if delivery.count > rows_left:
                if self._can_split and rows_left:
                    head, tail = _split_delivery(delivery, rows_left)
                    return [*deliveries[:index], head], [tail, *deliveries[index + 1 :]]
                count = max(index, 1)
                return deliveries[:count], deliveries[count:]
            rows_left -= delivery.count
        return deliveries, []

    def note_failure(self, deliveries: Sequence[Delivery], applied_count: int) -> None:
        """Note that a call with these deliveries failed after it applied `applied_count` rows."""
        count = sum(delivery.count for delivery in deliveries)
        self._rows_max = applied_count or max(count // 2, 1)
        first = deliveries[0]
        if count > 1 or applied_count or first.batch.is_control:
            self.failing = None
            return
        row = int(row_numbers(first)[0])
        offset, previous = first.first_offset + row, self.failing
        failures = previous.failures if previous is not None and previous.offset == offset else 0
        self.failing = FailingDelta(offset, first.batch.namespaces[row], first.batch.keys[row], failures + 1)

    def note_success(self, rows_per_call: int) -> None:
        """Note a call that applied all its rows: the bound doubles, and is dropped at `rows_per_call`."""
        self.failing = None
        if self._rows_max is not None:
            self._rows_max *= 2
            if self._rows_max >= rows_per_call:
                self._rows_max = None


def _split_delivery(delivery: Delivery, count: int) -> tuple[Delivery, Delivery]:
    """Return the first `count` rows, and the rest; the `end` of the first part is the rest's first offset."""
    rows = row_numbers(delivery)
    end = delivery.first_offset + int(rows[count])
    return replace(delivery, rows=rows[:count], end=end), replace(delivery, rows=rows[count:])


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
        """Write the quarantine durably, with retries while the feed has not ended; True if it is written."""
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
        """Forget the deltas held ahead of the cursor: a replay could apply them before earlier rows."""
        cursor = self._control.cursor
        cursor.limit = None
        ahead = [offset for offset in self._held_ahead if offset >= cursor.noted_applied]
        self._held_ahead = []
        self._invoker.counters.quarantined -= len(ahead)
        for offset in ahead:
            self._quarantine.forget(offset)
