"""Progress of one sink: its applied and committed offsets, and the waiters for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.delivery.offset_waiters import OffsetWaiters
from delta_prop.delivery.status import FeedState, SavedCursor
from delta_prop_wire.cursor import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.delivery.rebuild import Rebuilder
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.errors import Refused


class Progress:
    """The applied and committed offsets of a feed; the feed itself advances them."""

    def __init__(
        self,
        log: Log,
        start: int,
        reported: int,
        *,
        has_own_cursor: bool,
        on_progress: Callable[[], None],
    ) -> None:
        self.state = FeedState.IDLE
        self.reason: Refused | None = None
        self.rebuilder: Rebuilder | None = None
        """Set if the sink can be rebuilt."""
        self.cursor_before_rebuild: SavedCursor | None = None
        """The saved cursor of a sink that must be rebuilt, from its attachment until the rebuild begins."""
        self.is_paused = False
        self._log = log
        self._has_own_cursor = has_own_cursor
        self._on_progress = on_progress
        self._start = start
        self._applied = start
        self._committed = start
        self._reported = reported  # the offset that the sink itself reported as durable
        self._last_applied_end = start  # after the last row that was applied
        self._full_at: int | None = None  # the first offset of a delivery that did not fit the quarantine
        self._waiters = OffsetWaiters()
        self._commit_waiters = OffsetWaiters()

    @property
    def _is_idle(self) -> bool:
        """True while no row is in a call or waits for one, so all rows of the log are processed."""
        raise NotImplementedError

    @property
    def applied(self) -> int:
        """The offset below which all rows are applied, quarantined, or match none of the sink's topics."""
        return self._log.high_watermark if self._is_idle else self._applied

    @property
    def committed(self) -> int:
        """The offset below which no row is redelivered after a crash of the sink."""
        if not self._has_own_cursor:
            return self.applied
        return (
            self._log.high_watermark
            if self._is_idle and self._committed >= self._last_applied_end
            else self._committed
        )

    @property
    def saved_cursor(self) -> SavedCursor:
        """The cursor to save when the sink is detached, for its next attachment to the same log."""
        is_committed = not self._has_own_cursor or self._committed >= self._last_applied_end
        has_begun = self.rebuilder is not None and self.rebuilder.has_begun
        if self.cursor_before_rebuild is not None and self.is_rebuilding:
            return self.cursor_before_rebuild._replace(paused=self.is_paused, own=self._has_own_cursor)
        return SavedCursor(
            self._reported,
            self.applied if is_committed else self._committed,
            rebuilding=has_begun,
            paused=self.is_paused,
            own=self._has_own_cursor,
            rebuild_asked=self.rebuilder is not None and self.rebuilder.is_persistent,
        )

    @property
    def needed_from(self) -> int:
        """The offset from which on the log must retain rows for the sink."""
        rebuilt_from = None if self.rebuilder is None else self.rebuilder.needed_from
        return self.committed if rebuilt_from is None else rebuilt_from

    @property
    def is_rebuilding(self) -> bool:
        """True while a rebuild is requested or running: deltas wait until it has ended."""
        return self.rebuilder is not None and self.rebuilder.reason is not None

    @property
    def cursor(self) -> Cursor:
        """The durable cursor."""
        return Cursor(self._log.log_id, self._log.epoch, self.committed)

    async def wait(self, offset: int, *, committed: bool = False) -> None:
        """Wait until all rows below `offset` are applied (or committed). Raises Refused if the sink stops."""
        waiters = self._commit_waiters if committed else self._waiters
        while self.is_rebuilding or (self.committed if committed else self.applied) < offset:
            if self.reason is not None:
                raise self.reason.with_traceback(None)  # several waiters raise it: its traceback would grow
            await waiters.wait(offset)

    def note_committed(self, next_offset: int) -> None:
        """Note the sink's report that all rows below `next_offset`, and its own cursor, are durable."""
        if self.is_rebuilding:
            return
        self._reported = max(self._reported, next_offset)
        if next_offset > self._committed:
            self._committed = next_offset
            self._commit_waiters.wake(self.committed)
            self._on_progress()

    # --- advancing

    def _advance_past(self, offset: int) -> None:
        """Advance past rows that are not for this sink: all rows below `offset` are processed."""
        if self._committed >= self._last_applied_end:
            self._committed = max(self._committed, offset)
        self._applied = max(self._applied, offset)

    def _advance_applied(self, applied: int) -> None:
        if self._full_at is not None:
            applied = min(applied, self._full_at)
        if applied > self._applied:
            self._applied = applied
            self._notify_progress()

    def _notify_progress(self) -> None:
        self._waiters.wake(self._applied)
        if not self._has_own_cursor:
            self._commit_waiters.wake(self._applied)
        self._on_progress()
