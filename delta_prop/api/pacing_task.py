"""Task that steps the pacing of the sinks, and the pressure that results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.delivery.backpressure.controller import INTERVAL_S

if TYPE_CHECKING:
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.partition import Partition


IDLE_INTERVAL_S = 1.0
"""Seconds between two steps while there is nothing to pace, so that many idle partitions cost little."""


class PacingTask:
    """Steps the pacing of the sinks ten times a second, and wakes those that follow the pressure."""

    def __init__(self, partition: Partition, sinks: SinkManager) -> None:
        self._partition = partition
        self._sinks = sinks
        self._step_event = anyio.Event()
        self._last_end = -1  # of the log, at the last step

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await anyio.sleep(IDLE_INTERVAL_S if self._is_idle() else INTERVAL_S)
            now = self._partition.world.clock.now()
            self._sinks.cancel_overdue_calls(now)
            self._sinks.forget_tombstones()
            self._sinks.pacing.step(now, waiting=self._partition.pipeline.queue.depth > 0)
            self._partition.step()
            self._step_event.set()
            self._step_event = anyio.Event()

    def _is_idle(self) -> bool:
        """True if nothing was appended since the last call, nothing waits, and no sink is attached.

        A log in memory has no append times: its ages are as exact as the steps.
        """
        partition, last_end = self._partition, self._last_end
        self._last_end = partition.log.next_offset
        return (
            last_end == self._last_end
            and partition.storage is not None
            and not self._sinks.runtimes
            and not partition.pipeline.queue.depth
            and partition.capacity_monitor.full_resource() is None
        )

    def pressure(self) -> Pressure:
        """Return the current backpressure."""
        queue = self._partition.pipeline.queue
        return self._partition.capacity_monitor.adjust_pressure(
            self._sinks.pacing.pressure(queue.depth, queue.capacity_deltas)
        )

    async def wait_for_step(self) -> None:
        """Wait for the next step, or until no more follow."""
        await self._step_event.wait()

    def end(self) -> None:
        """Wake those that wait, since no more steps follow."""
        self._step_event.set()
