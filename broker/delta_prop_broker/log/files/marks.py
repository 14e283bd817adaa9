"""The mark file: how far the log was synced, in two slots that are written in turn.

A slot is written after the sync it tells of, and is not synced itself, so it can only lag; what it says
was on stable storage. So does the start: what lies before it was removed on purpose.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_prop_broker.log.files.writing import write_all
from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File

SLOT_BYTES = 4096  # apart from each other, so that one torn write hurts one slot
_SLOT = struct.Struct("<8sIIQQQ")
"""magic, version, flags, sequence, synced offset, start offset; then a CRC32C."""
_CRC = struct.Struct("<I")
_MAGIC = b"dp-mark\0"
_VERSION = 1
_CLEAN = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything below `synced` was on stable storage; the log starts at `start`.

    `clean`: the log was closed after this, so there was nothing behind `synced`.
    """

    sequence: int = 0
    synced: int = 0
    start: int = 0
    clean: bool = False


class MarkFile:
    """The two slots. Calls come from one thread at a time."""

    def __init__(self, file: File, newest: Mark) -> None:
        self._file = file
        self.newest = newest

    def write(self, mark: Mark) -> None:
        """Write the slot whose turn it is, without a sync."""
        mark = replace(mark, sequence=self.newest.sequence + 1)
        raw = _pack(mark)
        write_all(self._file, mark.sequence % 2 * SLOT_BYTES, [raw])
        self.newest = mark

    def settle(self, mark: Mark) -> None:
        """Write both slots and sync each: whatever is lost later, no older mark comes back."""
        for _ in range(2):
            self.write(mark)
            self._file.sync()

    def settle_clean(self, synced: int, start: int) -> None:
        """The log ends here, at `synced`, and there is nothing behind it."""
        self.settle(replace(self.newest, synced=synced, start=start, clean=True))

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def read_mark(file: File) -> tuple[Mark | None, int]:
    """The newest sound mark, and how many slots are damaged (not: never written)."""
    found: list[Mark] = []
    damaged = 0
    for slot in range(2):
        raw = file.read(slot * SLOT_BYTES, _SLOT.size + _CRC.size)
        mark = _unpack(raw)
        if mark is not None and mark.sequence % 2 == slot:
            found.append(mark)
        elif any(raw):
            damaged += 1
    return max(found, key=lambda mark: mark.sequence, default=None), damaged


def open_mark(disk: Disk, path: str, *, create: bool = False, read_only: bool = False) -> File | None:
    """The mark file, None where there is none and none is to be made."""
    try:
        return disk.open(path, create=create, read_only=read_only)
    except FileNotFoundError:
        return None


def _pack(mark: Mark) -> bytes:
    raw = _SLOT.pack(_MAGIC, _VERSION, _CLEAN if mark.clean else 0, mark.sequence, mark.synced, mark.start)
    return raw + _CRC.pack(crc32c(raw))


def _unpack(raw: bytes) -> Mark | None:
    if len(raw) != _SLOT.size + _CRC.size or crc32c(raw[: _SLOT.size]) != _CRC.unpack(raw[_SLOT.size :])[0]:
        return None
    magic, version, flags, sequence, synced, start = _SLOT.unpack(raw[: _SLOT.size])
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return Mark(sequence, synced, start, bool(flags & _CLEAN))
