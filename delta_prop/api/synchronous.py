"""The propagator for scripts and notebooks: the same verbs as plain calls, its loop on a thread of its own.

Every call may come from any thread; each waits within the deadline of its verb.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop.platform.loop_thread import LoopThread
from delta_prop.platform.world import waker
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from anyio.abc import TaskStatus
    from anyio.from_thread import BlockingPortal
    from numpy.typing import ArrayLike, NDArray

    from delta_prop.api.producer import Producer
    from delta_prop.api.publishing import AfterItem
    from delta_prop.api.settings import Settings
    from delta_prop.api.statistics import Statistics
    from delta_prop.calls.outcomes import Delivered
    from delta_prop.calls.receipt import PublishAck, Receipt
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.delivery.held_deltas import QuarantinedDelta
    from delta_prop.delivery.redelivery import ReplayResult
    from delta_prop.delivery.sink_manager import OnLogFull, ResetPosition
    from delta_prop.delivery.sink_opening import Start
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.recovery.recovery_result import RecoveryReport
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.delta import AckLevel, Delta, Dot
    from delta_prop_wire.spec import ErrorCode

    S = TypeVar("S", bound=Sink)

T = TypeVar("T")

logger = logging.getLogger("delta_prop")

_ALL_VISIBLE = "every sink has everything"
"""State at the exit of the interpreter if nothing is missing at any sink."""


class SyncPropagator:
    """Blocking form of `Propagator`: `with SyncPropagator() as p: p.publish(delta)`.

    `Propagator` documents each verb. If one block is too short, as for cells of a notebook, `open` and
    `close` do the same. A propagator that is still open when the interpreter exits is closed then, within
    `close_timeout_s` for each step of that.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        data: str | Path | None = None,
        log: LogSettings | None = None,
        backend: str = "asyncio",
    ) -> None:
        """Create a propagator; its log is in the directory `data`, with the settings `log`, else in memory.
        `backend`: of anyio, `asyncio` or `trio`.
        """
        self._backend = backend
        self._propagator = Propagator(settings, data=data, log=log)
        self._loop: LoopThread | None = None
        self._run: Future[None]
        self._request_end: Callable[[], object]
        self._exit_state = ""
        """At the interpreter's exit: which deltas the sinks have not received; "" before."""

    # --- opening and closing

    def open(self) -> SyncPropagator:
        """Open; return itself. `close` ends it, at the latest when the interpreter exits."""
        if self._loop is not None:
            raise UsageError("this propagator is open already: create another one")
        loop = LoopThread(self._backend)
        try:
            self._run, self._request_end = loop.portal.start_task(self._hold_open)
        except BaseException:
            loop.stop(cancel=True)
            raise
        self._loop = loop
        atexit.register(self._close_at_exit)
        return self

    def close(self) -> None:
        """Deliver to the sinks what the log holds, close them and the log; do nothing if closed. Raises what
        sinks or the log raise at that.
        """
        if self._loop is not None:
            self._require_portal()  # refuses a call that would wait for itself
            self._close()

    def __enter__(self) -> SyncPropagator:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing the propagator failed too: {failure!r}")

    @property
    def settings(self) -> Settings:
        """The settings that were given, or the defaults."""
        return self._propagator.settings

    @property
    def recovery(self) -> RecoveryReport | None:
        """Result of the log's recovery, at the last start or after a failure since."""
        return self._propagator.recovery

    @overload
    def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T: ...

    @overload
    def call(self, function: Callable[[], T]) -> T: ...

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function of no arguments on the loop's thread: a sink's `search` or `get`, for instance."""
        if not callable(function):
            raise UsageError(
                f"{function!r:.80} cannot be called: give a function, as in call(lambda: cache.get(…))"
            )
        return self._require_portal().call(_call_and_await, function)

    def attach(
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
        """Attach a sink; return it. Call its own methods through `call`."""
        attach = partial(
            self._propagator.attach,
            sink,
            topics=topics,
            name=name,
            start=start,
            required=required,
            pacing=pacing,
            on_log_full=on_log_full,
            batch_deltas=batch_deltas,
            linger_ms=linger_ms,
            rebuild=rebuild,
        )
        return self._require_portal().call(attach)

    def detach(self, name: str) -> None:
        """Detach a sink."""
        self._require_portal().call(self._propagator.detach, name)

    def forget(self, name: str) -> None:
        """Delete what is stored for a detached sink."""
        self.call(partial(self._propagator.forget, name))

    def sink(self, name: str) -> Sink:
        """Return the attached sink of that name."""
        return self.call(partial(self._propagator.sink, name))

    def restart(self, name: str) -> None:
        """Restart a stopped sink; one with an open circuit breaker is tried at once."""
        self.call(partial(self._propagator.restart, name))

    def rebuild(self, name: str) -> None:
        """Replace a sink's data from the log's newest snapshot and the deltas after it."""
        self.call(partial(self._propagator.rebuild, name))

    def pause(self, name: str) -> None:
        """Deliver nothing to a sink until `resume`."""
        self.call(partial(self._propagator.pause, name))

    def resume(self, name: str) -> None:
        """End a pause."""
        self.call(partial(self._propagator.resume, name))

    def reset(self, name: str, to: ResetPosition, *, timeout_s: float = 30.0) -> int:
        """Set the cursor of a sink to `earliest`, `latest` or an offset; return the offset."""
        return self._require_portal().call(partial(self._propagator.reset, name, to, timeout_s=timeout_s))

    def quarantine(self, sink: str) -> list[QuarantinedDelta]:
        """Return the deltas quarantined for this sink, in log order."""
        return self.call(partial(self._propagator.quarantine, sink))

    def replay(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> ReplayResult:
        """Apply quarantined deltas again (no offsets: all), and those blocked by them."""
        return self._require_portal().call(
            partial(self._propagator.replay, sink, *offsets, timeout_s=timeout_s)
        )

    def drop(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> ReplayResult:
        """Drop quarantined deltas (no offsets: all), and apply those blocked by them."""
        return self._require_portal().call(
            partial(self._propagator.drop, sink, *offsets, timeout_s=timeout_s)
        )

    def pressure(self) -> Pressure:
        """Return the current backpressure."""
        return self.call(self._propagator.pressure)

    def pressure_changes(self) -> Iterator[Pressure]:
        """Iterate over the pressure now and whenever it changes; close the iterator to end it."""
        changes = self._propagator.pressure_changes()
        return self._read(changes, changes.aclose)

    def offer(
        self, *deltas: Delta, after: Sequence[AfterItem] = (), ack_level: AckLevel | str | None = None
    ) -> Receipt:
        """Send deltas without waiting for their outcome; `call(receipt.wait)` waits for it."""
        offer = partial(self._propagator.offer, *deltas, after=after, ack_level=ack_level)
        return self.call(lambda: [offer()])[0]  # `call` would wait for a bare receipt

    def publish(
        self,
        *deltas: Delta,
        after: Sequence[AfterItem] = (),
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Publish deltas of one priority; return the acknowledgement."""
        publish = partial(
            self._propagator.publish, *deltas, after=after, ack_level=ack_level, timeout_s=timeout_s
        )
        return self._require_portal().call(publish)

    def publish_many(
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
        """Publish complete vectors, or with `indices` some of their elements, as columns."""
        publish = partial(
            self._propagator.publish_many,
            ids,
            matrix,
            indices=indices,
            namespace=namespace,
            kind=kind,
            priority=priority,
            ack_level=ack_level,
            timeout_s=timeout_s,
        )
        return self._require_portal().call(publish)

    def publish_as(self, producer: Producer, *deltas: Delta, timeout_s: float = 30.0) -> PublishAck:
        """Publish under a producer's own dots."""
        return self._require_portal().call(partial(producer.publish, *deltas, timeout_s=timeout_s))

    def producer(
        self, name: str, *, ack_level: AckLevel | str | None = None, source: Source = Source.LOCAL
    ) -> Producer:
        """Return a named handle, for `publish_as`."""
        return self.call(partial(self._propagator.producer, name, ack_level=ack_level, source=source))

    def register_transform(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        *,
        reads: str,
        nonblocking: bool = False,
    ) -> None:
        """Let deltas apply `function` to a vector; it is called in a thread of its own, or by the loop's."""
        self._propagator.register_transform(name, function, reads=reads, nonblocking=nonblocking)

    def wait_visible(
        self,
        published: PublishAck | Receipt | int,
        *,
        sinks: Iterable[str] | None = None,
        committed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until these sinks have applied a delta."""
        wait = partial(
            self._propagator.wait_visible, published, sinks=sinks, committed=committed, timeout_s=timeout_s
        )
        self._require_portal().call(wait)

    def outcome(self, dot: Dot, *, timeout_s: float | None = None) -> int | ErrorCode | None:
        """Return the offset of the delta with this dot, the code of a no-op; None if it was not appended."""
        return self._require_portal().call(partial(self._propagator.outcome, dot, timeout_s=timeout_s))

    def subscribe(
        self, *topics: str, start: Start = "latest", name: str | None = None
    ) -> Iterator[Delivered]:
        """Iterate over deltas as they come; close the iterator to end it."""
        subscription = self.call(partial(self._propagator.subscribe, *topics, start=start, name=name))
        return self._read(subscription, subscription.close)

    def head(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> Dot | None:
        """Return the dot of a vector's last delta."""
        return self.call(partial(self._propagator.head, vector_id, namespace))

    def statistics(self) -> Statistics:
        """Return a snapshot of all statistics."""
        return self.call(self._propagator.statistics)

    # --- helpers

    async def _hold_open(self, *, task_status: TaskStatus[Callable[[], object]]) -> None:
        """Hold the propagator open, in one task, until `_request_end` is called."""
        end_requested, wake = anyio.Event(), waker()
        async with self._propagator as p:
            task_status.started(lambda: wake(end_requested.set))
            await end_requested.wait()
            if self._exit_state:
                try:
                    end = p.statistics().log.next_offset
                    await p.wait_visible(end, timeout_s=self.settings.close_timeout_s / 2)
                except (Refused, TimeoutError) as failure:
                    self._exit_state = str(failure)

    def _close(self, limit_s: float | None = None) -> None:
        """Close, waiting for up to `limit_s`. Raises TimeoutError then, else what the propagator raises."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        atexit.unregister(self._close_at_exit)
        try:
            with suppress(RuntimeError):  # the loop has ended, and its tasks with it
                self._request_end()
            self._run.result(limit_s)
        finally:
            if self._run.done() or limit_s is None:  # else the loop is blocked and cannot be stopped
                loop.stop(cancel=not self._run.done())

    def _close_at_exit(self) -> None:
        """Close what the program has left open; log a warning if a sink has not received everything."""
        if self._loop is None or not self._loop.is_running:
            return
        self._exit_state, limit_s = _ALL_VISIBLE, 3 * self.settings.close_timeout_s
        try:
            self._close(limit_s)  # a third each for the sinks' deliveries, the log, and the sinks' end
        except Exception as failure:
            self._exit_state = str(failure) or f"its event loop has been blocked for {limit_s:g} s"
        if self._exit_state != _ALL_VISIBLE:
            logger.warning(
                "a SyncPropagator was left open, and closed at the program's exit: %s: close it yourself, "
                "with close() or a `with` block",
                self._exit_state,
            )

    def _read(self, items: AsyncIterator[T], close: Callable[[], Awaitable[None]]) -> Iterator[T]:
        portal = self._require_portal()
        try:
            while self._is_open(portal):
                try:
                    yield portal.call(items.__anext__)
                except StopAsyncIteration:
                    return
                except RuntimeError:
                    if self._is_open(portal):
                        raise  # else another thread has just closed it
        finally:
            if self._is_open(portal):
                portal.call(close)

    def _is_open(self, portal: BlockingPortal) -> bool:
        return self._loop is not None and self._loop.portal is portal

    def _require_portal(self) -> BlockingPortal:
        if self._loop is None:
            raise UsageError(
                "the propagator is not open: use it inside `with SyncPropagator() as p:`, or between open() "
                "and close()"
            )
        if get_ident() == self._loop.ident:
            raise UsageError(
                "a SyncPropagator was called on its own loop's thread, which would wait for itself: call it "
                "from another thread, not within `call`, `nonblocking` functions or sinks"
            )
        return self._loop.portal


async def _call_and_await(function: Callable[[], Any]) -> Any:
    """Call a function on the loop; await its result there if it is awaitable."""
    result = function()
    return await result if isawaitable(result) else result
