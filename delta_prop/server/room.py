"""Room for large frames on their way in, over all connections: who finds none waits, in turn, unread."""

from __future__ import annotations

from collections import deque

import anyio

FREE_BYTES = 64 * 1024
"""Frames up to this size need no room of their own: the receive buffer of each connection has it."""


class Room:
    """So many bytes, lent and given back."""

    def __init__(self, bytes_max: int) -> None:
        self.left = bytes_max
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    async def take(self, size: int) -> None:
        """Wait for so many bytes, behind those who wait already. The largest frame finds room once all is
        given back. Cancelled: nothing was taken.
        """
        if not self._waiting and size <= self.left:
            self.left -= size
            return
        turn = (size, anyio.Event())
        self._waiting.append(turn)
        try:
            await turn[1].wait()
        except anyio.get_cancelled_exc_class():
            if turn[1].is_set():
                self.give_back(size)
            else:
                self._waiting.remove(turn)
                self._let_in()
            raise

    def give_back(self, size: int) -> None:
        """What was taken is free again."""
        self.left += size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.left:
            size, turn = self._waiting.popleft()
            self.left -= size
            turn.set()
