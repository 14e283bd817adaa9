"""Parts of an open propagator that a server uses beyond the public calls.

Values only. The pipeline stays the same object when the log fails and is recovered; its contents do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.api.settings import Settings
    from delta_prop.delivery.operator_worker import OperatorWorker
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.capacity_monitor import CapacityMonitor
    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.platform.ports import World
    from delta_prop.platform.tick_callbacks import TickCallbacks
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog


@dataclass(frozen=True, slots=True)
class Internals:
    """The parts. `disk` is the data directory, None for an in-memory log; `now` returns monotonic seconds.

    `tick_callbacks`: entered by code that handles input, so that follow-up work runs once, at the end of the
    tick. `operator_worker`: carries out operators' requests, None for an in-memory log.
    """

    pipeline: Pipeline
    log: MemoryLog | DurableLog
    sinks: SinkManager
    world: World
    settings: Settings
    disk: Disk | None
    now: Callable[[], float]
    tick_callbacks: TickCallbacks
    capacity_monitor: CapacityMonitor
    operator_worker: OperatorWorker | None = None
