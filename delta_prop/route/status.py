"""A feed's limits, states and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from delta_prop.route.breaker import RetryLimits


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Limits of a feed: its mailbox, a full batch, how long a busy sink's deltas linger, the deltas of a
    call, a call's timeout, the retries of failed calls, the size of its quarantine."""

    mailbox_deltas_max: int
    mailbox_bytes_max: int
    batch_deltas: int
    linger_ms: float
    merge_deltas_max: int
    apply_timeout_s: float = inf
    retry: RetryLimits = field(default_factory=RetryLimits)
    quarantine_deltas_max: int = 10_000
    quarantine_bytes_max: int = 64 * 1024 * 1024


class SavedCursor(NamedTuple):
    """Durable offset that a sink reported, and offset below which all rows are processed, of any topic.

    `required`: the log retains what follows though the sink is not attached. `rebuilding`: a rebuild was
    begun and has not ended, so the sink is incomplete, and is rebuilt when it is attached. `paused`: it gets
    nothing until it is resumed. `own`: the sink stores its cursor with its data. `evictable`: when it keeps
    the log full its cursor is invalidated, instead of refusing producers. `rebuild_asked`: an operator
    requested a rebuild, which has not begun.
    """

    reported: int
    processed: int
    required: bool = False
    rebuilding: bool = False
    paused: bool = False
    own: bool = False
    evictable: bool = False
    rebuild_asked: bool = False


def format_failure(failure: BaseException | None) -> str:
    """Format a failure in one line, even if its own text raises."""
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception:
        return f"{type(failure).__name__}, whose text cannot be formatted"


class FeedState(Enum):
    """Present activity of a feed."""

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
    """A delta that blocks its sink: `failures` calls in a row with it alone have failed."""

    offset: int
    namespace: str
    vector_id: str
    failures: int

    def __str__(self) -> str:
        return (
            f"offset {self.offset} (vector {self.vector_id!r} in namespace {self.namespace!r}), delivered "
            f"alone, has failed {self.failures} times"
        )


ENDED_STATES = (FeedState.STOPPED, FeedState.PAUSED, FeedState.NEEDS_SNAPSHOT, FeedState.CLOSED)
"""States in which nothing is delivered until someone acts. A tuple is searched faster than hashed."""

WORSE_TRANSITIONS = frozenset(
    {
        (FeedState.STOPPED, FeedState.PAUSED),
        (FeedState.STOPPED, FeedState.NEEDS_SNAPSHOT),
        (FeedState.PAUSED, FeedState.NEEDS_SNAPSHOT),
    }
)
"""Transitions (old state, new state) between these that a stop may make."""


@dataclass(frozen=True, slots=True)
class RebuildProgress:
    """Progress of a rebuild. `rows_total`: all rows of the snapshot, subscribed or not."""

    why: str
    offset: int
    rows_done: int
    rows_total: int


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """One sink's progress. Offsets are next offsets: all rows below are processed. `lag_s`: seconds since
    the oldest row was appended that is not processed; 0 if there is none, None if that is not known at
    present.

    Each row between the feed's start and `applied_offset` had one outcome: `applied_deltas` (applied),
    `skipped` (not for this sink, or dropped before it was attached), in the quarantine now (`quarantined`)
    or dropped from it by an operator (`dropped`). Deltas quarantined before the sink was attached are counted
    in addition. `pulled` counts rows that could not be pushed, because the mailbox was full or the sink
    catching up, and are read from the log instead; `errors` failed calls of the sink, `unexpected_errors`
    those among them that failed with none of the contract's exceptions. `failing`: the delta that blocks
    the sink by failing each time. `rebuild`: progress of a rebuild that is requested or running; it may be
    retrying then. `rebuilds`: number of ended rebuilds; each resets these counts.
    """

    name: str
    state: str
    reason: str | None
    applied_offset: int
    committed_offset: int
    lag: int
    lag_s: float | None
    catching_up: bool
    mailbox_deltas: int
    mailbox_bytes: int
    in_call: int
    deliveries: int
    applied_deltas: int
    skipped: int
    pulled: int
    errors: int
    unexpected_errors: int
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
