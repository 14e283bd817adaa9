"""The clients' side of a run: the deltas that were sent, and the outcomes that clients received.

Pure: it knows the service only by its answers. A delta is identified by a token in its metadata, or by its
vector id, so the checks need not trust dots or offsets.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from delta_prop_simulations.chaos.sinks import Ref
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel, Dot
    from delta_prop_wire.spec import ErrorCode

TOKEN = "t"
"""The metadata name of a delta's token."""

ONCE = "once/"
"""The prefix of a vector id that only one delta has: the id is that delta's token."""

SUM = "sum/"
"""The prefix of a vector id to which only one writer adds ones."""

_DOTS_MAX = 20


class Ack(NamedTuple):
    """One acknowledgement as received. `offset`: None if it named none, which is a violation."""

    level: AckLevel
    offset: int | None
    duplicate: bool


@dataclass(slots=True)
class DeltaOutcome:
    """One delta and its outcomes. `is_unknown`: its outcome could not be determined at least once."""

    node: str
    writer: str
    ref: Ref
    asked_level: AckLevel | None
    acks: list[Ack] = field(default_factory=list)
    refused: ErrorCode | None = None
    is_unknown: bool = False


class ClientHistory:
    """All outcomes that all clients received."""

    def __init__(self) -> None:
        self.outcomes: dict[str, DeltaOutcome] = {}
        self.counts: Counter[str] = Counter()
        self._dots: dict[str, deque[Dot]] = {}

    def note_sent(self, token: str, node: str, writer: str, ref: Ref, asked: AckLevel | None) -> None:
        """Note that the delta was sent, for the first time or as a retry."""
        self.counts["sent again" if token in self.outcomes else "sent"] += 1
        self.outcomes.setdefault(token, DeltaOutcome(node, writer, ref, asked))

    def note_acknowledged(self, token: str, ack: Ack, dot: Dot | None = None) -> None:
        """Note an acknowledgement. `dot`: the delta's, if another delta can safely depend on it."""
        outcome = self.outcomes[token]
        outcome.acks.append(ack)
        self.counts["acknowledged as duplicate" if ack.duplicate else "acknowledged"] += 1
        if dot is not None:
            self._dots.setdefault(outcome.node, deque(maxlen=_DOTS_MAX)).append(dot)

    def note_refused(self, token: str, code: ErrorCode) -> None:
        """Note that the delta was refused and will not be sent again: it must never take effect."""
        self.outcomes[token].refused = code
        self.counts[f"refused with {code.name}"] += 1

    def note_unknown(self, token: str) -> None:
        """Note that the delta's outcome could not be determined."""
        self.outcomes[token].is_unknown = True
        self.counts["outcome unknown"] += 1

    def durable_dots(self) -> list[Dot]:
        """Return the newest dots acknowledged as durable, whose deltas reach every service."""
        return [dot for node in sorted(self._dots) for dot in self._dots[node]]


def token_of(batch: Batch, row: int) -> str | None:
    """Return the token of a row; None if it has none."""
    key = batch.keys[row]
    if key.startswith(ONCE):
        return key
    token = (batch.metadata(row) or {}).get(TOKEN) if batch.has_metadata else None
    return token if isinstance(token, str) else None
