"""The cursor of one sink: its applied and committed offsets, and those who wait for them."""

from __future__ import annotations

import heapq
from typing import Protocol

import anyio

from delta_prop.delivery.feed_state import FeedState, FeedStatus
from delta_prop.delivery.inbox import Inbox
from delta_prop.delivery.status import SavedCursor
from delta_prop_broker.log.contract import Log


class OffsetWaiters:
    """Waiters for one progress mark of one sink."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, anyio.Event]] = []
        self._wait_count = 0  # breaks ties: events cannot be compared

    def __len__(self) -> int:
        return len(self._heap)

    async def wait(self, offset: int) -> None:
        """Wait until the mark is at `offset`, or until `wake_all` is called. A cancelled wait is removed."""
        self._wait_count += 1
        event = anyio.Event()
        waiter = (offset, self._wait_count, event)
        heapq.heappush(self._heap, waiter)
        try:
            await event.wait()
        finally:
            if not event.is_set():
                self._heap.remove(waiter)
                heapq.heapify(self._heap)

    def wake(self, reached: int) -> None:
        """Wake the waiters up to `reached`, the mark's new offset."""
        while self._heap and self._heap[0][0] <= reached:
            heapq.heappop(self._heap)[2].set()

    def wake_all(self) -> None:
        """Wake all waiters: the mark will not advance any more."""
        for _, _, event in self._heap:
            event.set()
        self._heap.clear()


class ProgressListener(Protocol):
    """Is notified of the progress of a sink."""

    def note_progress(self) -> None:
        """Note that the sink has processed rows, or has stopped."""


class SinkCursor:
    """The only owner of a sink's cursor while the sink is attached.

    `noted_applied` and `noted_committed` are the offsets as of the last delivery; while the feed is idle, all
    rows of the log are processed, so `applied` and `committed` are at the high watermark.
    """

    def __init__(
        self,
        log: Log,
        status: FeedStatus,
        inbox: Inbox,
        listener: ProgressListener,
        *,
        start: int,
        reported: int,
        has_own: bool,
    ) -> None:
        self.noted_applied = start
        self.noted_committed = start
        self.reported = reported  # the offset that the sink itself reported as durable
        self.last_applied_end = start  # after the last row that was applied
        self.limit: int | None = None  # the offset that the present delivery must not pass
        self.waiters = OffsetWaiters()
        self.commit_waiters = OffsetWaiters()
        self._log = log
        self._status = status
        self._inbox = inbox
        self.listener = listener
        self._has_own = has_own  # True if the sink stores its cursor with its data

    @property
    def is_idle(self) -> bool:
        """True while no row is in a call or waits for one, so all rows of the log are processed."""
        status, inbox = self._status, self._inbox
        return status.state is FeedState.IDLE and not (
            inbox.is_catching_up or inbox.mailbox.delta_count or status.rebuild.reason is not None
        )

    @property
    def applied(self) -> int:
        """The offset below which all rows are applied, quarantined, or match none of the sink's topics."""
        return self._log.high_watermark if self.is_idle else self.noted_applied

    @property
    def committed(self) -> int:
        """The offset below which no row is redelivered after a crash of the sink."""
        if not self._has_own:
            return self.applied
        has_all = self.noted_committed >= self.last_applied_end
        return self._log.high_watermark if has_all and self.is_idle else self.noted_committed

    @property
    def saved(self) -> SavedCursor:
        """The cursor to save when the sink is detached, for its next attachment to the same log."""
        status, pending = self._status, self._status.rebuild
        if pending.cursor_before is not None and pending.reason is not None:
            return pending.cursor_before._replace(paused=status.is_paused, own=self._has_own)
        is_committed = not self._has_own or self.noted_committed >= self.last_applied_end
        return SavedCursor(
            self.reported,
            self.applied if is_committed else self.noted_committed,
            rebuilding=pending.has_begun,
            paused=status.is_paused,
            own=self._has_own,
            rebuild_asked=pending.is_persistent,
        )

    @property
    def needed_from(self) -> int:
        """The offset from which on the log must retain rows for the sink."""
        rebuilt_from = self._status.rebuild.needed_from
        return self.committed if rebuilt_from is None else rebuilt_from

    @property
    def sink_end(self) -> int:
        """The offset after the last row that the sink has."""
        return max(self.last_applied_end, self.reported)

    async def wait(self, offset: int, *, committed: bool = False) -> None:
        """Wait until all rows below `offset` are applied (or committed). Raises Refused if the sink stops."""
        status, waiters = self._status, self.commit_waiters if committed else self.waiters
        while status.rebuild.reason is not None or (self.committed if committed else self.applied) < offset:
            if status.reason is not None:
                # Several waiters raise it, so its traceback would grow.
                raise status.reason.with_traceback(None)
            await waiters.wait(offset)

    def note_committed(self, next_offset: int) -> None:
        """Note the sink's report that all rows below `next_offset`, and its own cursor, are durable."""
        if self._status.rebuild.reason is not None:
            return
        self.reported = max(self.reported, next_offset)
        if next_offset > self.noted_committed:
            self.noted_committed = next_offset
            self.commit_waiters.wake(self.committed)
            self.listener.note_progress()

    def advance_past(self, offset: int) -> None:
        """Advance past rows that are not for this sink: all rows below `offset` are processed."""
        if self.noted_committed >= self.last_applied_end and offset > self.noted_committed:
            self.noted_committed = offset
        self.noted_applied = max(self.noted_applied, offset)

    def advance_applied(self, applied: int) -> None:
        """Note that a delivery has processed all rows below `applied`, up to its limit."""
        if self.limit is not None:
            applied = min(applied, self.limit)
        if applied > self.noted_applied:
            self.noted_applied = applied
            self.notify()

    def notify(self) -> None:
        """Wake those who wait for what is applied."""
        self.waiters.wake(self.noted_applied)
        if not self._has_own:
            self.commit_waiters.wake(self.noted_applied)
        self.listener.note_progress()

    def wake_all(self) -> None:
        """Wake all who wait: there will be no progress."""
        self.waiters.wake_all()
        self.commit_waiters.wake_all()

    def restart_at(self, offset: int) -> None:
        """Move to an offset: the sink has, or will get, the states below it."""
        self.noted_applied = self.noted_committed = self.reported = self.last_applied_end = offset

    def truncate(self, end: int) -> None:
        """Move back to the end of a log that has lost its rows from there on."""
        self.noted_applied = min(self.noted_applied, end)
        self.noted_committed = min(self.noted_committed, end)
