"""What one turn of the event loop gives rise to is done at its end, once: a commit, then what follows of it.

Many frames come with one call of the system. Who takes them begins a turn and ends it without awaiting
between; what each of them rings is done when the last is taken, by plain calls and not by tasks that wake up.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

logger = logging.getLogger("delta_prop")

LATER_MAX = 32
"""Calls that one turn holds; who finds no room wakes its own task, so that no turn becomes long."""


class Turn:
    """Begun with `with`, and within itself too. Nobody awaits inside."""

    __slots__ = ("_depth", "_later")

    def __init__(self) -> None:
        self._depth = 0
        self._later: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth == 1:
            while self._later:
                try:
                    self._later.popleft()()
                except Exception:  # of one; the others have their turn all the same
                    logger.exception("a call failed that was left for the end of a turn")
        self._depth -= 1

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
