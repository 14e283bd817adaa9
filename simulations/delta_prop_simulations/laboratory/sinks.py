"""Sinks that only take their time: each call sleeps as long as a law says, and counts what it was brought.

They check what a sink can see of the promises: that rows come in log order, and none twice.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_simulations.laboratory.measures import Histogram
from delta_prop_sinks.sink import RejectDelta, TryAgain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.laboratory.laws import Law
    from delta_prop_simulations.laboratory.measures import Stamps
    from delta_prop_simulations.laboratory.scenario import Event, SinkSpec
    from delta_prop_sinks.sink import Delivery, Sink, SinkContext

SOON_S = 1.0
"""What is applied so soon after it got its offset counts as fresh."""


class SimulatedSink:
    """One sink of a scenario. Its cursor is kept by the service."""

    def __init__(self, spec: SinkSpec, law: Law, random: Random, stamps: Stamps) -> None:
        self.name = spec.name
        self.lag = Histogram()
        self.applied = self.failures = self.rejected = self.soon = 0
        self.next_offset = 0
        """Behind the last row that was applied."""
        self.out_of_order = self.twice = 0
        self._law, self._random, self._stamps = law, random, stamps
        self._at = spec.at
        self._sound = 0  # rows to come before the next one that is rejected
        self._share = 0.0
        self._reopened = False
        self._now: Callable[[], float]

    async def open(self, context: SinkContext) -> None:
        """Nothing to open. Opened again, it may be brought again what it had at last."""
        self._reopened = self.next_offset > 0
        self._now = context.clock.now

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Take the time that the law says, then count."""
        began = self._now()
        events = [one for one in self._at if one.covers(began)] if self._at else ()
        counts = [delivery.count for delivery in deliveries]
        size = sum([delivery.logged.batch.size for delivery in deliveries])
        seconds = self._law.draw(self._random, sum(counts), size)
        for event in events:
            if event.what == "slows":
                seconds *= event.factor
        await anyio.sleep(seconds)
        now = began + seconds
        for event in events:
            self._befall(event, deliveries, now)
        for delivery, count in zip(deliveries, counts, strict=True):
            self._note(delivery, count, now)

    async def aclose(self) -> None:
        """Nothing to close."""

    def statistics(self) -> int:
        """How many rows were applied."""
        return self.applied

    # --- within

    def _befall(self, event: Event, deliveries: Sequence[Delivery], now: float) -> None:
        """Fail, or reject a delta, where the scenario has it so."""
        if event.what == "fails":
            self.failures += 1
            raise TryAgain("it fails for a while, as the scenario has it")
        if event.what == "rejects" and (offset := self._first_rejected(deliveries, event)) is not None:
            self._note_below(deliveries, offset, now)
            self.rejected += 1
            raise RejectDelta(offset, "rejected, as the scenario has it")

    def _note(self, delivery: Delivery, count: int, now: float) -> None:
        """So many rows of a delivery, from its first on, are applied."""
        first = (
            delivery.first_offset if delivery.rows is None else delivery.first_offset + int(delivery.rows[0])
        )
        if first < self.next_offset:
            self._note_again(first, delivery.next_offset)
        self.next_offset = max(self.next_offset, delivery.next_offset)
        self.applied += count
        given = self._stamps.at(delivery.first_offset)
        lag_s = 0.0 if given is None else max(now - given, 0.0)
        self.lag.add(lag_s, count)
        if lag_s <= SOON_S:
            self.soon += count

    def _note_again(self, first: int, end: int) -> None:
        if self._reopened:
            return
        self.twice += end <= self.next_offset
        self.out_of_order += end > self.next_offset

    def _first_rejected(self, deliveries: Sequence[Delivery], event: Event) -> int | None:
        """The first row that is rejected, as drawn: gaps between them are geometric."""
        if event.share != self._share:
            self._share, self._sound = event.share, self._gap(event.share)
        for delivery in deliveries:
            rows = delivery.count
            if self._sound < rows:
                row = self._sound if delivery.rows is None else int(delivery.rows[self._sound])
                self._sound = self._gap(event.share)
                return delivery.first_offset + row
            self._sound -= rows
        return None

    def _gap(self, share: float) -> int:
        if share <= 0:
            return 1 << 62
        return 0 if share >= 1 else int(log(1 - self._random.random()) / log(1 - share))

    def _note_below(self, deliveries: Sequence[Delivery], offset: int, now: float) -> None:
        """What lies before a rejected row is applied."""
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
