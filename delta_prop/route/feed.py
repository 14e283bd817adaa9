"""A feed: the loop that brings one sink its deltas, in log order, at its own pace.

Push while hot, pull when behind: a sink that keeps up is handed batches from memory, one that does
not reads them from the log, so a full mailbox loses nothing, blocks nobody and never grows. A call that
fails comes again, ever more slowly; a delta that the sink rejects goes to its quarantine.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.route import reasons
from delta_prop.route.calling import Calling
from delta_prop.route.late import Replayed, answer_request, means, rows_of
from delta_prop.route.quarantine import Quarantine
from delta_prop.route.reading import deliveries_of
from delta_prop.route.status import ENDED, WORSE, FeedLimits, FeedState, FeedStatistics
from delta_prop_sinks.sink import Delivery, RejectDelta, StopSink, TakesManyAtOnce, TryAgain
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from delta_prop.ports import World
    from delta_prop.quarantines import Keeper
    from delta_prop.route.late import ReplayRequest
    from delta_prop.route.table import Table, Taker
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch

_IDLE = FeedState.IDLE
READ_BYTES_MAX = 4 * 1024 * 1024
READ_ROWS_MAX = 1_000
"""So many rows are read of the log at once: single deltas from the disk take some 20 ms."""

STUCK_S = 1.0
"""How long a call may take to end that was broken off, before that is told."""

logger = logging.getLogger("delta_prop")


class Feed(Calling):
    """One sink's way out of the log. `offer` is called by the chain, `run` by the feed's owner."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        log: Log,
        table: Table[Taker],
        world: World,
        limits: FeedLimits,
        start: int,
        keeps_cursor: bool,
        reported: int = 0,
        quarantine: Quarantine | None = None,
        keeper: Keeper | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`keeper`: who writes the quarantine down, before anything passes what is in it."""
        super().__init__(
            name,
            sink,
            log=log,
            world=world,
            limits=limits,
            start=start,
            keeps_cursor=keeps_cursor,
            reported=reported,
            on_progress=on_progress,
        )
        if quarantine is None:
            quarantine = Quarantine(limits.quarantine_deltas_max, limits.quarantine_bytes_max)
        quarantine.come_back(start)
        self.quarantine = quarantine
        self._keeper = keeper
        self.pacing = False
        self.unhurried = False
        """How far it is concerns only who asks or waits: it need not be moved where nothing is for it."""
        self._table = table
        self._takes_many = isinstance(sink, TakesManyAtOnce)
        self._enough = 0  # deltas to wake for
        self._full = False  # stopped because the quarantine is
        self._end = start  # everything below is dealt with, in hand, or in the mailbox
        self._bell: anyio.Event | None = None
        self._calls = anyio.CancelScope()
        self._requests: deque[ReplayRequest] = deque()
        self._set_aside = 0
        self._ahead: list[int] = []  # set aside out of the delivery in hand, before the cursor gets there
        self._backpressure = 0
        self._recoveries = 0  # of the log

    # --- what others ask

    @property
    def behind(self) -> bool:
        """Whether it reads the log, and is not pushed."""
        return self._behind

    @property
    def in_flight(self) -> tuple[int, int]:
        """Deltas and bytes handed over and not applied yet: what credits are spent on."""
        return self._mailbox.deltas + self._in_hand, self._mailbox.bytes

    @property
    def ended(self) -> bool:
        """Whether nothing is delivered any more, until someone acts."""
        return self.state in ENDED

    @property
    def answers(self) -> bool:
        """Whether it can do what an operator asks of its quarantine."""
        return self._full or not self.ended

    def statistics(self) -> FeedStatistics:
        """A snapshot."""
        quarantine, applied = self.quarantine, self.applied
        ahead = sum(offset >= applied for offset in self._ahead)
        return FeedStatistics(
            name=self.name,
            state=self.state.value,
            reason=self._told(),
            applied=applied,
            committed=self.committed,
            lag=max(0, self._log.visible - applied),
            lag_s=self._log.age_s(applied),
            behind=self._behind,
            mailbox_deltas=self._mailbox.deltas,
            mailbox_bytes=self._mailbox.bytes,
            in_hand=self._in_hand,
            deliveries=self._deliveries,
            success=self._success + quarantine.replayed,
            skipped=applied - self._start - self._success - self._set_aside + ahead,
            backpressure=self._backpressure,
            errors=self._errors,
            defects=self._defects,
            retries=self._retries,
            breaker=self.breaker.state.value,
            breaker_opened=self.breaker.opened,
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

    # --- what the chain does

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Hand over a batch that has become visible; `rows` None means all. Never waits."""
        if self.takes_at_once and self._may_be_called(logged) and self.call_at_once(Delivery(logged, rows)):
            self._end = logged.next_offset
            return
        if self._behind or self.ended or not self._push(logged, rows):
            self._behind = True  # from here on it reads the log
            self._backpressure += logged.count if rows is None else len(rows)
            return
        self._end = logged.next_offset
        if self._bell is not None and self._mailbox.deltas >= self._enough:
            self._bell.set()

    def _may_be_called(self, logged: LoggedBatch) -> bool:
        """Whether this batch is all there is to bring, and nothing else to see to: `_quiet`, in few steps."""
        return (
            self.state is _IDLE
            and not (self._behind or self._mailbox.deltas or self._requests)
            and (self.rebuilder is None or self.rebuilder.why is None)
            and logged.next_offset == self._log.visible
            and not self.quarantine.concerns(logged.offset)
            and not (self._keeper is not None and self._keeper.due)
        )

    def _push(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> bool:
        if self._quiet:
            self._settle(logged.offset)
        return self._mailbox.put(Delivery(logged, rows), self._clock.now())

    def note_visible(self) -> None:
        """More of the log may be read; what was meant for this sink has been offered.

        Where nobody waits for an unhurried one, it need not be told: it finds out when it is asked.
        """
        if self._applied >= self._log.visible or (
            self.unhurried and not (self._waiters or self._commit_waiters)
        ):
            return
        if self._quiet:
            self._rest()

    def note_offered(self, offset: int) -> None:
        """Everything for this sink up to there has been offered; one that passed it over says so now."""
        if self.unhurried and self._quiet:
            self._end = max(self._end, offset)
            self._settle(offset)

    def note_recovered(self) -> None:
        """The log was recovered: more may be in it than was shown; or less, then who has that is ahead."""
        end, handed = self._log.visible, self._handing if self._in_hand else 0
        self._recoveries += 1
        self.quarantine.cut(end)
        holds = max(self._handed_over, self._reported, handed)
        if holds > end and not self.rebuilding:
            refusal = reasons.ahead(self.name, holds, end, rebuilds=self.rebuilder is not None)
            self.stop(refusal, FeedState.NEEDS_SNAPSHOT)
        elif self._end > end:
            self._mailbox.clear()
            self._applied, self._committed = min(self._applied, end), min(self._committed, end)
            self._end = max(self._applied, handed)
        self._behind = self._behind or self._end < end
        self._ring_bell()

    # --- what an operator does

    def restart(self) -> None:
        """Go on after a stop, from the cursor; with an open breaker, try at once."""
        if self.state in (FeedState.BREAKER_OPEN, FeedState.STOPPED):
            self._probe_now.set()
        if self.state is FeedState.STOPPED:
            self._go_on()
            self.breaker.reset()
            self._ring_bell()

    def rebuild(self, why: str, *, lasting: bool = False) -> None:
        """Have the sink rebuilt, or rebuilt again from the beginning, before it gets another delta."""
        assert self.rebuilder is not None
        self.rebuilder.ask(why, lasting=lasting)
        if self.state in (FeedState.STOPPED, FeedState.NEEDS_SNAPSHOT):
            self._go_on()
            self.breaker.reset()
        self._behind = True
        self._probe_now.set()
        self._ring_bell()

    def begin_at(self, offset: int) -> None:
        """Of what lies below, the sink has or gets the states: go on from there, and count anew."""
        self.quarantine.come_back(offset)
        self._read_on()
        self._ahead = []
        self._success = self._set_aside = 0
        self._start = self._applied = self._committed = self._end = offset
        self._reported = self._handed_over = offset
        self._behind = True

    def rebuilt(self) -> None:
        """A rebuild has ended: what the quarantine held is in the states, and deltas come again."""
        self.quarantine.clear(self._start)
        self.state = FeedState.IDLE
        self._tell_progress()
        self._commit_waiters.wake(self.committed)

    def pause(self) -> None:
        """Deliver nothing until `resume`; what the log holds waits for it."""
        self.paused = True
        self.stop(reasons.is_paused(self.name, self._applied), FeedState.PAUSED)

    def resume(self) -> None:
        """End a pause; go on after a stop too."""
        self.paused = False
        if self.state is FeedState.PAUSED:
            self.state = FeedState.STOPPED
        self.restart()

    @property
    def resetting(self) -> bool:
        """Whether it is to go on from another offset, so that what is in hand does not matter any more."""
        return any(one.reset_to is not None and not one.withdrawn for one in self._requests)

    def request(self, request: ReplayRequest) -> None:
        """Have quarantined deltas applied or dropped, between two deliveries; or begin elsewhere."""
        if self.state is FeedState.CLOSED and self.reason is not None:
            request.end(self.reason)
            return
        kept = [one for one in self._requests if one is self._requests[0] or not one.withdrawn]
        self._requests = deque([*kept, request])
        if request.reset_to is not None:
            self._probe_now.set()
        self._ring_bell()

    def stop(self, refusal: Refused, state: FeedState = FeedState.STOPPED) -> None:
        """Deliver no more; whoever waits for this sink is told.

        Of two reasons the first counts, but for a full quarantine, from which a sink goes on by itself,
        and a sink that stands may still be paused, or lose its place.
        """
        if self.unhurried and self._quiet:
            self._rest()  # what it has passed over stays so
        worse = (self.state, state) in WORSE
        if self.ended and not self._full and not worse:
            if state is FeedState.CLOSED:
                self.state = state
        else:
            self.state, self.reason = state, refusal
            if state is not FeedState.CLOSED:
                logger.warning("%s", refusal.message)
        self._full = False
        self._mailbox.clear()
        self._behind = True
        self._waiters.wake_all()
        self._commit_waiters.wake_all()
        for request in self._requests if state is FeedState.CLOSED else ():
            request.end(self.reason or refusal)
        self._on_progress()

    def give_up(self) -> None:
        """Deliver no more, and let nobody wait for it: the reader has gone."""
        if self._quiet:
            self._rest()  # what came since and was for others is dealt with too
        self.stop(reasons.is_detached(self.name), FeedState.CLOSED)

    def lose_place(self) -> None:
        """The log keeps nothing for it any more: it cannot go on from its cursor."""
        self._lose(reasons.lost_place(self.name, self._applied))

    def _lose(self, refusal: Refused) -> None:
        if self.rebuilder is not None:
            self.rebuild(f"it had come to offset {self._applied}, which the log no longer holds")
        else:
            self.stop(refusal, FeedState.NEEDS_SNAPSHOT)

    def watch(self, now: float) -> None:
        """Break off a call that takes too long; what it was given comes again."""
        late_s = now - self._called_at - self.limits.apply_s_max
        if late_s > 0:
            self._calls.cancel()
        if late_s > STUCK_S and not self._stuck:
            self._stuck = True
            logger.warning("sink %r: %s", self.name, self._told())

    # --- the loop

    async def run(self) -> None:
        """Deliver until cancelled. A sink that must stop parks here until `restart`."""
        while True:
            with anyio.CancelScope() as self._calls:
                await self._run()
            self._forget_ahead()
            self._read_on()
            if self._brought:
                self._size.failed(self._brought, 0)
            late = TimeoutError(f"a call took longer than {self.limits.apply_s_max} s (apply_s_max)")
            self._errors += 1
            await self.back_off(late)

    async def _run(self) -> None:
        busy = False
        while True:
            if self._behind:
                await anyio.lowlevel.checkpoint()  # a sink that never waits must not keep others waiting
            elif busy:
                await self._gather()
            if self.rebuilder is not None and self.rebuilder.why is not None and not self.ended:
                await self.rebuilder.run(self)
                busy = False
                continue
            while self._requests and self.state is not FeedState.CLOSED:
                await self._answer(self._requests[0])
            if self.ended or not (self._behind or self._mailbox):
                self._rest()
                busy = False
                await self._ring(None)
            else:
                # No await between taking and the state that shows it: nobody may see an idle feed.
                await self._deliver(await self._pull() if self._behind else self._take())
                busy = True

    # --- taking

    @property
    def _deltas_a_call(self) -> int:
        least = self.limits.merge_deltas_max
        return max(least, self.sink.deltas_a_call) if self._takes_many else least  # type: ignore[attr-defined]

    def _take(self) -> list[Delivery]:
        return self._mailbox.take(self._deltas_a_call)

    async def _pull(self) -> list[Delivery]:
        """Read on from the log; once its end is reached, batches are pushed again.

        What takes much at once is read in pieces, between which others run: a feed that is behind is not
        idle.
        """
        if self._mailbox:
            return self._take()
        self._end = max(self._end, self._applied)
        found: list[Delivery] = []
        rows, size = self._deltas_a_call, READ_BYTES_MAX
        while True:
            try:
                read = self._log.read(self._end, rows_max=min(rows, READ_ROWS_MAX), bytes_max=size)
            except Refused as refusal:
                if refusal.code is ErrorCode.CURSOR_TOO_OLD:
                    self._lose(refusal)
                else:
                    self.stop(refusal)
                return []
            found += deliveries_of(read, self, self._table, self._end)
            end = self._end = read[-1].next_offset if read else self._end
            rows -= sum(logged.count for logged in read)
            size -= sum(logged.batch.size for logged in read)
            if end >= self._log.visible or rows <= 0 or size <= 0:
                break
            await anyio.lowlevel.checkpoint()
            if self._end != end:  # the log was recovered, and holds less
                return []
        # No await between this comparison and the flag: what is appended next is offered.
        self._behind = self._end < self._log.visible
        if self.rebuilder is not None and not self._behind:
            self.rebuilder.caught_up()
        if not found:
            self._progress(self._end)
        return found

    async def _gather(self) -> None:
        """While the sink was busy deltas arrived: wait for a full batch, 10 ms from the first at most."""
        limits = self.limits
        while self._mailbox and self._mailbox.deltas < limits.batch_deltas and not self._behind:
            left = self._mailbox.oldest_at + limits.linger_ms_max / 1000 - self._clock.now()
            if left <= 0:
                return
            await self._ring(left, limits.batch_deltas)

    async def _ring(self, timeout_s: float | None, enough: int = 0) -> None:
        self._bell, self._enough = anyio.Event(), enough
        try:
            if timeout_s is None:
                await self._bell.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await self._bell.wait()
        finally:
            self._bell = None

    def _ring_bell(self) -> None:
        if self._bell is not None:
            self._bell.set()

    def _go_on(self) -> None:
        self._read_on()
        self._full = False
        self.state, self.reason = FeedState.IDLE, None
        if self.paused:
            self.pause()

    def _read_on(self) -> None:
        """Forget what was handed over and not applied: it is read from the log again."""
        self._mailbox.clear()
        self._in_hand = 0
        self._end = self._applied
        self._behind = self._end < self._log.visible

    # --- delivering

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        """Have deliveries applied, whatever it takes; or set aside, as far as the sink rejects them."""
        end = deliveries[-1].next_offset if deliveries else 0
        recoveries = self._recoveries
        while deliveries and not (self.ended or self.rebuilding or self.resetting):
            if self.quarantine.concerns(deliveries[0].first_offset):
                deliveries = self._sift(deliveries)
                self._in_hand = sum(delivery.count for delivery in deliveries)
            keeper = self._keeper
            if keeper is not None and keeper.due and not await self.kept():
                break
            if not deliveries:
                break
            brought, rest = self._size.split(deliveries)
            failure = await self.call(brought, sum(delivery.count for delivery in rest))
            if failure is None:
                self.note_done(brought)
                self._size.succeeded(self._deltas_a_call)
                deliveries = rest
            else:
                deliveries = await self._after_failure(deliveries, brought, failure)
            if self._recoveries != recoveries:  # the log may have lost what the sink was not shown yet
                self._read_on()
                end = 0
                break
            if deliveries:
                await anyio.lowlevel.checkpoint()  # a sink that only rejects must not keep others waiting
        self._in_hand = 0
        if not (self.ended or self.rebuilding or self.resetting):
            self._progress(end)
            if self._full_at is not None:
                self._stop_full(self._full_at)
        self._forget_ahead()

    async def _after_failure(
        self, deliveries: list[Delivery], brought: list[Delivery], failure: Exception
    ) -> list[Delivery]:
        """Do what the failure asks for of a call that brought the first of these; what is left to deliver."""
        if isinstance(failure, StopSink):
            self.stop(self.failed(failure.reason))
            return deliveries
        if isinstance(failure, RejectDelta):
            if not any(means(delivery, failure.offset) for delivery in brought):
                self.stop(self.failed(reasons.rejected_another(failure)))
                return deliveries
            self.breaker.progressed()
            return await self._reject(self._drop_done(deliveries, failure.offset), failure)
        rest, before = deliveries, self._success
        if isinstance(failure, TryAgain) and failure.done_offset is not None:
            rest = self._drop_done(deliveries, min(failure.done_offset, brought[-1].next_offset))
            if rest is not deliveries:
                self.breaker.progressed()
        self._size.failed(brought, self._success - before)
        await self.back_off(failure)
        return rest

    def _drop_done(self, deliveries: list[Delivery], done: int) -> list[Delivery]:
        """Count what lies below `done` as applied; the same list where that is nothing."""
        finished = [delivery for delivery in deliveries if delivery.next_offset <= done]
        if finished:
            self.note_done(finished)
        rest = deliveries[len(finished) :]
        if rest:
            first = rest[0]
            rows = rows_of(first)
            count = int(np.searchsorted(rows, done - first.first_offset))
            if count:
                self._success += count
                self._handed_over = max(self._handed_over, first.first_offset + int(rows[count - 1]) + 1)
                self._progress(done)
                return [*([replace(first, rows=rows[count:])] if count < len(rows) else []), *rest[1:]]
        return rest if finished else deliveries

    # --- setting aside

    def _sift(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Line up what has to wait behind a rejected delta, as far as there is room; what passes."""
        passing: list[Delivery] = []
        at_us = self._clock.wall_us()
        for delivery in deliveries:
            sifted = self.quarantine.sift(delivery, at_us)
            self._set_aside += len(sifted.lined_up)
            self._ahead += sifted.lined_up
            if sifted.passing is not None:
                passing.append(sifted.passing)
            if sifted.full_at is not None:
                self._full_at = sifted.full_at
                break
        return passing

    async def kept(self) -> bool:
        """Wait until what is set aside is on stable storage, so that it may be passed; whether it is.

        However often the disk fails: only the end of the feed ends this.
        """
        keeper = self._keeper
        while keeper is not None and keeper.due and not self.ended:
            self.state = FeedState.WORKING
            self.breaker.probe()
            try:
                await keeper.keep()
            except OSError as error:
                await self.back_off(reasons.not_kept(error))
            else:
                self.breaker.progressed()
        return keeper is None or not (self.ended or keeper.due)

    async def _reject(self, rest: list[Delivery], failure: RejectDelta) -> list[Delivery]:
        """Set the rejected delta aside; what is left to deliver."""
        at, rows = failure.offset - rest[0].first_offset, rows_of(rest[0])
        if not self.quarantine.reject(rest[0].logged, at, failure.reason, self._clock.wall_us()):
            self._progress(failure.offset)  # what lies before it is applied, or held
            self._stop_full(failure.offset)
            return rest
        self._set_aside += 1
        level = logging.WARNING if len(self.quarantine) == 1 else logging.DEBUG  # one tells to look
        logger.log(level, "sink %r rejected offset %d: %s", self.name, failure.offset, failure.reason)
        left = rows[rows > at]
        if await self.kept():
            self._progress(failure.offset + 1)
        return [*([replace(rest[0], rows=left)] if len(left) else []), *rest[1:]]

    def _forget_ahead(self) -> None:
        """No delivery is in hand. What it lined up before the cursor got there comes again, in its turn;
        kept, it could be replayed before what comes first."""
        self._full_at = None
        ahead = [offset for offset in self._ahead if offset >= self._applied]
        self._ahead = []
        self._set_aside -= len(ahead)
        for offset in ahead:
            self.quarantine.forget(offset)

    async def _answer(self, request: ReplayRequest) -> None:
        """Do what an operator asks for; a full quarantine has room then, and the sink goes on."""
        if request.withdrawn:
            pass
        elif request.reset_to is not None:
            self.begin_at(request.reset_to)
            if self.state is FeedState.NEEDS_SNAPSHOT:
                self._go_on()
            request.end(Replayed(0, 0, len(self.quarantine)))
        elif not self.answers:
            request.end(
                self.failed("it applies nothing while it stands: restart it (or resume it), then ask again")
            )
        else:
            if self._full:  # stopped for that alone
                self._go_on()
            answer = await answer_request(self, request)
            self._in_hand = 0
            if not self.ended:
                self.state = FeedState.IDLE
            request.end(answer)
        self._requests.popleft()

    def _stop_full(self, offset: int) -> None:
        quarantine = self.quarantine
        standing = self.ended  # for another reason, which a replay does not cure
        self.stop(self.failed(reasons.is_full(quarantine, offset)))
        self._full = not standing

    # --- telling

    def _rest(self) -> None:
        """Nothing is left to do; a feed that has ended only waits."""
        if self.ended:
            return
        self.state = FeedState.IDLE
        self._end = self._log.visible
        if self._applied < self._end:
            self._settle(self._end)
            self._tell_progress()
        self._commit_waiters.wake(self.committed)
