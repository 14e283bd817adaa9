"""Splits long work on the event loop into pieces, so that other tasks run in between."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from delta_prop_sinks.ports import Clock

WORK_S = 0.004
"""The time that one piece of work holds the event loop."""

_REST_SHARE, _REST_S_MAX = 2.0, 0.05


class Pace:
    """Reports when a pause is due, and pauses for twice as long as the work since the last pause took.

    Requests that arrive during a pause wait, and the next call serves them together. So work that is done
    once per call is shared by them, and takes up to a third of the time in total.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now()

    def check(self) -> None:
        """Raise an error if the data being worked on have changed; called after each pause."""

    @property
    def is_due(self) -> bool:
        """True if a pause is due."""
        return self._clock.now() - self._since >= WORK_S

    async def yield_to_others(self) -> None:
        """Let other tasks run once, then continue: for work whose amount depends on its input only."""
        await anyio.lowlevel.checkpoint()
        self._since = self._clock.now()
        self.check()

    async def rest(self) -> None:
        """Pause for twice as long as the last piece of work took, up to 50 ms."""
        await anyio.sleep(min((self._clock.now() - self._since) * _REST_SHARE, _REST_S_MAX))
        self._since = self._clock.now()
        self.check()
