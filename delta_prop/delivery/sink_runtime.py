"""Runtime of one attached sink: its tasks, and its close.

Decides nothing about deltas; `feed.py` delivers them.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio

from delta_prop.delivery.cursors import AttachedCursor
from delta_prop.delivery.feed import Feed
from delta_prop.delivery.feed_state import FeedState
from delta_prop.delivery.sink_context import PartitionSinkContext
from delta_prop.delivery.sink_opening import OpenedSink
from delta_prop.delivery.status import format_failure
from delta_prop.partition.partition import Partition
from delta_prop_sinks.sink import HasBackground
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

logger = logging.getLogger("delta_prop")

READ_RETRY_S = 0.5
"""Seconds until the next read, after the log could not be read for a sink."""


class SinkRuntime:
    """An open sink with its feed. Its deliveries start once `start_event`, if there is one, is set."""

    def __init__(
        self,
        partition: Partition,
        opened: OpenedSink,
        context: PartitionSinkContext,
        feed: Feed,
        start_event: anyio.Event | None,
    ) -> None:
        context.feed = feed
        self.sink = feed.sink
        self.opened = opened
        self.context = context
        self.feed = feed
        self.cursor: AttachedCursor | None = None  # None for a subscription, which has none
        self.is_closing = False
        self.forgotten_below = 0  # the sink was told to remove tombstones below this offset
        self._partition = partition
        self._start_event = start_event
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    @property
    def name(self) -> str:
        """Name under which the sink is attached."""
        return self.feed.name

    async def run(self) -> None:
        """Deliver, and run the sink's own background work, until closed."""
        try:
            with self._scope:
                if self._start_event is not None:
                    await self._start_event.wait()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._background)
                    tasks.start_soon(self._deliver)
        finally:
            self._ended.set()
            if not self._scope.cancel_called:  # not by `close`: its waiters would wait for ever
                self.feed.control.close()

    async def close(self, timeout_s: float) -> None:
        """Deliver what the log holds, end the sink's tasks, close it; all under one deadline.

        A fifth of the time is reserved for the end of the tasks, and a fifth for the sink's own closing. A
        sink that keeps failing gets no such deliveries.
        """
        feed, clock = self.feed, self._partition.world.clock
        deadline = clock.now() + timeout_s
        has_started = self._start_event is None or self._start_event.is_set()
        if has_started and feed.state is not FeedState.BREAKER_OPEN:
            with anyio.move_on_after(0.6 * timeout_s), suppress(Refused):
                await feed.wait(self._partition.log.high_watermark)  # statistics show why, if it has stopped
        self._scope.cancel()
        with anyio.move_on_after(deadline - 0.2 * timeout_s - clock.now()):
            await self._ended.wait()  # a sink that detaches itself cannot end before this does
        feed.control.close()
        with anyio.move_on_after(deadline - clock.now()):
            await self.sink.aclose()

    async def _deliver(self) -> None:
        """Deliver to the sink; an Exception that ends the delivery stops only this sink."""
        feed = self.feed
        try:
            while True:
                try:
                    await feed.run()
                except OSError as failure:  # a failure of the log's disk, which may recover
                    feed.invoker.last_failure = failure
                    await anyio.sleep(READ_RETRY_S)
        except Exception as failure:
            feed.control.stop_because(
                f"its delivery failed with {format_failure(failure)}: detach it, and attach it again"
            )

    async def _background(self) -> None:
        """Run the sink's own background work; if that fails, only this sink stops."""
        if not isinstance(self.sink, HasBackground):
            return
        try:
            await self.sink.background()
        except Exception as failure:
            self.feed.control.stop(
                Refused(
                    ErrorCode.PROCESSING_FAILED,
                    f"sink {self.name!r} has stopped: its background work failed with "
                    f"{format_failure(failure)}; correct that, then detach the sink, and attach it again",
                )
            )
