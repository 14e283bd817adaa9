"""The clients' side of a run: what was sent, and what each was told became of it.

Pure: it knows nothing of the service but its answers. A delta is known by a token that it carries, or that
its vector id is, so that neither dots nor offsets have to be believed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from delta_prop_simulations.disasters.store import Ref
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel, Dot
    from delta_prop_wire.spec import ErrorCode

TOKEN = "t"
"""The name in a delta's metadata under which its token stands."""

ONCE = "once/"
"""What a vector id begins with that is used for one delta only: it is the token."""

SUM = "sum/"
"""What a vector id begins with to which one writer alone adds ones."""

_DOTS_KEPT = 20


class Ack(NamedTuple):
    """One acknowledgement as it was told. `offset`: None where none was told, which is wrong."""

    level: AckLevel
    offset: int | None
    duplicate: bool


@dataclass(slots=True)
class Told:
    """One delta and its outcomes. `doubtful`: at least once nobody could tell what became of it."""

    node: str
    writer: str
    ref: Ref
    asked: AckLevel | None
    acks: list[Ack] = field(default_factory=list)
    refused: ErrorCode | None = None
    doubtful: bool = False


class Shadow:
    """Everything that all clients were told."""

    def __init__(self) -> None:
        self.told: dict[str, Told] = {}
        self.counts: Counter[str] = Counter()
        self._dots: dict[str, deque[Dot]] = {}

    def sent(self, token: str, node: str, writer: str, ref: Ref, asked: AckLevel | None) -> None:
        """It goes out, for the first time or again."""
        self.counts["sent again" if token in self.told else "sent"] += 1
        self.told.setdefault(token, Told(node, writer, ref, asked))

    def acknowledged(self, token: str, ack: Ack, dot: Dot | None = None) -> None:
        """It was acknowledged. `dot`: where it can be named as a cause without risk."""
        told = self.told[token]
        told.acks.append(ack)
        self.counts["acknowledged as duplicate" if ack.duplicate else "acknowledged"] += 1
        if dot is not None:
            self._dots.setdefault(told.node, deque(maxlen=_DOTS_KEPT)).append(dot)

    def refused(self, token: str, code: ErrorCode) -> None:
        """It was refused, and is not sent again: it has not happened, and will not."""
        self.told[token].refused = code
        self.counts[f"refused with {code.name}"] += 1

    def unknown(self, token: str) -> None:
        """Nobody can tell whether it happened."""
        self.told[token].doubtful = True
        self.counts["outcome unknown"] += 1

    def dots(self) -> list[Dot]:
        """Deltas that a service has durably, and the others have or will have."""
        return [dot for node in sorted(self._dots) for dot in self._dots[node]]


def token_of(batch: Batch, row: int) -> str | None:
    """By what a row is known here; None where it is not."""
    key = batch.keys[row]
    if key.startswith(ONCE):
        return key
    token = (batch.metadata(row) or {}).get(TOKEN) if batch.has_metadata else None
    return token if isinstance(token, str) else None
