"""Who waits for an offset to be reached: woken in order, or all at once when nothing more will come."""

from __future__ import annotations

import heapq

import anyio


class OffsetWaiters:
    """Those that wait for one mark of one sink."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, anyio.Event]] = []
        self._waits = 0  # breaks ties: events cannot be compared

    def __len__(self) -> int:
        return len(self._heap)

    async def wait(self, offset: int) -> None:
        """Wait until the mark is at `offset`, or `wake_all`. Given up, nothing stays behind."""
        self._waits += 1
        waiter = (offset, self._waits, anyio.Event())
        heapq.heappush(self._heap, waiter)
        try:
            await waiter[2].wait()
        finally:
            if not waiter[2].is_set():
                self._heap.remove(waiter)
                heapq.heapify(self._heap)

    def wake(self, reached: int) -> None:
        """The mark is at `reached` now."""
        while self._heap and self._heap[0][0] <= reached:
            heapq.heappop(self._heap)[2].set()

    def wake_all(self) -> None:
        """It will not move any more."""
        for _, _, event in self._heap:
            event.set()
        self._heap.clear()
