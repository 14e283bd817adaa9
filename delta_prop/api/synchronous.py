"""The propagator for scripts and notebooks: the same verbs as plain calls, its loop on a thread of its own.

Every call may come from any thread; each waits within the deadline of its verb.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from inspect import isawaitable
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import anyio
import numpy as np
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal
from numpy.typing import ArrayLike, NDArray

from delta_prop.api.producer import Producer
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.outcomes import Delivered
from delta_prop.calls.receipt import PublishAck
from delta_prop.delivery.backpressure.pacer import Pressure
from delta_prop.delivery.sink_opening import Start
from delta_prop.platform.loop_thread import LoopThread
from delta_prop.platform.world import waker
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_sinks.sink import Sink
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    S = TypeVar("S", bound=Sink)

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("delta_prop")

_ALL_VISIBLE = "every sink has everything"
"""State at the exit of the interpreter if nothing is missing at any sink."""


def _awaited(
    method: Callable[Concatenate[Propagator, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncPropagator, P], T]:
    """Return the blocking form of an asynchronous method: the same parameters, docstring and result."""

    @wraps(method)
    def call(self: SyncPropagator, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def call_and_wait() -> T:
            return await method(self._propagator, *args, **kwargs)

        return self._require_portal().call(call_and_wait)

    return call


def _called(
    method: Callable[Concatenate[Propagator, P], T],
) -> Callable[Concatenate[SyncPropagator, P], T]:
    """Return the form of a plain method that runs on the loop's thread; what it returns is not awaited."""

    @wraps(method)
    def call(self: SyncPropagator, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def call_in_list() -> list[T]:  # since the portal would await a receipt
            return [method(self._propagator, *args, **kwargs)]

        return self._require_portal().call(call_in_list)[0]

    return call


class SyncPropagator:
    """Blocking form of `Propagator`: `with SyncPropagator() as p: p.publish(delta)`.

    The verbs are those of `Propagator`, with its parameters and docstrings. `offer` does not wait, but
    `call(receipt.wait)` does. If one block is too short, as for cells of a notebook, `open` and `close` do
    the same. A propagator that is still open when the interpreter exits is closed then, within
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

    attach = _awaited(Propagator.attach)
    detach = _awaited(Propagator.detach)
    forget = _called(Propagator.forget)
    sink = _called(Propagator.sink)
    restart = _called(Propagator.restart)
    rebuild = _called(Propagator.rebuild)
    pause = _called(Propagator.pause)
    resume = _called(Propagator.resume)
    reset = _awaited(Propagator.reset)
    quarantine = _called(Propagator.quarantine)
    replay = _awaited(Propagator.replay)
    drop = _awaited(Propagator.drop)
    erase = _awaited(Propagator.erase)
    pressure = _called(Propagator.pressure)
    offer = _called(Propagator.offer)
    publish = _awaited(Propagator.publish)
    publish_many = _awaited(Propagator.publish_many)
    producer = _called(Propagator.producer)
    wait_visible = _awaited(Propagator.wait_visible)
    outcome = _awaited(Propagator.outcome)
    head = _called(Propagator.head)
    statistics = _called(Propagator.statistics)

    def publish_as(self, producer: Producer, *deltas: Delta, timeout_s: float = 30.0) -> PublishAck:
        """Publish under a producer's own dots."""
        return self._require_portal().call(partial(producer.publish, *deltas, timeout_s=timeout_s))

    def pressure_changes(self) -> Iterator[Pressure]:
        """Iterate over the pressure now and whenever it changes; close the iterator to end it."""
        changes = self._propagator.pressure_changes()
        return self._read(changes, changes.aclose)

    def subscribe(
        self, *topics: str, start: Start = "latest", name: str | None = None
    ) -> Iterator[Delivered]:
        """Iterate over deltas as they come; close the iterator to end it."""
        subscription = self.call(partial(self._propagator.subscribe, *topics, start=start, name=name))
        return self._read(subscription, subscription.close)

    def register_transform(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        *,
        reads: str,
        nonblocking: bool = False,
    ) -> None:
        """Register `function` as `transform(name)` of a vector, which is read from the sink `reads`.

        The function is called in a thread, one call at a time; with `nonblocking`, by the loop's thread.
        """
        self._propagator.register_transform(name, function, reads=reads, nonblocking=nonblocking)

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
