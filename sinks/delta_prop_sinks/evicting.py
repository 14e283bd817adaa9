"""Which vectors leave memory first, and which of those that deltas touch are not in memory.

For resident vectors that are partly in a store alone. Reads tables and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.table import DIRTY, FLYING, LAMPORT, NO_LAMPORT, OFFSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Ref
    from delta_prop_sinks.sink import Delivery
    from delta_prop_sinks.table import Table


def missing_of(tables: Mapping[str, Table], deliveries: Iterable[Delivery]) -> list[Ref]:
    """Vectors that deliveries touch and that are in none of these tables."""
    wanted: dict[Ref, None] = {}
    for delivery in deliveries:
        batch = delivery.batch
        if batch.is_control:
            continue
        names, keys = batch.namespaces, batch.keys
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            table = tables.get(names[row])
            if table is None or keys[row] not in table.slots:
                wanted[names[row], keys[row]] = None
    return list(wanted)


def oldest_first(tables: Iterable[Table]) -> Iterator[tuple[Table, str]]:
    """What a store holds as it is, least recently used first. Each may be released when it is given."""
    ages: list[NDArray[np.int64]] = []
    places: list[tuple[Table, str]] = []
    for table in tables:
        used = table.used
        idle = (table.marks[:used] & (DIRTY | FLYING)) == 0
        idle &= table.heads[:used, LAMPORT] != NO_LAMPORT
        slots = idle.nonzero()[0]
        ages.append(np.maximum(table.heads[slots, OFFSET], table.reads[slots]))
        places.extend((table, str(table.ids[slot])) for slot in slots.tolist())
    if places:
        for at in np.argsort(np.concatenate(ages), kind="stable").tolist():
            yield places[at]
