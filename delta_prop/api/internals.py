"""Parts of an open propagator that a server uses beyond the public calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from delta_prop.delivery.request_executor import RequestExecutor
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.partition import Partition


class Internals(NamedTuple):
    """The parts. `request_executor`: carries out operators' requests, None for a log in memory."""

    partition: Partition
    sinks: SinkManager
    request_executor: RequestExecutor | None = None
