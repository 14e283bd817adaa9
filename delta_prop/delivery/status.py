"""A feed's limits, saved cursor and statistics. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from delta_prop.delivery.breaker import RetryLimits


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Limits of a feed: of its mailbox, its calls, their retries, and its quarantine.

    `batch_deltas`: the deltas of a full batch, for which the deltas of a busy sink wait up to `linger_ms`;
    `merge_deltas_max`: maximum number of deltas in a call.
    """

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
    """The durable offset that a sink reported, and the offset below which all rows, of any topic, are
    processed.

    `required`: the log retains the rows from there on, even while the sink is not attached. `rebuilding`: a
    rebuild has begun and not ended, so the sink is incomplete, and is rebuilt when it is attached. `paused`:
    the sink gets nothing until it is resumed. `own`: the sink stores its cursor with its data. `evictable`:
    if the sink keeps the log full, its cursor is invalidated, so that producers are not refused.
    `rebuild_asked`: an operator requested a rebuild, which has not begun.
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


@dataclass(frozen=True, slots=True)
class FailingDelta:
    """A delta that blocks its sink: the last `failures` calls, each with this delta alone, have failed."""

    offset: int
    namespace: str
    vector_id: str
    failures: int

    def __str__(self) -> str:
        return (
            f"offset {self.offset} (vector {self.vector_id!r} in namespace {self.namespace!r}), delivered "
            f"alone, has failed {self.failures} times"
        )


@dataclass(frozen=True, slots=True)
class RebuildProgress:
    """Progress of a rebuild. `rows_total`: all rows of the snapshot, subscribed or not."""

    why: str
    offset: int
    rows_done: int
    rows_total: int


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """One sink's progress. All rows below `applied_offset` (`committed_offset`) are processed (durably).

    `lag_s`: the age, in seconds, of the oldest row that is not processed; 0 if there is none, None if the age
    is unknown at present.

    Each row between the feed's start and `applied_offset` is counted once: as applied (`applied_deltas`), as
    not for this sink or dropped before it was attached (`skipped`), as in the quarantine now
    (`quarantined`), or as dropped from it by an operator (`dropped`). Deltas quarantined before the sink was
    attached are counted in addition. `pulled` counts rows that could not be pushed, because the mailbox was
    full or the sink catching up, and are read from the log instead. `errors` counts failed calls of the sink,
    `unexpected_errors` those of them that raised an exception outside the contract. `failing`: the delta that
    blocks the sink, since each call with it fails. `rebuild`: progress of a rebuild that is requested or
    running; its calls may be retried. `rebuilds`: number of ended rebuilds; each resets these counts.
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
