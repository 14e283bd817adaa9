"""How a sink is called: by its feed's task, or at once; and how a call that failed comes again.

A sink that never waits is called from within the publish, where it is idle and the batch is all there is to
bring: without a mailbox and without a task to wake. What goes wrong then comes again by the task, which sees
to it, so that there is one place for failures.
"""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.route import reasons
from delta_prop.route.breaker import Breaker, BreakerState
from delta_prop.route.call_size import CallSize
from delta_prop.route.mailbox import Mailbox
from delta_prop.route.progress import Progress
from delta_prop.route.status import FeedState, text_of
from delta_prop_sinks.sink import SinkFailure, TakesControlRows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop.ports import World
    from delta_prop.route.status import FailingDelta, FeedLimits
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Delivery, Sink
    from delta_prop_wire.errors import Refused

logger = logging.getLogger("delta_prop")


class Calling(Progress):
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
        keeps_cursor: bool,
        reported: int,
        on_progress: Callable[[], None],
    ) -> None:
        super().__init__(log, start, reported, keeps_cursor=keeps_cursor, on_progress=on_progress)
        self.name = name
        self.sink = sink
        self.limits = limits
        self.breaker = Breaker(limits.retry)
        self.last_failure: BaseException | None = None
        self.takes_at_once = takes_at_once(sink)
        self._clock = world.clock
        self._chance = world.randomness.fork(f"retries of {name}")  # one sink's must not move another's
        self._mailbox = Mailbox(limits.mailbox_deltas_max, limits.mailbox_bytes_max)
        self._behind = start < log.visible
        self._size = CallSize(cuts=not isinstance(sink, TakesControlRows))  # which takes batches as they lie
        self._brought: Sequence[Delivery] = ()  # by the call that runs
        self._in_hand = self._handing = 0  # rows; behind the last of them
        self._called_at = inf  # no call runs
        self._stuck = False  # it was broken off, and does not end
        self._probe_now = anyio.Event()
        self._deliveries = self._success = 0
        self._errors = self._defects = self._retries = 0

    @property
    def _quiet(self) -> bool:
        """Nothing in hand, nothing waiting: whatever the log holds, it is dealt with."""
        return self.state is FeedState.IDLE and not (self._mailbox or self._behind or self.rebuilding)

    # --- calls

    def call_at_once(self, delivery: Delivery) -> bool:
        """Have a quiet sink apply this without waiting; False where it has to come by `call`."""
        self._settle(delivery.logged.offset)
        try:
            done = self.sink.apply_now((delivery,))  # type: ignore[attr-defined]
        except Exception:  # it comes again, and its failure too
            return False
        if not done:
            return False
        self.note_done((delivery,))
        return True

    async def call(self, deliveries: Sequence[Delivery], waiting: int = 0) -> Exception | None:
        """Have these applied; what the sink failed with, None if nothing. `waiting`: rows taken besides."""
        count = waiting + sum(delivery.count for delivery in deliveries)
        self._handing = deliveries[-1].next_offset
        self._brought = deliveries
        failure = await self.attempt(partial(self.sink.apply, deliveries), FeedState.WORKING, count)
        self._brought = ()
        return failure

    async def attempt(
        self, call: Callable[[], Awaitable[None]], state: FeedState, count: int
    ) -> Exception | None:
        """One call of the sink, with so many rows in hand; what it failed with, None if it did not."""
        self.state = state
        self._in_hand = count
        self._called_at = self._clock.now()
        self.breaker.probe()
        try:
            await call()
        except anyio.get_cancelled_exc_class() as stray:
            await anyio.lowlevel.checkpoint_if_cancelled()
            self.stop(
                self.failed(f"its call let a cancellation out ({stray!r}): detach it, and attach it again")
            )
            raise
        except Exception as failure:
            self._errors += 1
            return reasons.only(failure)
        finally:
            self._called_at, self._stuck = inf, False
        self.breaker.succeeded()
        return None

    def note_read(self, seconds: float) -> None:
        """The call under way has had the log read for so long, which is not its sink's time."""
        self._called_at += seconds

    async def back_off(self, failure: Exception) -> None:
        """Wait for the next try. A failure without one of the contract's names is a defect of the sink."""
        self._retries += 1
        self._defects += not isinstance(failure, SinkFailure)
        self.last_failure = failure
        if self.ended:  # stopped while the call ran
            return
        opened = self.breaker.opened
        wait_s = self.breaker.failed(self._clock.now(), self._chance.random())
        if self.breaker.state is not BreakerState.OPEN:
            self.state = FeedState.RETRYING
            await anyio.sleep(wait_s)
            return
        self.state = FeedState.BREAKER_OPEN
        if self.breaker.opened > opened:
            cure = "" if self.failing is None else reasons.REJECT_IT
            logger.warning(
                "sink %r fails on and on and is tried every %g s: %s%s",
                self.name,
                wait_s,
                self._told(),
                cure,
            )
        self._probe_now = anyio.Event()
        self._on_progress()
        with anyio.move_on_after(wait_s):
            await self._probe_now.wait()

    def note_done(self, deliveries: Sequence[Delivery]) -> None:
        """These are applied."""
        self._deliveries += 1
        for delivery in deliveries:
            rows = delivery.rows
            self._success += delivery.logged.count if rows is None else len(rows)
        last = deliveries[-1]
        logged, rows = last.logged, last.rows
        behind = logged.next_offset if rows is None else logged.offset + int(rows[-1]) + 1
        self._handed_over = max(self._handed_over, behind)
        self._in_hand = 0
        self._progress(logged.next_offset if last.end is None else last.end)

    # --- telling

    @property
    def failing(self) -> FailingDelta | None:
        """The delta at which it stands: calls that brought it alone have failed on and on."""
        failing = self._size.failing
        return failing if failing is not None and failing.failures > self.limits.retry.retries else None

    @property
    def ended(self) -> bool:
        """Whether nothing is delivered any more, until someone acts."""
        raise NotImplementedError

    def stop(self, refusal: Refused, state: FeedState = FeedState.STOPPED) -> None:
        """Deliver no more; whoever waits for this sink is told."""
        raise NotImplementedError

    def failed(self, why: str) -> Refused:
        """Why it stops, in the words of a refusal."""
        return reasons.has_stopped(self.name, self._applied, why)

    def _told(self) -> str | None:
        """Why the sink gets nothing at the moment."""
        if self.reason is not None:
            return self.reason.message
        if self._stuck:
            return reasons.is_stuck(self.limits.apply_s_max)
        failing = self.failing
        if self.state not in (FeedState.RETRYING, FeedState.BREAKER_OPEN) and failing is None:
            return None
        told = text_of(self.last_failure)
        return told if failing is None else f"{told}; {failing}"


def takes_at_once(sink: Sink) -> bool:
    """Whether a sink applies without waiting, as the class says that says how it applies at all."""
    owners = [kind for kind in type(sink).__mro__ if "apply" in vars(kind) or "apply_now" in vars(kind)]
    return bool(owners) and "apply_now" in vars(owners[0]) and "apply" not in getattr(sink, "__dict__", ())
