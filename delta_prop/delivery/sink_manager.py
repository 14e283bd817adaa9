"""Sinks of one service: attaches, detaches and routes to them.

The pipeline hands batches to `route`; each sink's feed delivers them at the sink's own pace.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from delta_prop.calls.argument_checks import check_timeout
from delta_prop.calls.refusals import service_closing
from delta_prop.delivery.cursors import CursorStore
from delta_prop.delivery.feed import Feed
from delta_prop.delivery.held_deltas import QuarantinedDelta
from delta_prop.delivery.pacing import PacingGate
from delta_prop.delivery.quarantines import Quarantines
from delta_prop.delivery.reasons import cannot_be_rebuilt
from delta_prop.delivery.rebuild import Rebuilder, can_be_rebuilt
from delta_prop.delivery.redelivery import ForgetRequest, ReplayRequest, ReplayResult
from delta_prop.delivery.routing_table import NoRows, RouteTarget, RoutingTable, Rows
from delta_prop.delivery.sink_context import PartitionSinkContext, find_head, read_history
from delta_prop.delivery.sink_opening import OpenedSink, SinkOpening, Start
from delta_prop.delivery.sink_runtime import SinkRuntime
from delta_prop.delivery.status import FeedLimits, FeedStatistics, SavedCursor
from delta_prop.delivery.subscription import Subscription
from delta_prop.partition.partition import Partition
from delta_prop_sinks.argument_checks import check_sink_name
from delta_prop_sinks.sink import ControlRowSink, HoldsTombstones, Rebuildable, Sink, VectorHolder
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Head
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic

logger = logging.getLogger("delta_prop")

SLOW_CLOSE_S = 1.5
"""Seconds after which a close logs the sinks that it waits for."""

OnLogFull: TypeAlias = Literal["refuse", "invalidate_cursor"]
"""Policy for a required sink that keeps the log full: refuse producers, or invalidate the sink's cursor."""

ResetPosition: TypeAlias = Literal["earliest", "latest"] | int
"""Position at which a sink continues: the log start offset, the high watermark, or an offset."""


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Options of an attached sink: its topics, start, limits, and its effect on producers."""

    topics: Sequence[Topic]
    start: Start
    limits: FeedLimits
    required: bool
    pacing: bool = False
    on_log_full: OnLogFull | None = None
    rebuild: bool = False


class SinkManager:
    """The sinks by name. A detached sink's cursor and quarantine are stored until it is attached again."""

    def __init__(self, partition: Partition, cursors: CursorStore, tasks: TaskGroup) -> None:
        """Create a manager, whose sinks run in `tasks`. `cursors`: those of the service's last process."""
        log = partition.log
        self.runtimes: dict[str, SinkRuntime] = {}
        self.pacing = PacingGate(partition.settings, log)
        self.quarantines = Quarantines(partition.disk, log, partition.world)
        self._partition = partition
        self._log = log
        self._tasks = tasks
        self._is_closing = False
        self._offered_end = log.high_watermark  # sinks have been offered the batches up to there
        self._routing_table: RoutingTable[RouteTarget] = RoutingTable()
        self._targets: dict[RouteTarget, None] = {}  # an ordered set
        self.cursors = cursors
        self._start_event: anyio.Event | None = None  # of the sinks that are being attached together

    def start_tasks(self) -> None:
        """Start the tasks that do not belong to one sink; they run until cancelled."""
        self._tasks.start_soon(self.cursors.run)

    # --- attaching and detaching

    def check_name_free(self, name: object, sink: object) -> str:
        """Return the name under which a sink can be attached. Raises UsageError."""
        if isinstance(sink, type):
            raise UsageError(f"{sink.__name__} is a class: attach a sink made from it, as {sink.__name__}()")
        if not isinstance(name, str):
            raise UsageError(f"{sink!r:.80} has no name: give a sink (its contract is in delta_prop.sinks)")
        check_sink_name(name)
        for method in ("open", "apply", "aclose"):
            if not callable(getattr(sink, method, None)):
                raise UsageError(
                    f"{sink!r:.80} has no method {method}: give a sink (its contract is in delta_prop.sinks)"
                )
        for runtime in self.runtimes.values():
            if runtime.sink is sink:
                raise UsageError(
                    f"this sink is attached already, as {runtime.name!r}: detach it first, or create another "
                    "one"
                )
        if name in self.runtimes:
            raise UsageError(f"a sink named {name!r} is attached already: detach it, or give another name")
        return name

    @contextmanager
    def attach_together(self) -> Iterator[None]:
        """Start the sinks attached within the scope at its end; if it fails, start none."""
        self._start_event = start_event = anyio.Event()
        try:
            yield
            start_event.set()
        finally:
            self._start_event = None

    async def attach(self, name: str, sink: Sink, options: AttachOptions) -> Feed:
        """Open a sink and start its deliveries. Raises Refused, UsageError, QuarantineCorrupted, OSError."""
        quarantine, quarantine_writer, start_event = None, None, self._start_event
        if not isinstance(sink, Subscription):  # a subscription's name is never reused
            quarantine, quarantine_writer = await self.quarantines.open(name, options.limits)
        topics = frozenset(map(str, options.topics))
        context = PartitionSinkContext(self._partition, topics, quarantine)
        can_rebuild = can_be_rebuilt(sink, options.topics)
        saved = self.cursors.find(name) or SavedCursor(0, 0)
        opening = SinkOpening(name, sink, context, self._log, can_rebuild=can_rebuild)
        opened = await opening.open(options.start, saved, forced=options.rebuild)
        try:
            if self._is_closing:  # the service closed while the sink opened
                raise service_closing()
            if name in self.runtimes:
                raise UsageError(f"a sink named {name!r} was attached meanwhile: give this one another name")
            if opened.rebuild_reason is None:
                self._adopt_foreign_data(name, sink, opened)
        except (UsageError, Refused):
            await sink.aclose()
            raise
        feed = Feed(
            name,
            sink,
            log=self._log,
            routing_table=self._routing_table,
            world=self._partition.world,
            limits=options.limits,
            start=opened.start,
            has_own_cursor=opened.has_own_cursor,
            reported=opened.reported,
            quarantine=quarantine,
            quarantine_writer=quarantine_writer,
            listener=sink if isinstance(sink, Subscription) else self,
        )
        feed.control.lazy_progress = isinstance(sink, Subscription)
        runtime = self.runtimes[name] = SinkRuntime(self._partition, opened, context, feed, start_event)
        self._routing_table.subscribe(feed, options.topics, control_rows=isinstance(sink, ControlRowSink))
        evictable = self._is_evictable(options, can_rebuild=can_rebuild)
        if not isinstance(sink, Subscription):
            runtime.cursor = cursor = self.cursors.attach(
                feed, required=options.required, evictable=evictable
            )
            if isinstance(sink, Rebuildable) and can_rebuild:
                feed.rebuilder = Rebuilder(sink, context, self._log, self._routing_table, cursor)
                if opened.rebuild_reason is not None:
                    feed.status.rebuild.cursor_before = saved
                    feed.control.request_rebuild(opened.rebuild_reason)
        self.pacing.add(
            feed,
            pacing=options.pacing,
            required=options.required,
            evictable=evictable,
            now=self._partition.world.clock.now(),
        )
        if saved.paused:
            feed.control.pause()
        self._tasks.start_soon(runtime.run)
        return feed

    def _is_evictable(self, options: AttachOptions, *, can_rebuild: bool) -> bool:
        """True if the log invalidates this sink's cursor rather than refuse producers."""
        if options.on_log_full is None:
            storage = self._partition.storage
            return can_rebuild and storage is not None and storage.log.settings.compact
        return options.on_log_full == "invalidate_cursor"

    def rebuild(self, name: str) -> None:
        """Rebuild a sink from the newest snapshot or the complete log; a detached one once it is attached.

        Raises UsageError, Refused if there is neither: the sink continues as it was.
        """
        feed = self.feed(name) if name in self.runtimes else None
        if feed is not None and feed.rebuilder is None:
            raise UsageError(
                f"sink {name!r} cannot be rebuilt: it stores deltas, or its topics do not match complete "
                "vectors"
            )
        log_start = self._log.start_offset
        if log_start and not self._log.may_have_snapshot():
            raise cannot_be_rebuilt(name, log_start)
        if feed is None:
            self.cursors.save(name, self.cursors.require(name)._replace(rebuild_asked=True))
        else:
            feed.control.request_rebuild("an operator asked for it", is_persistent=True)

    async def detach(self, name: str) -> None:
        """Detach a sink; until that is done its name is taken, and the log retains its deltas."""
        runtime = self.require(name)
        with anyio.CancelScope(shield=True):
            await self._close(runtime, is_detached=True)

    def forget(self, name: str) -> None:
        """Delete what is stored for a detached sink; the log retains nothing for it any more."""
        if name in self.runtimes:
            raise UsageError(f"sink {name!r} is attached: detach it first")
        if self.cursors.find(name) is None and not self.quarantines.has_quarantine(name):
            raise UsageError(f"no sink named {name!r} is stored: give one of {self.cursors.detached_names}")
        self.cursors.forget(name)
        self.quarantines.forget(name)

    async def close_all(self) -> list[Exception]:
        """Close all sinks concurrently, however the service ends; return the errors."""
        self._is_closing = True
        failures: list[Exception] = []

        async def close(runtime: SinkRuntime) -> None:
            if runtime.is_closing:
                return
            try:
                await self._close(runtime)
            except Exception as failure:  # one sink's failure; the others must still close
                failures.append(failure)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as reporting:
                reporting.start_soon(self._report_slow_close)
                async with anyio.create_task_group() as closing:
                    for runtime in list(self.runtimes.values()):
                        closing.start_soon(close, runtime)
                reporting.cancel_scope.cancel()
        return failures

    async def _report_slow_close(self) -> None:
        await anyio.sleep(SLOW_CLOSE_S)
        logger.warning(
            "closing waits for sinks, for up to %g s (close_timeout_s): %s",
            self._partition.settings.close_timeout_s,
            self.format_states(list(self.runtimes)),
        )

    async def _close(self, runtime: SinkRuntime, *, is_detached: bool = False) -> None:
        """Close a sink; `is_detached`: it is being detached, so the log retains nothing for it any more."""
        name, feed = runtime.name, runtime.feed
        if runtime.is_closing:
            raise UsageError(f"sink {name!r} is being detached already: wait for its end")
        runtime.is_closing = True
        if isinstance(runtime.sink, Subscription):
            runtime.sink.end()
        try:
            await runtime.close(self._partition.settings.close_timeout_s)
        finally:
            self._routing_table.unsubscribe(feed)
            self._log.release(name)
            if runtime.cursor is not None:
                # While other sinks are being closed, the log still retains what this one needs at the next
                # start.
                saved = runtime.cursor.saved
                self.cursors.save(name, saved._replace(required=saved.required and not is_detached))
            self.pacing.remove(feed, self._partition.world.clock.now())
            try:
                if runtime.cursor is not None:
                    await self.quarantines.close(name)
            finally:
                del self.runtimes[name]
                self.cursors.detach(name)

    def _adopt_foreign_data(self, name: str, sink: Sink, opened: OpenedSink) -> None:
        """Continue above what a sink holds of an earlier log: its Lamport numbers, its vectors."""
        appender = self._partition.pipeline.appender
        if not opened.has_foreign_data and opened.lamport <= appender.lamport:
            return
        if opened.start < self._log.high_watermark:
            # Published deltas have lower Lamport numbers than the sink's data: a fold would put them first.
            raise UsageError(
                f"sink {name!r} holds deltas of an earlier log, and "
                f"{self._log.high_watermark - opened.start} were published before it: attach it first, or "
                'with start="latest" to skip those'
            )
        dimensions = sink.dimensions() if isinstance(sink, VectorHolder) else {}
        appender.vectors.note_foreign_vectors(dimensions)
        appender.lamport = max(appender.lamport, opened.lamport)

    # --- calls of the pipeline

    def route(self, logged: LoggedBatch) -> None:
        """Offer a batch to every sink whose topics match some of its rows."""
        for feed, rows in self._routing_table.plan(logged.batch):
            feed.offer(logged, rows)
        if not self.runtimes:  # nothing in this process reads rows
            logged.batch.drop_decoded_keys()

    def note_moved(self) -> None:
        """Note that the high watermark has moved: feeds without rows below it have processed up to it."""
        self._offered_end = self._log.high_watermark
        for runtime in self.runtimes.values():
            runtime.feed.note_visible()
        for target in self._targets:
            target.note_visible()

    def note_failed(self, refusal: Refused) -> None:
        """Do nothing: sinks read what is visible, which stays."""

    def note_progress(self) -> None:
        """Note that a sink has processed rows, so that those who wait for capacity retry."""
        if self.pacing.has_paced_mailboxes:
            self.pacing.note_progress(self._partition.world.clock.now())
        self._partition.note_progress()

    def note_recovered(self) -> None:
        """Note that the log was recovered in place, and may have another end."""
        for runtime in self.runtimes.values():
            runtime.feed.note_offered(self._offered_end)
            runtime.feed.note_recovered()
        for target in self._targets:
            target.note_recovered()

    # --- route targets that are not sinks, for which nothing is stored

    def add_target(self, target: RouteTarget, topics: Iterable[Topic]) -> None:
        """Offer a target every batch with rows of these topics, which replace its earlier ones."""
        self._targets[target] = None
        self._routing_table.subscribe(target, topics)

    def remove_target(self, target: RouteTarget) -> None:
        """Stop offering batches to a target."""
        self._targets.pop(target, None)
        self._routing_table.unsubscribe(target)

    def rows_for(self, target: RouteTarget, batch: Batch) -> Rows | NoRows:
        """Return the rows of a batch that match a target's topics, None for all."""
        return self._routing_table.rows_for(target, batch)

    def note_restored(self) -> None:
        """Note the vectors that sinks hold of an earlier log, after the pipeline's state was restored."""
        for runtime in self.runtimes.values():
            if runtime.opened.has_foreign_data and isinstance(runtime.sink, VectorHolder):
                self._partition.pipeline.appender.vectors.note_foreign_vectors(runtime.sink.dimensions())

    def load_head(self, namespace: str, vector_id: str) -> Head | None:
        """Return the head of a vector missing in the table of heads: from the log, else from a sink."""
        head = find_head(read_history(self._log, [(namespace, vector_id)]))
        for runtime in self.runtimes.values():
            if runtime.feed.is_rebuilding:
                continue  # its data is being rebuilt
            if head is None and isinstance(runtime.sink, VectorHolder):
                head = runtime.sink.head(namespace, vector_id)
        return head

    def forget_tombstones(self) -> None:
        """Have sinks remove the tombstones that the log's newest snapshot has no more."""
        storage = self._partition.storage
        below = 0 if storage is None else storage.log.tombstones_below
        for runtime in self.runtimes.values():
            if runtime.forgotten_below < below <= runtime.feed.committed:
                runtime.forgotten_below = below
                if isinstance(runtime.sink, HoldsTombstones):
                    runtime.feed.add_request(ForgetRequest((), below))

    def cancel_overdue_calls(self, now: float) -> None:
        """Cancel sinks' calls that exceed their time limit."""
        for runtime in self.runtimes.values():
            runtime.feed.cancel_overdue_call(now)

    # --- requests of operators

    def require(self, name: str) -> SinkRuntime:
        """Return the attached sink of that name. Raises UsageError."""
        if name not in self.runtimes:
            raise UsageError(f"no sink named {name!r} is attached: give one of {sorted(self.runtimes)}")
        return self.runtimes[name]

    def feed(self, name: str) -> Feed:
        """Return that sink's feed. Raises UsageError."""
        return self.require(name).feed

    def list_names(self) -> Iterator[str]:
        """Return the names of attached sinks other than subscriptions."""
        return (name for name, runtime in self.runtimes.items() if not isinstance(runtime.sink, Subscription))

    def statistics(self) -> dict[str, FeedStatistics]:
        """Return a snapshot of each sink."""
        return {name: runtime.feed.statistics() for name, runtime in self.runtimes.items()}

    def format_states(self, names: Sequence[str]) -> str:
        """Return the states of these sinks as text."""
        states = [self.runtimes[name].feed.statistics() for name in names if name in self.runtimes]
        return ", ".join(
            f"{feed.name!r} is {feed.state}, {feed.lag} deltas behind"
            + (f" ({' '.join(feed.reason.split()):.300})" if feed.reason else "")
            for feed in states
        )

    async def wait(self, names: Sequence[str], start: int, offset: int, *, committed: bool) -> None:
        """Wait until these sinks have processed all below `offset`. Raises Refused for a held delta."""
        for feed in [self.feed(name) for name in names]:
            await feed.wait(offset, committed=committed)
            record = feed.quarantine.first_held(start, offset)
            if record is not None:
                raise _quarantined_refusal(feed, record)

    def pause(self, name: str) -> None:
        """Deliver nothing to a sink until `resume`, also in later processes. Raises UsageError."""
        self._set_paused(name, True)

    def resume(self, name: str) -> None:
        """End a pause; a sink that has stopped continues too. Raises UsageError."""
        self._set_paused(name, False)

    def _set_paused(self, name: str, paused: bool) -> None:
        if name in self.runtimes:
            control = self.feed(name).control
            (control.pause if paused else control.resume)()
        else:
            self.cursors.save(name, self.cursors.require(name)._replace(paused=paused))

    async def reset(self, name: str, to: ResetPosition, timeout_s: float) -> int:
        """Set a cursor that is stored here; return its offset. Raises Refused, TimeoutError, UsageError."""
        check_timeout(timeout_s)
        offset = self._resolve_offset(to)
        feed = self.feed(name) if name in self.runtimes else None
        if (feed.cursor.saved if feed is not None else self.cursors.require(name)).own:
            raise UsageError(
                f"sink {name!r} stores its cursor with its data, which would not follow: rebuild it, or give "
                "it data and a name of its own"
            )
        if feed is None:
            self.cursors.save(name, self.cursors.require(name)._replace(reported=0, processed=offset))
            return offset
        request = ReplayRequest(None, drop=False, reset_to=offset)
        feed.add_request(request)
        with anyio.fail_after(timeout_s):
            await request.wait()
        return offset

    def _resolve_offset(self, position: ResetPosition) -> int:
        log = self._log
        offset = (
            {"earliest": log.start_offset, "latest": log.high_watermark}.get(position)
            if isinstance(position, str)
            else position
        )
        if type(offset) is not int or not log.start_offset <= offset <= log.high_watermark:
            raise UsageError(
                f"to={position!r:.80}: give earliest, latest or an offset from {log.start_offset} to "
                f"{log.high_watermark}"
            )
        return offset

    async def replay(
        self, name: str, offsets: Sequence[int], *, drop: bool, timeout_s: float
    ) -> ReplayResult:
        """Apply or drop quarantined deltas (none given: all). Raises Refused, TimeoutError, UsageError."""
        check_timeout(timeout_s)
        feed = self.feed(name)
        for offset in offsets:
            if not isinstance(offset, int):
                raise UsageError(f"offset {offset!r:.80}: give whole numbers, each as one argument")
            if offset not in feed.quarantine:
                raise UsageError(f"offset {offset} is not in the quarantine of sink {name!r}: give another")
            record = feed.quarantine[offset]
            if record.blocked_by != offset:
                raise UsageError(
                    f"offset {offset} was not rejected, but waits for {record.blocked_by}: give that one"
                )
            if drop and record.reason is None:
                raise UsageError(f"offset {offset} was not rejected, but waits to be replayed: replay it")
        request = ReplayRequest(frozenset(offsets) or None, drop=drop)
        feed.add_request(request)
        try:
            with anyio.fail_after(timeout_s):
                return await request.wait()
        except TimeoutError:
            raise TimeoutError(
                f"sink {name!r} has not answered within {timeout_s} s; its quarantine holds "
                f"{len(feed.quarantine)} deltas: see its state in statistics(), and retry"
            ) from None


def _quarantined_refusal(feed: Feed, record: QuarantinedDelta) -> Refused:
    head = feed.quarantine[record.blocked_by]
    blocked = "" if head is record else f"it is blocked by offset {head.offset}: "
    why = f"rejected: {head.reason}; replay or drop it" if head.reason is not None else "to be replayed"
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"sink {feed.name!r} has offset {record.offset} in its quarantine: {blocked}{why}",
        details={"sink": feed.name, "offset": record.offset},
    )
