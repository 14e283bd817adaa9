"""One file with a checksum, replaced atomically: a read returns the content last written, or fails.

A write creates a temporary file, syncs it, renames it and syncs the folder: a crash leaves the old or the new
file.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop_wire.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"dpgraph1"
_HEAD = struct.Struct("<8sQI")
_CHUNK_BYTES = 1 << 20


class GraphFileError(Exception):
    """The file could not be read or written; the message names the reason."""


class GraphFile:
    """The file of one index."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> memoryview | None:
        """Return the content last written, None if there is no file. Raises GraphFileError."""
        try:
            data = memoryview(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise GraphFileError(f"{self.path} cannot be read ({error})") from error
        if len(data) < _HEAD.size or bytes(data[: len(MAGIC)]) != MAGIC:
            raise GraphFileError(f"{self.path} is not a graph file of this version")
        _, size, checksum = _HEAD.unpack_from(data)
        content = data[_HEAD.size :]
        if len(content) != size:
            raise GraphFileError(
                f"{self.path} is torn: its header says {size} bytes and it has {len(content)}"
            )
        if _checksum([content]) != checksum:
            raise GraphFileError(f"{self.path} is corrupted: its checksum does not match")
        return content

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Replace the file. Raises GraphFileError; the old file then still exists."""
        new = self.path.with_name(self.path.name + ".new")
        try:
            with open(new, "wb") as file:
                file.write(_HEAD.pack(MAGIC, sum(len(part) for part in parts), _checksum(parts)))
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            if hasattr(os, "O_DIRECTORY"):  # other systems cannot sync a folder
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            raise GraphFileError(f"{self.path} cannot be written ({error})") from error


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):  # other threads run between chunks
            checksum = crc32c(part[start : start + _CHUNK_BYTES], checksum)
    return checksum
