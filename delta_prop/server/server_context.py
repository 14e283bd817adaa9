"""The context that the connections of one server share: the partition, access, limits and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop.server.counters import Counters
from delta_prop_wire.compression import available_codecs
from delta_prop_wire.frames import OriginGrant, PressureLevel

if TYPE_CHECKING:
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Clock
    from delta_prop.server.access import Access
    from delta_prop.server.audit import Audit
    from delta_prop.server.groups import Groups
    from delta_prop.server.jobs import Jobs
    from delta_prop.server.limits import RateLimiter
    from delta_prop.server.receive_budget import ReceiveBudget
    from delta_prop.server.settings import ServerSettings
    from delta_prop_wire.compression import Compression


@dataclass(slots=True, eq=False)
class ServicePressure:
    """The present backpressure of the service; while it is STOP, producers get no credit back."""

    level: PressureLevel = PressureLevel.OK
    _last_number: int = 0

    def next_number(self) -> int:
        """Return the number of the next report of backpressure."""
        self._last_number += 1
        return self._last_number


@dataclass(slots=True, eq=False)
class ServerContext:
    """The shared context."""

    partition: Partition
    sinks: SinkManager
    settings: ServerSettings
    access: Access
    rate_limiter: RateLimiter
    audit: Audit
    groups: Groups
    receive_budget: ReceiveBudget
    jobs: Jobs
    codecs: tuple[Compression, ...] = field(default_factory=available_codecs)
    counters: Counters = field(default_factory=Counters)
    pressure: ServicePressure = field(default_factory=ServicePressure)

    @property
    def clock(self) -> Clock:
        """The clock of the partition's world."""
        return self.partition.world.clock

    @property
    def features(self) -> tuple[str, ...]:
        """The optional features that this server supports."""
        return (*(codec.name.lower() for codec in self.codecs), *self.jobs.features)

    def forwarder_grants(self) -> list[OriginGrant]:
        """Return each origin's epoch and watermark here, for a forwarder. Raises Refused (LOG_FAILED)."""
        pipeline = self.partition.pipeline
        pipeline.check_running()
        grants = []
        for origin, watermark in pipeline.orderer.watermarks.items():
            if origin >= 0:  # negative origins stand for work without dots
                state = pipeline.origins.get(origin)
                grants.append(OriginGrant(origin, 0 if state is None else state.epoch, watermark))
        return grants
