"""The capacity for staged parts: bytes on the disk, and bytes that wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.server.job_rules import no_capacity, staging_backlogged

if TYPE_CHECKING:
    from delta_prop.partition.storage.storage import Storage

UNWRITTEN_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes that may wait for the disk, over all connections."""


class StagingCapacity:
    """The capacity of one server. `must_check_disk`: True if the free bytes are to be asked for again."""

    def __init__(self, storage: Storage | None, *, staged_bytes_max: int) -> None:
        self.must_check_disk = False
        self.unwritten_bytes = 0
        """Bytes that wait for the disk."""
        self._storage = storage
        self._staged_bytes_max = staged_bytes_max
        self._free_bytes = 0  # on the disk, when last checked

    def check(self, size: int, staged_bytes: int) -> None:
        """Check that `size` more bytes may be staged, besides `staged_bytes`. Raises Refused.

        If the disk seems too full, `must_check_disk` is set.
        """
        bound, unwritten = self._staged_bytes_max, self.unwritten_bytes
        if staged_bytes + size > bound:
            raise no_capacity(f"{staged_bytes} bytes of {bound} (staged_bytes_max) are staged")
        if unwritten and unwritten + size > UNWRITTEN_BYTES_MAX:
            raise staging_backlogged(unwritten, UNWRITTEN_BYTES_MAX)
        if unwritten + size > self._free_bytes - self._spare_bytes:
            self.must_check_disk = True
            raise no_capacity(f"{self._free_bytes} bytes are free, {self._spare_bytes} of them reserved")

    def note_free(self, free_bytes: int) -> None:
        """Note the free bytes of the disk."""
        self._free_bytes = free_bytes

    def note_written(self, written_bytes: int, free_bytes: int | None) -> None:
        """Note that `written_bytes` wait no more. `free_bytes`: of the disk; None if they are unknown."""
        self.unwritten_bytes -= written_bytes
        self._free_bytes = self._free_bytes - written_bytes if free_bytes is None else free_bytes

    @property
    def _spare_bytes(self) -> int:
        """Bytes that must stay free on the disk."""
        storage = self._storage
        return 0 if storage is None else storage.log.settings.free_bytes_min + storage.log.reserve.missing
