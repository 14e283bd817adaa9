"""Wakes the tasks of a client that wait until its state has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.calls.outcomes import PublishAck


class ChangeSignal:
    """Signal that something has changed; each waiting task checks its own condition then."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait."""
        self._event.set()

    def on_outcome(self, _outcome: PublishAck | Refused) -> None:
        """Note that calls have their outcome."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for the next change; a change since the last wait that nobody waited for counts too."""
        if self._event.is_set():
            self._event = anyio.Event()
        await self._event.wait()
