"""Sinks of the demo's fault scenes: one that can be slowed, one that can be killed.

Both pass all deltas to the real sink inside, and neither changes or skips one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_sinks.sink import Delivery, ResumePoint, Sink, SinkContext, StopSink, TryAgain

if TYPE_CHECKING:
    from delta_prop.demo.system import Workspace
    from delta_prop.platform.ports import Timer
    from delta_prop_sinks.storage import StorageSink

_MEASURED_MAX = 10_000


class SlowSink:
    """A sink whose deliveries can be slowed to many times their usual duration."""

    def __init__(self, sink: Sink, timer: Timer) -> None:
        self.name = sink.name
        self._sink, self._timer = sink, timer
        self._delivery_times_s: list[float] = []
        self._wait_s = 0.0
        self._released = anyio.Event()

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Open the real sink."""
        return await self._sink.open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Wait first, so that the deltas also reach the file late; then apply them to the real sink."""
        if self._wait_s:
            with anyio.move_on_after(self._wait_s * len(deliveries)):
                await self._released.wait()
        started = self._timer.now()
        await self._sink.apply(deliveries)
        if not self._wait_s and len(self._delivery_times_s) < _MEASURED_MAX:
            self._delivery_times_s.append((self._timer.now() - started) / len(deliveries))

    async def aclose(self) -> None:
        """Close the real sink."""
        await self._sink.aclose()

    def statistics(self) -> object:
        """Return the real sink's statistics."""
        return self._sink.statistics()

    def slow_down(self, factor: int) -> float:
        """Slow each delivery to `factor` times its usual duration; return the usual duration in seconds."""
        usual_s = median(self._delivery_times_s)
        self._wait_s = (factor - 1) * usual_s
        return usual_s

    def release(self) -> None:
        """End the slowdown at once."""
        self._released.set()
        self._wait_s = 0.0


class CrashingSink:
    """A storage sink that can be killed in the middle of a batch, and records the rows delivered to it.

    A killed process leaves its files as they are, and nothing of its memory. To simulate this, the sink first
    stops flushing, since SQLite itself handles a crash within a transaction. Then it applies a part of a
    batch in memory. Then the file and its write-ahead log are copied byte by byte, on the sink's own thread,
    where nothing else writes: a new sink gets only that copy, which was never checkpointed or closed. The old
    sink is abandoned without a flush, together with its vectors, which are not shared. Kills within a
    transaction are tested with real processes, in the tests of the sinks.
    """

    def __init__(self, sink: StorageSink, workspace: Workspace) -> None:
        self.name = sink.name
        self.resume_offset = 0
        self.applied_end = 0  # all rows below this offset are applied
        # For each delivery, the offset of its first row and the offset after its last row.
        self.offset_ranges: list[tuple[int, int]] = []
        self.is_dead = False
        self._sink, self._workspace = sink, workspace
        self._rows_left: int | None = None

    async def open(self, context: SinkContext) -> ResumePoint:
        """Open the real sink."""
        self._context = context
        self._flushing, self._flushed = anyio.CancelScope(), anyio.Event()
        point = await self._sink.open(context)
        self.resume_offset = point.cursor.next_offset
        return point

    async def background(self) -> None:
        """Run the real sink's background task, until it is killed."""
        try:
            with self._flushing:
                await self._sink.background()
        finally:
            self._flushed.set()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply to the real sink. Raises StopSink when this sink is killed."""
        passed: list[Delivery] = []
        for delivery in deliveries:
            if self._rows_left is not None:
                if delivery.count > self._rows_left:
                    await self._die([*passed, *_first_rows(delivery, self._rows_left)])
                self._rows_left -= delivery.count
            passed.append(delivery)
        await self._sink.apply(passed)
        self._note(passed)

    async def aclose(self) -> None:
        """Close the real sink; after a kill, it writes nothing more."""
        if not self.is_dead:
            await self._sink.aclose()
            return
        self._sink.close_s = 0
        with suppress(TryAgain):  # raised for unwritten rows
            await self._sink.aclose()

    def statistics(self) -> object:
        """Return the real sink's statistics."""
        return self._sink.statistics()

    def kill_after(self, rows: int) -> None:
        """Die after `rows` more rows are applied, within the batch of the last one."""
        self._rows_left = rows

    def count_redelivered(self, end: int) -> int:
        """Return the number of delivered rows below an offset."""
        return sum(max(0, min(range_end, end) - start) for start, range_end in self.offset_ranges)

    async def _die(self, deliveries: list[Delivery]) -> None:
        """Apply the last deliveries in memory only, copy the files, and stop. Raises StopSink."""
        self._flushing.cancel()
        await self._flushed.wait()
        if deliveries:
            await self._sink.apply(deliveries)
            self._note(deliveries)
        await self._context.threads.run(self._workspace.copy_replica)
        self.is_dead = True
        raise StopSink("killed within a batch")

    def _note(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            rows = np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows
            start, end = delivery.first_offset + int(rows[0]), delivery.first_offset + int(rows[-1]) + 1
            self.offset_ranges.append((start, end))
            self.applied_end = end


def _first_rows(delivery: Delivery, count: int) -> list[Delivery]:
    rows = np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows
    return [Delivery(delivery.logged, rows[:count])] if count else []
