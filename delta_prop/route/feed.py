"""A feed: the mailbox and the loop that bring one sink its deltas, in log order, at its own pace.

Push while hot, pull when behind: a sink that keeps up is handed batches from memory, one that does
not reads them from the log, so a full mailbox loses nothing, blocks nobody and never grows.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.route.table import Nothing
from delta_prop_sinks.sink import Delivery, RejectDelta, StopSink, TryAgain
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop.ports import World
    from delta_prop.route.table import Table
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch

RETRY_S_FIRST = 0.05
RETRY_S_MAX = 5.0
RETRY_JITTER = 0.1
READ_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """What bounds a feed: its mailbox, a full batch, how long a busy sink's deltas gather, a merge."""

    mailbox_deltas_max: int
    mailbox_bytes_max: int
    batch_deltas: int
    linger_ms_max: float
    merge_deltas_max: int


class KeptCursor(NamedTuple):
    """How far a sink said it was durable, and up to where all was dealt with, other topics' rows too."""

    reported: int
    dealt_with: int


class FeedState(Enum):
    """What a feed is doing."""

    IDLE = "idle"
    WORKING = "working"
    RETRYING = "retrying"
    STOPPED = "stopped"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """One sink's progress. Offsets are next offsets: everything below is dealt with.

    `success` counts rows applied, `skipped` rows that are not for this sink: together, all that lie
    between its start and `applied`. `backpressure` counts rows that found the mailbox full and are
    read from the log instead, `errors` calls of the sink that failed.
    """

    name: str
    state: str
    reason: str | None
    applied: int
    committed: int
    lag: int
    behind: bool
    mailbox_deltas: int
    mailbox_bytes: int
    deliveries: int
    deltas: int
    success: int
    skipped: int
    backpressure: int
    errors: int
    retries: int


class Feed:
    """One sink's way out of the log. `offer` is called by the chain, `run` by the feed's owner."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        log: Log,
        table: Table[Feed],
        world: World,
        limits: FeedLimits,
        start: int,
        keeps_cursor: bool,
        reported: int = 0,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.sink = sink
        self.state = FeedState.IDLE
        self.reason: Refused | None = None
        self._log = log
        self._table = table
        self._world = world
        self._limits = limits
        self._keeps_cursor = keeps_cursor
        self._on_progress = on_progress
        self._mail: deque[tuple[Delivery, float]] = deque()
        self._mail_deltas = 0
        self._mail_bytes = 0
        self.last_failure: Exception | None = None
        self._end = start  # everything below is dealt with, in hand, or in the mailbox
        self._behind = start < log.visible
        self._applied = start
        self._committed = start
        self._reported = reported  # as the sink itself says, rows of other topics left out
        self._handed_over = start  # behind the last row that was applied
        self._bell: anyio.Event | None = None
        self._waiters: list[tuple[int, int, anyio.Event]] = []
        self._commit_waiters: list[tuple[int, int, anyio.Event]] = []
        self._waits = 0
        self._start = start
        self._deliveries = self._deltas = 0
        self._backpressure = self._errors = self._retries = 0

    # --- what others ask

    @property
    def applied(self) -> int:
        """Everything below is applied, or matched none of the sink's topics."""
        return self._log.visible if self._quiet else self._applied

    @property
    def committed(self) -> int:
        """Everything below need not be delivered again after a crash of the sink."""
        if not self._keeps_cursor:
            return self.applied
        return self._log.visible if self._quiet and self._committed >= self._handed_over else self._committed

    @property
    def kept_cursor(self) -> KeptCursor:
        """What to remember of a sink that goes, for when it comes back to the same log."""
        settled = not self._keeps_cursor or self._committed >= self._handed_over
        return KeptCursor(self._reported, self.applied if settled else self._committed)

    @property
    def cursor(self) -> Cursor:
        """The durable cursor."""
        return Cursor(self._log.log_id, self._log.epoch, self.committed)

    @property
    def _quiet(self) -> bool:
        """Nothing in hand, nothing waiting: whatever the log holds, it is dealt with."""
        return self.state is FeedState.IDLE and not self._mail and not self._behind

    @property
    def _ended(self) -> bool:
        return self.state is FeedState.STOPPED or self.state is FeedState.CLOSED

    def statistics(self) -> FeedStatistics:
        """A snapshot."""
        return FeedStatistics(
            name=self.name,
            state=self.state.value,
            reason=self._told(),
            applied=self.applied,
            committed=self.committed,
            lag=self._log.visible - self.applied,
            behind=self._behind,
            mailbox_deltas=self._mail_deltas,
            mailbox_bytes=self._mail_bytes,
            deliveries=self._deliveries,
            deltas=self._deltas,
            success=self._deltas,
            skipped=self.applied - self._start - self._deltas,
            backpressure=self._backpressure,
            errors=self._errors,
            retries=self._retries,
        )

    async def wait(self, offset: int, *, committed: bool = False) -> None:
        """Wait until everything below `offset` is applied (or committed). Raises Refused if it stops."""
        waiters = self._commit_waiters if committed else self._waiters
        while (self.committed if committed else self.applied) < offset:
            if self.reason is not None:
                raise self.reason.with_traceback(None)  # many raise it; their traces must not add up
            self._waits += 1
            waiter = (offset, self._waits, anyio.Event())
            heapq.heappush(waiters, waiter)
            try:
                await waiter[2].wait()
            finally:
                if not waiter[2].is_set():  # given up: nothing stays behind
                    waiters.remove(waiter)
                    heapq.heapify(waiters)

    # --- what the chain does

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Hand over a batch that has become visible; `rows` None means all. Never waits."""
        if self._behind or self._ended:
            self._behind = True
            return
        if self._quiet:
            self._settle(logged.offset)
        delivery = Delivery(logged, rows)
        deltas, size = self._mail_deltas + delivery.count, self._mail_bytes + logged.batch.size
        full = deltas > self._limits.mailbox_deltas_max or size > self._limits.mailbox_bytes_max
        if full and self._mail:
            self._behind = True  # from here on it reads the log
            self._backpressure += delivery.count
            return
        self._mail.append((delivery, self._world.clock.now()))
        self._mail_deltas, self._mail_bytes = deltas, size
        self._end = logged.next_offset
        if self._bell is not None:
            self._bell.set()

    def note_committed(self, next_offset: int) -> None:
        """The sink says that everything below is durable, its own cursor with it."""
        self._reported = max(self._reported, next_offset)
        if next_offset > self._committed:
            self._committed = next_offset
            self._wake(self._commit_waiters, self.committed)
            self._on_progress()

    # --- the loop

    async def run(self) -> None:
        """Deliver until cancelled. A sink that must stop parks here until `restart`."""
        busy = False
        while True:
            if self._behind:
                await anyio.lowlevel.checkpoint()  # a sink that never waits must not keep others waiting
            elif busy:
                await self._gather()
            if self._ended or not (self._behind or self._mail):
                self._rest()
                busy = False
                await self._ring(None)
            else:
                # No await between taking and the state that shows it: nobody may see an idle feed.
                await self._deliver(self._pull() if self._behind else self._take())
                busy = True

    def restart(self) -> None:
        """Go on after a stop, from the cursor, reading the log."""
        if self.state is not FeedState.STOPPED:
            return
        self._empty_mailbox()
        self._end = self._applied
        self._behind = self._end < self._log.visible
        self.state, self.reason = FeedState.IDLE, None
        if self._bell is not None:
            self._bell.set()

    def stop(self, refusal: Refused, state: FeedState = FeedState.STOPPED) -> None:
        """Deliver no more; whoever waits for this sink is told."""
        if self.state is FeedState.CLOSED:
            return
        self.state, self.reason = state, refusal
        self._empty_mailbox()
        self._behind = True
        for waiters in (self._waiters, self._commit_waiters):
            for _, _, event in waiters:
                event.set()
            waiters.clear()
        self._on_progress()

    def give_up(self) -> None:
        """Deliver no more, and let nobody wait for it: the reader has gone."""
        if self._quiet:
            self._rest()  # what came since and was for others is dealt with too
        self.stop(
            Refused(ErrorCode.SHUTTING_DOWN, f"sink {self.name!r} is detached: attach it again"),
            FeedState.CLOSED,
        )

    # --- taking

    def _take(self) -> list[Delivery]:
        taken: list[Delivery] = []
        rows = 0
        while self._mail and (not taken or rows + self._mail[0][0].count <= self._limits.merge_deltas_max):
            delivery, _ = self._mail.popleft()
            taken.append(delivery)
            rows += delivery.count
            self._mail_bytes -= delivery.batch.size
        self._mail_deltas -= rows
        return taken

    def _pull(self) -> list[Delivery]:
        """Read on from the log; once its end is reached, batches are pushed again."""
        if self._mail:
            return self._take()
        self._end = max(self._end, self._applied)
        try:
            read = self._log.read(self._end, rows_max=self._limits.merge_deltas_max, bytes_max=READ_BYTES_MAX)
        except Refused as refusal:
            self.stop(refusal)
            return []
        found = list(self._matching(read))
        if read:
            self._end = read[-1].next_offset
        # No await between this comparison and the flag: what is appended next is offered.
        self._behind = self._end < self._log.visible
        if not found:
            self._progress(self._end)
        return found

    def _matching(self, read: Sequence[LoggedBatch]) -> Iterator[Delivery]:
        for logged in read:
            rows = self._table.rows_for(self, logged.batch)
            if isinstance(rows, Nothing):
                continue
            if logged.offset < self._end:  # resumes inside this batch
                chosen = np.arange(logged.count) if rows is None else rows
                rows = chosen[chosen >= self._end - logged.offset]
                if not len(rows):
                    continue
            yield Delivery(logged, rows)

    async def _gather(self) -> None:
        """While the sink was busy deltas arrived: wait for a full batch, 10 ms from the first at most."""
        while self._mail and self._mail_deltas < self._limits.batch_deltas and not self._behind:
            left = self._mail[0][1] + self._limits.linger_ms_max / 1000 - self._world.clock.now()
            if left <= 0:
                return
            await self._ring(left)

    async def _ring(self, timeout_s: float | None) -> None:
        self._bell = anyio.Event()
        try:
            if timeout_s is None:
                await self._bell.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await self._bell.wait()
        finally:
            self._bell = None

    # --- delivering

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        wait_s = RETRY_S_FIRST
        while deliveries and not self._ended:
            self.state = FeedState.WORKING
            try:
                await self.sink.apply(deliveries)
            except RejectDelta as failure:
                self._drop_done(deliveries, failure.offset)
                self._stop_for(failure)
            except StopSink as failure:
                self._stop_for(failure)
            except TryAgain as failure:
                deliveries = self._drop_done(deliveries, failure.done_offset)
                await self._back_off(wait_s, failure)
            except Exception as failure:  # a defect of the sink: told, and tried again
                await self._back_off(wait_s, failure)
            else:
                self._done(deliveries)
                return
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    async def _back_off(self, wait_s: float, failure: Exception) -> None:
        self._errors += 1
        self._retries += 1
        self.state = FeedState.RETRYING
        self.last_failure = failure
        await anyio.sleep(wait_s * (1 + RETRY_JITTER * (2 * self._world.randomness.random() - 1)))

    def _drop_done(self, deliveries: list[Delivery], done: int | None) -> list[Delivery]:
        if done is None or done <= deliveries[0].first_offset:
            return deliveries
        finished = [delivery for delivery in deliveries if delivery.next_offset <= done]
        if finished:
            self._done(finished)
        rest = deliveries[len(finished) :]
        if rest and rest[0].first_offset < done:
            first = rest[0]
            rows = np.arange(first.logged.count) if first.rows is None else first.rows
            left = rows[rows >= done - first.first_offset]
            self._deltas += first.count - len(left)
            self._handed_over = max(self._handed_over, done)
            self._progress(done)
            rest[:1] = [Delivery(first.logged, left)] if len(left) else []
        return rest

    def _done(self, deliveries: list[Delivery]) -> None:
        self._deliveries += 1
        for delivery in deliveries:
            self._deltas += delivery.count
        last = deliveries[-1]
        row = last.logged.count - 1 if last.rows is None else int(last.rows[-1])
        self._handed_over = max(self._handed_over, last.first_offset + row + 1)
        self._progress(last.next_offset)

    def _progress(self, applied: int) -> None:
        self._applied = max(self._applied, applied)
        self._wake(self._waiters, self._applied)
        if not self._keeps_cursor:
            self._wake(self._commit_waiters, self._applied)
        self._on_progress()

    def _rest(self) -> None:
        """Nothing is left to do; a feed that has ended only waits."""
        if self._ended:
            return
        self.state = FeedState.IDLE
        self._end = self._log.visible
        if self._applied < self._end:
            self._settle(self._end)
            self._progress(self._end)
        self._wake(self._commit_waiters, self.committed)

    def _settle(self, offset: int) -> None:
        """Nothing below is left to do, so what was passed over counts as done, and stays so."""
        if self._committed >= self._handed_over:
            self._committed = max(self._committed, offset)
        self._applied = max(self._applied, offset)

    def _stop_for(self, failure: RejectDelta | StopSink) -> None:
        self._errors += 1
        where = f"offset {failure.offset}: " if isinstance(failure, RejectDelta) else ""
        self.stop(
            Refused(
                ErrorCode.PROCESSING_FAILED,
                f"sink {self.name!r} has stopped at offset {self._applied}: {where}{failure.reason}",
                details={"sink": self.name, "applied": self._applied},
            )
        )

    def _told(self) -> str | None:
        """Why the sink gets nothing at the moment."""
        if self.reason is not None:
            return self.reason.message
        if self.state is not FeedState.RETRYING:
            return None
        return f"{type(self.last_failure).__name__}: {self.last_failure}"

    def _empty_mailbox(self) -> None:
        self._mail.clear()
        self._mail_deltas = self._mail_bytes = 0

    @staticmethod
    def _wake(waiters: list[tuple[int, int, anyio.Event]], reached: int) -> None:
        while waiters and waiters[0][0] <= reached:
            heapq.heappop(waiters)[2].set()
