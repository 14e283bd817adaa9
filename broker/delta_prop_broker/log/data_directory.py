"""A data directory: its lock, and the disk space that all its logs have in reserve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.log.disk_space import DiskSpace
from delta_prop_broker.segments.identity import check_format
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_broker.segments.reserve import Reserve, report_full_disk

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, Lock
    from delta_prop_broker.log_clock import MonotonicClock


class DataDirectory:
    """An open data directory, with the lock until `close`; several logs may be open in it.

    `reserve`: disk space for writes that must succeed on a full disk. `space`: of the disk, which all logs
    share. `open_logs`: paths of the logs that are open, which share memory.
    """

    def __init__(self, disk: Disk, reserve: Reserve, space: DiskSpace, lock: Lock | None) -> None:
        """Use `open`. `lock`: None if it is read-only."""
        self.space = space
        self.disk = disk
        self.open_logs: set[str] = set()
        self.reserve = reserve
        self._lock = lock

    @classmethod
    def open(
        cls, disk: Disk, *, reserve_bytes: int, clock: MonotonicClock, read_only: bool = False
    ) -> DataDirectory:
        """Create the directory if it is missing, and lock it; the caller closes it.

        Raises LogBusy, FormatUnknown, FormatOutdated, LogCorrupted, OSError.
        """
        reserve = Reserve(disk, reserve_bytes)
        space = DiskSpace(disk, reserve, clock)
        if read_only:
            return cls(disk, reserve, space, None)
        lock = _lock(disk)
        try:
            space.poll()
        except BaseException:
            lock.release()
            raise
        return cls(disk, reserve, space, lock)

    @property
    def is_writable(self) -> bool:
        """False if it is open read-only, or closed."""
        return self._lock is not None

    def close(self) -> None:
        """Release the lock, if that was not done before."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def _lock(disk: Disk) -> Lock:
    check_format(disk)  # before the lock file is created, so that a refused directory stays unchanged
    try:
        with report_full_disk(disk):
            disk.make_directory("")
            return disk.lock(LOCK_PATH)
    except BlockingIOError as error:
        raise LogBusy(error.strerror or str(error)) from None
