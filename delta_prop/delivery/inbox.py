"""What waits for one sink: the deliveries in its mailbox, or the rows of the log that it has not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import anyio
import anyio.lowlevel
import numpy as np
from numpy import intp
from numpy.typing import NDArray

from delta_prop.delivery.routing_table import NoRows, RouteTarget, RoutingTable
from delta_prop.delivery.status import FeedLimits
from delta_prop.platform.ports import Clock
from delta_prop_broker.log.contract import Log
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.batch import LoggedBatch


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


READ_BYTES_MAX = 4 * 1024 * 1024
READ_ROWS_MAX = 1_000
"""Maximum number of rows of one read; so many batches of one delta take about 20 ms to read from disk."""


class Inbox:
    """The rows that were handed over to a feed and not applied. All rows below `end` were handed over."""

    def __init__(self, log: Log, clock: Clock, limits: FeedLimits, start: int) -> None:
        self.mailbox = Mailbox(limits.mailbox_deltas_max, limits.mailbox_bytes_max)
        self.end = start
        self.is_catching_up = start < log.high_watermark
        """True while the log is read from `end` on, and nothing is pushed."""
        self.in_call = 0  # rows taken and not applied
        self.in_call_end = 0  # end offset of the running call
        self._log = log
        self._clock = clock
        self._limits = limits
        self._wake_event: anyio.Event | None = None
        self._wake_at_deltas = 0  # number of deltas in the mailbox at which the loop wakes

    def push(self, logged: LoggedBatch, rows: NDArray[intp] | None) -> bool:
        """Put a batch into the mailbox; return False if it is full."""
        mailbox = self.mailbox
        if not mailbox.put(Delivery(logged, rows), self._clock.now()):
            return False
        self.end = logged.next_offset
        if self._wake_event is not None and mailbox.delta_count >= self._wake_at_deltas:
            self._wake_event.set()
        return True

    def close(self) -> None:
        """Drop what was pushed: it is read from the log, should the feed continue."""
        self.mailbox.clear()
        self.is_catching_up = True

    def truncate(self, end: int) -> None:
        """Drop what was pushed, since the log has lost rows: what follows `end` is read from it."""
        self.mailbox.clear()
        self.end = end

    def reread(self, applied: int) -> None:
        """Drop the deltas that were handed over and not applied; they are read from the log again."""
        self.mailbox.clear()
        self.in_call = 0
        self.end = applied
        self.is_catching_up = self.end < self._log.high_watermark

    async def read(
        self, target: RouteTarget, table: RoutingTable[RouteTarget], rows_max: int
    ) -> list[Delivery] | None:
        """Read the next rows of the log; at its end, switch back to pushes. Raises Refused.

        Returns None if the log was recovered meanwhile, and lost rows. A large read is done in parts, between
        which other tasks run; a feed that is catching up is not idle.
        """
        deliveries: list[Delivery] = []
        rows_left, bytes_left = rows_max, READ_BYTES_MAX
        while True:
            batches = self._log.read(self.end, rows_max=min(rows_left, READ_ROWS_MAX), bytes_max=bytes_left)
            deliveries += make_deliveries(batches, target, table, self.end)
            end = self.end = batches[-1].next_offset if batches else self.end
            rows_left -= sum(logged.count for logged in batches)
            bytes_left -= sum(logged.batch.size for logged in batches)
            if end >= self._log.high_watermark or rows_left <= 0 or bytes_left <= 0:
                break
            await anyio.lowlevel.checkpoint()
            if self.end != end:
                return None
        # No await may separate this comparison from the flag: the next appended batch must be pushed.
        self.is_catching_up = self.end < self._log.high_watermark
        return deliveries

    async def linger(self) -> None:
        """Wait for a full batch, up to `linger_ms` from the arrival of the first delta."""
        limits, mailbox = self._limits, self.mailbox
        while mailbox and mailbox.delta_count < limits.batch_deltas and not self.is_catching_up:
            left_s = mailbox.oldest_at + limits.linger_ms / 1000 - self._clock.now()
            if left_s <= 0:
                return
            await self.wait(left_s, limits.batch_deltas)

    async def wait(self, timeout_s: float | None = None, wake_at_deltas: int = 0) -> None:
        """Wait for so many deltas in the mailbox, or for `notify`, or for the end of the time."""
        self._wake_event, self._wake_at_deltas = anyio.Event(), wake_at_deltas
        try:
            if timeout_s is None:
                await self._wake_event.wait()
            else:
                with anyio.move_on_after(timeout_s):
                    await self._wake_event.wait()
        finally:
            self._wake_event = None

    def notify(self) -> None:
        """Wake the loop: something other than a delivery needs it."""
        if self._wake_event is not None:
            self._wake_event.set()


def make_deliveries(
    batches: Iterable[LoggedBatch], feed: RouteTarget, table: RoutingTable[RouteTarget], start: int
) -> Iterator[Delivery]:
    """Yield deliveries with the rows that a feed's sink subscribes to, from offset `start` on."""
    for logged in batches:
        rows = table.rows_for(feed, logged.batch)
        if isinstance(rows, NoRows):
            continue
        if logged.offset < start:  # the feed resumes inside this batch
            chosen = np.arange(logged.count) if rows is None else rows
            rows = chosen[chosen >= start - logged.offset]
            if not len(rows):
                continue
        yield Delivery(logged, rows)
