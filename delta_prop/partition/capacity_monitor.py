"""Detects that the disk, the log (by its own bounds) or the queue is full, and since when.

It is polled ten times a second, so health, pressure, statistics and the program's log all report the same. A
refusal that ends within a second is ordinary backpressure, and not reported here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop.platform.dates import format_time
from delta_prop_broker.log.refusals import FULL
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import PressureLevel

if TYPE_CHECKING:
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.platform.ports import Clock
    from delta_prop_broker.log.contract import Log

FULL_S = 1.0
"""Seconds without an accepted delta before a resource is reported as full."""
KINDS = ("disk", "log", "queue")
"""Resources that can be full."""

logger = logging.getLogger("delta_prop")


@dataclass(frozen=True, slots=True)
class FullResource:
    """A full resource, for which all deltas are refused.

    `what`: one of `KINDS`. `since`: the wall time of the first refusal; `seconds`: how long ago that is.
    `reason`: the message of the refusals.
    """

    what: str
    since: str
    seconds: float
    reason: str
    retry_after_ms: int | None

    def __str__(self) -> str:
        return (
            f"the {self.what} has been full since {self.since}, for {self.seconds:.0f} s: deltas are refused"
        )


class CapacityMonitor:
    """Checks if there is capacity for new deltas. It polls, so that publishing costs nothing more."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._refusal: Refused | None = None
        self._since_s, self._since_us = 0.0, 0  # start of the shortage: monotonic, and wall time
        self._high_watermark = log.high_watermark
        self._is_reported = False

    def refresh(self) -> None:
        """Measure the free disk space, which other programs may have taken, for the next poll."""
        self._log.poll_capacity()

    def poll(self, pipeline: Pipeline) -> None:
        """Check for capacity now; a delta accepted since the last poll ends an earlier shortage."""
        refusal, high_watermark = self._shortage(pipeline), self._log.high_watermark
        if refusal is None:
            if self._is_reported:
                logger.warning("capacity is available again, after %.0f s: deltas are accepted", self._age_s)
            self._is_reported = False
        elif self._refusal is None or high_watermark > self._high_watermark:
            self._since_s, self._since_us = self._clock.now(), self._clock.wall_us()
        self._refusal, self._high_watermark = refusal, high_watermark
        full = self.full_resource()
        if full is not None and not self._is_reported:
            self._is_reported = True
            logger.warning("%s; %s", full, full.reason)

    def full_resource(self) -> FullResource | None:
        """Return the full resource; None while deltas are accepted."""
        refusal = self._refusal
        if refusal is None or self._age_s < FULL_S:
            return None
        what, since = str(refusal.details[FULL]), format_time(self._since_us)
        return FullResource(what, since, round(self._age_s, 1), refusal.message, refusal.retry_after_ms)

    def adjust_pressure(self, pressure: Pressure) -> Pressure:
        """Return the pressure raised to `stop` if a resource is full, whatever the sinks could take."""
        full = self.full_resource()
        if full is None:
            return pressure
        retry_after_ms = max(full.retry_after_ms or 0, pressure.retry_after_ms or 0)
        why = pressure.reason if pressure.level is PressureLevel.STOP else full.reason
        reason = f"{full}; {why}"
        return replace(pressure, level=PressureLevel.STOP, retry_after_ms=retry_after_ms, reason=reason)

    @property
    def _age_s(self) -> float:
        return self._clock.now() - self._since_s

    def _shortage(self, pipeline: Pipeline) -> Refused | None:
        refusal = self._log.shortage()
        # The recovered log is still being replayed, so what was full before is still reported.
        if refusal is None and pipeline.stop_refusal is not None:
            return self._refusal
        return refusal or pipeline.queue.shortage(self._clock.now())
