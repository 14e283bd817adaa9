"""One file with a checksum, replaced as a whole: what is read is what was written, or is refused.

Written under another name, synced, renamed, and the folder synced: a crash leaves the old file or the new.
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
_PART_BYTES = 1 << 20


class FileFailed(Exception):
    """The file could not be read or written; the message says why."""


class GraphFile:
    """The file of one index."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> memoryview | None:
        """What was written last, None where there is no file. Raises FileFailed."""
        try:
            found = memoryview(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FileFailed(f"{self.path} cannot be read ({error})") from error
        if len(found) < _HEAD.size or bytes(found[: len(MAGIC)]) != MAGIC:
            raise FileFailed(f"{self.path} is not a file of graphs of this version")
        _, size, checksum = _HEAD.unpack_from(found)
        content = found[_HEAD.size :]
        if len(content) != size:
            raise FileFailed(f"{self.path} is torn: it says {size} bytes and has {len(content)}")
        if _checksum([content]) != checksum:
            raise FileFailed(f"{self.path} is damaged: its checksum does not fit")
        return content

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Replace the file. Raises FileFailed; then the old file is still there."""
        new = self.path.with_name(self.path.name + ".new")
        try:
            with open(new, "wb") as file:
                file.write(_HEAD.pack(MAGIC, sum(len(part) for part in parts), _checksum(parts)))
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            if hasattr(os, "O_DIRECTORY"):  # else the system cannot sync a folder
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            raise FileFailed(f"{self.path} cannot be written ({error})") from error


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        for at in range(0, len(part), _PART_BYTES):  # others get their turn in between
            checksum = crc32c(part[at : at + _PART_BYTES], checksum)
    return checksum
