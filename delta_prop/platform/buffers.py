"""Sequences of buffers treated as one byte string, viewed instead of copied where possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


def total_bytes(parts: Iterable[Buffer]) -> int:
    """Return the total size of the buffers in bytes."""
    return sum(memoryview(part).nbytes for part in parts)


def skip_bytes(parts: Sequence[Buffer], count: int) -> list[memoryview]:
    """Return views of the bytes after the first `count`."""
    views = []
    for part in parts:
        view = memoryview(part).cast("B")
        if count < view.nbytes:
            views.append(view[count:])
        count = max(0, count - view.nbytes)
    return views


def chunks(parts: Sequence[Buffer], bytes_max: int) -> Iterator[Buffer]:
    """Yield the same bytes in few buffers of up to `bytes_max` bytes; small ones are joined."""
    views: list[memoryview] = []
    capacity = bytes_max
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            views.append(view[:capacity])
            view = view[capacity:]
            capacity -= views[-1].nbytes
            if capacity == 0:
                yield views[0] if len(views) == 1 else b"".join(views)
                views, capacity = [], bytes_max
    if views:
        yield views[0] if len(views) == 1 else b"".join(views)
