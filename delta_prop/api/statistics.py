"""Statistics of a service, in one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop.delivery.status import FeedStatistics
    from delta_prop.partition.capacity_monitor import FullResource
    from delta_prop.partition.ingest.fair_queue import QueueStatistics
    from delta_prop.partition.ingest.seen_ids import SeenIdsStatistics
    from delta_prop.partition.order.orderer import OrdererStatistics
    from delta_prop.partition.storage.log_reopener import ReopeningStatistics
    from delta_prop_broker.log.memory import MemoryLogStatistics
    from delta_prop_broker.log.statistics import DurableLogStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of all counters. `full`: the resource that is full, None if there is capacity."""

    accepted: int
    duplicates: int
    noops: int
    refused: int
    concurrent_updates: int
    ids: SeenIdsStatistics
    queue: QueueStatistics
    pending: OrdererStatistics
    log: MemoryLogStatistics | DurableLogStatistics
    sinks: Mapping[str, FeedStatistics]
    pressure: Pressure
    memory_bytes_max: int
    full: FullResource | None = None
    reopening: ReopeningStatistics | None = None
