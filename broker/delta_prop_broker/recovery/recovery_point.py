"""The recovery point file: the synced offset and the start offset of the log, in two
slots that are written in turn.

A slot is written after the sync that it records, and is not synced itself. So both offsets can only lag: rows
below the synced offset are on stable storage, and rows below the start offset were removed on purpose.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop_broker.segments.small_file import write_all
from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File

SLOT_BYTES = 4096  # as large as a page, so that a torn write corrupts only one slot
_SLOT = struct.Struct("<8sIIQQQ")
"""magic, version, flags (bit 0: clean), sequence, synced offset, start offset; then a CRC32C."""
_CRC = struct.Struct("<I")
_MAGIC = b"dp-mark\0"
_VERSION = 1
_CLEAN = 1


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """The offset `synced` up to which rows were synced, and the start of the log.

    `sequence`: grows with each write. `clean`: the log was closed with this recovery point, so it ends at
    `synced`.
    """

    sequence: int = 0
    synced: int = 0
    start: int = 0
    clean: bool = False


class RecoveryPointFile:
    """The two slots. Calls come from one thread at a time."""

    def __init__(self, file: File, newest: RecoveryPoint) -> None:
        self._file = file
        self.newest = newest

    def write(self, point: RecoveryPoint) -> None:
        """Write the next slot, without a sync."""
        point = replace(point, sequence=self.newest.sequence + 1)
        raw = _pack(point)
        write_all(self._file, point.sequence % 2 * SLOT_BYTES, [raw])
        self.newest = point

    def write_durably(self, point: RecoveryPoint) -> None:
        """Write both slots and sync each, so that no crash brings back an older recovery point."""
        for _ in range(2):
            self.write(point)
            self._file.sync()

    def write_clean(self, synced: int, start: int) -> None:
        """Record that the log ends at `synced`, with nothing after it."""
        self.write_durably(replace(self.newest, synced=synced, start=start, clean=True))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_recovery_point(file: File) -> tuple[RecoveryPoint | None, int]:
    """Return the newest valid recovery point, and the number of corrupted slots.

    A slot that was never written is not corrupted.
    """
    points: list[RecoveryPoint] = []
    corrupted = 0
    for slot in range(2):
        raw = file.read(slot * SLOT_BYTES, _SLOT.size + _CRC.size)
        point = _unpack(raw)
        if point is not None and point.sequence % 2 == slot:
            points.append(point)
        elif any(raw):
            corrupted += 1
    return max(points, key=lambda point: point.sequence, default=None), corrupted


def open_recovery_point(
    disk: Disk, path: str, *, create: bool = False, read_only: bool = False
) -> File | None:
    """Open the file; None if there is none, unless `create`."""
    try:
        return disk.open(path, create=create, read_only=read_only)
    except FileNotFoundError:
        return None


def _pack(point: RecoveryPoint) -> bytes:
    raw = _SLOT.pack(
        _MAGIC, _VERSION, _CLEAN if point.clean else 0, point.sequence, point.synced, point.start
    )
    return raw + _CRC.pack(crc32c(raw))


def _unpack(raw: bytes) -> RecoveryPoint | None:
    if len(raw) != _SLOT.size + _CRC.size or crc32c(raw[: _SLOT.size]) != _CRC.unpack(raw[_SLOT.size :])[0]:
        return None
    magic, version, flags, sequence, synced, start = _SLOT.unpack(raw[: _SLOT.size])
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return RecoveryPoint(sequence, synced, start, bool(flags & _CLEAN))
