"""What the server counts: plain integers, read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.server.job_files import Progress
    from delta_prop_wire.spec import ErrorCode


@dataclass(slots=True)
class JobCounts:
    """What there is of jobs: `active` ones, that are staged or being published, `staged_bytes` of them all.
    Since the server started, in deltas: `staged`, `published`, `duplicates` (known before), `refused`; and
    `expired` jobs, of which nobody decided in time.
    """

    active: int = 0
    staged_bytes: int = 0
    staged: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    expired: int = 0

    def note(self, told: Progress, now: Progress) -> Progress:
        """A publication has come further than it was when `told`; returns what is told now. It may have gone
        back, with a log that failed: what was counted before is not counted again.
        """
        counts = {}
        for name in ("published", "duplicates", "refused"):
            before = getattr(told, name)
            counts[name] = max(before, getattr(now, name))
            setattr(self, name, getattr(self, name) + counts[name] - before)
        return replace(now, **counts)


@dataclass(slots=True)
class Counters:
    """Since the server started. `repeated`: deltas that were acknowledged as duplicates."""

    connections: int = 0
    connections_refused: int = 0
    frames_in: int = 0
    frames_out: int = 0
    deltas_in: int = 0
    deltas_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    acks: int = 0
    repeated: int = 0
    peers_lost: int = 0
    nacks: dict[str, int] = field(default_factory=dict)
    jobs: JobCounts = field(default_factory=JobCounts)

    def nack(self, code: ErrorCode) -> None:
        """One more refusal was told."""
        self.nacks[code.name] = self.nacks.get(code.name, 0) + 1
