"""Complete writes: a short write is continued, never ignored."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import File


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
