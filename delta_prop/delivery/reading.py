"""Converts batches read from the log to deliveries for one feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.delivery.routing_table import NoRows
from delta_prop_sinks.sink import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop.delivery.routing_table import RouteTarget, RoutingTable
    from delta_prop_wire.batch import LoggedBatch


def make_deliveries(
    batches: Iterable[LoggedBatch], feed: RouteTarget, table: RoutingTable[RouteTarget], start: int
) -> Iterator[Delivery]:
    """Yield deliveries with the rows that a feed's sink subscribes to, from offset `start` on."""
    for logged in batches:
        rows = table.rows_for(feed, logged.batch)
        if isinstance(rows, NoRows):
            continue
        if logged.offset < start:  # the feed resumes inside this batch
            chosen = np.arange(logged.count) if rows is None else rows
            rows = chosen[chosen >= start - logged.offset]
            if not len(rows):
                continue
        yield Delivery(logged, rows)
