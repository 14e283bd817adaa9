"""Long work on the event loop, in pieces, between which others run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_sinks.ports import Clock

WORK_S = 0.004
"""So long nobody else gets a turn."""

_REST_SHARE, _REST_S_MAX = 2.0, 0.05


class Pace:
    """Tells when it is time for a rest, and rests for twice as long as was worked since the last one.

    What comes meanwhile is dealt with together afterwards; so who does long work once a call does it for ever
    more of what waits, and in all it takes a third of the time at most.
    """

    def __init__(self, clock: Clock, check: Callable[[], None] = lambda: None) -> None:
        """`check`: raises where what is worked on has changed meanwhile, after each rest."""
        self.check = check
        self._clock = clock
        self._since = clock.now()

    @property
    def is_due(self) -> bool:
        """True if a rest is due."""
        return self._clock.now() - self._since >= WORK_S

    async def give_way(self) -> None:
        """Let others have their turn, and go on: for work that grows with what it brings, and no more."""
        await anyio.lowlevel.checkpoint()
        self._since = self._clock.now()
        self.check()

    async def rest(self) -> None:
        """Let others run for twice as long."""
        await anyio.sleep(min((self._clock.now() - self._since) * _REST_SHARE, _REST_S_MAX))
        self._since = self._clock.now()
        self.check()
