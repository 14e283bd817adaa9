"""Callbacks at the end of an event loop tick, for work that many inputs of the tick share, such as a commit.

Many frames come with one system call. The code that handles them enters a tick and leaves it without awaiting
in between; the work that they cause runs once, after the last of them, by plain calls and not by woken tasks.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from types import TracebackType

import anyio
import anyio.lowlevel

logger = logging.getLogger("delta_prop")

DEFER_WINDOW_S = 0.0001
"""Seconds after a tick's calls within which the next tick defers its own."""
CALLS_MAX = 32
"""Maximum calls of one tick; a rejected caller wakes its own task, so that no tick becomes long."""


class Wakeup:
    """Wakes the one task that waits for it; a notification without a waiter ends the next wait at once.

    It works like an event that is renewed for each wait, but is created only if a task waits.
    """

    __slots__ = ("_event", "_is_notified")

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self._is_notified = False

    @property
    def has_waiter(self) -> bool:
        """True if a task waits for it, and has not been woken."""
        return self._event is not None and not self._is_notified

    def notify(self) -> None:
        """Wake the task."""
        self._is_notified = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Return once it has been notified; yields to other tasks in any case."""
        if self._is_notified:
            await anyio.lowlevel.checkpoint()
        else:
            self._event = anyio.Event()
            try:
                await self._event.wait()
            finally:
                self._event = None
        self._is_notified = False


class TickCallbacks:
    """A tick, which callers enter by `with`, nested or not; they await nothing inside.

    If ticks follow closely, of one connection after another, the calls are made once for all of them: a
    commit and system calls after each would cost more than they gain.
    """

    __slots__ = (
        "_call_soon",
        "_calls",
        "_depth",
        "_flush_requested",
        "_is_deferred",
        "_is_running",
        "_not_before",
        "_now",
        "_wakeup",
    )

    def __init__(
        self, now: Callable[[], float], call_soon: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """Create it; `call_soon` schedules a call at the end of the loop's tick; if None, `run` makes it."""
        self._now = now
        self._call_soon = call_soon
        self._is_deferred = False  # True while `call_soon` has yet to make the calls
        self._depth = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._not_before = -math.inf
        self._wakeup = Wakeup()
        self._is_running = self._flush_requested = False

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth == 1 and self._calls:
            if self._is_running and not self._flush_requested and self._now() < self._not_before:
                self._defer()
            else:
                self._run_calls()
        self._depth -= 1

    async def run(self) -> None:
        """Make the calls that ticks have deferred, until cancelled; then each tick makes its own."""
        self._is_running = True
        try:
            while True:
                await self._wakeup.wait()
                self._run_deferred()
        finally:
            self._is_running = False

    def _defer(self) -> None:
        if self._call_soon is None:
            self._wakeup.notify()
        elif not self._is_deferred:
            self._is_deferred = True
            self._call_soon(self._run_deferred)

    def _run_deferred(self) -> None:
        self._is_deferred = False
        self._depth += 1
        self._run_calls()
        self._depth -= 1

    def flush_now(self) -> None:
        """Do not defer this tick's calls: a caller waits for their result."""
        self._flush_requested = bool(self._calls)

    def _run_calls(self) -> None:
        self._flush_requested = False
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:  # one call's failure; the others are made all the same
                logger.exception("a callback at the end of a tick failed")
        self._not_before = self._now() + DEFER_WINDOW_S

    def call_at_end(self, call: Callable[[], None], *, first: bool = False) -> bool:
        """Schedule a call for the end of the tick; `first`: before those scheduled already.

        Return False if no tick is entered, or it has too many calls; then `call` is not called.
        """
        if not self._depth or len(self._calls) >= CALLS_MAX:
            return False
        if first:
            self._calls.appendleft(call)
        else:
            self._calls.append(call)
        return True
