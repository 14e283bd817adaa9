"""What the parts of one connection share: its partition, and the server's access, limits and counters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from delta_prop_wire.compression import Compression, available_codecs
from delta_prop_wire.frames import OriginGrant, PressureLevel
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Clock
    from delta_prop.server.access import Access
    from delta_prop.server.audit import Audit
    from delta_prop.server.connection_reader import ReceiveBudget
    from delta_prop.server.job_files import Progress
    from delta_prop.server.limits import RateLimiter
    from delta_prop.server.partitions import Partitions, ServedPartition
    from delta_prop.server.quotas import Quotas
    from delta_prop.server.settings import ServerSettings


@dataclass(slots=True)
class JobCounts:
    """Counts of jobs. `active`: jobs staged or being published; `staged_bytes`: the size of their parts.

    Since the server started: `staged`, `published`, `duplicates` (in the log already) and `refused` count
    deltas; `expired` counts jobs that were not decided in time.
    """

    active: int = 0
    staged_bytes: int = 0
    staged: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    expired: int = 0

    def add(self, other: JobCounts) -> None:
        """Add the counts of another partition's jobs."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def add_progress(self, counted: Progress, current: Progress) -> Progress:
        """Count by how much `current` exceeds `counted`; return the `counted` of the next call.

        After a log failure the publication may have gone back; rows counted before are not counted twice.
        """
        counts = {}
        for name in ("published", "duplicates", "refused"):
            before = getattr(counted, name)
            counts[name] = max(before, getattr(current, name))
            setattr(self, name, getattr(self, name) + counts[name] - before)
        return replace(current, **counts)


@dataclass(slots=True)
class Counters:
    """Counts since the server started. `duplicate_acks`: deltas that were acknowledged as duplicates."""

    connections: int = 0
    connections_refused: int = 0
    frames_in: int = 0
    frames_out: int = 0
    deltas_in: int = 0
    deltas_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    acks: int = 0
    duplicate_acks: int = 0
    connections_timed_out: int = 0
    nacks: dict[str, int] = field(default_factory=dict)

    def count_nack(self, code: ErrorCode) -> None:
        """Count a refusal."""
        self.nacks[code.name] = self.nacks.get(code.name, 0) + 1


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
    """The context of a connection, which shares all but the parts of its partition with the others.

    `served`: the partition that the connection works with, and what belongs to it; `partition` is a part.
    """

    partitions: Partitions
    settings: ServerSettings
    access: Access
    rate_limiter: RateLimiter
    audit: Audit
    receive_budget: ReceiveBudget
    counters: Counters
    clock: Clock
    quotas: Quotas
    codecs: tuple[Compression, ...] = field(default_factory=available_codecs)
    served: ServedPartition = field(init=False)
    partition: Partition = field(init=False)

    def for_connection(self) -> ServerContext:
        """Return the context of a new connection, which works with the default partition at first."""
        context = replace(self)
        context.bind(self.partitions.default)
        return context

    def bind(self, served: ServedPartition) -> None:
        """Work with another partition from now on."""
        self.served, self.partition = served, served.partition

    @property
    def features(self) -> tuple[str, ...]:
        """The optional features that this server supports."""
        return (*(codec.name.lower() for codec in self.codecs), *self.served.jobs.features)

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
