"""Reserved disk space, so that small files can be written, and recovery can run, when the disk is full.

The reserve is a file of allocated blocks. It is released (truncated to nothing) when a write that must
succeed finds no space, and allocated again when there is space. Until then appends are refused, so they never
use this space.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from delta_prop_broker.segments.paths import RESERVE_PATH
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

T = TypeVar("T")

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_disk_full(error: OSError) -> bool:
    """Return True if the error says that the disk is full."""
    return error.errno in _DISK_FULL


class DiskFull(DeltaPropError, OSError):
    """A log cannot be opened for lack of space. `free_bytes`: free space of the disk (None: unknown)."""

    def __init__(self, failure: OSError, free_bytes: int | None) -> None:
        what = failure.strerror or "no space left"
        where = f" ({failure.filename})" if failure.filename else ""
        left = "an unknown number of" if free_bytes is None else f"{free_bytes}"
        super().__init__(
            f"the disk is full: {what}{where}; {left} bytes are free, and no reserve was left to release: "
            "free a few MB (or raise a quota) for the small files that opening a log writes, then open it "
            "again; nothing is lost, and `delta-prop status` and `get` can read the log meanwhile"
        )
        self.errno = failure.errno
        self.free_bytes = free_bytes


@contextmanager
def report_full_disk(disk: Disk) -> Iterator[None]:
    """Raise DiskFull for an OSError that says the disk is full."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        free_bytes: int | None = None
        with suppress(OSError):
            free_bytes = disk.free_bytes()
        raise DiskFull(error, free_bytes) from error


class Reserve:
    """The file `reserve` in the data directory. Calls block; they may come from any thread that writes."""

    def __init__(self, disk: Disk, size: int) -> None:
        """`size`: in bytes; 0 reserves none. Touches no file."""
        self.bytes = 0
        """Bytes that are reserved now."""
        self.missing = 0
        """Bytes to allocate again after a release; appends leave them free."""
        self.releases = 0
        """Number of releases."""
        self._disk = disk
        self._size = size

    def allocate(self, free_bytes_min: int) -> bool:
        """Allocate the space durably if `free_bytes_min` stay free; return True if it is allocated.

        Raises OSError.
        """
        if self.bytes or not self._size:
            return bool(self.bytes)
        file = self._disk.open(RESERVE_PATH, create=True)
        try:
            if file.size() < self._size and self._disk.free_bytes() < self._size + free_bytes_min:
                return False
            file.allocate(self._size)
            file.sync()
        except OSError:
            with suppress(OSError):
                file.truncate(0)  # a partial reserve is of no use
            raise
        finally:
            file.close()
        self._disk.sync_directory("")
        self.bytes, self.missing = self._size, 0
        return True

    def release(self) -> bool:
        """Release the reserved space; return True if there was any. Raises OSError."""
        try:
            file = self._disk.open(RESERVE_PATH)
        except FileNotFoundError:
            return False
        try:
            was_allocated = file.size() > 0
            if was_allocated:
                file.truncate(0)
                self.releases += 1
                self.missing = self._size
            self.bytes = 0
            return was_allocated
        finally:
            file.close()

    def use(self, work: Callable[[], T]) -> T:
        """Run `work`, which writes; if the disk is full, release the reserve and run `work` again.

        Raises what `work` raises.
        """
        try:
            return work()
        except OSError as error:
            if not is_disk_full(error) or not self._try_release():
                raise
        return work()

    def _try_release(self) -> bool:
        try:
            return self.release()
        except OSError:  # the caller raises the first error instead
            return False
