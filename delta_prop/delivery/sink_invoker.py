"""Calls a sink, from its feed's task or directly from the publish, and retries failed calls.

A sink that never waits is called within the publish, without the mailbox and without waking the task, if it
is idle and has nothing else to apply. If that call fails, the task redelivers the batch and handles the
error, so that failures are handled in one place.
"""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.delivery import reasons
from delta_prop.delivery.breaker import Breaker, BreakerState
from delta_prop.delivery.call_size import CallSize
from delta_prop.delivery.mailbox import Mailbox
from delta_prop.delivery.progress import Progress
from delta_prop.delivery.status import FeedState, format_failure
from delta_prop_sinks.sink import ControlRowSink, SinkFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop.delivery.status import FailingDelta, FeedLimits
    from delta_prop.platform.ports import World
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Delivery, Sink
    from delta_prop_wire.errors import Refused

logger = logging.getLogger("delta_prop")


class SinkInvoker(Progress):
    """One sink and its calls, one at a time."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        log: Log,
        world: World,
        limits: FeedLimits,
        start: int,
        has_own_cursor: bool,
        reported: int,
        on_progress: Callable[[], None],
    ) -> None:
        super().__init__(log, start, reported, has_own_cursor=has_own_cursor, on_progress=on_progress)
        self.name = name
        self.sink = sink
        self.limits = limits
        self.breaker = Breaker(limits.retry)
        self.last_failure: BaseException | None = None
        self.has_apply_now = has_apply_now(sink)
        self._clock = world.clock
        self._rng = world.randomness.fork(f"retries of {name}")  # independent of other sinks' retries
        self._mailbox = Mailbox(limits.mailbox_deltas_max, limits.mailbox_bytes_max)
        self._catching_up = start < log.high_watermark
        # A sink of control rows takes whole batches, as they are in the log.
        self._call_size = CallSize(can_split=not isinstance(sink, ControlRowSink))
        self._called_deliveries: Sequence[Delivery] = ()  # those of the running call
        self._in_call = self._in_call_end = 0  # rows taken and not applied; end offset of the running call
        self._called_at = inf  # inf: no call is running
        self._is_stuck = False  # True while the call was cancelled, but does not end
        self._probe_now = anyio.Event()
        # Numbers of calls, and of applied rows.
        self._deliveries = self._applied_deltas = 0
        self._errors = self._unexpected_errors = self._retries = 0

    @property
    def _is_idle(self) -> bool:
        """True while no row is in a call or waits for one, so all rows of the log are processed."""
        return self.state is FeedState.IDLE and not (self._mailbox or self._catching_up or self.is_rebuilding)

    # --- calls

    def call_now(self, delivery: Delivery) -> bool:
        """Call `apply_now` of an idle sink; return False if the task must deliver by `call`."""
        self._advance_past(delivery.logged.offset)
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
        self._in_call_end = deliveries[-1].next_offset
        self._called_deliveries = deliveries
        failure = await self.attempt(partial(self.sink.apply, deliveries), FeedState.WORKING, count)
        self._called_deliveries = ()
        return failure

    async def attempt(
        self, call: Callable[[], Awaitable[None]], state: FeedState, count: int
    ) -> Exception | None:
        """Make one call of the sink, which counts as `count` rows in a call; return its failure, or None."""
        self.state = state
        self._in_call = count
        self._called_at = self._clock.now()
        self.breaker.probe()
        try:
            await call()
        except anyio.get_cancelled_exc_class() as stray:
            await anyio.lowlevel.checkpoint_if_cancelled()
            self.stop(
                self.make_stop_refusal(
                    f"its call leaked a cancellation ({stray!r}): detach it, and attach it again"
                )
            )
            raise
        except Exception as failure:
            self._errors += 1
            return reasons.unwrap_failure(failure)
        finally:
            self._called_at, self._is_stuck = inf, False
        self.breaker.note_success()
        return None

    def note_read(self, seconds: float) -> None:
        """Exclude the time of a log read from the running call."""
        self._called_at += seconds

    async def back_off(self, failure: Exception) -> None:
        """Wait before the next call. An exception outside the contract counts as unexpected."""
        self._retries += 1
        self._unexpected_errors += not isinstance(failure, SinkFailure)
        self.last_failure = failure
        if self.has_ended:  # stopped during the call
            return
        times_opened = self.breaker.times_opened
        wait_s = self.breaker.note_failure(self._clock.now(), self._rng.random())
        if self.breaker.state is not BreakerState.OPEN:
            self.state = FeedState.RETRYING
            await anyio.sleep(wait_s)
            return
        self.state = FeedState.BREAKER_OPEN
        if self.breaker.times_opened > times_opened:
            fix = "" if self.failing is None else reasons.REJECT_FIX
            logger.warning(
                "sink %r keeps failing and is retried every %g s: %s%s",
                self.name,
                wait_s,
                self._format_reason(),
                fix,
            )
        self._probe_now = anyio.Event()
        self._on_progress()
        with anyio.move_on_after(wait_s):
            await self._probe_now.wait()

    def note_done(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries as applied."""
        self._deliveries += 1
        for delivery in deliveries:
            rows = delivery.rows
            self._applied_deltas += delivery.logged.count if rows is None else len(rows)
        last = deliveries[-1]
        logged, rows = last.logged, last.rows
        end = logged.next_offset if rows is None else logged.offset + int(rows[-1]) + 1
        self._last_applied_end = max(self._last_applied_end, end)
        self._in_call = 0
        self._advance_applied(logged.next_offset if last.end is None else last.end)

    # --- status

    @property
    def failing(self) -> FailingDelta | None:
        """The delta that blocks the sink, as the calls with it alone have used up their retries."""
        failing = self._call_size.failing
        return failing if failing is not None and failing.failures > self.limits.retry.retries else None

    @property
    def has_ended(self) -> bool:
        """True while nothing is delivered until an operator acts."""
        raise NotImplementedError

    def stop(self, refusal: Refused, state: FeedState = FeedState.STOPPED) -> None:
        """Stop delivering, and notify the waiters of this sink."""
        raise NotImplementedError

    def make_stop_refusal(self, why: str) -> Refused:
        """Return the refusal of a sink that stops."""
        return reasons.sink_stopped(self.name, self._applied, why)

    def _format_reason(self) -> str | None:
        """Return why the sink gets nothing at the moment."""
        if self.reason is not None:
            return self.reason.message
        if self._is_stuck:
            return reasons.call_stuck(self.limits.apply_timeout_s)
        failing = self.failing
        if self.state not in (FeedState.RETRYING, FeedState.BREAKER_OPEN) and failing is None:
            return None
        text = format_failure(self.last_failure)
        return text if failing is None else f"{text}; {failing}"


def has_apply_now(sink: Sink) -> bool:
    """Return True if the most derived class that defines `apply` or `apply_now` defines `apply_now`."""
    classes = type(sink).__mro__
    owners = [owner for owner in classes if "apply" in vars(owner) or "apply_now" in vars(owner)]
    return bool(owners) and "apply_now" in vars(owners[0]) and "apply" not in getattr(sink, "__dict__", ())
