"""The rebuild of one sink: why it is requested, how far it is, what the log retains for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.delivery.status import RebuildProgress

if TYPE_CHECKING:
    from delta_prop.delivery.status import SavedCursor


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
