"""Calls a sink, from its feed's task or directly from the publish, and waits before it repeats failed calls.

A sink that never waits is called within the publish, without the mailbox and without waking the task, if it
is idle and has nothing else to apply. If that call fails, the task redelivers the batch and handles the
error, so that failures are handled in one place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.delivery import reasons
from delta_prop.delivery.call_size import CallSize
from delta_prop.delivery.feed_state import FeedEvent, FeedState
from delta_prop.delivery.status import format_failure
from delta_prop_sinks.sink import BulkSink, ControlRowSink, SinkFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop.delivery.feed_control import FeedControl
    from delta_prop.delivery.status import FailingDelta, FeedLimits
    from delta_prop.platform.ports import Clock
    from delta_prop_sinks.sink import Delivery, Sink

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

    # --- calls

    def call_now(self, delivery: Delivery) -> bool:
        """Call `apply_now` of an idle sink; return False if the task must deliver by `call`."""
        self._control.cursor.advance_past(delivery.logged.offset)
        try:
            done = self.sink.apply_now((delivery,))  # type: ignore[attr-defined]
        except Exception:  # the batch is redelivered, so the error recurs
            return False
        if not done:
            return False
        self.note_done((delivery,))
        return True

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
        """Make one call of the sink; return its failure, or None.

        `count`: the number of rows that the statistics show as in the call.
        """
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

    # --- status

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
    """Return True if the most derived class that defines `apply` or `apply_now` defines `apply_now`.

    A subclass that overrides `apply` alone must not be bypassed by its base's `apply_now`.
    """
    classes = type(sink).__mro__
    owners = [owner for owner in classes if "apply" in vars(owner) or "apply_now" in vars(owner)]
    return bool(owners) and "apply_now" in vars(owners[0]) and "apply" not in getattr(sink, "__dict__", ())
