"""Rebuilds one sink: from the log's newest snapshot, or from the beginning of a complete log.

The feed requests and runs the rebuild; deltas wait in the log, which retains the tail after the snapshot.
Whatever interrupts the rebuild (the sink, the process, or a log that drops the tail), it restarts from the
snapshot that is the newest then. Until it ends, the service remembers that the sink is incomplete.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import anyio.lowlevel
import numpy as np

from delta_prop.delivery.feed_state import FeedEvent
from delta_prop.delivery.reasons import cannot_be_rebuilt
from delta_prop.delivery.routing_table import NoRows, RouteTarget, RoutingTable
from delta_prop.delivery.status import format_failure
from delta_prop_broker.log.contract import Log, LogSnapshot
from delta_prop_sinks.sink import Rebuildable, Sink, SinkContext, StopSink, TryAgain
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.state_rows import StateRow, state_of
from delta_prop_wire.topics import Topic, TopicKind

if TYPE_CHECKING:
    from delta_prop.delivery.cursors import AttachedCursor
    from delta_prop.delivery.feed import Feed

logger = logging.getLogger("delta_prop")

FULL_VECTOR_TOPICS = frozenset({TopicKind.ALL, TopicKind.NAMESPACE, TopicKind.VECTOR_ID})
"""Topics that match all deltas of a vector or none, so that the vector's state can replace its deltas."""

_SLICE_ROWS = 100


class Rebuilder:
    """Rebuilds one sink when its feed requests it; `cursor` holds the log meanwhile."""

    def __init__(
        self,
        sink: Rebuildable,
        context: SinkContext,
        log: Log,
        routing_table: RoutingTable[RouteTarget],
        cursor: AttachedCursor,
    ) -> None:
        self._sink = sink
        self._context = context
        self._log = log
        self._routing_table = routing_table
        self._cursor = cursor

    def note_caught_up(self, feed: Feed) -> None:
        """Note that the sink has read the tail, or is detached, and release the log."""
        if feed.status.rebuild.is_holding:
            feed.status.rebuild.is_holding = False
            self._cursor.release()

    async def run(self, feed: Feed) -> None:
        """Rebuild with retries, until it has ended or the sink stops."""
        pending = feed.status.rebuild
        logger.warning("sink %r is being rebuilt: %s", feed.name, pending.reason)
        request_number = pending.request_number
        snapshot: LogSnapshot | None = None
        try:
            self._hold_from(feed, self._log.start_offset)  # no usable snapshot has a lower offset
            snapshot = await self._open(feed, request_number)
            offset = 0 if snapshot is None else snapshot.offset
            self._hold_from(feed, offset)
            pending.begin(0 if snapshot is None else snapshot.rows)
            feed.restart_at(offset)
            await self._call_until_done(feed, request_number, self._cursor.write)
            await self._call_until_done(feed, request_number, partial(self._sink.begin_rebuild, offset))
            if snapshot is not None:
                await self._load_snapshot(feed, request_number, snapshot)
            lamport = 0 if snapshot is None else snapshot.lamport
            await self._call_until_done(
                feed, request_number, partial(self._sink.end_rebuild, offset, lamport)
            )
            feed.quarantine.clear(offset)
            # The removals from the quarantine must be durable before the rebuild counts as ended.
            if not await feed.deliverer.wait_quarantine_written():
                return
        except _RebuildAborted:
            return
        finally:
            if snapshot is not None:
                snapshot.close()
        pending.end()
        logger.warning("sink %r was rebuilt as of offset %d, and resumes from there", feed.name, offset)
        feed.end_rebuild()

    def _hold_from(self, feed: Feed, offset: int) -> None:
        feed.status.rebuild.hold_from(offset)
        self._cursor.hold()

    async def _open(self, feed: Feed, request_number: int) -> LogSnapshot | None:
        """Open the newest snapshot; None if the log is complete without one. Raises _RebuildAborted."""
        snapshot: LogSnapshot | None = None

        async def open_newest() -> None:
            nonlocal snapshot
            snapshot = await self._context.threads.run(self._log.snapshot)

        await self._call_until_done(feed, request_number, open_newest)
        if snapshot is not None and snapshot.offset < self._log.start_offset:
            snapshot.close()  # the rows in between are lost
            snapshot = None
        if snapshot is None and self._log.start_offset:
            self.note_caught_up(feed)
            feed.control.stop(cannot_be_rebuilt(feed.name, self._log.start_offset), FeedEvent.INVALIDATE)
            raise _RebuildAborted
        return snapshot

    async def _load_snapshot(self, feed: Feed, request_number: int, snapshot: LogSnapshot) -> None:
        frames = snapshot.frames()
        while True:
            frame: list[LoggedBatch] = []  # the next frame; none at the end

            async def read_next(frame: list[LoggedBatch] = frame) -> None:
                try:
                    frame += await self._context.threads.run(
                        lambda: [logged for logged in (next(frames, None),) if logged]
                    )
                except Exception as failure:
                    feed.status.rebuild.request_number += (
                        1  # its position is lost: restart from the newest snapshot
                    )
                    raise TryAgain(f"the snapshot cannot be read: {format_failure(failure)}") from failure

            await self._call_until_done(feed, request_number, read_next)
            if not frame:
                return
            rows = self._select_rows(feed, frame[0])  # in parts: a frame may hold 10,000 rows
            while part := await _take_rows(rows, feed.limits.merge_deltas_max):
                await self._call_until_done(
                    feed, request_number, partial(self._sink.load_states, part), len(part)
                )
                await anyio.lowlevel.checkpoint()  # a sink that never waits must not block other tasks
            feed.status.rebuild.note_rows(frame[0].count)

    def _select_rows(self, feed: Feed, logged: LoggedBatch) -> Iterator[StateRow]:
        batch = logged.batch
        rows = self._routing_table.rows_for(feed, batch)
        if isinstance(rows, NoRows):
            return
        for row in (np.arange(batch.count) if rows is None else rows).tolist():
            yield StateRow(
                batch.namespaces[row], batch.keys[row], state_of(batch, row), logged.row_offset(row)
            )

    async def _call_until_done(
        self, feed: Feed, request_number: int, call: Callable[[], Awaitable[None]], row_count: int = 0
    ) -> None:
        """Retry a call until it succeeds. Raises _RebuildAborted if the sink stops, or on a restart."""
        pending = feed.status.rebuild
        while not (feed.has_ended or pending.request_number != request_number):
            failure = await feed.invoker.attempt(call, FeedEvent.CALL_REBUILD, row_count)
            if failure is None:
                break
            if isinstance(failure, StopSink):
                feed.control.stop_because(failure.reason)
            else:
                await feed.invoker.back_off(failure)
        if feed.has_ended or pending.request_number != request_number:
            raise _RebuildAborted


async def _take_rows(rows: Iterator[StateRow], rows_max: int) -> list[StateRow]:
    """Return the next rows. Each takes about 20 µs to make, so other tasks run between slices of them."""
    taken: list[StateRow] = []
    while len(taken) < rows_max and (more := list(islice(rows, min(_SLICE_ROWS, rows_max - len(taken))))):
        taken += more
        await anyio.lowlevel.checkpoint()
    return taken


class _RebuildAborted(Exception):
    """The rebuild ends early; if a rebuild is still requested, it restarts."""


def has_snapshot(log: Log) -> bool:
    """Return True if the log continues from its snapshot. Raises DeltaPropError, OSError."""
    snapshot = log.snapshot()
    if snapshot is not None:
        snapshot.close()
    return snapshot is not None and snapshot.offset >= log.start_offset


def oldest_known_offset(log: Log) -> int:
    """Return the first offset that the log or its snapshot covers; 0 if the log has lost no row."""
    snapshot = log.snapshot() if log.start_offset else None
    if snapshot is None:
        return log.start_offset
    try:
        return snapshot.begin if snapshot.offset >= log.start_offset else log.start_offset
    finally:
        snapshot.close()


def can_be_rebuilt(sink: Sink, topics: Iterable[Topic]) -> bool:
    """Return True if states can replace all deltas that this sink subscribes to."""
    return isinstance(sink, Rebuildable) and all(topic.kind in FULL_VECTOR_TOPICS for topic in topics)
