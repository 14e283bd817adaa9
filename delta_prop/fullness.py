"""What takes nothing more for want of room, and since when: the disk, the log by its own bounds, the queue.

Looked at ten times a second, so that whoever asks is told the same: health, pressure, statistics, the log of
the program. A refusal that passes within a second is no more than backpressure, and not told here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop.dates import shown_time
from delta_prop_broker.log.refusals import FULL
from delta_prop_wire.frames import Level

if TYPE_CHECKING:
    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.pipeline import Chain
    from delta_prop.ports import Clock
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.errors import Refused

FULL_S = 1.0
"""How long nothing has to have been taken before something is called full."""
KINDS = ("disk", "log", "queue")
"""What may be full."""

logger = logging.getLogger("delta_prop")


@dataclass(frozen=True, slots=True)
class Full:
    """What is full, so that all is refused. `since`: from when on nothing was taken, by the clock, for
    `seconds` by now; `reason`: as those are told who are refused.
    """

    what: str
    since: str
    seconds: float
    reason: str
    retry_after_ms: int | None

    def __str__(self) -> str:
        return f"the {self.what} is full since {self.since}, for {self.seconds:.0f} s: nothing is taken"


class RoomWatch:
    """Looks whether there is room for what comes. Nothing is counted where deltas are: it asks."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._refusal: Refused | None = None
        self._since_s, self._since_us = 0.0, 0
        self._visible = log.visible
        self._told = False

    def ask(self) -> None:
        """Have it found out what others have taken of the disk, for the next look."""
        self._log.look_at_room()

    def look(self, chain: Chain) -> None:
        """See whether there is room now; what was taken since the last look ends what was full before."""
        refusal, visible = self._shortage(chain), self._log.visible
        if refusal is None:
            if self._told:
                logger.warning("there is room again, after %.0f s: deltas are taken", self._age_s)
            self._told = False
        elif self._refusal is None or visible > self._visible:
            self._since_s, self._since_us = self._clock.now(), self._clock.wall_us()
        self._refusal, self._visible = refusal, visible
        full = self.full()
        if full is not None and not self._told:
            self._told = True
            logger.warning("%s; %s", full, full.reason)

    def full(self) -> Full | None:
        """The resource that is full; None while something is taken."""
        refusal = self._refusal
        if refusal is None or self._age_s < FULL_S:
            return None
        what, since = str(refusal.details[FULL]), shown_time(self._since_us)
        return Full(what, since, round(self._age_s, 1), refusal.message, refusal.retry_after_ms)

    def press(self, pressure: Pressure) -> Pressure:
        """The pressure, where something is full: nothing goes, whatever sinks could take."""
        full = self.full()
        if full is None:
            return pressure
        retry_after_ms = max(full.retry_after_ms or 0, pressure.retry_after_ms or 0)
        why = pressure.reason if pressure.level is Level.STOP else full.reason
        reason = f"{full}; {why}"
        return replace(pressure, level=Level.STOP, retry_after_ms=retry_after_ms, reason=reason)

    @property
    def _age_s(self) -> float:
        return self._clock.now() - self._since_s

    def _shortage(self, chain: Chain) -> Refused | None:
        refusal = self._log.shortage()
        if refusal is None and chain.stopped is not None:  # it was recovered, and is read back
            return self._refusal
        return refusal or chain.lanes.shortage(self._clock.now())
