"""Stops a feed and lets it continue: what an operator, the sink, the log and the service's end do to it."""

from __future__ import annotations

import logging

import anyio

from delta_prop.delivery import reasons
from delta_prop.delivery.breaker import Breaker, BreakerState, RetryLimits
from delta_prop.delivery.feed_state import FeedEvent, FeedState, FeedStatus
from delta_prop.delivery.inbox import Inbox
from delta_prop.delivery.redelivery import FeedRequest, ReplayQueue
from delta_prop.delivery.sink_cursor import SinkCursor
from delta_prop.platform.ports import World
from delta_prop_broker.log.contract import Log
from delta_prop_wire.errors import Refused

logger = logging.getLogger("delta_prop")


class Backoff:
    """One sink's breaker, with the time and the randomness that it needs."""

    def __init__(self, name: str, world: World, limits: RetryLimits) -> None:
        self.breaker = Breaker(limits)
        self._clock = world.clock
        self._rng = world.randomness.fork(f"retries of {name}")  # independent of other sinks' retries
        self._probe_event = anyio.Event()

    @property
    def is_open(self) -> bool:
        """True while no call is made until a probe."""
        return self.breaker.state is BreakerState.OPEN

    def note_failure(self) -> float:
        """Note a failed call; return the seconds until the next one."""
        return self.breaker.note_failure(self._clock.now(), self._rng.random())

    async def wait_probe(self, wait_s: float) -> None:
        """Wait until it is time for a probe, or until `probe_now`."""
        with anyio.move_on_after(wait_s):
            await self._probe_event.wait()

    def prepare_probe(self) -> None:
        """Forget earlier calls of `probe_now`, before a wait."""
        self._probe_event = anyio.Event()

    def probe_now(self) -> None:
        """End a wait for the next probe."""
        self._probe_event.set()


class FeedControl:
    """Control of a feed: stop, restart, pause, rebuild, and the offset from which it delivers."""

    def __init__(
        self, name: str, log: Log, *, status: FeedStatus, inbox: Inbox, cursor: SinkCursor, backoff: Backoff
    ) -> None:
        self.name = name
        self.status = status
        self.inbox = inbox
        self.cursor = cursor
        self.backoff = backoff
        self.requests = ReplayQueue()
        self.lazy_progress = False
        """True if progress past rows that are not for this sink may be deferred until it is needed."""
        self._log = log

    def stop(self, refusal: Refused, event: FeedEvent = FeedEvent.STOP) -> None:
        """Stop delivering, and notify the waiters of this sink."""
        if self.lazy_progress and self.cursor.is_idle:
            self.become_idle()  # advances past rows that are not for this sink
        if self.status.end(event, refusal) and event is not FeedEvent.CLOSE:
            logger.warning("%s", refusal.message)
        self.inbox.close()
        self.cursor.wake_all()
        if event is FeedEvent.CLOSE:
            self.requests.finish_all(self.status.reason or refusal)
        self.cursor.listener.note_progress()

    def stop_because(self, why: str) -> None:
        """Stop delivering to a sink that failed."""
        self.stop(self.make_stop_refusal(why))

    def stop_full(self, why: str) -> None:
        """Stop since the quarantine is full; the feed continues once a request has freed capacity."""
        had_ended = self.status.has_ended  # for another reason, which freed capacity does not mend
        self.stop_because(why)
        self.status.is_full = not had_ended

    def close(self) -> None:
        """Stop delivering for good, and notify all waiters: the sink was detached."""
        if self.cursor.is_idle:
            self.become_idle()  # advances past rows that are not for this sink, too
        self.stop(reasons.sink_detached(self.name), FeedEvent.CLOSE)

    def make_stop_refusal(self, why: str) -> Refused:
        """Return the refusal of a sink that stops."""
        return reasons.sink_stopped(self.name, self.cursor.noted_applied, why)

    def pause(self) -> None:
        """Deliver nothing until `resume`; the log retains what the sink misses."""
        self.status.is_paused = True
        self.stop(reasons.sink_paused(self.name, self.cursor.noted_applied), FeedEvent.PAUSE)

    def resume(self) -> None:
        """End a pause, or resume after a stop."""
        self.status.is_paused = False
        if self.status.state is FeedState.PAUSED:
            self._continue_and_probe()
        else:
            self.restart()

    def restart(self) -> None:
        """Resume after a stop, from the cursor; if the breaker is open, probe at once."""
        if self.status.state is FeedState.BREAKER_OPEN:
            self.backoff.probe_now()
        elif self.status.state is FeedState.STOPPED:
            self._continue_and_probe()

    def _continue_and_probe(self) -> None:
        self.backoff.probe_now()
        self.continue_from_cursor()
        self.backoff.breaker.reset()
        self.inbox.notify()

    def continue_from_cursor(self) -> None:
        """Deliver again after a stop; a sink that was paused before its stop is paused again."""
        self.inbox.reread(self.cursor.noted_applied)
        self.status.move(FeedEvent.CONTINUE)
        if self.status.is_paused:
            self.pause()

    def request_rebuild(self, why: str, *, is_persistent: bool = False) -> None:
        """Rebuild the sink, or restart its rebuild, before it gets another delta."""
        self.status.rebuild.request(why, is_persistent=is_persistent)
        if self.status.state in (FeedState.STOPPED, FeedState.NEEDS_SNAPSHOT):
            self.continue_from_cursor()
            self.backoff.breaker.reset()
        self.inbox.is_catching_up = True
        self.backoff.probe_now()
        self.inbox.notify()

    def add_request(self, request: FeedRequest) -> None:
        """Queue a request, to be carried out between deliveries."""
        if self.status.state is FeedState.CLOSED and self.status.reason is not None:
            request.finish(self.status.reason)
            return
        self.requests.add(request)
        if self.requests.is_resetting:
            self.backoff.probe_now()
        self.inbox.notify()

    def become_idle(self) -> None:
        """Rest: all rows for this sink are processed, so advance past the others. Nothing if it has ended."""
        if self.status.has_ended:
            return
        cursor, inbox = self.cursor, self.inbox
        self.status.move(FeedEvent.REST)
        inbox.end = self._log.high_watermark
        if cursor.noted_applied < inbox.end:
            cursor.advance_past(inbox.end)
            cursor.notify()
        cursor.commit_waiters.wake(cursor.committed)
