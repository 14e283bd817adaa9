"""Free space of the disk: polled now and then, estimated in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.segments.reserve import Reserve
    from delta_prop_wire.errors import Refused

POLL_INTERVAL_US = 100_000
"""Time for which an estimate is used before the disk is polled again."""


class FreeSpace:
    """The free space of a disk. `bytes`: as last polled, less the bytes written since.

    Appends leave `bytes_min` free, and what `reserve` misses.
    """

    def __init__(
        self, disk: Disk, clock: LogClock, reserve: Reserve, *, bytes_min: int, read_only: bool
    ) -> None:
        """`clock`: its seen time says when a poll is due."""
        self.bytes = 0 if read_only else disk.free_bytes()
        self.bytes_min = bytes_min
        self.reserve = reserve
        self._disk = disk
        self._clock = clock
        self._polled_us = clock.seen_us

    def poll(self) -> int:
        """Poll the disk now. Raises OSError."""
        self.bytes = self._disk.free_bytes()
        return self.bytes

    def claim_poll(self) -> bool:
        """Return True if a poll is due, and start the next interval.

        If True, the caller must poll the disk, itself or in a commit.
        """
        now_us = self._clock.seen_us
        is_due = now_us - self._polled_us >= POLL_INTERVAL_US
        if is_due:
            self._polled_us = now_us
        return is_due

    def refusal(self, size: int) -> Refused | None:
        """Return the error with which `size` unwritten bytes would be refused; None if they fit."""
        reserved = self.bytes_min + self.reserve.missing
        needed = reserved + size
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
        self.bytes = self.bytes - size if free_bytes is None else free_bytes

    def forget(self) -> None:
        """Reset the free space to 0, so that the next use polls."""
        self.bytes = 0
