"""Sinks as the demo's hard scenes need them: one that can be slowed, one that can be killed.

Both hand everything on to the real sink inside; neither changes, keeps or skips a delta.
"""

from __future__ import annotations

from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_sinks.sink import Delivery, StopSink, TryAgain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_sinks.sink import ResumePoint, Sink, SinkContext
    from delta_prop_sinks.storage import StorageSink

_MEASURED_MAX = 10_000


class Slowed:
    """A sink that can be made to take many times as long for each delivery as it took before."""

    def __init__(self, sink: Sink, now: Callable[[], float]) -> None:
        self.name = sink.name
        self._sink, self._now = sink, now
        self._took_s: list[float] = []
        self._wait_s = 0.0
        self._let_go = anyio.Event()

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """As the sink does."""
        return await self._sink.open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Wait first, so that what is late is late in its file too; then as the sink does."""
        if self._wait_s:
            with anyio.move_on_after(self._wait_s * len(deliveries)):
                await self._let_go.wait()
        started = self._now()
        await self._sink.apply(deliveries)
        if not self._wait_s and len(self._took_s) < _MEASURED_MAX:
            self._took_s.append((self._now() - started) / len(deliveries))

    async def aclose(self) -> None:
        """As the sink does."""
        await self._sink.aclose()

    def statistics(self) -> object:
        """The sink's numbers."""
        return self._sink.statistics()

    def slow_down(self, factor: int) -> float:
        """From now on each delivery takes `factor` times the usual; the usual one, in s, measured so far."""
        usual_s = median(self._took_s)
        self._wait_s = (factor - 1) * usual_s
        return usual_s

    def let_go(self) -> None:
        """Be as fast as ever, from this very moment."""
        self._let_go.set()
        self._wait_s = 0.0


class Mortal:
    """A storage sink that can be killed in the middle of a batch, and tells what it was brought.

    A process that is killed leaves its files as they lie there, and nothing of its memory. So here: first the
    sink's flushing ends, a transaction that has begun being SQLite's own affair. Then it applies part of a
    batch, in memory. Then the file and its write-ahead log are copied byte by byte, on the sink's own thread,
    where nothing else writes: that copy, never checkpointed nor closed in order, is all that a new sink gets.
    The old sink is left without a flush, and with it its vectors, which are shared with nobody. A file whose
    writer dies within a transaction is a matter of the sinks' tests: those kill processes.
    """

    def __init__(self, sink: StorageSink, leave: Callable[[], None] = lambda: None) -> None:
        self.name = sink.name
        self.resumed_at = 0
        self.in_hand = 0
        self.offsets: list[tuple[int, int]] = []  # of each delivery: its first row's, and behind its last's
        self.dead = False
        self._sink, self._leave = sink, leave
        self._rows_left: int | None = None

    async def open(self, context: SinkContext) -> ResumePoint:
        """As the sink does."""
        self._context = context
        self._flushing, self._flushed = anyio.CancelScope(), anyio.Event()
        point = await self._sink.open(context)
        self.resumed_at = point.cursor.next_offset
        return point

    async def background(self) -> None:
        """As the sink does, until it is killed."""
        try:
            with self._flushing:
                await self._sink.background()
        finally:
            self._flushed.set()

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """As the sink does. Raises StopSink where it dies."""
        whole: list[Delivery] = []
        for delivery in deliveries:
            if self._rows_left is not None:
                if delivery.count > self._rows_left:
                    await self._die([*whole, *_first(delivery, self._rows_left)])
                self._rows_left -= delivery.count
            whole.append(delivery)
        await self._sink.apply(whole)
        self._note(whole)

    async def aclose(self) -> None:
        """As the sink does; a dead one writes no more."""
        if not self.dead:
            await self._sink.aclose()
            return
        self._sink.close_s = 0
        with suppress(TryAgain):  # it says that there was more to write
            await self._sink.aclose()

    def statistics(self) -> object:
        """The sink's numbers."""
        return self._sink.statistics()

    def kill_after(self, rows: int) -> None:
        """Die when so many more rows are applied, and another one of their batch is not."""
        self._rows_left = rows

    def again(self, before: int) -> int:
        """How many rows below an offset it was brought."""
        return sum(max(0, min(end, before) - begin) for begin, end in self.offsets)

    async def _die(self, deliveries: list[Delivery]) -> None:
        self._flushing.cancel()
        await self._flushed.wait()
        if deliveries:
            await self._sink.apply(deliveries)
            self._note(deliveries)
        await self._context.threads.run(self._leave)
        self.dead = True
        raise StopSink("killed within a batch")

    def _note(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            rows = np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows
            begin, end = delivery.first_offset + int(rows[0]), delivery.first_offset + int(rows[-1]) + 1
            self.offsets.append((begin, end))
            self.in_hand = end


def _first(delivery: Delivery, count: int) -> list[Delivery]:
    """A delivery's first rows, if any."""
    rows = np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows
    return [Delivery(delivery.logged, rows[:count])] if count else []
