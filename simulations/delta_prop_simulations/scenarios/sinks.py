"""Simulated sinks: each call sleeps for a time that is drawn from a distribution, and counts its rows.

They check the promises that a sink can observe: rows come in the order of the log, and none comes twice.
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

LAG_S_MAX = 1.0
"""A row that is applied within this time of its append counts as `within_1s`."""


class SinkCounts:
    """Counts of the rows of one sink.

    `applied`, `failures`, `rejected`, `within_1s`: numbers of applied rows, failed calls, rejected rows, and
    rows applied within `LAG_S_MAX` of their append. `out_of_order`, `duplicates`: numbers of deliveries that
    came out of the log's order, or again.
    """

    def __init__(self) -> None:
        self.lag = Histogram()
        self.applied = self.failures = self.rejected = self.within_1s = 0
        self.out_of_order = self.duplicates = 0

    def note_applied(self, rows: int, lag_s: float) -> None:
        """Count applied rows."""
        self.applied += rows
        self.lag.add(lag_s, rows)
        if lag_s <= LAG_S_MAX:
            self.within_1s += rows

    def note_redelivery(self, *, is_duplicate: bool) -> None:
        """Count a delivery that begins before the last applied row."""
        self.duplicates += is_duplicate
        self.out_of_order += not is_duplicate


class _Rejections:
    """Draws the rows to reject; the gaps between them are geometrically distributed."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._share = 0.0
        self._rows_left = self._draw_gap(self._share)  # the number of rows before the next rejected one

    def first_rejected(self, deliveries: Sequence[Delivery], share: float) -> int | None:
        """Return the offset of the first row to reject, if any. `share`: of all rows, how many to reject."""
        if share != self._share:
            self._share, self._rows_left = share, self._draw_gap(share)
        for delivery in deliveries:
            if self._rows_left < delivery.count:
                row = self._rows_left if delivery.rows is None else int(delivery.rows[self._rows_left])
                self._rows_left = self._draw_gap(share)
                return delivery.first_offset + row
            self._rows_left -= delivery.count
        return None

    def _draw_gap(self, share: float) -> int:
        if share <= 0:
            return 1 << 62
        return 0 if share >= 1 else int(log(1 - self._random.random()) / log(1 - share))


class SimulatedSink:
    """One sink of a scenario, whose cursor the service stores."""

    def __init__(
        self, spec: SinkSpec, distribution: Distribution, random: Random, offset_times: OffsetTimes
    ) -> None:
        self.name = spec.name
        self.counts = SinkCounts()
        self.next_offset = 0
        """The offset after the last applied row."""
        self._distribution, self._random, self._offset_times = distribution, random, offset_times
        self._faults = spec.faults
        self._rejections = _Rejections(random)
        self._was_reopened = False
        self._now: Callable[[], float]

    async def open(self, context: SinkContext) -> None:
        """Open the sink. After it was opened again, the last delivery may be redelivered."""
        self._was_reopened = self.next_offset > 0
        self._now = context.clock.now

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Sleep for the drawn time, then count the rows, or fail as planned."""
        started_at = self._now()
        events = [event for event in self._faults if event.covers(started_at)] if self._faults else ()
        counts = [delivery.count for delivery in deliveries]
        size_bytes = sum([delivery.logged.batch.size for delivery in deliveries])
        seconds = self._distribution.draw(self._random, sum(counts), size_bytes)
        for event in events:
            if event.what == "slows":
                seconds *= event.factor
        await anyio.sleep(seconds)
        now = started_at + seconds
        for event in events:
            self._apply_fault(event, deliveries, now)
        for delivery, count in zip(deliveries, counts, strict=True):
            self._note_applied(delivery, count, now)

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    def statistics(self) -> int:
        """Return the number of applied rows."""
        return self.counts.applied

    # --- internals

    def _apply_fault(self, event: Event, deliveries: Sequence[Delivery], now: float) -> None:
        """Fail, or reject a delta, as the event says. Raises TryAgain, RejectDelta."""
        if event.what == "fails":
            self.counts.failures += 1
            raise TryAgain("planned failure of the scenario")
        if (
            event.what == "rejects"
            and (offset := self._rejections.first_rejected(deliveries, event.share)) is not None
        ):
            self._note_applied_below(deliveries, offset, now)
            self.counts.rejected += 1
            raise RejectDelta(offset, "planned rejection of the scenario")

    def _note_applied(self, delivery: Delivery, count: int, now: float) -> None:
        """Note that the first `count` rows of a delivery are applied."""
        first = (
            delivery.first_offset if delivery.rows is None else delivery.first_offset + int(delivery.rows[0])
        )
        if first < self.next_offset and not self._was_reopened:
            self.counts.note_redelivery(is_duplicate=delivery.next_offset <= self.next_offset)
        self.next_offset = max(self.next_offset, delivery.next_offset)
        appended_at = self._offset_times.at(delivery.first_offset)
        lag_s = 0.0 if appended_at is None else max(now - appended_at, 0.0)
        self.counts.note_applied(count, lag_s)

    def _note_applied_below(self, deliveries: Sequence[Delivery], offset: int, now: float) -> None:
        """Note that the rows before `offset`, the rejected one, are applied."""
        for delivery in deliveries:
            if delivery.next_offset <= offset:
                self._note_applied(delivery, delivery.count, now)
                continue
            row = offset - delivery.first_offset
            count = row if delivery.rows is None else int(np.searchsorted(delivery.rows, row))
            if count > 0:
                self._note_applied(delivery, count, now)
            self.next_offset = min(self.next_offset, offset) if count > 0 else self.next_offset
            return


if TYPE_CHECKING:

    def _conforms(sink: SimulatedSink) -> Sink:
        return sink
