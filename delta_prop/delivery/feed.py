"""A feed: the loop that delivers deltas to one sink, in log order, at the sink's pace.

A sink that keeps up gets batches pushed from memory; for a lagging sink, the feed reads them from the log. So
a full mailbox loses nothing, blocks no other sink, and never grows. A failed call is retried with backoff; a
delta that the sink rejects goes to its quarantine.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.delivery import reasons
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.reading import make_deliveries
from delta_prop.delivery.redelivery import ReplayResult, contains_offset, execute_replay, row_numbers
from delta_prop.delivery.sink_invoker import SinkInvoker
from delta_prop.delivery.status import ENDED_STATES, WORSE_TRANSITIONS, FeedLimits, FeedState, FeedStatistics
from delta_prop_sinks.sink import BulkSink, Delivery, RejectDelta, StopSink, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from delta_prop.delivery.quarantines import QuarantineWriter
    from delta_prop.delivery.redelivery import ReplayRequest
    from delta_prop.delivery.routing_table import RouteTarget, RoutingTable
    from delta_prop.platform.ports import World
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch

_IDLE = FeedState.IDLE
READ_BYTES_MAX = 4 * 1024 * 1024
READ_ROWS_MAX = 1_000
"""Maximum number of rows of one read; so many batches of one delta take about 20 ms to read from disk."""

STUCK_S = 1.0
"""Time that a cancelled call may take to end before a warning is logged."""

logger = logging.getLogger("delta_prop")


class Feed(SinkInvoker):
    """The feed of one sink. The pipeline calls `offer`; the feed's owner calls `run`."""

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
        reported: int = 0,
        quarantine: Quarantine | None = None,
        quarantine_writer: QuarantineWriter | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`quarantine_writer`: writes the quarantine to disk before the cursor passes its deltas."""
        super().__init__(
            name,
            sink,
            log=log,
            world=world,
            limits=limits,
            start=start,
            has_own_cursor=has_own_cursor,
            reported=reported,
            on_progress=on_progress,
        )
        if quarantine is None:
            quarantine = Quarantine(limits.quarantine_deltas_max, limits.quarantine_bytes_max)
        quarantine.resume_from(start)
        self.quarantine = quarantine
        self._quarantine_writer = quarantine_writer
        self.pacing = False  # True while the sink paces producers
        self.lazy_progress = False
        """True if progress past rows that are not for this sink may be deferred until it is needed."""
        self._routing_table = routing_table
        self._takes_many = isinstance(sink, BulkSink)
        self._wake_at_deltas = 0  # number of deltas in the mailbox at which the loop wakes
        self._is_stopped_full = False  # stopped because the quarantine is full
        self._end = start  # all rows below are processed, in a call, or in the mailbox
        self._wake_event: anyio.Event | None = None
        self._call_scope = anyio.CancelScope()
        self._requests: deque[ReplayRequest] = deque()  # of operators, oldest first
        self._quarantined = 0  # number of rows
        # Offsets that were held from the present delivery before the cursor has reached them.
        self._held_ahead: list[int] = []
        self._pulled = 0  # number of rows that were not pushed
        self._recoveries = 0  # number of recoveries of the log

    # --- queries

    @property
    def is_catching_up(self) -> bool:
        """True while the feed reads the log instead of getting pushes."""
        return self._catching_up

    @property
    def in_flight(self) -> tuple[int, int]:
        """Deltas in the mailbox and in a call, and bytes in the mailbox; both use up credit."""
        return self._mailbox.delta_count + self._in_call, self._mailbox.bytes

    @property
    def has_ended(self) -> bool:
        """True while nothing is delivered until an operator acts."""
        return self.state in ENDED_STATES

    @property
    def can_answer(self) -> bool:
        """True if the feed can execute an operator's request on its quarantine."""
        return self._is_stopped_full or not self.has_ended

    def statistics(self) -> FeedStatistics:
        """Return a snapshot."""
        quarantine, applied = self.quarantine, self.applied
        ahead = sum(offset >= applied for offset in self._held_ahead)
        return FeedStatistics(
            name=self.name,
            state=self.state.value,
            reason=self._format_reason(),
            applied_offset=applied,
            committed_offset=self.committed,
            lag=max(0, self._log.high_watermark - applied),
            lag_s=self._log.age_s(applied),
            catching_up=self._catching_up,
            mailbox_deltas=self._mailbox.delta_count,
            mailbox_bytes=self._mailbox.bytes,
            in_call=self._in_call,
            deliveries=self._deliveries,
            applied_deltas=self._applied_deltas + quarantine.replayed,
            skipped=applied - self._start - self._applied_deltas - self._quarantined + ahead,
            pulled=self._pulled,
            errors=self._errors,
            unexpected_errors=self._unexpected_errors,
            retries=self._retries,
            breaker=self.breaker.state.value,
            breaker_opened=self.breaker.times_opened,
            quarantined=len(quarantine) - ahead,
            quarantined_bytes=quarantine.bytes,
            rejected=quarantine.rejected,
            replayed=quarantine.replayed,
            dropped=quarantine.dropped,
            pacing=self.pacing,
            failing=self.failing,
            rebuild=None if self.rebuilder is None else self.rebuilder.progress(),
            rebuilds=0 if self.rebuilder is None else self.rebuilder.rebuilds,
        )

    # --- calls from the pipeline

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Deliver or queue a batch below the high watermark; `rows` None means all. Never waits."""
        if self.has_apply_now and self._can_call_now(logged) and self.call_now(Delivery(logged, rows)):
            self._end = logged.next_offset
            return
        if self._catching_up or self.has_ended or not self._push(logged, rows):
            self._catching_up = True  # from now on it reads the log
            self._pulled += logged.count if rows is None else len(rows)
            return
        self._end = logged.next_offset
        if self._wake_event is not None and self._mailbox.delta_count >= self._wake_at_deltas:
            self._wake_event.set()

    def _can_call_now(self, logged: LoggedBatch) -> bool:
        """Return True if this batch is all that is left to deliver, and nothing else must be done first."""
        return (
            self.state is _IDLE
            and not (self._catching_up or self._mailbox.delta_count or self._requests)
            and (self.rebuilder is None or self.rebuilder.reason is None)
            and logged.next_offset == self._log.high_watermark
            and not self.quarantine.can_affect(logged.offset)
            and not (self._quarantine_writer is not None and self._quarantine_writer.is_dirty)
        )

    def _push(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> bool:
        if self._is_idle:
            self._advance_past(logged.offset)
        return self._mailbox.put(Delivery(logged, rows), self._clock.now())

    def note_visible(self) -> None:
        """Note that the high watermark has advanced and this sink's rows below it were offered.

        A feed with lazy progress does nothing while no one waits for its progress; it advances when asked.
        """
        if self._applied >= self._log.high_watermark or (
            self.lazy_progress and not (self._waiters or self._commit_waiters)
        ):
            return
        if self._is_idle:
            self._become_idle()

    def note_offered(self, offset: int) -> None:
        """Note that all rows for this sink below `offset` were offered; a lazy feed advances now."""
        if self.lazy_progress and self._is_idle:
            self._end = max(self._end, offset)
            self._advance_past(offset)

    def note_recovered(self) -> None:
        """Note that the log was recovered: it may have more rows, or fewer, so that the sink is ahead."""
        end, called_end = self._log.high_watermark, self._in_call_end if self._in_call else 0
        self._recoveries += 1
        self.quarantine.truncate(end)
        sink_end = max(self._last_applied_end, self._reported, called_end)
        if sink_end > end and not self.is_rebuilding:
            refusal = reasons.sink_ahead(self.name, sink_end, end, can_rebuild=self.rebuilder is not None)
            self.stop(refusal, FeedState.NEEDS_SNAPSHOT)
        elif self._end > end:
            self._mailbox.clear()
            self._applied, self._committed = min(self._applied, end), min(self._committed, end)
            self._end = max(self._applied, called_end)
        self._catching_up = self._catching_up or self._end < end
        self._notify()

    # --- calls from an operator

    def restart(self) -> None:
        """Resume after a stop, from the cursor; if the breaker is open, probe at once."""
        if self.state in (FeedState.BREAKER_OPEN, FeedState.STOPPED):
            self._probe_now.set()
        if self.state is FeedState.STOPPED:
            self._continue()
            self.breaker.reset()
            self._notify()

    def rebuild(self, why: str, *, is_persistent: bool = False) -> None:
        """Rebuild the sink, or restart its rebuild, before it gets another delta."""
        assert self.rebuilder is not None
        self.rebuilder.request(why, is_persistent=is_persistent)
        if self.state in (FeedState.STOPPED, FeedState.NEEDS_SNAPSHOT):
            self._continue()
            self.breaker.reset()
        self._catching_up = True
        self._probe_now.set()
        self._notify()

    def restart_at(self, offset: int) -> None:
        """Restart from an offset, and reset the counters: the sink has, or will get, the states below it."""
        self.quarantine.resume_from(offset)
        self._reread()
        self._held_ahead = []
        self._applied_deltas = self._quarantined = 0
        self._start = self._applied = self._committed = self._end = offset
        self._reported = self._last_applied_end = offset
        self._catching_up = True

    def end_rebuild(self) -> None:
        """End a rebuild: the states include the quarantined deltas, and deliveries resume."""
        self.quarantine.clear(self._start)
        self.state = FeedState.IDLE
        self._notify_progress()
        self._commit_waiters.wake(self.committed)

    def pause(self) -> None:
        """Deliver nothing until `resume`; the log retains what the sink misses."""
        self.is_paused = True
        self.stop(reasons.sink_paused(self.name, self._applied), FeedState.PAUSED)

    def resume(self) -> None:
        """End a pause, or resume after a stop."""
        self.is_paused = False
        if self.state is FeedState.PAUSED:
            self.state = FeedState.STOPPED
        self.restart()

    @property
    def is_resetting(self) -> bool:
        """True if a request moves the cursor, so that the present delivery no longer matters."""
        return any(request.reset_to is not None and not request.is_withdrawn for request in self._requests)

    def add_request(self, request: ReplayRequest) -> None:
        """Queue a request to apply or drop quarantined deltas, or to move the cursor, between deliveries."""
        if self.state is FeedState.CLOSED and self.reason is not None:
            request.finish(self.reason)
            return
        open_requests = [
            queued for queued in self._requests if queued is self._requests[0] or not queued.is_withdrawn
        ]
        self._requests = deque([*open_requests, request])
        if request.reset_to is not None:
            self._probe_now.set()
        self._notify()

    def stop(self, refusal: Refused, state: FeedState = FeedState.STOPPED) -> None:
        """Stop delivering, and notify the waiters of this sink.

        Of two reasons, the first counts. But any reason replaces that of a full quarantine, after which a
        sink resumes by itself; and a stopped sink may still be paused, or have its cursor invalidated.
        """
        if self.lazy_progress and self._is_idle:
            self._become_idle()  # advances past rows that are not for this sink
        is_worse = (self.state, state) in WORSE_TRANSITIONS
        if self.has_ended and not self._is_stopped_full and not is_worse:
            if state is FeedState.CLOSED:
                self.state = state
        else:
            self.state, self.reason = state, refusal
            if state is not FeedState.CLOSED:
                logger.warning("%s", refusal.message)
        self._is_stopped_full = False
        self._mailbox.clear()
        self._catching_up = True
        self._waiters.wake_all()
        self._commit_waiters.wake_all()
        for request in self._requests if state is FeedState.CLOSED else ():
            request.finish(self.reason or refusal)
        self._on_progress()

    def close(self) -> None:
        """Stop delivering for good, and notify all waiters: the sink was detached."""
        if self._is_idle:
            self._become_idle()  # advances past rows that are not for this sink, too
        self.stop(reasons.sink_detached(self.name), FeedState.CLOSED)

    def invalidate_cursor(self) -> None:
        """Note that the log no longer retains rows for this sink, which cannot resume from its cursor."""
        self._require_snapshot(reasons.cursor_invalidated(self.name, self._applied))

    def _require_snapshot(self, refusal: Refused) -> None:
        if self.rebuilder is not None:
            self.rebuild(f"its cursor {self._applied} is below the log's start")
        else:
            self.stop(refusal, FeedState.NEEDS_SNAPSHOT)

    def cancel_overdue_call(self, now: float) -> None:
        """Cancel the running call if it takes too long; its rows are redelivered."""
        overdue_s = now - self._called_at - self.limits.apply_timeout_s
        if overdue_s > 0:
            self._call_scope.cancel()
        if overdue_s > STUCK_S and not self._is_stuck:
            self._is_stuck = True
            logger.warning("sink %r: %s", self.name, self._format_reason())

    # --- the loop

    async def run(self) -> None:
        """Deliver until cancelled. A sink that must stop waits here until `restart`."""
        while True:
            with anyio.CancelScope() as self._call_scope:
                await self._run()
            self._drop_held_ahead()
            self._reread()
            if self._called_deliveries:
                self._call_size.note_failure(self._called_deliveries, 0)
            overdue = TimeoutError(f"a call took over {self.limits.apply_timeout_s} s (apply_timeout_s)")
            self._errors += 1
            await self.back_off(overdue)

    async def _run(self) -> None:
        was_busy = False
        while True:
            if self._catching_up:
                await anyio.lowlevel.checkpoint()  # a sink that never waits must not block other tasks
            elif was_busy:
                await self._linger()
            if self.rebuilder is not None and self.rebuilder.reason is not None and not self.has_ended:
                await self.rebuilder.run(self)
                was_busy = False
                continue
            while self._requests and self.state is not FeedState.CLOSED:
                await self._run_request(self._requests[0])
            if self.has_ended or not (self._catching_up or self._mailbox):
                self._become_idle()
                was_busy = False
                await self._wait_wakeup(None)
            else:
                # No await may separate the take from the change of state: the feed would appear idle.
                await self._deliver(await self._pull() if self._catching_up else self._take())
                was_busy = True

    # --- taking

    @property
    def _deltas_per_call(self) -> int:
        default = self.limits.merge_deltas_max
        return max(default, self.sink.deltas_per_call) if self._takes_many else default  # type: ignore[attr-defined]

    def _take(self) -> list[Delivery]:
        return self._mailbox.take(self._deltas_per_call)

    async def _pull(self) -> list[Delivery]:
        """Read the next rows of the log; at its end, switch back to pushes.

        A large read is done in parts, between which other tasks run; a feed that is catching up is not idle.
        """
        if self._mailbox:
            return self._take()
        self._end = max(self._end, self._applied)
        deliveries: list[Delivery] = []
        rows_left, bytes_left = self._deltas_per_call, READ_BYTES_MAX
        while True:
            try:
                rows_max = min(rows_left, READ_ROWS_MAX)
                batches = self._log.read(self._end, rows_max=rows_max, bytes_max=bytes_left)
            except Refused as refusal:
                if refusal.code is ErrorCode.CURSOR_TOO_OLD:
                    self._require_snapshot(refusal)
                else:
                    self.stop(refusal)
                return []
            deliveries += make_deliveries(batches, self, self._routing_table, self._end)
            end = self._end = batches[-1].next_offset if batches else self._end
            rows_left -= sum(logged.count for logged in batches)
            bytes_left -= sum(logged.batch.size for logged in batches)
            if end >= self._log.high_watermark or rows_left <= 0 or bytes_left <= 0:
                break
            await anyio.lowlevel.checkpoint()
            if self._end != end:  # the log was recovered, and lost rows
                return []
        # No await may separate this comparison from the flag: the next appended batch must be pushed.
        self._catching_up = self._end < self._log.high_watermark
        if self.rebuilder is not None and not self._catching_up:
            self.rebuilder.note_caught_up()
        if not deliveries:
            self._advance_applied(self._end)
        return deliveries

    async def _linger(self) -> None:
        """Wait for a full batch, up to `linger_ms` from the arrival of the first delta."""
        limits = self.limits
        while self._mailbox and self._mailbox.delta_count < limits.batch_deltas and not self._catching_up:
            left_s = self._mailbox.oldest_at + limits.linger_ms / 1000 - self._clock.now()
            if left_s <= 0:
                return
            await self._wait_wakeup(left_s, limits.batch_deltas)

    async def _wait_wakeup(self, timeout_s: float | None, wake_at_deltas: int = 0) -> None:
        self._wake_event, self._wake_at_deltas = anyio.Event(), wake_at_deltas
        try:
            if timeout_s is None:
                await self._wake_event.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await self._wake_event.wait()
        finally:
            self._wake_event = None

    def _notify(self) -> None:
        if self._wake_event is not None:
            self._wake_event.set()

    def _continue(self) -> None:
        self._reread()
        self._is_stopped_full = False
        self.state, self.reason = FeedState.IDLE, None
        if self.is_paused:
            self.pause()

    def _reread(self) -> None:
        """Drop the deltas that were handed over and not applied; they are read from the log again."""
        self._mailbox.clear()
        self._in_call = 0
        self._end = self._applied
        self._catching_up = self._end < self._log.high_watermark

    # --- delivering

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        """Deliver until all deltas are applied, or quarantined if the sink rejects them."""
        end = deliveries[-1].next_offset if deliveries else 0
        recoveries = self._recoveries
        while deliveries and not (self.has_ended or self.is_rebuilding or self.is_resetting):
            if self.quarantine.can_affect(deliveries[0].first_offset):
                deliveries = self._hold_dependents(deliveries)
                self._in_call = sum(delivery.count for delivery in deliveries)
            writer = self._quarantine_writer
            if writer is not None and writer.is_dirty and not await self.wait_quarantine_written():
                break
            if not deliveries:
                break
            called, rest = self._call_size.split(deliveries)
            failure = await self.call(called, sum(delivery.count for delivery in rest))
            if failure is None:
                self.note_done(called)
                self._call_size.note_success(self._deltas_per_call)
                deliveries = rest
            else:
                deliveries = await self._handle_failure(deliveries, called, failure)
            if self._recoveries != recoveries:  # the log may have lost rows that are not delivered yet
                self._reread()
                end = 0
                break
            if deliveries:
                await anyio.lowlevel.checkpoint()  # a sink that only rejects must not block other tasks
        self._in_call = 0
        if not (self.has_ended or self.is_rebuilding or self.is_resetting):
            self._advance_applied(end)
            if self._full_at is not None:
                self._stop_full(self._full_at)
        self._drop_held_ahead()

    async def _handle_failure(
        self, deliveries: list[Delivery], called: list[Delivery], failure: Exception
    ) -> list[Delivery]:
        """Handle the failure of a call with the first of these deliveries; return the remaining ones."""
        if isinstance(failure, StopSink):
            self.stop(self.make_stop_refusal(failure.reason))
            return deliveries
        if isinstance(failure, RejectDelta):
            if not any(contains_offset(delivery, failure.offset) for delivery in called):
                self.stop(self.make_stop_refusal(reasons.rejected_unknown(failure)))
                return deliveries
            self.breaker.note_progress()
            return await self._reject(self._drop_done(deliveries, failure.offset), failure)
        rest, before = deliveries, self._applied_deltas
        if isinstance(failure, TryAgain) and failure.done_offset is not None:
            rest = self._drop_done(deliveries, min(failure.done_offset, called[-1].next_offset))
            if rest is not deliveries:
                self.breaker.note_progress()
        self._call_size.note_failure(called, self._applied_deltas - before)
        await self.back_off(failure)
        return rest

    def _drop_done(self, deliveries: list[Delivery], done: int) -> list[Delivery]:
        """Count rows below offset `done` as applied; return the rest, or the same list if there are none."""
        finished = [delivery for delivery in deliveries if delivery.next_offset <= done]
        if finished:
            self.note_done(finished)
        rest = deliveries[len(finished) :]
        if rest:
            first = rest[0]
            rows = row_numbers(first)
            count = int(np.searchsorted(rows, done - first.first_offset))
            if count:
                self._applied_deltas += count
                self._last_applied_end = max(
                    self._last_applied_end, first.first_offset + int(rows[count - 1]) + 1
                )
                self._advance_applied(done)
                return [*([replace(first, rows=rows[count:])] if count < len(rows) else []), *rest[1:]]
        return rest if finished else deliveries

    # --- quarantine

    def _hold_dependents(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Hold the dependents of rejected deltas, within the capacity; return the deliveries of the rest."""
        passing: list[Delivery] = []
        at_us = self._clock.wall_us()
        for delivery in deliveries:
            split = self.quarantine.hold_dependents(delivery, at_us)
            self._quarantined += len(split.held_dependents)
            self._held_ahead += split.held_dependents
            if split.passing is not None:
                passing.append(split.passing)
            if split.full_at is not None:
                self._full_at = split.full_at
                break
        return passing

    async def wait_quarantine_written(self) -> bool:
        """Wait until the quarantine is on stable storage; return True if it is.

        Disk failures are retried; only the end of the feed ends the wait before that.
        """
        writer = self._quarantine_writer
        while writer is not None and writer.is_dirty and not self.has_ended:
            self.state = FeedState.WORKING
            self.breaker.probe()
            try:
                await writer.write()
            except OSError as error:
                await self.back_off(reasons.quarantine_not_written(error))
            else:
                self.breaker.note_progress()
        return writer is None or not (self.has_ended or writer.is_dirty)

    async def _reject(self, rest: list[Delivery], failure: RejectDelta) -> list[Delivery]:
        """Quarantine the rejected delta; return the remaining deliveries."""
        row, rows = failure.offset - rest[0].first_offset, row_numbers(rest[0])
        if not self.quarantine.reject(rest[0].logged, row, failure.reason, self._clock.wall_us()):
            self._advance_applied(failure.offset)  # rows before it are applied, or held
            self._stop_full(failure.offset)
            return rest
        self._quarantined += 1
        level = logging.WARNING if len(self.quarantine) == 1 else logging.DEBUG  # one warning is enough
        logger.log(level, "sink %r rejected offset %d: %s", self.name, failure.offset, failure.reason)
        rest_rows = rows[rows > row]
        if await self.wait_quarantine_written():
            self._advance_applied(failure.offset + 1)
        return [*([replace(rest[0], rows=rest_rows)] if len(rest_rows) else []), *rest[1:]]

    def _drop_held_ahead(self) -> None:
        """Forget the deltas that are held ahead of the cursor, after a delivery has ended.

        They are redelivered later. Otherwise a replay could apply them before the rows that precede them.
        """
        self._full_at = None
        ahead = [offset for offset in self._held_ahead if offset >= self._applied]
        self._held_ahead = []
        self._quarantined -= len(ahead)
        for offset in ahead:
            self.quarantine.forget(offset)

    async def _run_request(self, request: ReplayRequest) -> None:
        """Execute an operator's request; it frees capacity in a full quarantine, so the sink resumes."""
        if request.is_withdrawn:
            pass
        elif request.reset_to is not None:
            self.restart_at(request.reset_to)
            if self.state is FeedState.NEEDS_SNAPSHOT:
                self._continue()
            request.finish(ReplayResult(0, 0, len(self.quarantine)))
        elif not self.can_answer:
            request.finish(
                self.make_stop_refusal(
                    "a stopped sink applies nothing: restart it (or resume it), then retry"
                )
            )
        else:
            if self._is_stopped_full:  # the request frees capacity
                self._continue()
            answer = await execute_replay(self, request)
            self._in_call = 0
            if not self.has_ended:
                self.state = FeedState.IDLE
            request.finish(answer)
        self._requests.popleft()

    def _stop_full(self, offset: int) -> None:
        quarantine = self.quarantine
        had_ended = self.has_ended  # for another reason, which a replay does not end
        self.stop(self.make_stop_refusal(reasons.quarantine_full(quarantine, offset)))
        self._is_stopped_full = not had_ended

    # --- notifying

    def _become_idle(self) -> None:
        """Advance past rows that are not for this sink, as all others are processed; unless it has ended."""
        if self.has_ended:
            return
        self.state = FeedState.IDLE
        self._end = self._log.high_watermark
        if self._applied < self._end:
            self._advance_past(self._end)
            self._notify_progress()
        self._commit_waiters.wake(self.committed)
