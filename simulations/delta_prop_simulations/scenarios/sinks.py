"""Simulated sinks: each call sleeps for a time drawn from a distribution, and counts the delivered rows.

They check the promises that a sink can observe: rows come in log order, and none twice.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_simulations.scenarios.measures import Histogram
from delta_prop_sinks.sink import RejectDelta, TryAgain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_simulations.rng import Random
    from delta_prop_simulations.scenarios.distributions import Distribution
    from delta_prop_simulations.scenarios.measures import OffsetTimes
    from delta_prop_simulations.scenarios.scenario import Event, SinkSpec
    from delta_prop_sinks.sink import Delivery, Sink, SinkContext

SOON_S = 1.0
"""The maximum time from offset to application that counts as soon."""


class SimulatedSink:
    """One sink of a scenario. The service stores its cursor."""

    def __init__(
        self, spec: SinkSpec, distribution: Distribution, random: Random, offset_times: OffsetTimes
    ) -> None:
        self.name = spec.name
        self.lag = Histogram()
        self.applied = self.failures = self.rejected = self.soon = 0
        self.next_offset = 0
        """The offset after the last applied row."""
        self.out_of_order = self.duplicates = 0
        self._distribution, self._random, self._offset_times = distribution, random, offset_times
        self._faults = spec.faults
        self._rows_to_rejection = 0  # rows until the next rejected one
        self._share = 0.0
        self._was_reopened = False
        self._now: Callable[[], float]

    async def open(self, context: SinkContext) -> None:
        """Open the sink. After a reopening, the last delivery may come again."""
        self._was_reopened = self.next_offset > 0
        self._now = context.clock.now

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Sleep for the drawn time, then count."""
        began = self._now()
        events = [one for one in self._faults if one.covers(began)] if self._faults else ()
        counts = [delivery.count for delivery in deliveries]
        size = sum([delivery.logged.batch.size for delivery in deliveries])
        seconds = self._distribution.draw(self._random, sum(counts), size)
        for event in events:
            if event.what == "slows":
                seconds *= event.factor
        await anyio.sleep(seconds)
        now = began + seconds
        for event in events:
            self._apply_fault(event, deliveries, now)
        for delivery, count in zip(deliveries, counts, strict=True):
            self._note(delivery, count, now)

    async def aclose(self) -> None:
        """Close nothing."""

    def statistics(self) -> int:
        """Return the number of applied rows."""
        return self.applied

    # --- internals

    def _apply_fault(self, event: Event, deliveries: Sequence[Delivery], now: float) -> None:
        """Fail, or reject a delta, as the scenario plans."""
        if event.what == "fails":
            self.failures += 1
            raise TryAgain("planned failure of the scenario")
        if event.what == "rejects" and (offset := self._first_rejected(deliveries, event)) is not None:
            self._note_below(deliveries, offset, now)
            self.rejected += 1
            raise RejectDelta(offset, "planned rejection of the scenario")

    def _note(self, delivery: Delivery, count: int, now: float) -> None:
        """Note that the first `count` rows of a delivery are applied."""
        first = (
            delivery.first_offset if delivery.rows is None else delivery.first_offset + int(delivery.rows[0])
        )
        if first < self.next_offset:
            self._note_redelivery(first, delivery.next_offset)
        self.next_offset = max(self.next_offset, delivery.next_offset)
        self.applied += count
        given = self._offset_times.at(delivery.first_offset)
        lag_s = 0.0 if given is None else max(now - given, 0.0)
        self.lag.add(lag_s, count)
        if lag_s <= SOON_S:
            self.soon += count

    def _note_redelivery(self, first: int, end: int) -> None:
        if self._was_reopened:
            return
        self.duplicates += end <= self.next_offset
        self.out_of_order += end > self.next_offset

    def _first_rejected(self, deliveries: Sequence[Delivery], event: Event) -> int | None:
        """Return the offset of the first rejected row, if any: gaps between rejections are geometric."""
        if event.share != self._share:
            self._share, self._rows_to_rejection = event.share, self._gap(event.share)
        for delivery in deliveries:
            rows = delivery.count
            if self._rows_to_rejection < rows:
                row = (
                    self._rows_to_rejection
                    if delivery.rows is None
                    else int(delivery.rows[self._rows_to_rejection])
                )
                self._rows_to_rejection = self._gap(event.share)
                return delivery.first_offset + row
            self._rows_to_rejection -= rows
        return None

    def _gap(self, share: float) -> int:
        if share <= 0:
            return 1 << 62
        return 0 if share >= 1 else int(log(1 - self._random.random()) / log(1 - share))

    def _note_below(self, deliveries: Sequence[Delivery], offset: int, now: float) -> None:
        """Note that the rows before a rejected one are applied."""
        for delivery in deliveries:
            if delivery.next_offset <= offset:
                self._note(delivery, delivery.count, now)
                continue
            at = offset - delivery.first_offset
            count = at if delivery.rows is None else int(np.searchsorted(delivery.rows, at))
            if count > 0:
                self._note(delivery, count, now)
            self.next_offset = min(self.next_offset, offset) if count > 0 else self.next_offset
            return


if TYPE_CHECKING:

    def _conforms(sink: SimulatedSink) -> Sink:
        return sink
