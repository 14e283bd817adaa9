"""A sink's mailbox: deliveries handed over in memory, bounded in deltas and bytes.

Deliveries beyond its bounds are read from the log later, so none is lost. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_sinks.sink import Delivery


class Mailbox:
    """A FIFO queue. If empty, it accepts a delivery of any size, so that every delivery can be pushed."""

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        self.delta_count = 0
        self.bytes = 0
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[Delivery, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_at(self) -> float:
        """The arrival time of the first delivery."""
        return self._waiting[0][1]

    def put(self, delivery: Delivery, now: float) -> bool:
        """Queue a delivery; return False if it exceeds the bounds."""
        deltas, size = self.delta_count + delivery.count, self.bytes + delivery.batch.size
        if self._waiting and (deltas > self._deltas_max or size > self._bytes_max):
            return False
        self._waiting.append((delivery, now))
        self.delta_count, self.bytes = deltas, size
        return True

    def take(self, deltas_max: int) -> list[Delivery]:
        """Remove and return the next deliveries, at least one, with up to `deltas_max` deltas together."""
        taken: list[Delivery] = []
        deltas = 0
        while self._waiting and (not taken or deltas + self._waiting[0][0].count <= deltas_max):
            delivery, _ = self._waiting.popleft()
            taken.append(delivery)
            deltas += delivery.count
            self.bytes -= delivery.batch.size
        self.delta_count -= deltas
        return taken

    def clear(self) -> None:
        """Drop all deliveries."""
        self._waiting.clear()
        self.delta_count = self.bytes = 0
