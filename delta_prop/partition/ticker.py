"""The task that runs queued work once the gate admits it, and refuses work whose dependencies are overdue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.platform.ports import Clock

TICK_S_MAX = 1.0
TICK_S_MIN = 0.001
"""Longest and shortest wait between two ticks."""


class Ticker:
    """Ticks a pipeline: when its next deadline is due, when the gate may admit, and when it is woken."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = anyio.Event()
        self._is_gate_timer_set = False

    def wake(self) -> None:
        """Tick now."""
        self._event.set()

    def wake_queue(self) -> None:
        """Tick now for work that waits at the gate, unless the timer for it is set already."""
        if not self._is_gate_timer_set:
            self._event.set()

    async def run(self, pipeline: Pipeline) -> None:
        """Tick until cancelled."""
        while True:
            self._event = anyio.Event()
            now = self._clock.now()
            deadline, gate_s = pipeline.tick(now), pipeline.gate_wait_s(now)
            wait_s = TICK_S_MAX if deadline is None else min(max(deadline - now, 0), TICK_S_MAX)
            self._is_gate_timer_set = gate_s is not None
            with anyio.move_on_after(max(wait_s if gate_s is None else min(wait_s, gate_s), TICK_S_MIN)):
                await self._event.wait()
