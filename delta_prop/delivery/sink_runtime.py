"""Runtime of one attached sink: its context, its start offset, its tasks, its close.

Decides nothing about deltas; `feed.py` delivers them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio

from delta_prop.calls.refusals import ForeignSinkData
from delta_prop.delivery.reasons import cannot_be_rebuilt
from delta_prop.delivery.rebuild import has_snapshot, newest_snapshot, oldest_known_offset
from delta_prop.delivery.redelivery import ReplayRequest
from delta_prop.delivery.status import FeedState, format_failure
from delta_prop.partition.ingest.expectations import is_alive_after
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.sink import HasBackground, ResumePoint, TryAgain
from delta_prop_wire.delta import AckLevel, Head
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from delta_prop.delivery.feed import Feed
    from delta_prop.delivery.quarantine import Quarantine
    from delta_prop.delivery.status import SavedCursor
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Clock, Threads
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.cursor import Cursor

Start: TypeAlias = Literal["resume", "earliest", "latest"] | int
"""Position at which a sink starts: its cursor, the log start offset, the high watermark, or an offset."""

logger = logging.getLogger("delta_prop")

READ_RETRY_S = 0.5
"""Seconds until the next read, after the log could not be read for a sink."""
_READ_ROWS_MAX = 500
_READ_BYTES_MAX = 1024 * 1024
"""Maximum bytes of one read of the log for a vector's history: some milliseconds of the event loop."""


class SinkRuntime:
    """A sink with its feed; also the `SinkContext` that the sink gets."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        partition: Partition,
        topics: frozenset[str] = frozenset("*"),
    ) -> None:
        self.name = name
        self.topics = topics
        self.sink = sink
        self.feed: Feed | None = None
        self.quarantine: Quarantine | None = None  # quarantine for the feed
        self.lamport = 0  # highest Lamport number that the sink holds
        self.reported = 0  # offset that the sink itself reported as durable
        self.is_closing = False
        self.required = self.evictable = False
        self.has_foreign_data = False  # True if it holds deltas of an earlier log
        self.rebuild_reason: str | None = None  # reason for a rebuild before any delivery
        self.start_event: anyio.Event | None = None  # deliveries start once this is set
        self._partition = partition
        self._log = partition.log
        self._world = partition.world
        self._threads: Threads | None = None
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    # --- the sink's context

    @property
    def log_id(self) -> bytes:
        """Id of the log that deliveries come from."""
        return self._log.log_id

    @property
    def epoch(self) -> int:
        """Epoch of that log."""
        return self._log.epoch

    @property
    def log_start(self) -> int:
        """Oldest offset that the log still holds, or that its snapshot includes; 0 if nothing was removed."""
        return oldest_known_offset(self._log)

    @property
    def clock(self) -> Clock:
        """Clock of elapsed and wall time."""
        return self._world.clock

    @property
    def threads(self) -> Threads:
        """Worker thread of this sink, created at the first use."""
        if self._threads is None:
            self._threads = self._world.new_threads()
        return self._threads

    def own_thread(self) -> AbstractAsyncContextManager[Threads]:
        """Return a new thread that lasts as long as the scope."""
        return self._world.own_thread()

    def background_thread(self) -> AbstractAsyncContextManager[Threads]:
        """Return a new thread of low priority that lasts as long as the scope."""
        return self._world.background_thread()

    def committed(self, next_offset: int) -> None:
        """Note that the sink is durable up to this offset."""
        if self.feed is not None:
            self.feed.note_committed(next_offset)

    def dimension(self, namespace: str) -> int | None:
        """Return the dimension of a namespace's vectors; None while it has none."""
        # With a log in memory, a sink that opens may hold vectors of an earlier log, and reports their
        # dimensions.
        if self.feed is None and self._log.ack_level is AckLevel.MEMORY:
            return None
        return self._partition.pipeline.appender.vectors.dimension(namespace) or None

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Return the offset of the first delta that a log with these watermarks lacks; None if unknown."""
        return self._partition.pipeline.appender.first_missing(watermarks)

    def rewind(self, offset: int) -> None:
        """Redeliver from an offset. Raises Refused."""
        if offset < self._log.start_offset:
            raise Refused(ErrorCode.CURSOR_TOO_OLD, f"the log starts at offset {self._log.start_offset}")
        self.require_feed().add_request(ReplayRequest(None, drop=False, reset_to=offset))

    async def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """Yield the deltas that the log still holds of some vectors, in log order, as (batch, row).

        Leaves out those in this sink's quarantine, and those dropped from it. The time of reading a long log
        does not count towards the time limit of a sink's call. Raises TryAgain.
        """
        quarantine = self.quarantine if self.feed is None else self.feed.quarantine
        clock = self._world.clock
        pace, read_since = Pace(clock), clock.now()
        try:
            for batch_and_row in read_history(self._log, vectors):
                if pace.is_due:
                    await pace.rest()
                    if self.feed is not None:
                        self.feed.note_read(clock.now() - read_since)
                    read_since = clock.now()
                if batch_and_row is None:
                    continue
                logged, row = batch_and_row
                if (
                    logged.batch.is_state
                    or quarantine is None
                    or not quarantine.is_withheld(logged.offset + row)
                ):
                    yield logged, row
        except Refused as refused:
            raise TryAgain(f"the log cannot be read: {refused.message}") from None

    # --- opening, running, closing

    def require_feed(self) -> Feed:
        """Return the feed, which exists once the sink is attached."""
        assert self.feed is not None
        return self.feed

    async def open(
        self, start: Start, saved: SavedCursor, *, can_rebuild: bool, forced: bool = False
    ) -> tuple[int, bool]:
        """Open the sink; return its first offset, and True if it stores its cursor itself.

        `saved` is the stored cursor of this name. `can_rebuild`: True if the sink can be rebuilt;
        `rebuild_reason` is then set if its data is incomplete, the log has removed its next deltas, or an
        operator asked for it. `forced`: True if the sink is to be rebuilt whatever it holds.
        Raises Refused, what the sink raises.
        """
        opening = self.sink.open(self)
        if not isawaitable(opening):
            raise UsageError(f"sink {self.name!r}: open() is a plain function: define it as async")
        resume = await opening
        try:
            if resume is not None and not isinstance(resume, ResumePoint):
                raise UsageError(f"sink {self.name!r}: open() gave {resume!r:.80}, not a ResumePoint or None")
            if forced:
                self.rebuild_reason = "its owner asked for it"
            elif saved.rebuilding or (resume is not None and resume.rebuilding):
                self.rebuild_reason = "an earlier rebuild was interrupted"
            elif saved.rebuild_asked and await self._is_rebuildable(can_rebuild):
                self.rebuild_reason = "an operator asked for it"
            if self.rebuild_reason is not None:
                await self._check_rebuildable(can_rebuild)
                return self._log.start_offset, resume is not None
            start_offset, reached = self._resume_offsets(start, saved, resume, can_rebuild=can_rebuild)
            log_start = self._log.start_offset
            if (
                start in ("resume", "earliest")
                and reached < log_start
                and can_rebuild
                and await self._has_snapshot()
            ):
                self.rebuild_reason = f"its cursor is at offset {reached}, but the log starts at {log_start}"
                return self._log.start_offset, resume is not None
            self._check_start(start_offset, can_rebuild=can_rebuild)
            return start_offset, resume is not None
        except (DeltaPropError, OSError):  # reading the snapshot may raise OSError
            await self.sink.aclose()
            raise

    def _resume_offsets(
        self, start: Start, saved: SavedCursor, resume: ResumePoint | None, *, can_rebuild: bool
    ) -> tuple[int, int]:
        """Return the start offset, and the offset that the sink has reached, by its own or the stored cursor.

        The later of the two counts, unless the sink lost data that it had reported.
        """
        if resume is None:
            return self._resolve_start(start, saved.processed), saved.processed
        self.lamport = resume.lamport
        self.has_foreign_data = resume.lamport > 0 and resume.cursor.log_id != self._log.log_id
        cursor = resume.cursor
        reached = cursor.next_offset if cursor.log_id == self._log.log_id else 0
        if cursor.log_id == self._log.log_id:
            self._check_not_ahead(
                cursor.epoch, max(cursor.next_offset, resume.reach), can_rebuild=can_rebuild
            )
            self.reported = reached
            if reached >= saved.reported:  # else it lost data that it had reported: its own cursor counts
                reached = max(reached, saved.processed)
        if self.has_foreign_data and self._log.ack_level > AckLevel.MEMORY:
            raise self._foreign_log_refusal(cursor, can_rebuild=can_rebuild)
        # With an in-memory log a cursor of another log is normal: the sink keeps its data and starts at the
        # new log's beginning, with Lamport numbers above those that it holds.
        return self._resolve_start(start, reached), reached

    async def _has_snapshot(self) -> bool:
        return await self.threads.run(partial(has_snapshot, self._log))

    async def _is_rebuildable(self, can_rebuild: bool) -> bool:
        """True if it can be rebuilt; else the request is logged and ignored."""
        try:
            await self._check_rebuildable(can_rebuild)
        except (UsageError, Refused) as error:
            logger.warning("the requested rebuild of sink %r was refused: %s", self.name, error)
            return False
        return True

    async def _check_rebuildable(self, can_rebuild: bool) -> None:
        if not can_rebuild:
            raise UsageError(
                f"sink {self.name!r} must be rebuilt ({self.rebuild_reason or 'an operator asked for it'}), "
                "but cannot be: it keeps the deltas themselves, or its topics select only some deltas of a "
                "vector: attach it with an empty store and another name"
            )
        if self._log.start_offset and not await self._has_snapshot():
            raise cannot_be_rebuilt(self.name, self._log.start_offset)

    async def run(self) -> None:
        """Deliver, and run the sink's own background work, until closed."""
        feed = self.require_feed()
        try:
            with self._scope:
                if self.start_event is not None:
                    await self.start_event.wait()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._background)
                    tasks.start_soon(self._deliver)
        finally:
            self._ended.set()
            if not self._scope.cancel_called:  # not by `close`: its waiters would wait for ever
                feed.close()

    async def close(self, timeout_s: float) -> None:
        """Deliver what the log holds, end the sink's tasks, close it; all under one deadline.

        A fifth of the time is reserved for the end of the tasks, and a fifth for the sink's own closing. A
        sink that keeps failing gets no such deliveries.
        """
        feed, deadline = self.require_feed(), self._world.clock.now() + timeout_s
        has_started = self.start_event is None or self.start_event.is_set()
        if has_started and feed.state is not FeedState.BREAKER_OPEN:
            with anyio.move_on_after(0.6 * timeout_s), suppress(Refused):
                await feed.wait(self._log.high_watermark)  # statistics show why, if it has stopped
        self._scope.cancel()
        with anyio.move_on_after(deadline - 0.2 * timeout_s - self._world.clock.now()):
            await self._ended.wait()  # a sink that detaches itself cannot end before this does
        feed.close()
        with anyio.move_on_after(deadline - self._world.clock.now()):
            await self.sink.aclose()

    # --- helpers

    async def _deliver(self) -> None:
        """Deliver to the sink; an Exception that ends the delivery stops only this sink."""
        feed = self.require_feed()
        try:
            while True:
                try:
                    await feed.run()
                except OSError as failure:  # a failure of the log's disk, which may recover
                    feed.last_failure = failure
                    await anyio.sleep(READ_RETRY_S)
        except Exception as failure:
            feed.stop(
                feed.make_stop_refusal(
                    f"its delivery failed with {format_failure(failure)}: detach it, and attach it again"
                )
            )

    async def _background(self) -> None:
        """Run the sink's own background work; if that fails, only this sink stops."""
        if not isinstance(self.sink, HasBackground):
            return
        try:
            await self.sink.background()
        except Exception as failure:
            self.require_feed().stop(
                Refused(
                    ErrorCode.PROCESSING_FAILED,
                    f"sink {self.name!r} has stopped: its background work failed with "
                    f"{format_failure(failure)}; correct that, then detach the sink, and attach it again",
                )
            )

    def _resolve_start(self, start: Start, reached: int) -> int:
        log = self._log
        offset_of_name: dict[Start, int] = {
            "resume": reached,
            "earliest": log.start_offset,
            "latest": log.high_watermark,
        }
        offset = offset_of_name.get(start, start) if isinstance(start, str | int) else -1
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= log.high_watermark:
            raise UsageError(
                f"start {start!r}: give resume, earliest, latest or an offset from 0 to {log.high_watermark}"
            )
        return offset

    def _check_start(self, start: int, *, can_rebuild: bool) -> None:
        log = self._log
        if start < log.start_offset:
            rebuild_fix = (
                "let the log compact, so that it can be rebuilt from a snapshot, " if can_rebuild else ""
            )
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"sink {self.name!r} needs offset {start}, but the log starts at {log.start_offset}: "
                f'attach it with start="earliest" to take what is left, {rebuild_fix}or raise the bounds of '
                "the log",
                details={"offset": start, "start_offset": log.start_offset},
            )

    def _foreign_log_refusal(self, cursor: Cursor, *, can_rebuild: bool) -> Refused:
        empty_note = "" if self._log.next_offset else ", which is empty"
        return ForeignSinkData(
            f"sink {self.name!r} holds data of another log ({cursor.log_id.hex()}, up to offset "
            f"{cursor.next_offset}), this one is {self._log.log_id.hex()}{empty_note}",
            can_rebuild=can_rebuild,
            details={"offset": cursor.next_offset},
        )

    def _check_not_ahead(self, epoch: int, next_offset: int, *, can_rebuild: bool) -> None:
        end = self._log.epoch_end(epoch)  # the epoch's tail from there on was lost
        end = self._log.next_offset if end is None else end
        if epoch > self._log.epoch or next_offset > end:
            raise ForeignSinkData(
                f"sink {self.name!r} is ahead: it holds epoch {epoch} up to offset {next_offset}, the log "
                f"epoch {self._log.epoch} up to {end}",
                can_rebuild=can_rebuild,
                details={"offset": next_offset, "next_offset": end},
            )


def find_head(history: Iterable[tuple[LoggedBatch, int] | None]) -> Head | None:
    """Return the head of the vector with these deltas, given in log order; None if there are none."""
    rows = [batch_and_row for batch_and_row in history if batch_and_row is not None]
    alive: bool | None = None
    for logged, row in sorted(rows, key=lambda pair: pair[0].key(pair[1])):
        alive = is_alive_after(logged.batch.kinds[row], alive)
    if alive is None:
        return None
    last_batch, last_row = rows[-1]
    return Head(last_batch.batch.dot(last_row), alive)


def read_history(log: Log, vectors: Collection[tuple[str, str]]) -> Iterator[tuple[LoggedBatch, int] | None]:
    """Yield the deltas that a log still holds of some vectors, in log order. Reads the complete log.

    If the log does not start at 0, its snapshot's rows of the vectors come first. Yields None now and then,
    so that the caller can do other work before the next delta. Raises Refused, LogCorrupted, OSError.
    """
    offset = log.start_offset
    snapshot = newest_snapshot(log) if offset else None
    if snapshot is not None:
        offset = snapshot.offset
        try:
            for namespace, vector_id in sorted(vectors):
                yield snapshot.find(namespace, vector_id)
        finally:
            snapshot.close()
    ids_by_namespace: dict[str, set[str]] = {}
    for namespace, vector_id in vectors:
        ids_by_namespace.setdefault(namespace, set()).add(vector_id)
    while batches := log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=_READ_BYTES_MAX):
        for logged in batches:
            yield from _matching_rows(logged, ids_by_namespace)
        yield None
        offset = batches[-1].next_offset


def _matching_rows(
    logged: LoggedBatch, ids_by_namespace: Mapping[str, set[str]]
) -> Iterator[tuple[LoggedBatch, int]]:
    """Yield the rows of a batch that belong to these vectors."""
    batch = logged.batch
    if batch.is_control:
        return
    if batch.namespace is not None:
        ids = ids_by_namespace.get(batch.namespace)
        if ids is not None and not ids.isdisjoint(batch.keys):
            yield from ((logged, row) for row, key in enumerate(batch.keys) if key in ids)
    elif not ids_by_namespace.keys().isdisjoint(batch.namespace_names):
        for row, (namespace, key) in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            if key in ids_by_namespace.get(namespace, ()):
                yield logged, row
