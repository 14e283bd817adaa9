"""Waiters for an offset: woken in order, or all at once when no progress is left to wait for."""

from __future__ import annotations

import heapq

import anyio


class OffsetWaiters:
    """Waiters for one progress mark of one sink."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, anyio.Event]] = []
        self._wait_count = 0  # breaks ties: events cannot be compared

    def __len__(self) -> int:
        return len(self._heap)

    async def wait(self, offset: int) -> None:
        """Wait until the mark is at `offset`, or until `wake_all` is called. A cancelled wait is removed."""
        self._wait_count += 1
        event = anyio.Event()
        waiter = (offset, self._wait_count, event)
        heapq.heappush(self._heap, waiter)
        try:
            await event.wait()
        finally:
            if not event.is_set():
                self._heap.remove(waiter)
                heapq.heapify(self._heap)

    def wake(self, reached: int) -> None:
        """Wake the waiters up to `reached`, the mark's new offset."""
        while self._heap and self._heap[0][0] <= reached:
            heapq.heappop(self._heap)[2].set()

    def wake_all(self) -> None:
        """Wake all waiters: the mark will not advance any more."""
        for _, _, event in self._heap:
            event.set()
        self._heap.clear()
