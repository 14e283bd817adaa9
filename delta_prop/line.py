"""The line of callers that wait for room: one a priority, served in order, woken when a sink gets on.

Waiting only; whether there is room is for the chain to say. Pending is not waited for here: the very
delta that would empty it must not stand behind those that fill it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop_wire.delta import Priority
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.receipt import Receipt
    from delta_prop_wire.errors import Refused

ROOM_CODES = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.LOG_FULL})
"""Refusals that pass when a sink gets on."""

YIELDS_MAX = 8
"""How often in a row a caller lets more urgent ones go first, so that it is never starved."""


def waits(refusal: Refused | None) -> bool:
    """Whether a caller waits such a refusal out in the line: for room, or for a failed log to come back."""
    if refusal is None:
        return False
    again = refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is not None
    return again or refusal.code in ROOM_CODES


class Line:
    """First come, first served within a priority. Who is cancelled leaves, and nothing happened."""

    def __init__(self) -> None:
        self._inside = 0
        self._turns = tuple(anyio.Lock() for _ in Priority)
        self._bell = anyio.Event()

    def waited_for(self, priority: Priority) -> bool:
        """Whether somebody as urgent is in line: who comes now stands behind."""
        return self._inside > 0 and any(turn.locked() for turn in self._turns[: priority + 1])

    async def until_room(self, send: Callable[[], Receipt], priority: Priority) -> Receipt:
        """Wait for one's turn, then send until the answer is not that there is no room."""
        self._inside += 1
        try:
            async with self._turns[priority]:
                return await self._until_room(send, priority)
        finally:
            self._inside -= 1

    async def _until_room(self, send: Callable[[], Receipt], priority: Priority) -> Receipt:
        yielded = 0
        while True:
            wait_s = 0.01
            if yielded < YIELDS_MAX and priority and self.waited_for(Priority(priority - 1)):
                yielded += 1
            else:
                yielded = 0
                receipt = send()
                refusal = receipt.refusal()
                if refusal is None or not waits(refusal):
                    return receipt
                wait_s = (refusal.retry_after_ms or 10) / 1000
            if self._bell.is_set():
                self._bell = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._bell.wait()

    def ring(self) -> None:
        """Something moved on: whoever is first may try again."""
        if self._inside:
            self._bell.set()
