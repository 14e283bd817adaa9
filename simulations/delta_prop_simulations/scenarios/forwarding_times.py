"""Measures how long deltas take from the service that accepts them to each other service.

A batch is identified by its last dot, since forwarding does not split batches. It is forgotten once all
services have it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio

from delta_prop_simulations.scenarios.measures import Histogram
from delta_prop_simulations.scenarios.sinks import LAG_S_MAX

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_simulations.scenarios.measures import OffsetTimes
    from delta_prop_wire.batch import LoggedBatch

_BATCHES_MAX = 1_000_000


class ForwardingTimes:
    """The forwarding times of one run, in which all services get all deltas in the end."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], Histogram] = {}
        """The forwarding times, keyed by source and target service."""
        self.within_1s: Counter[tuple[str, str]] = Counter()
        """The number of deltas that took up to one second."""
        self._in_transit: dict[tuple[int, int], tuple[str, float, int]] = {}
        """First service, time there, and number of services that lack the batch; by origin and last
        counter.
        """

    def note(self, service: str, logged: LoggedBatch, now: float, other_count: int) -> None:
        """Note that a batch is visible at a service. `other_count`: the number of the other services."""
        batch = logged.batch
        key = (batch.origin, batch.last)
        entry = self._in_transit.get(key)
        if entry is None:
            if other_count and len(self._in_transit) < _BATCHES_MAX:
                self._in_transit[key] = (service, now, other_count)
            return
        source, at_s, missing_count = entry
        if source == service:
            return
        path = (source, service)
        self.times.setdefault(path, Histogram()).add(now - at_s, batch.count)
        if now - at_s <= LAG_S_MAX:
            self.within_1s[path] += batch.count
        if missing_count > 1:
            self._in_transit[key] = (source, at_s, missing_count - 1)
        else:
            del self._in_transit[key]


class Tap:
    """A route target of one service that notes the time at which each batch becomes visible there."""

    def __init__(
        self, service: str, offset_times: OffsetTimes, forwarding_times: ForwardingTimes, other_count: int
    ) -> None:
        self._service = service
        self.offset_times = offset_times
        self._forwarding_times = forwarding_times
        self._other_count = other_count

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Note that a batch has become visible."""
        now = anyio.current_time()
        self.offset_times.note(logged.offset, now)
        self._forwarding_times.note(self._service, logged, now, self._other_count)

    def note_visible(self) -> None:
        """Do nothing: `offer` has noted the batch."""

    def note_recovered(self) -> None:
        """Do nothing: earlier batches keep their times."""
