"""A simulated sink that outlives its service, as an external store does.

It recognises duplicates by their offsets, as does a sink that stores its cursor with its data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.sink import RejectDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.scenarios.sinks import SimulatedSink
    from delta_prop_sinks.sink import Delivery, Sink, SinkContext


class PersistentSink:
    """A sink that counts its rows. `new_row_count`: the number of rows that had an effect; `duplicate_count`:
    the number of rows that it already had.
    """

    def __init__(self, inner: SimulatedSink) -> None:
        self.inner = inner
        self.name = inner.name
        self.new_row_count = self.duplicate_count = 0
        self._next_offset = 0

    async def open(self, context: SinkContext) -> None:
        """Open the sink for a service, or for its successor."""
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
        """Close the inner sink."""
        await self.inner.aclose()

    def statistics(self) -> int:
        """Return the number of rows that had an effect."""
        return self.new_row_count

    def _count(self, deliveries: Sequence[Delivery], end: int) -> None:
        """Count the rows below `end`, which were applied."""
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


if TYPE_CHECKING:

    def _conforms(sink: PersistentSink) -> Sink:
        return sink
