"""Selects vectors to evict from memory, and lists the vectors that deltas touch and memory lacks.

For resident vectors of which some are only in a store. Reads tables and changes nothing.
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


def oldest_first(tables: Iterable[VectorTable]) -> Iterator[tuple[VectorTable, str]]:
    """Yield the vectors that a store holds unchanged, least recently used first. Callers may release each."""
    ages: list[NDArray[np.int64]] = []
    found: list[tuple[VectorTable, str]] = []
    for table in tables:
        used = table.used
        idle = (table.flags[:used] & (DIRTY | IN_FLIGHT)) == 0
        idle &= table.heads[:used, LAMPORT] != NO_LAMPORT
        slots = idle.nonzero()[0]
        ages.append(np.maximum(table.heads[slots, OFFSET], table.read_offsets[slots]))
        found.extend((table, str(table.ids[slot])) for slot in slots.tolist())
    if found:
        for index in np.argsort(np.concatenate(ages), kind="stable").tolist():
            yield found[index]
