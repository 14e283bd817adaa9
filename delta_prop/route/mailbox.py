"""A sink's mailbox: deliveries handed over in memory, bounded in deltas and bytes.

What a full one does not take is read from the log later, so that nothing is lost with it. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_sinks.sink import Delivery


class Mailbox:
    """First in, first out; an empty one takes a delivery of any size, or that could never be pushed."""

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        self.deltas = 0
        self.bytes = 0
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[Delivery, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_at(self) -> float:
        """When the first delivery that waits came."""
        return self._waiting[0][1]

    def put(self, delivery: Delivery, now: float) -> bool:
        """Take a delivery; False where there is no room for it."""
        deltas, size = self.deltas + delivery.count, self.bytes + delivery.batch.size
        if self._waiting and (deltas > self._deltas_max or size > self._bytes_max):
            return False
        self._waiting.append((delivery, now))
        self.deltas, self.bytes = deltas, size
        return True

    def take(self, deltas_max: int) -> list[Delivery]:
        """The next deliveries, at least one, with at most so many deltas together."""
        taken: list[Delivery] = []
        deltas = 0
        while self._waiting and (not taken or deltas + self._waiting[0][0].count <= deltas_max):
            delivery, _ = self._waiting.popleft()
            taken.append(delivery)
            deltas += delivery.count
            self.bytes -= delivery.batch.size
        self.deltas -= deltas
        return taken

    def clear(self) -> None:
        """Let everything go."""
        self._waiting.clear()
        self.deltas = self.bytes = 0
