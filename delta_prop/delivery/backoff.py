"""The waits of a sink whose calls fail: retries first, then probes by its circuit breaker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.delivery.breaker import Breaker, BreakerState

if TYPE_CHECKING:
    from delta_prop.delivery.breaker import RetryLimits
    from delta_prop.platform.ports import World


class Backoff:
    """One sink's breaker, with the time and the randomness that it needs."""

    def __init__(self, name: str, world: World, limits: RetryLimits) -> None:
        self.breaker = Breaker(limits)
        self._clock = world.clock
        self._rng = world.randomness.fork(f"retries of {name}")  # independent of other sinks' retries
        self._probe_event = anyio.Event()

    @property
    def is_open(self) -> bool:
        """True while no call is made until a probe."""
        return self.breaker.state is BreakerState.OPEN

    def note_failure(self) -> float:
        """Note a failed call; return the seconds until the next one."""
        return self.breaker.note_failure(self._clock.now(), self._rng.random())

    async def wait_probe(self, wait_s: float) -> None:
        """Wait until it is time for a probe, or until `probe_now`."""
        with anyio.move_on_after(wait_s):
            await self._probe_event.wait()

    def prepare_probe(self) -> None:
        """Forget earlier calls of `probe_now`, before a wait."""
        self._probe_event = anyio.Event()

    def probe_now(self) -> None:
        """End a wait for the next probe."""
        self._probe_event.set()
