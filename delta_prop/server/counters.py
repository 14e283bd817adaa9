"""Counters of the server: plain integers, read on request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.server.job_files import Progress
    from delta_prop_wire.spec import ErrorCode


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
