"""The small files of a log that was used and closed, without its rows."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from delta_prop_broker.recovery.recovery_point import RecoveryPoint, RecoveryPointFile
from delta_prop_broker.segments.identity import Identity, write_identity

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

LOG_ID = bytes(range(16))
EPOCH = 3


def write_log(disk: Disk, path: str, *, start: int = 0, end: int, clean: bool = True) -> None:
    """Write the small files of a log into its directory."""
    disk.make_directory(path)
    write_identity(disk, f"{path}/log", Identity(LOG_ID, ((1, 0), (EPOCH, 5))))
    with closing(disk.open(f"{path}/mark", create=True)) as file:
        RecoveryPointFile(file, RecoveryPoint()).write_durably(RecoveryPoint(0, end, start, clean))
