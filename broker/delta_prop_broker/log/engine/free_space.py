"""Free space of the disk: polled now and then, estimated in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk

POLL_INTERVAL_US = 100_000
"""Time for which an estimate is used before the disk is polled again."""


class FreeSpace:
    """`bytes`: the free space, as far as known."""

    def __init__(self, disk: Disk, seen_us: Callable[[], int], *, read_only: bool) -> None:
        self._disk = disk
        self._seen_us = seen_us
        self._polled_us = seen_us()
        self.bytes = 0 if read_only else disk.free_bytes()

    def poll(self) -> int:
        """Poll the disk now. Raises OSError."""
        self.bytes = self._disk.free_bytes()
        return self.bytes

    def is_due(self) -> bool:
        """Return True if a poll is due; the caller then polls, or has the next commit do it."""
        seen_us = self._seen_us()
        due = seen_us - self._polled_us >= POLL_INTERVAL_US
        if due:
            self._polled_us = seen_us
        return due

    def note_written(self, size: int, free_bytes: int | None) -> None:
        """Subtract `size` written bytes; `free_bytes`: what a poll returned after them, None without one."""
        self.bytes = self.bytes - size if free_bytes is None else free_bytes

    def forget(self) -> None:
        """Reset the free space to 0, so that the next use polls."""
        self.bytes = 0
