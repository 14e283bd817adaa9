"""Free space of the disk: polled now and then, estimated in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk

POLL_INTERVAL_US = 100_000
"""Time for which an estimate is used before the disk is polled again."""


class FreeSpace:
    """The free space of a disk. `bytes`: as last polled, less the bytes written since."""

    def __init__(self, disk: Disk, now_us: Callable[[], int], *, read_only: bool) -> None:
        """`now_us` returns the seen time of the log, in microseconds."""
        self._disk = disk
        self._now_us = now_us
        self._polled_us = now_us()
        self.bytes = 0 if read_only else disk.free_bytes()

    def poll(self) -> int:
        """Poll the disk now. Raises OSError."""
        self.bytes = self._disk.free_bytes()
        return self.bytes

    def claim_poll(self) -> bool:
        """Return True if a poll is due, and start the next interval.

        If True, the caller must poll the disk, itself or in a commit.
        """
        now_us = self._now_us()
        is_due = now_us - self._polled_us >= POLL_INTERVAL_US
        if is_due:
            self._polled_us = now_us
        return is_due

    def note_written(self, size: int, free_bytes: int | None) -> None:
        """Subtract `size` written bytes; if the disk was polled after the write, store `free_bytes`."""
        self.bytes = self.bytes - size if free_bytes is None else free_bytes

    def forget(self) -> None:
        """Reset the free space to 0, so that the next use polls."""
        self.bytes = 0
