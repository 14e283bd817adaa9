"""Measures the times that deltas take from the service that they enter to each of the others.

The last row identifies a batch, as forwarding does not split it; a batch that all services have is forgotten.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio

from delta_prop_simulations.scenarios.measures import Histogram
from delta_prop_simulations.scenarios.sinks import SOON_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_simulations.scenarios.measures import OffsetTimes
    from delta_prop_wire.batch import LoggedBatch

_WAITING_MAX = 1_000_000


class ForwardingTimes:
    """The forwarding times of one run; all its services hold the same in the end."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str], Histogram] = {}
        """The times, by the services they lead from and to."""
        self.soon: Counter[tuple[str, str]] = Counter()
        """The number of deltas that took no more than a second."""
        self._entered: dict[tuple[int, int], tuple[str, float, int]] = {}  # service, time, others left

    def note(self, where: str, logged: LoggedBatch, now: float, others: int) -> None:
        """Note that a batch is visible at a service; `others`: the number of services still to get it."""
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
        path = (came_from, where)
        self.took.setdefault(path, Histogram()).add(now - at_s, batch.count)
        if now - at_s <= SOON_S:
            self.soon[path] += batch.count
        if lacking > 1:
            self._entered[key] = (came_from, at_s, lacking - 1)
        else:
            del self._entered[key]


class Tap:
    """A route target of one service that notes the time at which each batch becomes visible there."""

    def __init__(
        self, where: str, offset_times: OffsetTimes, crossings: ForwardingTimes, others: int
    ) -> None:
        self._where = where
        self.offset_times = offset_times
        self._crossings = crossings
        self._others = others

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Note that a batch has become visible."""
        now = anyio.current_time()
        self.offset_times.note(logged.offset, now)
        self._crossings.note(self._where, logged, now, self._others)

    def note_visible(self) -> None:
        """Do nothing: `offer` has noted it."""

    def note_recovered(self) -> None:
        """Do nothing: earlier batches keep their time."""
