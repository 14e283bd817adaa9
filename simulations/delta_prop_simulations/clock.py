"""Clocks of simulated machines: the wall clock jumps and drifts; elapsed time is that of the event loop.

The wall clock is computed from elapsed time, so nothing has to advance it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.testing.world import EPOCH_US
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections import Counter

    from delta_prop.platform.ports import Clock, Timer

_US = 1_000_000
_DRIFT_MAX = 0.5


@dataclass(frozen=True, slots=True)
class ClockFaults:
    """`drift`: seconds that the wall clock gains per second; negative if it loses. `jumps`: pairs of the
    elapsed time of a jump and its size, both in seconds; a negative size is a jump back.
    """

    drift: float = 0.0
    jumps: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not -_DRIFT_MAX <= self.drift <= _DRIFT_MAX:
            raise UsageError(f"drift {self.drift}: out of range: give -{_DRIFT_MAX} to {_DRIFT_MAX}")


class FaultyClock:
    """The clock of one machine. `timer`: the elapsed time; `event_counts`: counts the observed jumps, and
    readings during a drift.
    """

    def __init__(self, timer: Timer, faults: ClockFaults, event_counts: Counter[str]) -> None:
        self.now = timer.now
        self._faults = faults
        self._event_counts = event_counts
        self._jumps_seen = 0

    def wall_us(self) -> int:
        """Return the microseconds since 1970 that this machine's wall clock shows."""
        now = self.now()
        past_jumps = [by_s for at_s, by_s in self._faults.jumps if at_s <= now]
        self._event_counts["clock jumped"] += max(0, len(past_jumps) - self._jumps_seen)
        self._jumps_seen = len(past_jumps)
        if self._faults.drift:
            self._event_counts["clock read while it drifts"] += 1
        return EPOCH_US + round((now * (1 + self._faults.drift) + sum(past_jumps)) * _US)


if TYPE_CHECKING:

    def _conforms(clock: FaultyClock) -> Clock:
        return clock
