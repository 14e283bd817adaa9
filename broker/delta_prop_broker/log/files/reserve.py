"""Disk space reserved for a full disk: small files and recovery can still be written then.

A file of allocated blocks. It is dropped (truncated to nothing) when a write that must happen finds no space,
and taken once more when there is space. Appends never get it: while it is dropped they are refused.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from delta_prop_broker.log.files.paths import RESERVE_PATH
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop_broker.disk import Disk

T = TypeVar("T")

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_disk_full(error: OSError) -> bool:
    """Return True if the error says that the disk is full."""
    return error.errno in _DISK_FULL


class DiskFull(DeltaPropError, OSError):
    """A log cannot be opened for lack of space. `free_bytes`: free space of the disk (None: not known)."""

    def __init__(self, failure: OSError, free_bytes: int | None) -> None:
        what = failure.strerror or "no space left"
        where = f" ({failure.filename})" if failure.filename else ""
        left = "an unknown number of" if free_bytes is None else f"{free_bytes}"
        super().__init__(
            f"the disk is full: {what}{where}, {left} bytes are free, and no reserve was left to release; "
            "opening a log for writing writes a few small files: free some MB (or raise a quota), then open "
            "it again; nothing is lost, and `delta-prop status` and `get` read it meanwhile"
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
        """Bytes that were dropped and are to be taken once more: space that appends must leave free."""
        self.drops = 0
        """Count of drops."""
        self._disk = disk
        self._size = size

    def take(self, free_bytes_min: int) -> bool:
        """Allocate it durably, if `free_bytes_min` stay free; return True if it is held. Raises OSError."""
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

    def drop(self) -> bool:
        """Free the reserved space; return True if there was any. Raises OSError."""
        try:
            file = self._disk.open(RESERVE_PATH)
        except FileNotFoundError:
            return False
        try:
            held = file.size() > 0
            if held:
                file.truncate(0)
                self.drops += 1
                self.missing = self._size
            self.bytes = 0
            return held
        finally:
            file.close()

    def use(self, work: Callable[[], T]) -> T:
        """Run `work`, which writes; if the disk is full, drop the reserve and run it once more.

        Raises what `work` raises.
        """
        try:
            return work()
        except OSError as error:
            if not is_disk_full(error) or not self._try_drop():
                raise
        return work()

    def _try_drop(self) -> bool:
        try:
            return self.drop()
        except OSError:  # the caller raises the first error instead
            return False
