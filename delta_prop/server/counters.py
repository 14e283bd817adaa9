"""What the server counts: plain integers, read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop_wire.spec import ErrorCode


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

    def nack(self, code: ErrorCode) -> None:
        """One more refusal was told."""
        self.nacks[code.name] = self.nacks.get(code.name, 0) + 1
