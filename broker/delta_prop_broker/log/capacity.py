"""Capacity of a log on disk for appends: unwritten bytes, free space of the disk, and the log's quota."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.segments.reserve import Reserve
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.retention import Retention
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log.writing import CommitQueue
    from delta_prop_broker.log_clock import LogClock

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


class Capacity:
    """Says if a batch fits, and why not. `batch_bytes_max`: the largest batch that can ever fit.

    `free_space`: of the disk. `refused_count`: number of refused appends.
    """

    def __init__(
        self, settings: LogSettings, free_space: FreeSpace, queue: CommitQueue, retention: Retention
    ) -> None:
        self.batch_bytes_max = settings.bytes_max - settings.segment_bytes_max
        self.free_space = free_space
        self.refused_count = 0
        self._settings = settings
        self._queue = queue
        self._retention = retention
        self._refused_size: int | None = None
        """The size that was last refused for lack of capacity; None once capacity was available."""

    def has(self, size: int) -> bool:
        """Return True if `refusal` is sure to return None; quicker, and frees no capacity."""
        settings, free_space = self._settings, self.free_space
        unwritten = self._queue.unwritten_bytes + size
        return (
            size <= self.batch_bytes_max
            and unwritten <= settings.unwritten_bytes_max
            and settings.free_bytes_min + unwritten <= free_space.bytes
            and not free_space.reserve.missing
            and self._retention.bytes + size <= settings.bytes_max
        )

    def refusal(self, size: int) -> Refused | None:
        """Return the error with which `size` bytes would be refused now; removes old segments first."""
        refusal = self._find_refusal(size)
        if refusal is not None and refusal.code is ErrorCode.LOG_FULL:
            self._refused_size = size
        return refusal

    def _find_refusal(self, size: int) -> Refused | None:
        if size > self.batch_bytes_max:
            return refusals.batch_too_large(size, self.batch_bytes_max)
        unwritten, unwritten_max = self._queue.unwritten_bytes, self._settings.unwritten_bytes_max
        if unwritten and unwritten + size > unwritten_max:
            return refusals.disk_too_slow(unwritten, unwritten_max)
        return self.free_space.refusal(unwritten + size) or self._retention.refusal(size)

    def shortage(self, stop_refusal: Refused | None) -> Refused | None:
        """Return the error while capacity is short; None otherwise, as far as known.

        It is short if the disk is full, or if the size that was last refused would be refused again.
        `stop_refusal`: the error of a log that has stopped.
        """
        refusal = stop_refusal or self.free_space.refusal(self._queue.unwritten_bytes)
        if refusal is None and self._refused_size is not None:
            refusal = self.refusal(self._refused_size)
        if refusal is not None and refusals.FULL in refusal.details:
            return refusal
        self._refused_size = None
        return None

    def poll(self) -> None:
        """Poll the free space of the disk if a poll is due, since other programs write to it too."""
        if self.free_space.claim_poll():
            with suppress(OSError):
                self.free_space.poll()
