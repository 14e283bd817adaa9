"""The space of a disk: what is free, and what all open logs of a directory have yet to write there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log_clock import MonotonicClock
    from delta_prop_broker.segments.reserve import Reserve
    from delta_prop_wire.errors import Refused

POLL_INTERVAL_S = 0.1
"""Time for which an estimate is used before the disk is polled again."""


class DiskSpace:
    """The space of one disk, shared by all logs there.

    `bytes`: free, as last polled, less the bytes written since; 0 before the first poll. `unwritten_bytes`:
    appended to all logs, and not on disk yet. Appends leave free what `reserve` misses.
    """

    def __init__(self, disk: Disk, reserve: Reserve, clock: MonotonicClock) -> None:
        """`clock`: says when a poll is due."""
        self.bytes = 0
        self.unwritten_bytes = 0
        self.reserve = reserve
        self._disk = disk
        self._now = clock.now
        self._polled_at = -math.inf

    def poll(self) -> int:
        """Poll the disk now. Raises OSError."""
        self.bytes, self._polled_at = self._disk.free_bytes(), self._now()
        return self.bytes

    def claim_poll(self) -> bool:
        """Return True if a poll is due, and start the next interval.

        If True, the caller must poll the disk, itself or in a commit.
        """
        now = self._now()
        is_due = now - self._polled_at >= POLL_INTERVAL_S
        if is_due:
            self._polled_at = now
        return is_due

    def refusal(self, size: int, bytes_min: int) -> Refused | None:
        """Return the error with which `size` more bytes would be refused; None if they fit.

        `bytes_min`: the bytes that must stay free.
        """
        reserved = bytes_min + self.reserve.missing
        needed = reserved + self.unwritten_bytes + size
        if self.bytes >= needed and not self.reserve.missing:
            return None
        try:
            if self.poll() >= needed:  # polled, so that appends resume by themselves
                return None
        except OSError as error:
            return refusals.free_space_unknown(error)
        return refusals.disk_full(self.bytes, reserved, needed)

    def note_written(self, size: int, free_bytes: int | None) -> None:
        """Subtract `size` written bytes; if the disk was polled after the write, store `free_bytes`."""
        self.unwritten_bytes -= size
        self.bytes = self.bytes - size if free_bytes is None else free_bytes

    def forget(self) -> None:
        """Reset the free space to 0, so that the next use polls."""
        self.bytes = 0
