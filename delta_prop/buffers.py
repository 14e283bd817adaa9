"""Buffers that stand for the bytes in them, one behind the other. Nothing is copied that can be viewed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer


def bytes_in(parts: Iterable[Buffer]) -> int:
    """How many bytes they are together."""
    return sum(memoryview(part).nbytes for part in parts)


def behind(parts: Sequence[Buffer], count: int) -> list[memoryview]:
    """What is left of them behind so many bytes."""
    left = []
    for part in parts:
        view = memoryview(part).cast("B")
        if count < view.nbytes:
            left.append(view[count:])
        count = max(0, count - view.nbytes)
    return left


def chunks(parts: Sequence[Buffer], bytes_max: int) -> Iterator[Buffer]:
    """The same bytes in few buffers of up to so many bytes; small ones are joined."""
    some: list[memoryview] = []
    room = bytes_max
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            some.append(view[:room])
            view = view[room:]
            room -= some[-1].nbytes
            if room == 0:
                yield some[0] if len(some) == 1 else b"".join(some)
                some, room = [], bytes_max
    if some:
        yield some[0] if len(some) == 1 else b"".join(some)
