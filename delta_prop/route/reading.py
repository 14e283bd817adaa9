"""What is read from the log, as deliveries for one feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.route.table import Nothing
from delta_prop_sinks.sink import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop.route.table import Table, Taker
    from delta_prop_wire.batch import LoggedBatch


def deliveries_of(
    read: Iterable[LoggedBatch], feed: Taker, table: Table[Taker], begin: int
) -> Iterator[Delivery]:
    """What of these batches a feed's sink wants, from an offset on."""
    for logged in read:
        rows = table.rows_for(feed, logged.batch)
        if isinstance(rows, Nothing):
            continue
        if logged.offset < begin:  # resumes inside this batch
            chosen = np.arange(logged.count) if rows is None else rows
            rows = chosen[chosen >= begin - logged.offset]
            if not len(rows):
                continue
        yield Delivery(logged, rows)
