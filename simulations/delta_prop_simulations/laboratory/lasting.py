"""A simulated sink that outlives its service, as a store elsewhere does: what comes again has no effect.

It knows which rows it had by their offsets, as one would that keeps the cursor with its data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.sink import RejectDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.laboratory.sinks import SimulatedSink
    from delta_prop_sinks.sink import Delivery, Sink, SinkContext


class LastingSink:
    """`fresh`: rows that had an effect; `again`: rows that came although they had had theirs."""

    def __init__(self, inner: SimulatedSink) -> None:
        self.inner = inner
        self.name = inner.name
        self.fresh = self.again = 0
        self._next = 0

    async def open(self, context: SinkContext) -> None:
        """Begin with a service, or with the one after it."""
        await self.inner.open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Have the sink apply them, and count what was new."""
        try:
            await self.inner.apply(deliveries)
        except RejectDelta as rejection:
            self._count(deliveries, rejection.offset)
            raise
        self._count(deliveries, deliveries[-1].next_offset)

    async def aclose(self) -> None:
        """Nothing to close."""
        await self.inner.aclose()

    def statistics(self) -> int:
        """How many rows had an effect."""
        return self.fresh

    def _count(self, deliveries: Sequence[Delivery], end: int) -> None:
        """All rows below `end` were applied."""
        for delivery in deliveries:
            applied = _rows_below(delivery, end)
            known = min(_rows_below(delivery, self._next), applied)
            self.again += known
            self.fresh += applied - known
        self._next = max(self._next, min(end, deliveries[-1].next_offset))


def _rows_below(delivery: Delivery, offset: int) -> int:
    at = min(offset, delivery.next_offset) - delivery.first_offset
    if delivery.rows is None:
        return max(at, 0)
    return int(np.searchsorted(delivery.rows, at))


if TYPE_CHECKING:

    def _conforms(sink: LastingSink) -> Sink:
        return sink
