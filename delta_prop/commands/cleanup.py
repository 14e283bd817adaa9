"""Removes the data directory that a failed start created, if nothing was there before.

Only a log without a single delta is removed, and only under the directory's lock, because another process may
have started there meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from delta_prop.directory.readonly_log import open_readonly_log
from delta_prop.platform import system
from delta_prop_broker.segments.paths import FORMAT_PATH, LOCK_PATH
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def remove_on_failure(data: str) -> Iterator[Callable[[], None]]:
    """Remove the data directory that the block creates, and created parent directories, if the block raises.

    Yields a function; the block calls it as soon as the directory must stay.
    """
    was_absent = system.is_absent_or_empty(data)
    missing = system.find_missing_directories(data)
    stay_calls = list[bool]()
    try:
        yield lambda: stay_calls.append(True)
    except Exception:
        if was_absent and not stay_calls:
            with suppress(OSError, DeltaPropError):  # the start's own error is the one to raise
                _remove_log(data)
            for directory in missing:
                system.remove_empty_directory(directory)
        raise


def _remove_log(data: str) -> None:
    """Remove a log in which no delta was ever written. Raises DeltaPropError, OSError."""
    disk = system.open_disk_at(data)
    lock = disk.lock(LOCK_PATH)
    try:
        if FORMAT_PATH in disk.list(""):
            with open_readonly_log(data) as (_, log, report):
                pass  # the counts stay readable after the log is closed
            if log.next_offset or report.bytes:
                return
        system.remove_content(data)
    finally:
        lock.release()
