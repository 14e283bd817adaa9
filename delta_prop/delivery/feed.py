"""A feed: the loop that delivers deltas to one sink, in log order, at the sink's pace.

A sink that keeps up gets batches pushed from memory; for a lagging sink, the feed reads them from the log. So
a full mailbox loses nothing, blocks no other sink, and never grows. A failed call is retried with backoff; a
delta that the sink rejects goes to its quarantine.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel
from numpy import intp
from numpy.typing import NDArray

from delta_prop.delivery import reasons
from delta_prop.delivery.feed_control import Backoff, FeedControl
from delta_prop.delivery.feed_state import FeedEvent, FeedState, FeedStatus
from delta_prop.delivery.inbox import Inbox
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantines import QuarantineWriter
from delta_prop.delivery.rebuild import Rebuilder
from delta_prop.delivery.redelivery import (
    FeedRequest,
    ForgetRequest,
    ReplayRequest,
    ReplayResult,
    execute_forget,
    execute_replay,
)
from delta_prop.delivery.routing_table import RouteTarget, RoutingTable
from delta_prop.delivery.sink_cursor import ProgressListener, SinkCursor
from delta_prop.delivery.sink_invoker import Deliverer, FeedCounters, SinkInvoker
from delta_prop.delivery.status import FeedLimits, FeedStatistics
from delta_prop.platform.ports import World
from delta_prop_broker.log.contract import Log
from delta_prop_sinks.sink import Delivery, Sink
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

_IDLE = FeedState.IDLE


class Feed:
    """The feed of one sink. The pipeline calls `offer`; the feed's owner calls `run`.

    `status`: its state; `cursor`: how far the sink is; `inbox`: what waits for the sink; `control`: stops and
    continues; `invoker`: the calls; `deliverer`: one delivery, with what the sink rejects.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        log: Log,
        routing_table: RoutingTable[RouteTarget],
        world: World,
        limits: FeedLimits,
        start: int,
        has_own_cursor: bool,
        listener: ProgressListener,
        reported: int = 0,
        quarantine: Quarantine | None = None,
        quarantine_writer: QuarantineWriter | None = None,
    ) -> None:
        """`quarantine_writer`: writes the quarantine to disk before the cursor passes its deltas."""
        if quarantine is None:
            quarantine = Quarantine(limits.quarantine_deltas_max, limits.quarantine_bytes_max)
        quarantine.resume_from(start)
        clock = world.clock
        self.quarantine = quarantine
        self.pacing = False  # True while the sink paces producers
        self.rebuilder: Rebuilder | None = None
        """Set if the sink can be rebuilt."""
        self.status = FeedStatus()
        self.inbox = Inbox(log, clock, limits, start)
        self.cursor = SinkCursor(
            log, self.status, self.inbox, listener, start=start, reported=reported, has_own=has_own_cursor
        )
        backoff = Backoff(name, world, limits.retry)
        self.control = FeedControl(
            name, log, status=self.status, inbox=self.inbox, cursor=self.cursor, backoff=backoff
        )
        self.invoker = SinkInvoker(sink, limits, self.control, clock, FeedCounters(start))
        self.deliverer = Deliverer(self.control, self.invoker, quarantine, quarantine_writer, clock)
        self._log = log
        self._routing_table = routing_table
        self._call_scope = anyio.CancelScope()

    @property
    def name(self) -> str:
        """Name of the sink."""
        return self.control.name

    @property
    def sink(self) -> Sink:
        """The sink."""
        return self.invoker.sink

    @property
    def limits(self) -> FeedLimits:
        """The limits of its mailbox, its calls and its quarantine."""
        return self.invoker.limits

    @property
    def state(self) -> FeedState:
        """The present activity."""
        return self.status.state

    @property
    def reason(self) -> Refused | None:
        """The refusal that stopped it; None while it runs."""
        return self.status.reason

    @property
    def has_ended(self) -> bool:
        """True while nothing is delivered until an operator acts."""
        return self.status.has_ended

    @property
    def applied(self) -> int:
        """The offset below which all rows are applied, quarantined, or match none of the sink's topics."""
        return self.cursor.applied

    @property
    def committed(self) -> int:
        """The offset below which no row is redelivered after a crash of the sink."""
        return self.cursor.committed

    @property
    def is_rebuilding(self) -> bool:
        """True while a rebuild is requested or running: deltas wait until it has ended."""
        return self.status.rebuild.reason is not None

    @property
    def is_catching_up(self) -> bool:
        """True while the feed reads the log instead of getting pushes."""
        return self.inbox.is_catching_up

    @property
    def in_flight(self) -> tuple[int, int]:
        """Deltas in the mailbox and in a call, and bytes in the mailbox; both use up credit."""
        mailbox = self.inbox.mailbox
        return mailbox.delta_count + self.inbox.in_call, mailbox.bytes

    @property
    def can_answer(self) -> bool:
        """True if the feed can execute an operator's request on its quarantine."""
        return self.status.is_full or not self.status.has_ended

    def statistics(self) -> FeedStatistics:
        """Return a snapshot."""
        quarantine, applied, counters = self.quarantine, self.cursor.applied, self.invoker.counters
        inbox, breaker, pending = self.inbox, self.control.backoff.breaker, self.status.rebuild
        ahead = self.deliverer.count_held_ahead(applied)
        return FeedStatistics(
            name=self.name,
            state=self.status.state.value,
            reason=self.invoker.format_reason(),
            applied_offset=applied,
            committed_offset=self.cursor.committed,
            lag=max(0, self._log.high_watermark - applied),
            lag_s=self._log.age_s(applied),
            catching_up=inbox.is_catching_up,
            mailbox_deltas=inbox.mailbox.delta_count,
            mailbox_bytes=inbox.mailbox.bytes,
            in_call=inbox.in_call,
            deliveries=counters.deliveries,
            applied_deltas=counters.applied_deltas + quarantine.replayed,
            skipped=applied - counters.start - counters.applied_deltas - counters.quarantined + ahead,
            pulled=counters.pulled,
            errors=counters.errors,
            unexpected_errors=counters.unexpected_errors,
            retries=counters.retries,
            breaker=breaker.state.value,
            breaker_opened=breaker.times_opened,
            quarantined=len(quarantine) - ahead,
            quarantined_bytes=quarantine.bytes,
            rejected=quarantine.rejected,
            replayed=quarantine.replayed,
            dropped=quarantine.dropped,
            pacing=self.pacing,
            failing=self.invoker.failing,
            rebuild=pending.progress(),
            rebuilds=pending.rebuilds,
        )

    async def wait(self, offset: int, *, committed: bool = False) -> None:
        """Wait until all rows below `offset` are applied (or committed). Raises Refused if the sink stops."""
        await self.cursor.wait(offset, committed=committed)

    # --- calls from the pipeline

    def offer(self, logged: LoggedBatch, rows: NDArray[intp] | None) -> None:
        """Deliver or queue a batch below the high watermark; `rows` None means all. Never waits."""
        inbox, invoker = self.inbox, self.invoker
        if invoker.has_apply_now and self._can_call_now(logged):
            delivery = (Delivery(logged, rows),)
            self.cursor.advance_past(logged.offset)
            try:
                is_done = invoker.sink.apply_now(delivery)  # type: ignore[attr-defined]
            except Exception:  # the task redelivers the batch, so the error recurs, and is handled there
                is_done = False
            if is_done:
                invoker.note_done(delivery)
                inbox.end = logged.next_offset
                return
        if not (inbox.is_catching_up or self.status.has_ended):
            if self.cursor.is_idle:
                self.cursor.advance_past(logged.offset)
            if inbox.push(logged, rows):
                return
        inbox.is_catching_up = True  # from now on it reads the log
        invoker.counters.pulled += logged.count if rows is None else len(rows)

    def _can_call_now(self, logged: LoggedBatch) -> bool:
        """Return True if this batch is all that is left to deliver, and nothing else must be done first."""
        status, inbox, writer = self.status, self.inbox, self.deliverer.writer
        return (
            status.state is _IDLE
            and not (inbox.is_catching_up or inbox.mailbox.delta_count or self.control.requests.waiting)
            and status.rebuild.reason is None
            and logged.next_offset == self._log.high_watermark
            and not self.quarantine.can_affect(logged.offset)
            and not (writer is not None and writer.is_dirty)
        )

    def note_visible(self) -> None:
        """Note that the high watermark has advanced; with lazy progress, only if someone waits for that."""
        cursor = self.cursor
        if cursor.noted_applied >= self._log.high_watermark or (
            self.control.lazy_progress and not (cursor.waiters or cursor.commit_waiters)
        ):
            return
        if cursor.is_idle:
            self.control.become_idle()

    def note_offered(self, offset: int) -> None:
        """Note that all rows for this sink below `offset` were offered; a lazy feed advances now."""
        if self.control.lazy_progress and self.cursor.is_idle:
            self.inbox.end = max(self.inbox.end, offset)
            self.cursor.advance_past(offset)

    def note_recovered(self) -> None:
        """Note that the log was recovered: it may have more rows, or fewer, so that the sink is ahead."""
        cursor, inbox, end = self.cursor, self.inbox, self._log.high_watermark
        called_end = inbox.in_call_end if inbox.in_call else 0
        self.deliverer.note_recovered()
        self.quarantine.truncate(end)
        sink_end = max(cursor.sink_end, called_end)
        if sink_end > end and not self.is_rebuilding:
            refusal = reasons.sink_ahead(self.name, sink_end, end, can_rebuild=self.rebuilder is not None)
            self.control.stop(refusal, FeedEvent.INVALIDATE)
        elif inbox.end > end:
            cursor.truncate(end)
            inbox.truncate(max(cursor.noted_applied, called_end))
        inbox.is_catching_up = inbox.is_catching_up or inbox.end < end
        inbox.notify()

    # --- calls from an operator and the log

    def add_request(self, request: FeedRequest) -> None:
        """Queue a request, to be carried out between deliveries."""
        self.control.add_request(request)

    def invalidate_cursor(self) -> None:
        """Note that the log no longer retains rows for this sink, which cannot resume from its cursor."""
        self._require_snapshot(reasons.cursor_invalidated(self.name, self.cursor.noted_applied))

    def _require_snapshot(self, refusal: Refused) -> None:
        if self.rebuilder is not None:
            self.control.request_rebuild(f"its cursor {self.cursor.noted_applied} is below the log's start")
        else:
            self.control.stop(refusal, FeedEvent.INVALIDATE)

    def cancel_overdue_call(self, now: float) -> None:
        """Cancel the running call if it takes too long; its rows are redelivered."""
        if self.invoker.is_overdue(now):
            self._call_scope.cancel()

    # --- calls of a rebuild

    def restart_at(self, offset: int) -> None:
        """Restart from an offset, and reset the counters: the sink has, or will get, the states below it."""
        self.quarantine.resume_from(offset)
        self.deliverer.restart()
        self.invoker.counters.restart_at(offset)
        self.cursor.restart_at(offset)
        self.inbox.reread(offset)
        self.inbox.is_catching_up = True

    def end_rebuild(self) -> None:
        """End a rebuild: the states include the quarantined deltas, and deliveries resume."""
        self.quarantine.clear(self.invoker.counters.start)
        self.status.move(FeedEvent.REST)
        self.cursor.notify()
        self.cursor.commit_waiters.wake(self.cursor.committed)

    async def run(self) -> None:
        """Deliver until cancelled. A sink that must stop waits here until `restart`."""
        while True:
            with anyio.CancelScope() as self._call_scope:
                await self._run()
            self.deliverer.drop_held_ahead()
            self.inbox.reread(self.cursor.noted_applied)
            await self.invoker.back_off(self.invoker.note_cancelled())

    async def _run(self) -> None:
        status, inbox, requests = self.status, self.inbox, self.control.requests
        was_busy = False
        while True:
            if inbox.is_catching_up:
                await anyio.lowlevel.checkpoint()  # a sink that never waits must not block other tasks
            elif was_busy:
                await inbox.linger()
            if self.rebuilder is not None and status.rebuild.reason is not None and not status.has_ended:
                await self.rebuilder.run(self)
                was_busy = False
                continue
            while requests.waiting and status.state is not FeedState.CLOSED:
                await self._run_request(requests.waiting[0])
            if status.has_ended or not (inbox.is_catching_up or inbox.mailbox):
                self.control.become_idle()
                was_busy = False
                await inbox.wait()
            else:
                # No await may separate the take from the change of state: the feed would appear idle.
                await self.deliverer.deliver(await self._pull() if inbox.is_catching_up else self._take())
                was_busy = True

    def _take(self) -> list[Delivery]:
        return self.inbox.mailbox.take(self.invoker.deltas_per_call)

    async def _pull(self) -> list[Delivery]:
        """Take the rest of the mailbox, then read the next rows of the log."""
        inbox, cursor = self.inbox, self.cursor
        if inbox.mailbox:
            return self._take()
        inbox.end = max(inbox.end, cursor.noted_applied)
        try:
            deliveries = await inbox.read(self, self._routing_table, self.invoker.deltas_per_call)
        except Refused as refusal:
            if refusal.code is ErrorCode.CURSOR_TOO_OLD:
                self._require_snapshot(refusal)
            else:
                self.control.stop(refusal)
            return []
        if deliveries is None:
            return []
        if self.rebuilder is not None and not inbox.is_catching_up:
            self.rebuilder.note_caught_up(self)
        if not deliveries:
            cursor.advance_applied(inbox.end)
        return deliveries

    async def _run_request(self, request: FeedRequest) -> None:
        """Carry out a request; a replay frees capacity in a full quarantine, so the sink resumes."""
        control, status = self.control, self.status
        if request.is_withdrawn:
            pass
        elif isinstance(request, ReplayRequest) and request.reset_to is not None:
            self.restart_at(request.reset_to)
            if status.state is FeedState.NEEDS_SNAPSHOT:
                control.continue_from_cursor()
            request.finish(ReplayResult(0, 0, len(self.quarantine)))
        elif not self.can_answer:
            request.finish(
                control.make_stop_refusal(
                    "a stopped sink applies nothing: restart it (or resume it), then retry"
                )
            )
        elif isinstance(request, ForgetRequest):
            answer = await execute_forget(self, request)
            self.inbox.in_call = 0
            if not status.has_ended:
                status.move(FeedEvent.REST)
            request.finish(answer)
        elif isinstance(request, ReplayRequest):
            if status.is_full:  # the request frees capacity
                control.continue_from_cursor()
            answer = await execute_replay(self, request)
            self.inbox.in_call = 0
            if not status.has_ended:
                status.move(FeedEvent.REST)
            request.finish(answer)
        control.requests.waiting.popleft()
