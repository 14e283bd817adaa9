"""Everything that a service counts, in one snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.fullness import Full
    from delta_prop.ingest.lanes import LanesStatistics
    from delta_prop.ingest.seen_ids import SeenIdsStatistics
    from delta_prop.order.orderer import OrdererStatistics
    from delta_prop.reopening import ReopeningStatistics
    from delta_prop.route.status import FeedStatistics
    from delta_prop_broker.log.memory import MemoryLogStatistics
    from delta_prop_broker.log.statistics import DurableLogStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of everything, in deltas, bytes and offsets as named. `full`: what takes nothing more."""

    accepted: int
    duplicates: int
    voided: int
    refused: int
    conflicts: int
    ids: SeenIdsStatistics
    queue: LanesStatistics
    pending: OrdererStatistics
    log: MemoryLogStatistics | DurableLogStatistics
    sinks: Mapping[str, FeedStatistics]
    pressure: Pressure
    memory_bytes_max: int
    full: Full | None = None
    reopening: ReopeningStatistics | None = None
