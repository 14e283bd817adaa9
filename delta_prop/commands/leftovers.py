"""What a start that fails has made is removed: its data directory, if nothing was there before.

Only a log without a single delta goes, and only under the directory's lock: another process may have begun
there meanwhile, and what it has is not this one's to remove.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from delta_prop.commands import edge
from delta_prop.commands.opened import opened_log
from delta_prop_broker.log.files.names import FORMAT_PATH, LOCK_PATH
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def removing_if_failed(data: str) -> Iterator[Callable[[], None]]:
    """Remove the data directory that the block makes, and those above it, where the block raises.

    What it yields is called once the directory is to stay.
    """
    begins, missing, kept = edge.holds_nothing(data), edge.missing_directories(data), list[bool]()
    try:
        yield lambda: kept.append(True)
    except Exception:
        if begins and not kept:
            with suppress(OSError, DeltaPropError):  # why the start failed is what counts
                _remove_log(data)
            for directory in missing:
                edge.remove_empty(directory)
        raise


def _remove_log(data: str) -> None:
    """Remove a log in which no delta was ever written. Raises DeltaPropError, OSError."""
    disk = edge.disk_at(data)
    lock = disk.lock(LOCK_PATH)
    try:
        if FORMAT_PATH in disk.list(""):
            with opened_log(data) as (_, log, report):
                pass  # what it knows of itself is enough
            if log.next_offset or report.bytes:
                return
        edge.remove_content(data)
    finally:
        lock.release()
