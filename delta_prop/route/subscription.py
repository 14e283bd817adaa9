"""A live listener in this process: a sink that hands its rows to whoever iterates, at their pace.

It keeps at most one delivery in hand; while the reader is slow the feed reads the log.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from delta_prop.route.feed import Feed
    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_wire.delta import Delta


class Delivered(NamedTuple):
    """One delta as a subscriber gets it: its place, its Lamport number, what it says."""

    offset: int
    lamport: int
    delta: Delta


class Subscription:
    """Async iterator over `Delivered`. Close it with `async with`, or with the propagator.

    Raises Refused (CURSOR_TOO_OLD) where the log no longer has what comes next.
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
        self._change = anyio.Event()
        self._drained = anyio.Event()
        self._delivered = 0
        self._closed = False

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
            if self._feed.reason is not None:
                raise self._feed.reason
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
        """End the subscription; an iteration that waits ends too."""
        if self._feed is not None and not self._closed:
            self._feed.give_up()  # what is not read yet is not wanted
            await self._detach(self.name)
        self._closed = True
        self.ring()

    def ring(self) -> None:
        """Something changed that an iteration may wait for."""
        self._change.set()

    # --- the feed's side

    async def open(self, context: SinkContext) -> None:
        """Nothing to open: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Hand the rows over; return when the reader has taken the last one."""
        self._drained = anyio.Event()
        for delivery in deliveries:
            rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
            self._rows.extend((delivery, row) for row in rows)
        self._change.set()
        try:
            await self._drained.wait()
        finally:
            self._rows.clear()

    async def aclose(self) -> None:
        """The service lets go: what is in hand can still be read, then the iteration ends."""
        self._closed = True
        self.ring()

    def statistics(self) -> int:
        """How many deltas the reader has taken."""
        return self._delivered

    def _take(self) -> Delivered:
        delivery, row = self._rows.popleft()
        logged = delivery.logged
        self._delivered += 1
        return Delivered(logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source))
