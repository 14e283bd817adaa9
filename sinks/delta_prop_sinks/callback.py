"""A sink that calls one function for each delta or delivery.

The service stores its cursor. So after a failure or restart the function may get a delta twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutinefunction, signature
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import anyio.lowlevel

from delta_prop_sinks.argument_checks import check_sink_name
from delta_prop_sinks.sink import Delivery, ResumePoint, SinkContext, SinkFailure, TryAgain
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_sinks.ports import Threads

    Call: TypeAlias = tuple[int, tuple[object, ...]]
    """The call's first offset in the log, and its arguments."""

_PARAMETERS = {"delta": ("offset", "delta"), "delivery": ("delivery",)}
"""Parameters of the function, by `per`."""
_CALLS_MAX = 100
"""Maximum number of calls prepared for the thread at a time; the event loop decodes their deltas."""
_THREAD_S_MAX = 0.02
"""How long the thread makes calls before the event loop checks for cancellation."""


@dataclass(frozen=True, slots=True)
class CallbackStatistics:
    """Counts of calls and failures. `applied_offset`: the offset up to which all deltas are applied.

    `running`: True while the thread runs a call.
    """

    calls: int
    failures: int
    applied_offset: int
    running: bool = False


class CallbackSink:
    """Calls `function` in log order, one call at a time.

    `per="delta"` calls it with (offset, Delta); `per="delivery"` with a Delivery, many rows at once.
    When it returns, its rows are applied. It may raise a `SinkFailure`; any other exception counts as
    TryAgain. After a TryAgain without a `done_offset`, the rows of earlier calls are not redelivered.

    The sink calls a plain function in its own thread, so a function that blocks delays nothing else. With
    `nonblocking=True` the event loop calls it: use this only for a function that never waits, or that uses
    objects of the loop. The event loop always calls an `async def` function.

    Nothing can stop a plain call: if a delivery takes longer than `apply_timeout_s`, the sink waits for the
    running call, and the delivery is redelivered in parts. A call that still runs when the sink is closed is
    abandoned after `close_timeout_s`, and the sink cannot be opened until it returns.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "callback",
        per: Literal["delta", "delivery"] = "delta",
        nonblocking: bool = False,
    ) -> None:
        if not callable(function):
            raise UsageError(f"function {function!r:.80} is not callable: give a function")
        if per not in _PARAMETERS:
            raise UsageError(f'per {per!r} is not "delta" or "delivery": give one of them')
        if not isinstance(nonblocking, bool):
            raise UsageError(f"nonblocking {nonblocking!r:.80} is not a bool: give True or False")
        _check_signature(function, _PARAMETERS[per])
        self.name = check_sink_name(name)
        self.per = per
        self.nonblocking = nonblocking
        self._function = function
        self._is_blocking = not (nonblocking or is_async(function))
        self._exit = AsyncExitStack()  # closes the thread
        self._thread: Threads | None = None
        self._now: Callable[[], float]  # set by open()
        self._running = False  # True while the thread runs a call
        self._calls = self._failures = self._applied_offset = 0

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Start the thread. Raises UsageError if a call that began before the last close still runs."""
        if self._running:
            raise UsageError(
                f"sink {self.name!r}: a call of its function, made before the sink was closed, still runs: "
                "wait until it returns, or attach another sink"
            )
        self._now = context.clock.now
        if self._is_blocking:
            self._thread = await self._exit.enter_async_context(context.own_thread())
        return None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Call the function for each delivery, or for each delta, in order."""
        calls = self._calls_for(deliveries)
        try:
            if self._thread is None:
                await self._run_calls(calls, None)
            else:
                while chunk := list(islice(calls, _CALLS_MAX)):
                    await self._run_calls(iter(chunk), self._thread)
        except TryAgain as failure:
            self._note_applied(deliveries, failure.done_offset or 0)
            raise
        self._note_applied(deliveries, deliveries[-1].next_offset)

    async def aclose(self) -> None:
        """End the thread. A call that still runs there is abandoned."""
        self._thread = None
        await self._exit.aclose()

    def statistics(self) -> CallbackStatistics:
        """Return a snapshot of the sink's numbers."""
        return CallbackStatistics(self._calls, self._failures, self._applied_offset, self._running)

    def _calls_for(self, deliveries: Sequence[Delivery]) -> Iterator[Call]:
        for delivery in deliveries:
            logged = delivery.logged
            if logged.batch.is_control:
                continue
            if self.per == "delivery":
                yield logged.offset, (delivery,)
                continue
            for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
                offset = logged.offset + row
                yield offset, (offset, logged.batch.delta(row, logged.source))

    async def _run_calls(self, calls: Iterator[Call], thread: Threads | None) -> None:
        """Make the calls; if one returns an awaitable, await that on the event loop."""
        while True:
            if thread is None:
                unfinished = self._run_until(calls, inf)
            else:
                await anyio.lowlevel.checkpoint_if_cancelled()
                unfinished = await thread.run(partial(self._run_in_thread, calls))
            if unfinished is None:
                return
            offset, result = unfinished
            if result is not None:
                try:
                    await result
                except Exception as failure:
                    self._raise(failure, offset)

    def _run_in_thread(self, calls: Iterator[Call]) -> tuple[int, Awaitable[object] | None] | None:
        self._running = True
        try:
            return self._run_until(calls, self._now() + _THREAD_S_MAX)
        finally:
            self._running = False

    def _run_until(self, calls: Iterator[Call], until: float) -> tuple[int, Awaitable[object] | None] | None:
        """Make calls until one returns an awaitable or the time is `until`; return None once all are made.

        Otherwise return the offset of the last call, and the awaitable if there is one.
        """
        for offset, arguments in calls:
            self._calls += 1
            try:
                result = self._function(*arguments)
            except Exception as failure:
                self._raise(failure, offset)
            if result is not None and isawaitable(result):
                return offset, result
            if until < inf and self._now() >= until:
                return offset, None
        return None

    def _raise(self, failure: Exception, offset: int) -> NoReturn:
        """Raise a `SinkFailure` for an exception of the function. Rows of earlier calls are applied."""
        self._failures += 1
        if not isinstance(failure, SinkFailure):
            raise TryAgain(f"{type(failure).__name__}: {failure}", offset) from failure
        if isinstance(failure, TryAgain) and failure.done_offset is None:
            raise TryAgain(failure.reason, offset) from failure  # the function may raise one object twice
        raise failure

    def _note_applied(self, deliveries: Sequence[Delivery], end: int) -> None:
        for delivery in deliveries:
            if not delivery.redelivered and delivery.next_offset <= end:
                self._applied_offset = max(self._applied_offset, delivery.next_offset)


def _check_signature(function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    """Check that a function accepts these arguments, as far as it has a signature. Raises UsageError."""
    try:
        declared = signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        declared.bind(*parameters)
    except TypeError as error:
        raise UsageError(
            f"function {function!r:.80} does not accept its arguments ({error}): "
            f"give a function of ({', '.join(parameters)})"
        ) from None


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call returns an awaitable, as far as is known before the call."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)
