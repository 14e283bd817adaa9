"""Capacity of a log on disk for appends: unwritten bytes, free space of the disk, and the log's quota."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.log.disk_space import DiskSpace
    from delta_prop_broker.log.retention import Retention
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log.writing import CommitQueue


class Capacity:
    """Says if a batch fits, and why not. `batch_bytes_max`: the largest batch that can ever fit.

    `space`: of the disk. `refused_count`: number of refused appends.
    """

    def __init__(
        self, settings: LogSettings, space: DiskSpace, queue: CommitQueue, retention: Retention
    ) -> None:
        self.batch_bytes_max = settings.bytes_max - settings.segment_bytes_max
        self.space = space
        self.refused_count = 0
        self._settings = settings
        self._queue = queue
        self._retention = retention
        self._refused_size: int | None = None
        """The size that was last refused for lack of capacity; None once capacity was available."""

    def has(self, size: int) -> bool:
        """Return True if `refusal` is sure to return None; quicker, and frees no capacity."""
        settings, space = self._settings, self.space
        unwritten = space.unwritten_bytes + size
        return (
            size <= self.batch_bytes_max
            and unwritten <= settings.unwritten_bytes_max
            and settings.free_bytes_min + unwritten <= space.bytes
            and not space.reserve.missing
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
        unwritten, unwritten_max = self.space.unwritten_bytes, self._settings.unwritten_bytes_max
        # A log of which nothing waits may append one batch, so the others never stop it.
        if self._queue.unwritten_bytes and unwritten + size > unwritten_max:
            return refusals.disk_too_slow(unwritten, unwritten_max)
        return self.space.refusal(size, self._settings.free_bytes_min) or self._retention.refusal(size)

    def shortage(self, stop_refusal: Refused | None) -> Refused | None:
        """Return the error while capacity is short; None otherwise, as far as known.

        It is short if the disk is full, or if the size that was last refused would be refused again.
        `stop_refusal`: the error of a log that has stopped.
        """
        refusal = stop_refusal or self.space.refusal(0, self._settings.free_bytes_min)
        if refusal is None and self._refused_size is not None:
            refusal = self.refusal(self._refused_size)
        if refusal is not None and refusals.FULL in refusal.details:
            return refusal
        self._refused_size = None
        return None

    def poll(self) -> None:
        """Poll the free space of the disk if a poll is due, since other programs write to it too."""
        if self.space.claim_poll():
            with suppress(OSError):
                self.space.poll()
