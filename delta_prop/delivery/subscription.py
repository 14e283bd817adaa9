"""A subscription in this process: a sink that passes its rows to an iterating reader, at the reader's pace.

It holds the deliveries of up to one call; if the reader is slow, the feed reads the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from delta_prop.calls.outcomes import Delivered
from delta_prop.delivery.feed import Feed
from delta_prop.delivery.feed_state import FeedState
from delta_prop_sinks.sink import Delivery, SinkContext
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.delivery.sink_manager import SinkManager


class Subscription:
    """Async iterator over `Delivered`, for one reader at a time.

    Close it, with `async with` or `close`: until then, it keeps its present deliveries in memory. Raises
    Refused: CURSOR_TOO_OLD if the log no longer has the next rows, SHUTTING_DOWN if the propagator closed
    before all rows were read.
    """

    def __init__(
        self, name: str, attach: Callable[[Subscription], Awaitable[Feed]], sinks: SinkManager
    ) -> None:
        """Create it; `attach` starts its deliveries before the first read."""
        self.name = name
        self._attach = attach
        self._sinks = sinks
        self._feed: Feed | None = None
        self._rows: deque[tuple[Delivery, int]] = deque()
        self._rows_end = 0  # the offset after the present rows
        self._changed_event = anyio.Event()
        self._drained_event = anyio.Event()
        self._delivered_count = 0
        self._closed = False
        self._unread_refusal: Refused | None = None

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Delivered:
        while True:
            if self._rows:
                return self._take()
            if self._closed:
                raise StopAsyncIteration
            if self._feed is None:
                self._feed = await self._attach(self)
            self._check_not_ended(self._feed)
            self._drained_event.set()
            self._changed_event = anyio.Event()
            await self._changed_event.wait()

    async def __aenter__(self) -> Subscription:
        if self._feed is None:
            self._feed = await self._attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the subscription, and an iteration that waits. Unread rows are dropped."""
        if self._closed:
            return
        self._closed = True
        self._rows.clear()
        self.notify()
        if self._feed is not None and self._feed.state is not FeedState.CLOSED:
            self._feed.control.close()
            await self._sinks.detach(self.name)

    def notify(self) -> None:
        """Wake an iteration that waits, since something has changed."""
        self._changed_event.set()

    def note_progress(self) -> None:
        """Wake the iteration if the feed has stopped; progress alone does not concern it."""
        feed = self._feed
        if feed is None or feed.reason is not None or feed.state is FeedState.CLOSED:
            self.notify()

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service stores the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Pass the rows to the reader; return when it asks for more."""
        self._drained_event = anyio.Event()
        self._rows_end = deliveries[-1].next_offset
        for delivery in deliveries:
            rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
            self._rows.extend((delivery, row) for row in rows)
        self.notify()
        await self._drained_event.wait()

    def end(self) -> None:
        """End without waiting for the reader, which can still read the present rows."""
        feed = self._feed
        if feed is None or feed.state is FeedState.CLOSED:
            return
        progress = feed.statistics()
        read_end, log_end = (
            max(progress.applied_offset, self._rows_end),
            progress.applied_offset + progress.lag,
        )
        if read_end < log_end:
            self._unread_refusal = Refused(
                ErrorCode.SHUTTING_DOWN,
                f"the propagator closed when {self.name!r} had read up to offset {read_end} of {log_end}: "
                "read to the end before you leave the `async with` block",
                details={"offset": read_end, "next_offset": log_end},
            )
        feed.control.close()

    async def aclose(self) -> None:
        """Wake the iteration; there is nothing to close."""
        self.notify()

    def statistics(self) -> int:
        """Return the number of deltas that the reader has taken."""
        return self._delivered_count

    def _check_not_ended(self, feed: Feed) -> None:
        if feed.state is FeedState.CLOSED:
            if self._unread_refusal is not None:
                raise self._unread_refusal.with_traceback(None)
            raise StopAsyncIteration
        if feed.reason is not None:
            raise feed.reason.with_traceback(None)

    def _take(self) -> Delivered:
        delivery, row = self._rows.popleft()
        logged = delivery.logged
        self._delivered_count += 1
        return Delivered(logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source))
