"""What bounds a feed, what it may be doing, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from delta_prop.route.breaker import RetryLimits


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """What bounds a feed: its mailbox, a full batch, how long a busy sink's deltas gather, a merge, how
    long one call may take, how failed calls come again, what its quarantine holds."""

    mailbox_deltas_max: int
    mailbox_bytes_max: int
    batch_deltas: int
    linger_ms_max: float
    merge_deltas_max: int
    apply_s_max: float = inf
    retry: RetryLimits = field(default_factory=RetryLimits)
    quarantine_deltas_max: int = 10_000
    quarantine_bytes_max: int = 64 * 1024 * 1024


class KeptCursor(NamedTuple):
    """How far a sink said it was durable, and up to where all was dealt with, other topics' rows too.

    `required`: the log keeps what comes after for it, though it is not attached. `rebuilding`: a rebuild
    was begun and has not ended, so the sink holds nothing whole, and is rebuilt when it comes back.
    `paused`: it gets nothing until it is resumed. `own`: the sink keeps its cursor with its data.
    `gives_way`: where the log is full on its account it loses its place, rather than producers be refused.
    `rebuild_asked`: an operator wants it rebuilt, which has not begun.
    """

    reported: int
    dealt_with: int
    required: bool = False
    rebuilding: bool = False
    paused: bool = False
    own: bool = False
    gives_way: bool = False
    rebuild_asked: bool = False


def text_of(failure: BaseException | None) -> str:
    """A failure in one line, whatever its own text does."""
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception:
        return f"{type(failure).__name__}, whose text cannot be had"


class FeedState(Enum):
    """What a feed is doing."""

    IDLE = "idle"
    WORKING = "working"
    RETRYING = "retrying"
    BREAKER_OPEN = "breaker open"
    REBUILDING = "rebuilding"
    STOPPED = "stopped"
    PAUSED = "paused"
    NEEDS_SNAPSHOT = "needs snapshot"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class FailingDelta:
    """A delta that holds up its sink: so many calls in a row that brought it alone have failed."""

    offset: int
    namespace: str
    vector_id: str
    failures: int

    def __str__(self) -> str:
        return (
            f"offset {self.offset} (vector {self.vector_id!r} in namespace {self.namespace!r}), brought "
            f"alone, has failed {self.failures} times"
        )


ENDED = (FeedState.STOPPED, FeedState.PAUSED, FeedState.NEEDS_SNAPSHOT, FeedState.CLOSED)
"""Nothing is delivered any more, until someone acts. Looked through quicker than an enum is hashed."""

WORSE = frozenset(
    {
        (FeedState.STOPPED, FeedState.PAUSED),
        (FeedState.STOPPED, FeedState.NEEDS_SNAPSHOT),
        (FeedState.PAUSED, FeedState.NEEDS_SNAPSHOT),
    }
)
"""What a feed stands for, and for what it stands from then on."""


@dataclass(frozen=True, slots=True)
class RebuildProgress:
    """How far a rebuild is. `rows_total`: all of the snapshot, whether the sink wants them or not."""

    why: str
    offset: int
    rows_done: int
    rows_total: int


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """One sink's progress. Offsets are next offsets: everything below is dealt with. `lag_s`: how long ago
    the oldest row was appended that is not dealt with, in seconds; 0 where there is none, None where that
    cannot be told at present.

    Each row that lies between the feed's start and `applied` had one outcome: `success` (applied),
    `skipped` (not for this sink, or dropped before it was attached), in the quarantine now (`quarantined`)
    or dropped from it by an operator (`dropped`). What the quarantine held already when the sink was
    attached comes on top. `backpressure` counts rows that could not be pushed, because the mailbox was
    full or the sink behind, and are read from the log instead; `errors` calls of the sink that failed,
    `defects` those among them that failed with none of the contract's exceptions.
    `failing`: the delta that holds up the sink, as it fails on and on.
    `rebuild`: how far a rebuild is, that is wanted or under way; it may be retrying then. `rebuilds`: how
    many came to their end; each begins these counts anew.
    """

    name: str
    state: str
    reason: str | None
    applied: int
    committed: int
    lag: int
    lag_s: float | None
    behind: bool
    mailbox_deltas: int
    mailbox_bytes: int
    in_hand: int
    deliveries: int
    success: int
    skipped: int
    backpressure: int
    errors: int
    defects: int
    retries: int
    breaker: str
    breaker_opened: int
    quarantined: int
    quarantined_bytes: int
    rejected: int
    replayed: int
    dropped: int
    pacing: bool
    failing: FailingDelta | None = None
    rebuild: RebuildProgress | None = None
    rebuilds: int = 0
