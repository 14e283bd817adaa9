"""Small files that are replaced as a whole, most with a checksum of their content; and complete writes.

A file is written under a temporary name, synced and renamed, so a reader finds the old content or the new.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import closing
from enum import Enum
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.paths import TEMPORARY
from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File


def write_all(file: File, at: int, parts: Sequence[Buffer], size: int = -1) -> int:
    """Write the buffers one after the other from position `at` on; return the end position. Raises OSError.

    `size`: the sum of their sizes, if known, so that a complete write need not compute it.
    """
    if size > 0:
        written = file.write(at, parts)
        if written == size:
            return at + size
        return _write_rest(file, at, [memoryview(part) for part in parts], written)
    return _write_rest(file, at, [memoryview(part) for part in parts])


def _write_rest(file: File, at: int, views: list[memoryview], written: int | None = None) -> int:
    """Write all but the first `written` bytes, which an earlier write has written (None: there was none)."""
    first = 0
    while first < len(views):
        if written is None:
            written = file.write(at, views[first:] if first else views)
        if written <= 0:
            raise OSError(errno.EIO, f"the disk wrote nothing of a write at byte {at}")
        at += written
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]
        written = None
    return at


BYTES_MAX = 1 << 20
"""The default bound of what a reader takes into memory."""
_CRC_BYTES = 4


class Checksum(Enum):
    """The position of the CRC32C of a file's content."""

    FIRST_LINE = "first line"  # in hexadecimal, before a text
    TRAILER = "trailer"  # four bytes, little-endian, after binary content


def read_checked(disk: Disk, path: str, checksum: Checksum, *, bytes_max: int = BYTES_MAX) -> bytes | None:
    """Return the content of a file; None if it is missing.

    Raises LogCorrupted if the content does not fit its checksum, or the file is larger than `bytes_max`;
    OSError.
    """
    raw = read_file(disk, path, bytes_max=bytes_max + 1)
    if raw is None:
        return None
    if len(raw) > bytes_max:
        raise LogCorrupted(path, f"it is larger than the maximum of {bytes_max} bytes")
    if checksum is Checksum.FIRST_LINE:
        stored, _, content = raw.partition(b"\n")
        is_valid = stored == _hexadecimal(content)
    else:
        content = raw[:-_CRC_BYTES]
        # The CRC32C of nothing is 0, so four zero bytes would count as an empty file.
        is_valid = bool(content) and raw[-_CRC_BYTES:] == _little_endian(content)
    if not is_valid:
        raise LogCorrupted(path, f"its {len(raw)} bytes do not fit their checksum")
    return content


def replace_checked(disk: Disk, path: str, content: bytes, checksum: Checksum) -> None:
    """Replace a file atomically by this content and its checksum; durable when it returns. Raises OSError."""
    if checksum is Checksum.FIRST_LINE:
        replace_file(disk, path, [_hexadecimal(content) + b"\n", content])
    else:
        replace_file(disk, path, [content, _little_endian(content)])


def read_file(disk: Disk, path: str, *, bytes_max: int = BYTES_MAX) -> bytes | None:
    """Return the first bytes of a file, up to `bytes_max`; None if it is missing. Raises OSError."""
    try:
        file = disk.open(path, read_only=True)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, min(file.size(), bytes_max))
    finally:
        file.close()


def replace_file(disk: Disk, path: str, parts: Iterable[bytes]) -> None:
    """Replace a file atomically: write it under a temporary name, sync and rename it, and sync the name."""
    write_temporary(disk, path, parts)
    disk.rename(path + TEMPORARY, path)
    disk.sync_directory(path.rpartition("/")[0])


def write_temporary(disk: Disk, path: str, parts: Iterable[bytes]) -> int:
    """Write a file under its temporary name and sync it; return its size. Raises OSError."""
    with closing(disk.open(path + TEMPORARY, create=True)) as file:
        file.truncate(0)
        position = 0
        for part in parts:
            position = write_all(file, position, [part])
        file.sync()
    return position


def _hexadecimal(content: bytes) -> bytes:
    return b"%08x" % crc32c(content)


def _little_endian(content: bytes) -> bytes:
    return crc32c(content).to_bytes(_CRC_BYTES, "little")
