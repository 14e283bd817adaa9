"""A sink made of one function: for users whose target is a call away.

It keeps no cursor; the broker does. So after a failure or restart the function may see a delta again.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutinefunction, signature
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import anyio.lowlevel

from delta_prop_sinks.bounds import check_sink_name
from delta_prop_sinks.sink import SinkFailure, TryAgain
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from delta_prop_sinks.ports import Threads
    from delta_prop_sinks.sink import Delivery, ResumePoint, SinkContext

    Call: TypeAlias = tuple[int, tuple[object, ...]]
    """Where it begins in the log, and its arguments."""

_GIVEN = {"delta": ("offset", "delta"), "delivery": ("delivery",)}
"""Arguments of the function, by `per`."""
_CALLS_MAX = 100
"""Calls that are got ready for the thread at a time; deltas are decoded by the event loop."""
_ASIDE_S_MAX = 0.02
"""How long the thread makes calls one behind the other before it looks whether they were broken off."""


@dataclass(frozen=True, slots=True)
class CallbackStatistics:
    """How often the function was called, how far it is, and whether a call of it runs in the thread."""

    calls: int
    failures: int
    applied_offset: int
    running: bool = False


class CallbackSink:
    """Calls `function` in log order, one call at a time.

    `per="delta"` calls it with (offset, Delta); `per="delivery"` with a Delivery, many rows at once.
    Returning means applied. It may raise the contract's failures; any other exception is a TryAgain. What was
    applied before a TryAgain that names no `done_offset` does not come again.

    A plain function is called in a thread of the sink's own, so one that blocks delays nobody else. With
    `nonblocking=True` it is called by the event loop: for one that never waits, or that uses what belongs to
    the loop. An `async def` function always is. Nothing ends a plain call from outside: where a delivery
    takes longer than `apply_s_max` the call that runs is waited for, and the delivery comes again, in parts;
    a call that runs on when the sink is closed is left alone after `close_timeout_s`, and the sink cannot be
    opened again until it returns.
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
            raise UsageError(f"{function!r:.80} cannot be called: give a function")
        if per not in _GIVEN:
            raise UsageError(f'per {per!r} is not "delta" or "delivery"')
        if not isinstance(nonblocking, bool):
            raise UsageError(f"nonblocking={nonblocking!r:.80}: give True or False")
        _check_takes(function, _GIVEN[per])
        self.name = check_sink_name(name)
        self.per = per
        self.nonblocking = nonblocking
        self._function = function
        self._blocks = not (nonblocking or is_async(function))
        self._exit = AsyncExitStack()  # of the thread
        self._thread: Threads | None = None
        self._now: Callable[[], float]  # once it is open
        self._running = False  # a call, on the thread
        self._calls = self._failures = self._applied = 0

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Start the thread; the broker keeps the cursor. Raises UsageError while an earlier call runs."""
        if self._running:
            raise UsageError(
                f"sink {self.name!r}: a call of its function runs since before it was closed: wait "
                "for it, or attach another sink"
            )
        self._now = context.clock.now
        if self._blocks:
            self._thread = await self._exit.enter_async_context(context.own_thread())
        return None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Call the function for every delivery, or every delta of it, in order."""
        calls = self._calls_for(deliveries)
        try:
            if self._thread is None:
                await self._make(calls, None)
            else:
                while some := list(islice(calls, _CALLS_MAX)):
                    await self._make(iter(some), self._thread)
        except TryAgain as failure:
            self._note_applied(deliveries, failure.done_offset or 0)
            raise
        self._note_applied(deliveries, deliveries[-1].next_offset)

    async def aclose(self) -> None:
        """End the thread. A call that still runs there is waited for no more."""
        self._thread = None
        await self._exit.aclose()

    def statistics(self) -> CallbackStatistics:
        """A snapshot of the sink's numbers."""
        return CallbackStatistics(self._calls, self._failures, self._applied, self._running)

    # --- within

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

    async def _make(self, calls: Iterator[Call], thread: Threads | None) -> None:
        """Make these calls; what one gives to be awaited is awaited by the event loop."""
        while True:
            if thread is None:
                waiting = self._work(calls, inf)
            else:
                await anyio.lowlevel.checkpoint_if_cancelled()
                waiting = await thread.run(partial(self._work_aside, calls))
            if waiting is None:
                return
            offset, answer = waiting
            if answer is not None:
                try:
                    await answer
                except Exception as failure:
                    self._raise(failure, offset)

    def _work_aside(self, calls: Iterator[Call]) -> tuple[int, Awaitable[object] | None] | None:
        self._running = True
        try:
            return self._work(calls, self._now() + _ASIDE_S_MAX)
        finally:
            self._running = False

    def _work(self, calls: Iterator[Call], until: float) -> tuple[int, Awaitable[object] | None] | None:
        """Make calls until one gives something to be awaited, or time is up; None: all are made."""
        for offset, arguments in calls:
            self._calls += 1
            try:
                answer = self._function(*arguments)
            except Exception as failure:
                self._raise(failure, offset)
            if answer is not None and isawaitable(answer):
                return offset, answer
            if until < inf and self._now() >= until:
                return offset, None
        return None

    def _raise(self, failure: Exception, offset: int) -> NoReturn:
        """Raise what the contract says instead. What was called before has returned, so it is applied."""
        self._failures += 1
        if not isinstance(failure, SinkFailure):
            raise TryAgain(f"{type(failure).__name__}: {failure}", offset) from failure
        if isinstance(failure, TryAgain) and failure.done_offset is None:
            raise TryAgain(failure.reason, offset) from failure  # the same one may be raised again elsewhere
        raise failure

    def _note_applied(self, deliveries: Sequence[Delivery], below: int) -> None:
        for delivery in deliveries:
            if not delivery.late and delivery.next_offset <= below:
                self._applied = max(self._applied, delivery.next_offset)


def _check_takes(function: Callable[..., Any], given: tuple[str, ...]) -> None:
    """Check that a function can be called with these, as far as it tells. Raises UsageError."""
    try:
        takes = signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        takes.bind(*given)
    except TypeError as error:
        raise UsageError(
            f"{function!r:.80} cannot take what it gets, {error}: give a function of ({', '.join(given)})"
        ) from None


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call gives what is to be awaited, as far as can be told before the call."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)
