"""The propagator: the whole service inside a program. Publish within `async with Propagator() as p:`.

It owns every task and every limit; nothing outlives the `async with`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, get_args

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import ArrayLike, NDArray

from delta_prop.api.erasing import erase_vector
from delta_prop.api.internals import Internals
from delta_prop.api.lifecycle import Lifecycle
from delta_prop.api.pacing_task import PacingTask
from delta_prop.api.producer import Producer
from delta_prop.api.publishing import AfterItem, Publisher
from delta_prop.api.settings import Settings, check_data
from delta_prop.api.statistics import Statistics
from delta_prop.api.transforms import Transforms
from delta_prop.calls.argument_checks import (
    check_instance,
    check_timeout,
    is_transform,
    parse_topics,
    timeout_or_default,
)
from delta_prop.calls.receipt import PublishAck, Receipt
from delta_prop.calls.refusals import lost_with_log
from delta_prop.delivery.backpressure.pacer import Pressure
from delta_prop.delivery.cursors import CursorStore
from delta_prop.delivery.feed import Feed
from delta_prop.delivery.held_deltas import QuarantinedDelta
from delta_prop.delivery.operator_requests import DEFAULT_PLACE
from delta_prop.delivery.operator_worker import OnePartition, OperatorWorker
from delta_prop.delivery.pacing import has_changed
from delta_prop.delivery.redelivery import ReplayResult
from delta_prop.delivery.request_executor import RequestExecutor
from delta_prop.delivery.sink_manager import AttachOptions, OnLogFull, ResetPosition, SinkManager
from delta_prop.delivery.sink_opening import Start
from delta_prop.delivery.subscription import Subscription
from delta_prop.partition.core.coalesced_draft import can_share_batch, draft_from_columns
from delta_prop.partition.outcome_query import find_outcome, wait_running, wait_settled
from delta_prop.partition.partition import Partition
from delta_prop.platform.ports import World
from delta_prop.platform.world import real_world
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_sinks.argument_checks import check_sink_name, check_texts
from delta_prop_sinks.sink import Sink
from delta_prop_wire.delta import (
    DEFAULT_NAMESPACE,
    AckLevel,
    Delta,
    Dot,
    Kind,
    Priority,
    Source,
    delete,
    namespace_of,
)
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    S = TypeVar("S", bound=Sink)


class Propagator:
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
        settings = Settings() if settings is None else settings
        self.settings = check_instance("settings", settings, Settings, "delta_prop.Settings(…)")
        self._log_options = check_data(data, log)
        self._custom_world = world
        self._lifecycle = Lifecycle()
        self._transforms = Transforms()
        self._subscription_count = 0

    @property
    def recovery(self) -> RecoveryReport | None:
        """Result of the log's recovery, at the last start or after a failure since; None in memory."""
        storage = self._partition.storage if hasattr(self, "_partition") else None
        return None if storage is None else storage.recovery

    # --- opening and closing

    async def __aenter__(self) -> Propagator:
        if self._lifecycle.is_open:
            raise UsageError("this propagator is open already: create another one")
        self._partition = partition = await self._open_partition(self._custom_world or real_world())
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            cursors = await CursorStore.open(partition)
            self._sinks = SinkManager(partition, cursors, self._tasks)
            await partition.start(self._sinks, self._sinks.pacing)
            self._request_executor = self._make_request_executor()
            operator_worker = await self._start_operator_worker()
            self._publisher = Publisher(partition, self._lifecycle)
        except BaseException:
            try:
                await self._tasks.__aexit__(None, None, None)
            finally:
                await partition.abandon()
            raise
        self._pacing_task = PacingTask(partition, self._sinks)
        self._lifecycle.begin()
        partition.start_tasks(self._tasks)
        self._sinks.start_tasks()
        self._tasks.start_soon(self._publisher.accumulator.run)
        self._tasks.start_soon(self._pacing_task.run)
        if operator_worker is not None:
            self._tasks.start_soon(operator_worker.run)
        return self

    async def _open_partition(self, world: World) -> Partition:
        directory, log_settings = self._log_options
        if directory is None:
            return Partition.create_in_memory(self.settings, world)
        return await Partition.open_directory(directory, log_settings, self.settings, world)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._lifecycle.begin_close()
        try:
            failures = await self._finish()
        except BaseException as interruption:  # such as KeyboardInterrupt: no task or scope may stay open
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(type(interruption), interruption, interruption.__traceback__)
            raise
        self._lifecycle.end_close()
        self._publisher.has_ended = True
        self._pacing_task.end()
        self._tasks.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            try:
                return await self._tasks.__aexit__(kind, error, trace)
            finally:
                await self._partition.close()
        # The program's own exception is re-raised as it is; a task group would wrap it in an exception group.
        await self._tasks.__aexit__(None, None, None)
        await self._partition.close()
        if error is None and failures:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("sinks failed to close", failures)
        return None

    async def _finish(self) -> list[Exception]:
        """Commit what is appended and close the sinks; return the errors."""
        self._publisher.accumulator.send()
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

    def _make_request_executor(self) -> RequestExecutor | None:
        disk = self._partition.disk
        return None if disk is None else RequestExecutor(self._partition, self._sinks, DEFAULT_PLACE, disk)

    async def _start_operator_worker(self) -> OperatorWorker | None:
        """Create the worker for operators' requests in the directory; it carries out earlier ones first."""
        disk, executor = self._partition.disk, self._request_executor
        if disk is None or executor is None:
            return None
        worker = OperatorWorker(disk, OnePartition(executor), self._partition.world)
        await worker.begin()
        await worker.carry_out_earlier(executor)
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
        self._lifecycle.check()
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
        self._lifecycle.check()
        await self._sinks.detach(name)

    def forget(self, name: str) -> None:
        """Delete what is stored for a detached sink: cursor, quarantine, and the log's retention for it."""
        self._lifecycle.check()
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
        self._lifecycle.check()
        self._sinks.rebuild(name)

    def pause(self, name: str) -> None:
        """Deliver nothing to a sink until `resume`, also after a restart. Raises UsageError."""
        self._lifecycle.check()
        self._sinks.pause(name)

    def resume(self, name: str) -> None:
        """End a pause: the sink continues from its cursor, also one that has stopped. Raises UsageError."""
        self._lifecycle.check()
        self._sinks.resume(name)

    async def reset(self, name: str, to: ResetPosition, *, timeout_s: float = 30.0) -> int:
        """Set the cursor of a sink to `to` (`earliest`, `latest`, an offset); return the offset.

        Deltas after it are delivered, or redelivered; dropped ones are not. For sinks whose cursor is stored
        beside the log. Raises Refused, TimeoutError, UsageError.
        """
        self._lifecycle.check()
        return await self._sinks.reset(name, to, timeout_s)

    def quarantine(self, sink: str) -> list[QuarantinedDelta]:
        """Return a sink's quarantined deltas, in log order: rejected ones, and those blocked by them."""
        self._check_was_open()
        return self._sinks.feed(sink).quarantine.records()

    async def replay(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> ReplayResult:
        """Apply again the deltas rejected at these offsets (none given: all), and those blocked by them.

        Deltas rejected again stay in the quarantine. Raises Refused, TimeoutError, UsageError.
        """
        self._lifecycle.check()
        return await self._sinks.replay(sink, offsets, drop=False, timeout_s=timeout_s)

    async def drop(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> ReplayResult:
        """Drop the deltas rejected at these offsets (none: all), and apply those blocked. See `replay`."""
        self._lifecycle.check()
        return await self._sinks.replay(sink, offsets, drop=True, timeout_s=timeout_s)

    async def erase(self, vector_id: str, namespace: str | None = None, *, timeout_s: float = 60.0) -> None:
        """Delete a vector, and remove all that files of the log and of its sinks have of it.

        `namespace`: if absent, the text before the first `:` of the vector id, else `default`.
        All rows of the log that there are now are replaced by a snapshot first, which takes its time in a
        large log. Backups and other services keep what they have. With a server's jobs in the directory,
        only the server erases. Raises Refused (CONFLICT: it was written again meanwhile; PROCESSING_FAILED:
        not done in time, and why), UsageError, OSError.
        """
        self._lifecycle.check()
        check_texts(vector_id=vector_id)
        check_timeout(timeout_s)
        namespace = namespace or namespace_of(vector_id)
        deleted = Delta(vector_id, delete(), namespace)
        await erase_vector(
            self._partition,
            self._sinks,
            (namespace, vector_id),
            jobs=None if self._request_executor is None else self._request_executor.jobs,
            delete=partial(self.publish, deleted, ack_level=AckLevel.DURABLE, timeout_s=timeout_s),
            timeout_s=timeout_s,
        )

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
        self._lifecycle.check()
        self._publisher.accumulator.send()
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
        self._lifecycle.check()
        if not isinstance(dot, Dot):
            raise UsageError(f"{dot!r:.80} is not a Dot: give the dot of an acknowledgement or of a refusal")
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        return await find_outcome(self._partition.pipeline, dot, limit_s)

    # --- publishing

    def offer(
        self, *deltas: Delta, after: Sequence[AfterItem] = (), ack_level: AckLevel | str | None = None
    ) -> Receipt:
        """Send deltas into the pipeline; never waits. The receipt gets the outcome.

        All deltas of one call have one priority and one outcome. Single offers within one tick of the event
        loop go as one batch, if nothing prevents it. Raises InvalidDelta, UsageError, and Refused
        (SHUTTING_DOWN) while closing; the receipt gets any other refusal.
        """
        self._lifecycle.check()
        publisher = self._publisher
        draft = publisher.pack_call(deltas, after, ack_level)
        if draft is None:
            draft = publisher.make_draft(deltas, after, ack_level)
            if len(deltas) != 1 or after or not can_share_batch(deltas[0]):
                return publisher.send(draft)
        publisher.accumulator.offer(draft)
        return draft.receipt

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[AfterItem] = (),
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Send deltas and wait for the acknowledgement.

        While the queue or the log is full, calls of one priority wait in their order. Raises Refused; for a
        retryable cause, after `timeout_s`. A publish that raises had no effect, unless the code is
        OUTCOME_UNKNOWN. Then `timeout_s` passed while the delta was in a log that had failed; `outcome`
        returns the result of the dot in `details` once the log is recovered. If an anyio scope cancels it and
        the log has not failed, either it had no effect, or the acknowledgement is returned. A cancellation
        without a scope (`asyncio.wait_for`, `task.cancel()`) is raised even if the delta was appended and
        takes effect. Use `timeout_s`, or `offer`, whose receipt always gets the outcome.
        """
        self._lifecycle.check()
        if timeout_s is not None:
            check_timeout(timeout_s)
        publisher = self._publisher
        call = publisher.pack_call(deltas, after, ack_level)
        if call is not None:
            return await publisher.publish_call(call, timeout_s)
        if any(map(is_transform, deltas)):
            return await self._publish_transform(deltas, after, ack_level, timeout_s)
        priority = deltas[0].priority if deltas else Priority.NORMAL
        return await publisher.offer_until_done(
            lambda: publisher.make_draft(deltas, after, ack_level), priority, timeout_s
        )

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        indices: ArrayLike | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind | None = None,
        priority: Priority = Priority.NORMAL,
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Publish columns: row i of `matrix` is the vector `ids[i]`; with `indices`, which has the shape of
        `matrix`, row i holds new values for the elements `indices[i]` of that vector.

        `kind` is CREATE (default) or DENSE; with indices SPARSE (default) or SPARSE_ADD. Raises as `publish`
        does.
        """
        self._lifecycle.check()
        if timeout_s is not None:
            check_timeout(timeout_s)
        level = self._publisher.resolve_level(ack_level)
        if kind is None:
            kind = Kind.CREATE if indices is None else Kind.SPARSE
        call = draft_from_columns(
            ids, matrix, indices, namespace=namespace, kind=kind, priority=priority, ack_level=level
        )
        return await self._publisher.publish_call(call, timeout_s)

    def producer(
        self, name: str, *, ack_level: AckLevel | str | None = None, source: Source = Source.LOCAL
    ) -> Producer:
        """Return a handle with dots of its own; the former holder of the name is fenced. Raises Refused."""
        self._lifecycle.check()
        publisher = self._publisher
        return Producer(name, publisher, ack_level=publisher.resolve_level(ack_level), source=source)

    def register_transform(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        *,
        reads: str,
        nonblocking: bool = False,
    ) -> None:
        """Register `function` as `transform(name)` of a vector, which is read from the sink `reads`.

        The function is called in a thread, one call at a time; with `nonblocking`, by the event loop.
        """
        self._transforms.register(name, function, reads, nonblocking=nonblocking)

    # --- reading

    def subscribe(self, *topics: str, start: Start = "latest", name: str | None = None) -> Subscription:
        """Return an async iterator over the deltas of these topics (all, if none are named), as `Delivered`.

        It is pulled at the reader's pace: a slow one reads the log. The log retains nothing for it, so a
        reader that lags beyond the log's bounds gets Refused (CURSOR_TOO_OLD).
        """
        self._lifecycle.check()
        self._publisher.accumulator.send()
        self._subscription_count += 1
        parsed_topics = parse_topics(topics or "*")
        name = f"subscription-{self._subscription_count}" if name is None else check_sink_name(name)
        start_position: Start = self._partition.log.high_watermark if start == "latest" else start

        async def attach(subscription: Subscription) -> Feed:
            self._lifecycle.check()
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
        self._lifecycle.check()
        self._publisher.accumulator.send()
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
        return self._pacing_task.pressure()

    async def pressure_changes(self) -> AsyncGenerator[Pressure, None]:
        """Yield the pressure now, and whenever its level, its cause or its rate (by a tenth) changes."""
        self._lifecycle.check()
        last: Pressure | None = None
        while self._lifecycle.is_open:
            current = self.pressure()
            if last is None or has_changed(last, current):
                last = current
                yield current
            else:
                await self._pacing_task.wait_for_step()

    def statistics(self) -> Statistics:
        """Return a snapshot of all statistics."""
        self._check_was_open()
        self._publisher.accumulator.send()
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
        self._lifecycle.check()
        self._publisher.accumulator.send()
        return Internals(self._partition, self._sinks, self._request_executor)

    # --- internals

    def _now(self) -> float:
        return self._partition.world.clock.now()

    async def _publish_transform(
        self,
        deltas: Sequence[Delta],
        after: Sequence[AfterItem],
        ack_level: AckLevel | str | None,
        timeout_s: float | None,
    ) -> PublishAck:
        if len(deltas) != 1:
            raise UsageError("a transform reads before it writes: publish it alone")

        async def publish(resolved: Delta) -> PublishAck:
            return await self._publisher.offer_until_done(
                lambda: self._publisher.make_draft([resolved], after, ack_level), resolved.priority, timeout_s
            )

        async def catch_up(name: str) -> None:
            await self.wait_visible(self._partition.log.high_watermark, sinks=[name], timeout_s=timeout_s)

        return await self._transforms.publish(
            deltas[0],
            find_sink=self.sink,
            catch_up=catch_up,
            publish=publish,
            threads=self._partition.world.new_threads(),
        )

    def _check_was_open(self) -> None:
        """Raise UsageError unless the propagator was opened; it can be inspected even after its end."""
        if not hasattr(self, "_partition"):
            raise UsageError("the propagator is not open: use it inside `async with Propagator() as p:`")
