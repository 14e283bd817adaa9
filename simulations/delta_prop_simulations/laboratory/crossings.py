"""How long deltas take from the service that they enter to each of the others.

Known by the last row of each batch, which forwarding leaves whole; what is seen everywhere is forgotten.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio

from delta_prop_simulations.laboratory.measures import Histogram
from delta_prop_simulations.laboratory.sinks import SOON_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_simulations.laboratory.measures import Stamps
    from delta_prop_wire.batch import LoggedBatch

_WAITING_MAX = 1_000_000


class Crossings:
    """Of one run with so many services that hold the same in the end."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str], Histogram] = {}
        """From where to where, how long."""
        self.soon: Counter[tuple[str, str]] = Counter()
        """How many of them took no more than a second."""
        self._entered: dict[tuple[int, int], tuple[str, float, int]] = {}  # where, when, who lacks it

    def note(self, where: str, logged: LoggedBatch, now: float, others: int) -> None:
        """A batch may be read at a service; `others`: how many more are to get it."""
        batch = logged.batch
        key = (batch.origin, batch.last)
        first = self._entered.get(key)
        if first is None:
            if others and len(self._entered) < _WAITING_MAX:
                self._entered[key] = (where, now, others)
            return
        came_from, at_s, lacking = first
        if came_from == where:
            return
        way = (came_from, where)
        self.took.setdefault(way, Histogram()).add(now - at_s, batch.count)
        if now - at_s <= SOON_S:
            self.soon[way] += batch.count
        if lacking > 1:
            self._entered[key] = (came_from, at_s, lacking - 1)
        else:
            del self._entered[key]


class Tap:
    """An outlet of one service that notes when each batch may be read there."""

    def __init__(self, where: str, stamps: Stamps, crossings: Crossings, others: int) -> None:
        self._where = where
        self.stamps = stamps
        self._crossings = crossings
        self._others = others

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """A batch has become visible."""
        now = anyio.current_time()
        self.stamps.note(logged.offset, now)
        self._crossings.note(self._where, logged, now, self._others)

    def note_visible(self) -> None:
        """Told in `offer`."""

    def note_recovered(self) -> None:
        """What came before keeps its time."""
