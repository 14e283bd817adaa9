"""The parts of a pipeline that settings bound: queue, orderer, known ids, origins, heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop.partition.core.fast_heads import FastVectorHeads
from delta_prop.partition.ingest.epochs import epoch_floor, epoch_limit
from delta_prop.partition.ingest.fair_queue import FairQueue
from delta_prop.partition.ingest.origins import Origins
from delta_prop.partition.ingest.seen_ids import WAITING_MAX, SeenIds
from delta_prop.partition.order.orderer import Orderer

if TYPE_CHECKING:
    from delta_prop.api.settings import Settings


class PipelineParts(NamedTuple):
    """The parts, each with an empty state."""

    queue: FairQueue
    orderer: Orderer
    ids: SeenIds
    origins: Origins
    vectors: FastVectorHeads


def create_parts(settings: Settings, openings: int | None) -> PipelineParts:
    """Create the parts. `openings`: how often the log was opened, which bounds epochs; None in memory."""
    if openings is None:
        ids = SeenIds(
            generation_ids=settings.memory_ids_per_generation, retained_min=settings.ids_retained_min
        )
    else:
        ids = SeenIds(
            generation_ids=settings.ids_per_generation,
            retained_min=settings.ids_retained_min,
            waiting_max=WAITING_MAX,
            index_bytes_max=settings.id_index_bytes_max,
        )
    return PipelineParts(
        queue=FairQueue(
            capacity_deltas=settings.queue_deltas_max,
            capacity_bytes=settings.queue_bytes_max,
            high=settings.queue_high_mark,
            low=settings.queue_low_mark,
            ageing_s=settings.queue_ageing_s,
        ),
        orderer=Orderer(
            ids,
            pending_deltas_max=settings.pending_deltas_max,
            pending_bytes_max=settings.pending_bytes_max,
            pending_timeout_s=settings.pending_timeout_s,
        ),
        ids=ids,
        origins=Origins(
            origins_max=settings.origins_max,
            per_owner_max=settings.origins_per_owner_max,
            epoch_floor=epoch_floor(openings),
            epoch_limit=epoch_limit(openings),
        ),
        vectors=FastVectorHeads(heads_max=settings.heads_max),
    )
