"""A budget for the large frames that all connections receive: frames beyond it wait unread, in order."""

from __future__ import annotations

from collections import deque

import anyio

UNBUDGETED_BYTES = 64 * 1024
"""Frames up to this size need no budget: each connection's receive buffer can hold them."""


class ReceiveBudget:
    """Bytes that connections acquire and release."""

    def __init__(self, bytes_max: int) -> None:
        self.free_bytes = bytes_max
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    async def acquire(self, size: int) -> None:
        """Acquire `size` bytes, after earlier waiters.

        The budget is at least the largest frame, so every waiter gets its turn. If cancelled, nothing is
        acquired.
        """
        if not self._waiting and size <= self.free_bytes:
            self.free_bytes -= size
            return
        admitted = anyio.Event()
        waiter = (size, admitted)
        self._waiting.append(waiter)
        try:
            await admitted.wait()
        except anyio.get_cancelled_exc_class():
            if admitted.is_set():
                self.release(size)
            else:
                self._waiting.remove(waiter)
                self._admit()
            raise

    def release(self, size: int) -> None:
        """Release acquired bytes."""
        self.free_bytes += size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free_bytes:
            size, admitted = self._waiting.popleft()
            self.free_bytes -= size
            admitted.set()
