"""Complete writes: a short write is continued, never ignored."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import File


def write_all(file: File, at: int, parts: Sequence[Buffer], size: int = -1) -> int:
    """Write the buffers one after the other from `at` on; return the end position. Raises OSError.

    `size`: their total bytes, if known: then a complete write needs no look at each buffer.
    """
    if size > 0:
        taken = file.write(at, parts)
        if taken == size:
            return at + size
        return _write_rest(file, at, [memoryview(part) for part in parts], taken)
    return _write_rest(file, at, [memoryview(part) for part in parts])


def _write_rest(file: File, at: int, views: list[memoryview], taken: int | None = None) -> int:
    """Write the bytes that the first write has not taken, if there was one."""
    first = 0
    while first < len(views):
        if taken is None:
            taken = file.write(at, views[first:] if first else views)
        if taken <= 0:
            raise OSError(errno.EIO, f"the disk took no byte of a write at byte {at}")
        at += taken
        while first < len(views) and taken >= views[first].nbytes:
            taken -= views[first].nbytes
            first += 1
        if taken:
            views[first] = views[first][taken:]
        taken = None
    return at
