"""The propagator: the whole service inside a program. Publish within `async with Propagator() as p:`.

It owns every task and every limit; nothing outlives the `async with`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, TypeVar, get_args

import anyio
import anyio.lowlevel

from delta_prop.api.internals import Internals
from delta_prop.api.publishing import PublishMixin
from delta_prop.api.record_accumulator import RecordAccumulator
from delta_prop.api.settings import Settings, check_data
from delta_prop.api.statistics import Statistics
from delta_prop.calls.argument_checks import check_instance, parse_topics, timeout_or_default
from delta_prop.calls.receipt import PublishAck, Receipt
from delta_prop.calls.refusals import lost_with_log
from delta_prop.delivery.backpressure.controller import INTERVAL_S
from delta_prop.delivery.cursors import CursorStore
from delta_prop.delivery.feed import Feed
from delta_prop.delivery.operator_worker import OperatorWorker
from delta_prop.delivery.pacing import has_changed
from delta_prop.delivery.sink_manager import AttachOptions, OnLogFull, ResetPosition, SinkManager
from delta_prop.delivery.sink_opening import Start
from delta_prop.delivery.subscription import Subscription
from delta_prop.partition.outcome_query import find_outcome, wait_running, wait_settled
from delta_prop.partition.partition import Partition
from delta_prop.platform.world import real_world, this_thread
from delta_prop_sinks.argument_checks import check_sink_name, check_texts
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Dot
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path
    from types import TracebackType

    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.delivery.feed import Feed
    from delta_prop.delivery.held_deltas import QuarantinedDelta
    from delta_prop.delivery.redelivery import ReplayResult
    from delta_prop.platform.ports import World
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.recovery.recovery_result import RecoveryReport
    from delta_prop_sinks.sink import Sink

    S = TypeVar("S", bound=Sink)

_TICK_S_MIN, _TICK_S_MAX = 0.001, 1.0
"""Bounds of the wait between two ticks."""


class Propagator(PublishMixin):
    """Accepts deltas, orders them, appends them to its log, and delivers them to every attached sink.

    *Resources*: some tasks of its own, and one per sink; a thread for each sink that requests one. All end
    with the `async with`; sinks close within `close_timeout_s`.
    *Errors*: a caller gets `Refused` with a code; a failing sink stops alone and reports its error in
    `statistics()`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        data: str | Path | None = None,
        log: LogSettings | None = None,
        world: World | None = None,
    ) -> None:
        """Create a propagator; its log is in the directory `data`, with the settings `log`, or in memory."""
        super().__init__()
        settings = Settings() if settings is None else settings
        self.settings = check_instance("settings", settings, Settings, "delta_prop.Settings(…)")
        self._data, self._log_settings = check_data(data, log)
        self._custom_world = world
        self._exit_stack = AsyncExitStack()
        self._subscription_count = 0

    @property
    def recovery(self) -> RecoveryReport | None:
        """Result of the log's recovery, at the last start or after a failure since; None in memory."""
        storage = self._partition.storage if hasattr(self, "_partition") else None
        return None if storage is None else storage.recovery

    # --- opening and closing

    async def __aenter__(self) -> Propagator:
        if self._open_on:
            raise UsageError("this propagator is open already: create another one")
        self._world = self._custom_world or real_world()
        self._partition = partition = await self._open_partition(self._world)
        await self._exit_stack.__aenter__()
        try:
            cursors = await CursorStore.open(partition)
            self._tasks = await self._exit_stack.enter_async_context(anyio.create_task_group())
            self._sinks = SinkManager(partition, cursors, self._tasks)
            await partition.start(self._sinks, self._sinks.pacing)
            self._operator_worker = await self._start_operator_worker()
            self._accumulator = RecordAccumulator(partition)
        except BaseException:
            try:
                await self._exit_stack.aclose()
            finally:
                await partition.abandon()
            raise
        self._pace_event = anyio.Event()
        self._open_on = this_thread()
        partition.start_tasks(self._tasks)
        self._sinks.start_tasks()
        self._tasks.start_soon(self._accumulator.run)
        self._tasks.start_soon(self._pace)
        if self._operator_worker is not None:
            self._tasks.start_soon(self._operator_worker.run)
        return self

    async def _open_partition(self, world: World) -> Partition:
        if self._data is None:
            return Partition.create_in_memory(self.settings, world)
        return await Partition.open_directory(self._data, self._log_settings, self.settings, world)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._open_on, self._is_closing = 0, True
        try:
            failures = await self._finish()
        except BaseException as interruption:  # such as KeyboardInterrupt: no task or scope may stay open
            self._tasks.cancel_scope.cancel()
            await self._exit_stack.__aexit__(type(interruption), interruption, interruption.__traceback__)
            raise
        self._is_closing = False
        self._pace_event.set()
        self._tasks.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            try:
                return await self._exit_stack.__aexit__(kind, error, trace)
            finally:
                await self._partition.close()
        # The program's own exception is re-raised as it is; a task group would wrap it in an exception group.
        await self._exit_stack.__aexit__(None, None, None)
        await self._partition.close()
        if error is None and failures:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("sinks failed to close", failures)
        return None

    async def _finish(self) -> list[Exception]:
        """Commit what is appended and close the sinks; return the errors."""
        self._accumulator.send()
        with anyio.CancelScope(shield=True):
            await self._partition.drain(self.settings.close_timeout_s)
        failures = await self._sinks.close_all()
        try:
            with anyio.CancelScope(shield=True):
                await self._sinks.quarantines.tidy()
                await self._sinks.cursors.write()
        except OSError as failure:  # raised at the end, so that everything else closes first
            failures.append(failure)
        return failures

    async def _start_operator_worker(self) -> OperatorWorker | None:
        """Create the worker for operators' requests in the directory; it carries out earlier ones first."""
        disk = self._partition.disk
        if disk is None:
            return None
        worker = OperatorWorker(disk, self._partition.log.log_id, self._sinks, self._world)
        await worker.begin()
        return worker

    # --- sinks

    async def attach(
        self,
        sink: S,
        *,
        topics: str | Iterable[str] = "*",
        name: str | None = None,
        start: Start = "resume",
        required: bool = True,
        pacing: bool = False,
        on_log_full: OnLogFull | None = None,
        batch_deltas: int | None = None,
        linger_ms: float | None = None,
        rebuild: bool = False,
    ) -> S:
        """Open a sink and deliver every delta of these topics to it, from its cursor on; return the sink.

        `start`: `resume` (from its own cursor, else offset 0), `earliest` (the log start offset), `latest`,
        or an offset. `required`: the log retains what this sink has not processed. From `pacing_high_mark` of
        the log's bounds on, the sink paces producers; at the bound, `on_log_full` decides: `refuse`
        producers, or `invalidate_cursor` of the sink (the default of a rebuildable sink, if the log makes
        snapshots). `pacing`: producers are always paced by this sink, within its mailbox.

        A rebuildable sink is rebuilt from a snapshot if it resumes below the log start offset, or if a
        rebuild was interrupted. With `rebuild` it is always rebuilt, whatever it holds. A rebuild replaces
        its data. Raises Refused (CURSOR_TOO_OLD, SHUTTING_DOWN), UsageError, OSError and
        QuarantineCorrupted if its quarantine cannot be read, and what the sink raises.
        """
        self._check_open()
        name = self._sinks.check_name_free(getattr(sink, "name", None) if name is None else name, sink)
        if not all(isinstance(flag, bool) for flag in (required, pacing, rebuild)):
            raise UsageError(
                f"required={required!r}, pacing={pacing!r}, rebuild={rebuild!r}: give True or False"
            )
        if on_log_full not in (None, *get_args(OnLogFull)):
            raise UsageError(f"on_log_full {on_log_full!r}: give one of {', '.join(get_args(OnLogFull))}")
        options = AttachOptions(
            topics=parse_topics(topics),
            start=start,
            limits=self.settings.feed_limits(batch_deltas, linger_ms),
            required=required,
            pacing=pacing,
            on_log_full=on_log_full,
            rebuild=rebuild,
        )
        await self._sinks.attach(name, sink, options)
        return sink

    async def detach(self, name: str) -> None:
        """Close and detach a sink; its cursor and its quarantine are stored until it is attached again."""
        self._check_open()
        await self._sinks.detach(name)

    def forget(self, name: str) -> None:
        """Delete what is stored for a detached sink: cursor, quarantine, and the log's retention for it."""
        self._check_open()
        self._sinks.forget(name)

    def restart(self, name: str) -> None:
        """Restart a stopped sink from its cursor; one with an open circuit breaker is tried at once."""
        self._check_was_open()
        self._sinks.feed(name).control.restart()

    def rebuild(self, name: str) -> None:
        """Replace a sink's data from the log's newest snapshot, or from its deltas if the log still has all.

        `statistics()` reports the progress, `wait_visible` waits for the end. Deltas in its quarantine are
        part of the new data, so it is emptied. A detached sink is rebuilt when it is attached; if the service
        ends before the rebuild begins, the next start begins it. Raises UsageError; Refused (CURSOR_TOO_OLD)
        if the log has neither a snapshot nor all its deltas: then the sink continues as before.
        """
        self._check_open()
        self._sinks.rebuild(name)

    def pause(self, name: str) -> None:
        """Deliver nothing to a sink until `resume`, also after a restart. Raises UsageError."""
        self._check_open()
        self._sinks.pause(name)

    def resume(self, name: str) -> None:
        """End a pause: the sink continues from its cursor, also one that has stopped. Raises UsageError."""
        self._check_open()
        self._sinks.resume(name)

    async def reset(self, name: str, to: ResetPosition, *, timeout_s: float = 30.0) -> int:
        """Set the cursor of a sink to `to` (`earliest`, `latest`, an offset); return the offset.

        Deltas after it are delivered, or redelivered; dropped ones are not. For sinks whose cursor is stored
        beside the log. Raises Refused, TimeoutError, UsageError.
        """
        self._check_open()
        return await self._sinks.reset(name, to, timeout_s)

    def quarantine(self, sink: str) -> list[QuarantinedDelta]:
        """Return a sink's quarantined deltas, in log order: rejected ones, and those blocked by them."""
        self._check_was_open()
        return self._sinks.feed(sink).quarantine.records()

    async def replay(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> ReplayResult:
        """Apply again the deltas rejected at these offsets (none given: all), and those blocked by them.

        Deltas rejected again stay in the quarantine. Raises Refused, TimeoutError, UsageError.
        """
        self._check_open()
        return await self._sinks.replay(sink, offsets, drop=False, timeout_s=timeout_s)

    async def drop(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> ReplayResult:
        """Drop the deltas rejected at these offsets (none: all), and apply those blocked. See `replay`."""
        self._check_open()
        return await self._sinks.replay(sink, offsets, drop=True, timeout_s=timeout_s)

    async def wait_visible(
        self,
        published: PublishAck | Receipt | int,
        *,
        sinks: Iterable[str] | None = None,
        committed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until these sinks (all, if none are named) have applied a delta: read your own write.

        `committed`: until it is durable there. A subscription counts only if it is named, since its reader
        may be the caller. While the log has failed, what is not synced waits for its recovery. Raises
        TimeoutError, which withdraws nothing; Refused if a sink stops, is detached, or has quarantined the
        delta, or (LOG_FAILED) if the log was recovered without the delta.
        """
        self._check_open()
        self._accumulator.send()
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        began_at = self._now()
        if isinstance(published, Receipt):
            published = await wait_settled(published, limit_s)
        offset = published.next_offset if isinstance(published, PublishAck) else published
        if type(offset) is not int or offset < 0:
            raise UsageError(f"{published!r:.80}: give a publish result, a receipt, or an offset")
        if not self._partition.is_durable(offset):
            try:
                with anyio.fail_after(max(began_at + limit_s - self._now(), 0)):
                    await wait_running(self._partition.pipeline)
            except TimeoutError:
                raise TimeoutError(f"the log has failed and was not recovered within {limit_s} s") from None
        if isinstance(published, PublishAck) and not self._partition.has_stored(published):
            raise lost_with_log()
        if offset > self._partition.log.next_offset:
            raise UsageError(
                f"offset {offset} is not in the log yet: give at most {self._partition.log.next_offset}"
            )
        if isinstance(sinks, str) or not isinstance(sinks, Iterable | None):
            raise UsageError(f"sinks={sinks!r}: give a list of names, like [{str(sinks)!r}]")
        names = list(self._sinks.list_names() if sinks is None else sinks)
        for name in names:
            self._sinks.require(name)
        first = published.offset if isinstance(published, PublishAck) else offset
        first = offset if first is None else first
        try:
            with anyio.fail_after(max(began_at + limit_s - self._now(), 0)):
                await self._sinks.wait(names, first, offset, committed=committed)
        except TimeoutError:
            raise TimeoutError(
                f"not everything below offset {offset} is visible within {limit_s} s: "
                f"{self._sinks.format_states(names)}"
            ) from None

    async def outcome(self, dot: Dot, *, timeout_s: float | None = None) -> int | ErrorCode | None:
        """Return the offset of the delta with this dot; None if it was not appended.

        Returns the code if the dot is a no-op: that of the refusal, DOT_REUSED if its producer left the
        counter out, OUTCOME_UNKNOWN if the log no longer holds it. A delta of `publish` and `offer` that is
        not appended has no dot; one that `producer` sends may still arrive. Waits for a recovery of the log,
        and until what it returns is durable. Raises Refused: OUTCOME_UNKNOWN after `timeout_s`, LOG_FAILED if
        the log has stopped for good.
        """
        self._check_open()
        if not isinstance(dot, Dot):
            raise UsageError(f"{dot!r:.80} is not a Dot: give the dot of an acknowledgement or of a refusal")
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        return await find_outcome(self._partition.pipeline, dot, limit_s)

    # --- reading

    def subscribe(self, *topics: str, start: Start = "latest", name: str | None = None) -> Subscription:
        """Return an async iterator over the deltas of these topics (all, if none are named), as `Delivered`.

        It is pulled at the reader's pace: a slow one reads the log. The log retains nothing for it, so a
        reader that lags beyond the log's bounds gets Refused (CURSOR_TOO_OLD).
        """
        self._check_open()
        self._accumulator.send()
        self._subscription_count += 1
        parsed_topics = parse_topics(topics or "*")
        name = f"subscription-{self._subscription_count}" if name is None else check_sink_name(name)
        start_position: Start = self._partition.log.high_watermark if start == "latest" else start

        async def attach(subscription: Subscription) -> Feed:
            self._check_open()
            # A reader sets its own pace, and gains nothing from batches that linger.
            limits = replace(self.settings.feed_limits(None, 0), apply_timeout_s=inf)
            return await self._sinks.attach(
                subscription.name,
                subscription,
                AttachOptions(topics=parsed_topics, start=start_position, limits=limits, required=False),
            )

        return Subscription(name, attach, self._sinks)

    def head(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> Dot | None:
        """Return the dot of a vector's last delta, for `expect=`; None if none is known.

        Raises Refused (LOG_FAILED) while the log has failed.
        """
        self._check_open()
        self._accumulator.send()
        self._partition.pipeline.check_running()
        check_texts(vector_id=vector_id, namespace=namespace)
        dot = self._partition.pipeline.appender.vectors.head(namespace, vector_id)
        if dot is None and self._partition.pipeline.appender.vectors.is_incomplete(namespace):
            head = self._sinks.load_head(namespace, vector_id)
            dot = None if head is None else head.dot
        return dot

    def sink(self, name: str) -> Sink:
        """Return the attached sink of that name."""
        self._check_was_open()
        return self._sinks.require(name).sink

    def pressure(self) -> Pressure:
        """Return the current backpressure: level, rate, depth, capacity, retry time, and the pacing sink."""
        self._check_was_open()
        queue = self._partition.pipeline.queue
        return self._partition.capacity_monitor.adjust_pressure(
            self._sinks.pacing.pressure(queue.depth, queue.capacity_deltas)
        )

    async def pressure_changes(self) -> AsyncGenerator[Pressure, None]:
        """Yield the pressure now, and whenever its level, its cause or its rate (by a tenth) changes."""
        self._check_open()
        last: Pressure | None = None
        while self._open_on:
            current = self.pressure()
            if last is None or has_changed(last, current):
                last = current
                yield current
            else:
                await self._pace_event.wait()

    def statistics(self) -> Statistics:
        """Return a snapshot of all statistics."""
        self._check_was_open()
        self._accumulator.send()
        pipeline, counters = self._partition.pipeline, self._partition.pipeline.appender.counters
        log, storage = self._partition.log, self._partition.storage
        return Statistics(
            accepted=counters.accepted,
            duplicates=counters.duplicates,
            noops=counters.noops,
            refused=pipeline.refused,
            concurrent_updates=pipeline.appender.vectors.concurrent_updates,
            ids=pipeline.appender.ids.statistics(),
            queue=pipeline.queue.statistics(),
            pending=pipeline.orderer.statistics(),
            log=log.statistics(),
            sinks=self._sinks.statistics(),
            pressure=self.pressure(),
            full=self._partition.capacity_monitor.full_resource(),
            memory_bytes_max=self.settings.memory_bytes_max(len(self._sinks.runtimes)),
            reopening=None if storage is None else storage.reopener.statistics(),
        )

    def internals(self) -> Internals:
        """Return the parts that a server uses, while this is open; not for programs that embed it."""
        self._check_open()
        self._accumulator.send()
        return Internals(self._partition, self._sinks, self._operator_worker)

    # --- internals

    def _check_was_open(self) -> None:
        """Raise UsageError unless the propagator was opened; it can be inspected even after its end."""
        if not hasattr(self, "_partition"):
            raise UsageError("the propagator is not open: use it inside `async with Propagator() as p:`")

    async def _pace(self) -> None:
        """Step the sinks' pacing ten times a second."""
        while True:
            await anyio.sleep(INTERVAL_S)
            now = self._now()
            self._sinks.cancel_overdue_calls(now)
            self._sinks.pacing.step(now, waiting=self._partition.pipeline.queue.depth > 0)
            self._partition.step()
            self._pace_event.set()
            self._pace_event = anyio.Event()
