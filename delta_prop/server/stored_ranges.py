"""The ranges of closed partitions, read from the small files of their logs without opening them.

A log that is open, or was not closed cleanly, says so in its recovery point: only its opening finds its end.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop_broker.catalogue.store import place_of, stream_directory
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.recovery.recovery_point import open_recovery_point, read_recovery_point
from delta_prop_broker.segments.identity import read_identity
from delta_prop_broker.segments.paths import IDENTITY, RECOVERY_POINT
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.frames import PartitionRange

if TYPE_CHECKING:
    from delta_prop_broker.catalogue.stream import Stream
    from delta_prop_broker.disk import Disk


@dataclass(frozen=True, slots=True)
class StoredRanges:
    """The ranges of closed partitions by number, and the used partitions whose range needs an opening."""

    ranges: dict[int, PartitionRange] = field(default_factory=dict)
    unclear: list[int] = field(default_factory=list)


def read_ranges(disk: Disk, stream: Stream) -> StoredRanges:
    """Read the ranges of the partitions that were ever used, and create nothing. For a thread.

    Raises OSError.
    """
    found = StoredRanges()
    for number in _used_partitions(disk, stream):
        stored = _read_range(disk, place_of(stream, number).log_path, number)
        if stored is None:
            found.unclear.append(number)
        else:
            found.ranges[number] = stored
    return found


def _used_partitions(disk: Disk, stream: Stream) -> list[int]:
    """Return the partitions that have a log, in order; looks only at those that have a directory."""
    numbers = sorted(int(name) for name in disk.list(stream_directory(stream)) if name.isdecimal())
    return [number for number in numbers if disk.list(place_of(stream, number).log_path)]


def _read_range(disk: Disk, log_path: str, number: int) -> PartitionRange | None:
    """Return the range of a log that was closed cleanly; None for any other."""
    try:
        identity = read_identity(disk, f"{log_path}/{IDENTITY}")
        file = open_recovery_point(disk, f"{log_path}/{RECOVERY_POINT}", read_only=True)
        if identity is None or file is None:
            return None
        with closing(file):
            point, _ = read_recovery_point(file)
    except (LogCorrupted, OSError):  # its opening repairs or explains it
        return None
    if point is None or not point.clean:
        return None
    return PartitionRange(number, point.start, Cursor(identity.log_id, identity.epoch, point.synced))
