"""The states of a feed, and the table of its moves. Pure."""

from __future__ import annotations

from enum import Enum

from delta_prop.delivery.status import RebuildProgress, SavedCursor
from delta_prop_wire.errors import Refused


class PendingRebuild:
    """At most one rebuild; `reason` is None while there is none. A new request restarts a running one."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_persistent = False  # True if the next process carries out the request, should this one end
        self.has_begun = False  # True while the sink is incomplete
        self.rebuilds = 0  # number of rebuilds that have ended
        self.request_number = 0  # tells the running rebuild that there is a newer request
        self.is_holding = False  # True while the log retains the tail for it
        self.cursor_before: SavedCursor | None = None
        """The saved cursor of a sink that must be rebuilt, from its attachment until the rebuild begins."""
        self._offset = self._rows_done = self._rows_total = 0

    @property
    def needed_from(self) -> int | None:
        """The offset from which on the log must retain rows for the rebuild; None while none is running."""
        return self._offset if self.is_holding and self.reason is not None else None

    def request(self, reason: str, *, is_persistent: bool = False) -> None:
        """Request a rebuild, or restart the running one. `is_persistent`: the next process knows it, too."""
        self.reason = reason
        self.is_persistent = self.is_persistent or is_persistent
        self.request_number += 1

    def hold_from(self, offset: int) -> None:
        """Note that the log must retain the rows from an offset on."""
        self._offset, self.is_holding = offset, True

    def begin(self, rows_total: int) -> None:
        """Note that the sink is incomplete from now on; a snapshot of so many rows is loaded."""
        self._rows_done, self._rows_total = 0, rows_total
        self.has_begun, self.is_persistent, self.cursor_before = True, False, None

    def note_rows(self, count: int) -> None:
        """Note that so many more rows of the snapshot are loaded."""
        self._rows_done += count

    def end(self) -> None:
        """Note that the sink is complete as of the snapshot."""
        self.reason, self.has_begun = None, False
        self.rebuilds += 1

    def progress(self) -> RebuildProgress | None:
        """Return the progress; None if no rebuild is requested."""
        if self.reason is None:
            return None
        return RebuildProgress(self.reason, self._offset, self._rows_done, self._rows_total)


class FeedState(Enum):
    """The present activity of a feed."""

    IDLE = "idle"
    WORKING = "working"
    RETRYING = "retrying"
    BREAKER_OPEN = "breaker open"
    REBUILDING = "rebuilding"
    STOPPED = "stopped"
    PAUSED = "paused"
    NEEDS_SNAPSHOT = "needs snapshot"
    CLOSED = "closed"

    __hash__ = object.__hash__  # there is one object per member; hashing its name would take longer


class FeedEvent(Enum):
    """Event that moves a feed from one state to another."""

    REST = "nothing is left to do"
    CALL = "a call of the sink, or a write of its quarantine, begins"
    CALL_REBUILD = "a call of a rebuild begins"
    FAIL = "a call failed, and is retried soon"
    TRIP = "a call failed, and the breaker is open"
    STOP = "the sink or the log failed for good"
    PAUSE = "an operator pauses the sink"
    INVALIDATE = "the log no longer has the sink's next rows"
    CLOSE = "the sink is detached"
    CONTINUE = "an operator, or freed capacity, ends a stop"

    __hash__ = object.__hash__


ACTIVE_STATES = (
    FeedState.IDLE,
    FeedState.WORKING,
    FeedState.RETRYING,
    FeedState.BREAKER_OPEN,
    FeedState.REBUILDING,
)
"""States in which the feed delivers, or will do so by itself. In all others, an operator must act."""

_FROM_ACTIVE = {
    FeedEvent.REST: FeedState.IDLE,
    FeedEvent.CALL: FeedState.WORKING,
    FeedEvent.CALL_REBUILD: FeedState.REBUILDING,
    FeedEvent.FAIL: FeedState.RETRYING,
    FeedEvent.TRIP: FeedState.BREAKER_OPEN,
    FeedEvent.STOP: FeedState.STOPPED,
    FeedEvent.PAUSE: FeedState.PAUSED,
    FeedEvent.INVALIDATE: FeedState.NEEDS_SNAPSHOT,
    FeedEvent.CLOSE: FeedState.CLOSED,
}

MOVES: dict[tuple[FeedState, FeedEvent], FeedState] = {
    (state, event): to for state in ACTIVE_STATES for event, to in _FROM_ACTIVE.items()
} | {
    # Of two reasons to stop, the first counts, unless the second is worse.
    (FeedState.STOPPED, FeedEvent.STOP): FeedState.STOPPED,
    (FeedState.STOPPED, FeedEvent.PAUSE): FeedState.PAUSED,
    (FeedState.STOPPED, FeedEvent.INVALIDATE): FeedState.NEEDS_SNAPSHOT,
    (FeedState.STOPPED, FeedEvent.CLOSE): FeedState.CLOSED,
    (FeedState.STOPPED, FeedEvent.CONTINUE): FeedState.IDLE,
    (FeedState.PAUSED, FeedEvent.STOP): FeedState.PAUSED,
    (FeedState.PAUSED, FeedEvent.PAUSE): FeedState.PAUSED,
    (FeedState.PAUSED, FeedEvent.INVALIDATE): FeedState.NEEDS_SNAPSHOT,
    (FeedState.PAUSED, FeedEvent.CLOSE): FeedState.CLOSED,
    (FeedState.PAUSED, FeedEvent.CONTINUE): FeedState.IDLE,
    (FeedState.NEEDS_SNAPSHOT, FeedEvent.STOP): FeedState.NEEDS_SNAPSHOT,
    (FeedState.NEEDS_SNAPSHOT, FeedEvent.PAUSE): FeedState.NEEDS_SNAPSHOT,
    (FeedState.NEEDS_SNAPSHOT, FeedEvent.INVALIDATE): FeedState.NEEDS_SNAPSHOT,
    (FeedState.NEEDS_SNAPSHOT, FeedEvent.CLOSE): FeedState.CLOSED,
    (FeedState.NEEDS_SNAPSHOT, FeedEvent.CONTINUE): FeedState.IDLE,
    (FeedState.CLOSED, FeedEvent.STOP): FeedState.CLOSED,
    (FeedState.CLOSED, FeedEvent.PAUSE): FeedState.CLOSED,
    (FeedState.CLOSED, FeedEvent.INVALIDATE): FeedState.CLOSED,
    (FeedState.CLOSED, FeedEvent.CLOSE): FeedState.CLOSED,
}
"""The state that follows a state and an event. A pair that is missing is a defect."""


class FeedStatus:
    """The state of one feed, why it has stopped, and its rebuild. Only `move` and `end` change the state."""

    def __init__(self) -> None:
        self.state = FeedState.IDLE
        self.has_ended = False  # True while nothing is delivered, until an operator acts or capacity is freed
        self.reason: Refused | None = None  # why it has ended
        self.is_paused = False  # True until an operator resumes, whatever else stops the feed
        self.is_full = False  # True if it stopped because the quarantine is full
        self.rebuild = PendingRebuild()

    def move(self, event: FeedEvent) -> None:
        """Move by an event that does not end the feed. Raises KeyError if the table lacks the move."""
        self.state = MOVES[self.state, event]
        if event is FeedEvent.CONTINUE:
            self.reason, self.has_ended, self.is_full = None, False, False

    def end(self, event: FeedEvent, refusal: Refused) -> bool:
        """Move to the state in which `event` ends the feed; return True if `refusal` is the reason.

        The first reason is kept. Only a full quarantine is replaced by a later reason, since after it a feed
        would continue by itself.
        """
        if self.is_full:
            self.move(FeedEvent.CONTINUE)
        before = self.state
        self.state = MOVES[before, event]
        is_new = self.state is not before and (self.reason is None or event is not FeedEvent.CLOSE)
        if is_new:
            self.reason = refusal
        self.has_ended = True
        return is_new
