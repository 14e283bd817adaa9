"""Simulated sinks: each call sleeps for a drawn time; they check the log's order, and that no row repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Protocol

import anyio
import numpy as np

from delta_prop_simulations.scenarios.measures import Histogram, OffsetTimes
from delta_prop_sinks.sink import Delivery, RejectDelta, SinkContext, TryAgain

if TYPE_CHECKING:
    from delta_prop_simulations.rng import Random
    from delta_prop_simulations.scenarios.scenario import Event, SinkSpec


class Distribution(Protocol):
    """Draws service times."""

    def draw(self, random: Random, deltas: int, size_bytes: int) -> float:
        """Draw the seconds that a call with this many deltas and bytes takes."""
        ...


class ConfiguredDistribution:
    """A sink's configured distribution: a time per call, a time per delta, and a random factor."""

    def __init__(self, spec: SinkSpec) -> None:
        self._call_s = spec.per_call_ms / 1_000
        self._delta_s = spec.per_delta_us / 1_000_000
        self._capacity = spec.capacity_per_s
        self._factor = _factor(spec)

    def draw(self, random: Random, deltas: int, size_bytes: int) -> float:
        """Draw the seconds that a call with this many deltas takes; their size has no effect."""
        duration_s = (self._call_s + self._delta_s * deltas) * self._factor(random)
        return max(duration_s, deltas / self._capacity) if self._capacity else duration_s


def _factor(spec: SinkSpec) -> Callable[[Random], float]:
    """Return a function that draws the factor by which a call's duration differs from its mean."""
    noise = spec.noise
    if spec.distribution == "exponential":
        return lambda random: random.expovariate(1.0)
    if spec.distribution == "constant" or not noise:
        return lambda random: 1.0
    if spec.distribution == "normal":
        return lambda random: max(random.gauss(1.0, noise), 0.0)
    sigma = sqrt(log(1 + noise * noise))
    return lambda random: exp(random.gauss(-sigma * sigma / 2, sigma))


@dataclass(slots=True)
class SinkCounts:
    """Counts of one sink: `lag` of its applied rows, failed calls, rejected rows, wrong deliveries."""

    lag: Histogram = field(default_factory=Histogram)
    failures: int = 0
    rejected: int = 0
    out_of_order: int = 0
    duplicates: int = 0


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
        self.spec = spec
        self.name = spec.name
        self.counts = SinkCounts()
        self.next_offset = 0
        """The offset after the last applied row."""
        self._distribution, self._random, self._offset_times = distribution, random, offset_times
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
        events = [event for event in self.spec.faults if event.covers(started_at)]
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
        return self.counts.lag.count

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
            is_duplicate = delivery.next_offset <= self.next_offset
            self.counts.duplicates += is_duplicate
            self.counts.out_of_order += not is_duplicate
        self.next_offset = max(self.next_offset, delivery.next_offset)
        appended_at = self._offset_times.at(delivery.first_offset)
        self.counts.lag.add(0.0 if appended_at is None else max(now - appended_at, 0.0), count)

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


class PersistentSink:
    """A sink that counts its rows: those that had an effect, and those that it already had."""

    def __init__(self, inner: SimulatedSink) -> None:
        self.inner = inner
        self.name = inner.name
        self.new_row_count = self.duplicate_count = 0
        self._next_offset = 0

    async def open(self, context: SinkContext) -> None:
        await self.inner.open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply the deliveries with the inner sink, and count the new rows."""
        try:
            await self.inner.apply(deliveries)
        except RejectDelta as rejection:
            self._count(deliveries, rejection.offset)
            raise
        self._count(deliveries, deliveries[-1].next_offset)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def statistics(self) -> int:
        """Return the number of rows that had an effect."""
        return self.new_row_count

    def _count(self, deliveries: Sequence[Delivery], end: int) -> None:
        for delivery in deliveries:
            applied = _rows_below(delivery, end)
            known = min(_rows_below(delivery, self._next_offset), applied)
            self.duplicate_count += known
            self.new_row_count += applied - known
        self._next_offset = max(self._next_offset, min(end, deliveries[-1].next_offset))


def _rows_below(delivery: Delivery, offset: int) -> int:
    row = min(offset, delivery.next_offset) - delivery.first_offset
    if delivery.rows is None:
        return max(row, 0)
    return int(np.searchsorted(delivery.rows, row))
