"""A live listener in this process: a sink that hands its rows to whoever iterates, at their pace.

It keeps at most one call's deliveries in hand; while the reader is slow the feed reads the log.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

from delta_prop.published import Delivered
from delta_prop.route.status import FeedState
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from delta_prop.route.feed import Feed
    from delta_prop_sinks.sink import Delivery, SinkContext


class Subscription:
    """Async iterator over `Delivered`, for one reader at a time. Close it, with `async with` or `close`;
    one that is left open holds what it has in hand until the propagator closes.

    Raises Refused: CURSOR_TOO_OLD where the log no longer has what comes next, SHUTTING_DOWN where the
    propagator closed before everything was read.
    """

    def __init__(
        self,
        name: str,
        attach: Callable[[Subscription], Awaitable[Feed]],
        detach: Callable[[str], Awaitable[None]],
    ) -> None:
        self.name = name
        self._attach = attach
        self._detach = detach
        self._feed: Feed | None = None
        self._rows: deque[tuple[Delivery, int]] = deque()
        self._rows_end = 0  # the offset behind what is in hand
        self._change = anyio.Event()
        self._drained = anyio.Event()
        self._delivered = 0
        self._closed = False
        self._missed: Refused | None = None

    # --- the reader's side

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
            self._check_going_on(self._feed)
            self._drained.set()
            self._change = anyio.Event()
            await self._change.wait()

    async def __aenter__(self) -> Subscription:
        if self._feed is None:
            self._feed = await self._attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the subscription; an iteration that waits ends too. What is not read yet is not wanted."""
        if self._closed:
            return
        self._closed = True
        self._rows.clear()
        self.ring()
        if self._feed is not None and self._feed.state is not FeedState.CLOSED:
            self._feed.give_up()
            await self._detach(self.name)

    def ring(self) -> None:
        """Something changed that an iteration may wait for."""
        self._change.set()

    def note_progress(self) -> None:
        """The feed has moved on, which an iteration does not wait for, or it stands, which ends one."""
        feed = self._feed
        if feed is None or feed.reason is not None or feed.state is FeedState.CLOSED:
            self.ring()

    # --- the feed's side

    async def open(self, context: SinkContext) -> None:
        """Nothing to open: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Hand the rows over; return when the reader has come back for more."""
        self._drained = anyio.Event()
        self._rows_end = deliveries[-1].next_offset
        for delivery in deliveries:
            rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
            self._rows.extend((delivery, row) for row in rows)
        self.ring()
        await self._drained.wait()

    def end(self) -> None:
        """The service closes, and waits for no reader: what is in hand can still be read, then it ends."""
        feed = self._feed
        if feed is None or feed.state is FeedState.CLOSED:
            return
        progress = feed.statistics()
        reached, there_is = max(progress.applied, self._rows_end), progress.applied + progress.lag
        if reached < there_is:
            self._missed = Refused(
                ErrorCode.SHUTTING_DOWN,
                f"the propagator closed when {self.name!r} had read up to offset {reached} of {there_is}: "
                "read to the end before you leave its block",
                details={"offset": reached, "next_offset": there_is},
            )
        feed.give_up()

    async def aclose(self) -> None:
        """Nothing is kept open."""
        self.ring()

    def statistics(self) -> int:
        """How many deltas the reader has taken."""
        return self._delivered

    # --- helpers

    def _check_going_on(self, feed: Feed) -> None:
        if feed.state is FeedState.CLOSED:
            if self._missed is not None:
                raise self._missed.with_traceback(None)
            raise StopAsyncIteration
        if feed.reason is not None:
            raise feed.reason.with_traceback(None)

    def _take(self) -> Delivered:
        delivery, row = self._rows.popleft()
        logged = delivery.logged
        self._delivered += 1
        return Delivered(logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source))
