"""What waits for one sink: the deliveries in its mailbox, or the rows of the log that it has not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.delivery.mailbox import Mailbox
from delta_prop.delivery.reading import make_deliveries
from delta_prop_sinks.sink import Delivery

if TYPE_CHECKING:
    from numpy import intp
    from numpy.typing import NDArray

    from delta_prop.delivery.routing_table import RouteTarget, RoutingTable
    from delta_prop.delivery.status import FeedLimits
    from delta_prop.platform.ports import Clock
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch

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

    # --- pushes

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

    # --- reads of the log

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

    # --- waiting

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
