"""The line of callers that wait for room: served in order, each woken when a sink gets on.

Waiting only; whether there is room is for the chain to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.receipt import Receipt

ROOM_CODES = frozenset(
    {ErrorCode.QUEUE_FULL, ErrorCode.LOG_FULL, ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED}
)
"""Refusals that pass when something moves on."""


class Line:
    """First come, first served. A caller that is cancelled leaves the line, and nothing happened."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._bell = anyio.Event()

    @property
    def waited_for(self) -> bool:
        """Whether somebody is in line: who comes now stands behind."""
        return self._turn.locked()

    async def until_room(self, send: Callable[[], Receipt]) -> Receipt:
        """Wait for one's turn, then send until the answer is not that there is no room."""
        async with self._turn:
            while True:
                receipt = send()
                refusal = receipt.refusal()
                if refusal is None or refusal.code not in ROOM_CODES:
                    return receipt
                self._bell = anyio.Event()
                with anyio.move_on_after((refusal.retry_after_ms or 10) / 1000):
                    await self._bell.wait()

    def ring(self) -> None:
        """Something moved on: whoever is first may try again."""
        self._bell.set()
