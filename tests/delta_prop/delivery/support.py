"""A log, a routing table and feeds without the rest of the pipeline, and sinks that tests control."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.delivery.feed import Feed
from delta_prop.delivery.routing_table import RoutingTable
from delta_prop.delivery.status import FeedLimits
from delta_prop.testing import virtual_world
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.delta import Delta, Source, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from delta_prop.delivery.quarantine import Quarantine
    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_wire.batch import Batch, LoggedBatch

ORIGIN = 16
LIMITS = FeedLimits(
    mailbox_deltas_max=2000,
    mailbox_bytes_max=1 << 20,
    batch_deltas=100,
    linger_ms=10,
    merge_deltas_max=1000,
)
SMALL_LIMITS = replace(LIMITS, mailbox_deltas_max=20, merge_deltas_max=15, batch_deltas=8)


class TinySink:
    """A sink that records offsets and call times; its hook `before` runs first, and may wait or fail."""

    name = "tiny"

    def __init__(self, before: Callable[[Sequence[Delivery]], Any] | None = None) -> None:
        self.before = before
        self.offsets: list[int] = []
        self.calls: list[tuple[float, int]] = []  # (start time of the call, number of rows)
        self.running = False

    async def open(self, context: SinkContext) -> None:
        """Do nothing."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        assert not self.running
        assert deliveries
        assert all(delivery.count for delivery in deliveries)
        self.running = True
        self.calls.append((anyio.current_time(), sum(delivery.count for delivery in deliveries)))
        try:
            if self.before is not None:
                await self.before(deliveries)
        finally:
            self.running = False
        self.note(deliveries)

    def note(self, deliveries: Sequence[Delivery], below: float = float("inf")) -> None:
        """Record the rows as applied, or only those below an offset."""
        self.offsets += [offset for offset in offsets_of(deliveries) if offset < below]

    async def aclose(self) -> None:
        """Do nothing."""

    def statistics(self) -> None:
        """Return nothing."""


def sleep_for(seconds: float) -> Callable[[Sequence[Delivery]], Awaitable[None]]:
    """Return a hook that delays a sink's call."""

    async def before(_: Sequence[Delivery]) -> None:
        await anyio.sleep(seconds)

    return before


def offsets_of(deliveries: Sequence[Delivery]) -> list[int]:
    """Return the offsets of the delivered rows."""
    return [
        delivery.logged.offset + row
        for delivery in deliveries
        for row in (range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist())
    ]


class TruncatedLog(MemoryLog):
    """A log that can end earlier, as after a recovery without its tail."""

    end: int | None = None

    @property
    def high_watermark(self) -> int:
        return super().high_watermark if self.end is None else self.end

    def read(self, offset: int, **bounds: int) -> list[LoggedBatch]:
        return [logged for logged in super().read(offset, **bounds) if logged.offset < self.high_watermark]


class Route:
    """A log, a routing table and feeds; it appends and offers batches as the pipeline does."""

    def __init__(self, **log_bounds: int) -> None:
        self.log = MemoryLog(bytes(16), **log_bounds)
        self.table: RoutingTable[Feed] = RoutingTable()
        self.world = virtual_world()
        self.progress_count = 0
        self._scopes: dict[str, anyio.CancelScope] = {}
        self.tasks: Any = None

    @classmethod
    @asynccontextmanager
    async def running(cls, **log_bounds: int) -> AsyncIterator[Route]:
        route = cls(**log_bounds)
        async with anyio.create_task_group() as route.tasks:
            yield route
            route.tasks.cancel_scope.cancel()

    def feed(
        self,
        sink: TinySink,
        *topics: str,
        start: int = 0,
        limits: FeedLimits = LIMITS,
        required: bool = True,
        keeps_cursor: bool = False,
        quarantine: Quarantine | None = None,
    ) -> Feed:
        feed = Feed(
            f"sink-{len(self.table._filters)}",
            sink,
            log=self.log,
            routing_table=self.table,
            world=self.world,
            limits=limits,
            start=start,
            has_own_cursor=keeps_cursor,
            quarantine=quarantine,
            listener=self,
        )
        self.table.subscribe(feed, [Topic.parse(topic) for topic in topics or ("*",)])
        if required:
            self.log.hold(feed.name, lambda: feed.committed)
        self._scopes[feed.name] = anyio.CancelScope()
        self.tasks.start_soon(self._run, feed)
        return feed

    async def _run(self, feed: Feed) -> None:
        with self._scopes[feed.name]:
            await feed.run()

    async def detach(self, feed: Feed) -> None:
        """End a feed, even during a call."""
        self._scopes[feed.name].cancel()
        await until_quiet()
        feed.control.close()
        self.table.unsubscribe(feed)
        self.log.release(feed.name)

    def publish(self, *namespaces: str) -> LoggedBatch:
        """Append one batch with a row per namespace."""
        deltas = [Delta("v", create([1.0]), namespace) for namespace in namespaces]
        return self.append(encode_batch(deltas, origin=ORIGIN, base=self.log.next_offset + 1))

    def append(self, batch: Batch) -> LoggedBatch:
        logged = self.log.append(batch, lamport=self.log.next_offset + 1, source=Source.LOCAL)
        for feed, rows in self.table.plan(batch):
            feed.offer(logged, rows)
        return logged

    def note_progress(self) -> None:
        self.progress_count += 1


async def until_quiet() -> None:
    """Let all tasks run that are ready now."""
    await anyio.sleep(1e-6)
