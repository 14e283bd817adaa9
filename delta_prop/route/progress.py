"""How far one sink is: what it has applied, what of that is durable there, and who waits for which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.route.status import FeedState, KeptCursor
from delta_prop.route.waiting import OffsetWaiters
from delta_prop_wire.cursor import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.route.rebuild import Rebuilder
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.errors import Refused


class Progress:
    """A feed's marks; the feed itself moves them."""

    def __init__(
        self,
        log: Log,
        start: int,
        reported: int,
        *,
        keeps_cursor: bool,
        on_progress: Callable[[], None],
    ) -> None:
        self.state = FeedState.IDLE
        self.reason: Refused | None = None
        self.rebuilder: Rebuilder | None = None
        """Where the sink can be rebuilt."""
        self.before: KeptCursor | None = None
        """What was remembered of a sink that has to be rebuilt since it came back, until that has begun."""
        self.paused = False
        self._log = log
        self._keeps_cursor = keeps_cursor
        self._on_progress = on_progress
        self._start = start
        self._applied = start
        self._committed = start
        self._reported = reported  # as the sink itself says, rows of other topics left out
        self._handed_over = start  # behind the last row that was applied
        self._full_at: int | None = None  # no room for what lies here and behind it: a delivery is in hand
        self._waiters = OffsetWaiters()
        self._commit_waiters = OffsetWaiters()

    @property
    def _quiet(self) -> bool:
        """Nothing in hand, nothing waiting: whatever the log holds, it is dealt with."""
        raise NotImplementedError

    @property
    def applied(self) -> int:
        """Everything below is applied, set aside, or matched none of the sink's topics."""
        return self._log.visible if self._quiet else self._applied

    @property
    def committed(self) -> int:
        """Everything below need not be delivered again after a crash of the sink."""
        if not self._keeps_cursor:
            return self.applied
        return self._log.visible if self._quiet and self._committed >= self._handed_over else self._committed

    @property
    def kept_cursor(self) -> KeptCursor:
        """What to remember of a sink that goes, for when it comes back to the same log."""
        settled = not self._keeps_cursor or self._committed >= self._handed_over
        void = self.rebuilder is not None and self.rebuilder.begun
        if self.before is not None and self.rebuilding:
            return self.before._replace(paused=self.paused, own=self._keeps_cursor)
        return KeptCursor(
            self._reported,
            self.applied if settled else self._committed,
            rebuilding=void,
            paused=self.paused,
            own=self._keeps_cursor,
            rebuild_asked=self.rebuilder is not None and self.rebuilder.lasting,
        )

    @property
    def needed(self) -> int:
        """From where on the log must be kept for it."""
        rebuilt_from = None if self.rebuilder is None else self.rebuilder.needed
        return self.committed if rebuilt_from is None else rebuilt_from

    @property
    def rebuilding(self) -> bool:
        """Whether a rebuild is wanted, or under way: deltas wait until it has ended."""
        return self.rebuilder is not None and self.rebuilder.why is not None

    @property
    def cursor(self) -> Cursor:
        """The durable cursor."""
        return Cursor(self._log.log_id, self._log.epoch, self.committed)

    async def wait(self, offset: int, *, committed: bool = False) -> None:
        """Wait until everything below `offset` is applied (or committed). Raises Refused if it stops."""
        waiters = self._commit_waiters if committed else self._waiters
        while self.rebuilding or (self.committed if committed else self.applied) < offset:
            if self.reason is not None:
                raise self.reason.with_traceback(None)  # many raise it; their traces must not add up
            await waiters.wait(offset)

    def note_committed(self, next_offset: int) -> None:
        """The sink says that everything below is durable, its own cursor with it."""
        if self.rebuilding:
            return
        self._reported = max(self._reported, next_offset)
        if next_offset > self._committed:
            self._committed = next_offset
            self._commit_waiters.wake(self.committed)
            self._on_progress()

    # --- moving

    def _settle(self, offset: int) -> None:
        """Nothing below is left to do, so what was passed over counts as done, and stays so."""
        if self._committed >= self._handed_over:
            self._committed = max(self._committed, offset)
        self._applied = max(self._applied, offset)

    def _progress(self, applied: int) -> None:
        if self._full_at is not None:
            applied = min(applied, self._full_at)
        if applied > self._applied:
            self._applied = applied
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._waiters.wake(self._applied)
        if not self._keeps_cursor:
            self._commit_waiters.wake(self._applied)
        self._on_progress()
