"""What one turn of the event loop gives rise to is done at its end, once: a commit, then what follows of it.

Many frames come with one call of the system. Who takes them begins a turn and ends it without awaiting
between; what each of them rings is done when the last is taken, by plain calls and not by tasks that wake up.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

logger = logging.getLogger("delta_prop")

CLOSE_S = 0.0001
"""A turn that ends so soon after the last one's calls leaves its own."""
LATER_MAX = 32
"""Calls that one turn holds; who finds no room wakes its own task, so that no turn becomes long."""


class Bell:
    """Wakes the one task that waits for it; rung while nobody waits, it is heard by the next who does.

    As an event that is made anew for each wait, without making one where nobody waits.
    """

    __slots__ = ("_event", "_rung")

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self._rung = False

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it, and has not been woken."""
        return self._event is not None and not self._rung

    def ring(self) -> None:
        """Wake it."""
        self._rung = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Return once it has been rung; others have their turn in any case."""
        if self._rung:
            await anyio.lowlevel.checkpoint()
        else:
            self._event = anyio.Event()
            try:
                await self._event.wait()
            finally:
                self._event = None
        self._rung = False


class Turn:
    """Begun with `with`, and within itself too. Nobody awaits inside.

    Where turns come close upon each other, one connection's behind another's, the calls are made once for all
    of them: a commit and calls of the system after each would cost more than they bring.
    """

    __slots__ = ("_bell", "_depth", "_later", "_left", "_not_before", "_now", "_pressed", "_runs", "_soon")

    def __init__(
        self, now: Callable[[], float], soon: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """`soon`: has a call made behind all that the event loop has to do already; None: `run` does it."""
        self._now = now
        self._soon = soon
        self._left = False  # to `soon`, which has not made the calls yet
        self._depth = 0
        self._later: deque[Callable[[], None]] = deque()
        self._not_before = -math.inf
        self._bell = Bell()
        self._runs = self._pressed = False

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth == 1 and self._later:
            if self._runs and not self._pressed and self._now() < self._not_before:
                self._leave()
            else:
                self._make_calls()
        self._depth -= 1

    async def run(self) -> None:
        """Make the calls that turns have left, until cancelled; then each makes its own."""
        self._runs = True
        try:
            while True:
                await self._bell.wait()
                self._make_left()
        finally:
            self._runs = False

    def _leave(self) -> None:
        if self._soon is None:
            self._bell.ring()
        elif not self._left:
            self._left = True
            self._soon(self._make_left)

    def _make_left(self) -> None:
        self._left = False
        self._depth += 1
        self._make_calls()
        self._depth -= 1

    def press(self) -> None:
        """Somebody waits for what this turn leads to: it is done at its end, however close turns come."""
        self._pressed = bool(self._later)

    def _make_calls(self) -> None:
        self._pressed = False
        while self._later:
            try:
                self._later.popleft()()
            except Exception:  # of one; the others have their turn all the same
                logger.exception("a call failed that was left for the end of a turn")
        self._not_before = self._now() + CLOSE_S

    def later(self, call: Callable[[], None], *, first: bool = False) -> bool:
        """Have this called when the turn ends; `first`: before what waits already.

        False where no turn has begun, or it has enough to do: it is not called then.
        """
        if not self._depth or len(self._later) >= LATER_MAX:
            return False
        if first:
            self._later.appendleft(call)
        else:
            self._later.append(call)
        return True
