"""Selects vectors to evict from memory, and lists vectors that deltas touch and that are not in memory.

Used for resident vectors of which some are in a store only. Reads tables and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.vector_table import DIRTY, IN_FLIGHT, LAMPORT, NO_LAMPORT, OFFSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from delta_prop_sinks.delta_chain import Ref
    from delta_prop_sinks.sink import Delivery
    from delta_prop_sinks.vector_table import VectorTable


def missing_vectors(tables: Mapping[str, VectorTable], deliveries: Iterable[Delivery]) -> list[Ref]:
    """Return the vectors that deliveries touch and that are in none of these tables."""
    missing: dict[Ref, None] = {}
    for delivery in deliveries:
        batch = delivery.batch
        if batch.is_control:
            continue
        namespaces, keys = batch.namespaces, batch.keys
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            table = tables.get(namespaces[row])
            if table is None or keys[row] not in table.slots:
                missing[namespaces[row], keys[row]] = None
    return list(missing)


def oldest_first(tables: Iterable[VectorTable]) -> Iterator[tuple[VectorTable, str]]:
    """Yield the vectors whose present state is in the store, least recently used first.

    The caller may release each vector before it takes the next.
    """
    ages: list[NDArray[np.int64]] = []
    candidates: list[tuple[VectorTable, str]] = []
    for table in tables:
        used = table.used
        idle = (table.flags[:used] & (DIRTY | IN_FLIGHT)) == 0
        idle &= table.heads[:used, LAMPORT] != NO_LAMPORT
        slots = idle.nonzero()[0]
        ages.append(np.maximum(table.heads[slots, OFFSET], table.read_offsets[slots]))
        candidates.extend((table, str(table.ids[slot])) for slot in slots.tolist())
    if candidates:
        for index in np.argsort(np.concatenate(ages), kind="stable").tolist():
            yield candidates[index]
