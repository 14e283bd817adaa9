"""Subscriptions as aiostream streams, for programs on asyncio that may be under the GPL: aiostream is.

The extra `streams` installs it. The rule of the operators: a delta is acknowledged only when everything that
was made of it is done, and no more are taken than may be open, so a slow step slows the service down.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from delta_prop.published import Delivered
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence

    from aiostream import Stream

    from delta_prop.client.subscriber import Subscriber

__all__ = ["Delivered", "Item", "chunk", "items", "keep", "map", "merge", "values"]

T = TypeVar("T")
U = TypeVar("U")

OPEN_MAX = 1_000
"""Deltas of one subscription that may be taken and not done with."""
TASKS = 8
CHUNK_S = 0.1


class Item(Generic[T]):
    """What travels: a value, and the deltas that it was made of. `done()`: nothing more comes of it."""

    __slots__ = ("_origins", "value")

    def __init__(self, value: T, origins: Sequence[tuple[_Open, int]]) -> None:
        self.value = value
        self._origins = origins

    def done(self) -> None:
        """Acknowledge its deltas, as soon as all before them are done with too. Once."""
        origins, self._origins = self._origins, ()
        for open_, offset in origins:
            open_.done(offset)

    def into(self, value: U) -> Item[U]:
        """Something made of it, which takes its place."""
        origins, self._origins = self._origins, ()
        return Item(value, origins)


def items(subscriber: Subscriber, *, open_max: int = OPEN_MAX) -> Stream[Item[Delivered]]:
    """A subscription's deltas. The subscriber is open, and made with `ack="manual"`. Raises UsageError."""
    from aiostream import stream

    if not subscriber.manual:
        raise UsageError('the subscriber acknowledges by itself: make it with ack="manual"')
    if open_max < 1:
        raise UsageError(f"open_max {open_max}: give at least 1")
    return stream.iterate(_Deltas(_Open(subscriber, open_max)))


def merge(*streams: AsyncIterable[Item[T]]) -> Stream[Item[T]]:
    """Several streams as one, each in its own order, none waiting for another."""
    from aiostream import stream

    return stream.merge(*streams)


def map(
    source: AsyncIterable[Item[T]],
    function: Callable[[T], Awaitable[U]],
    *,
    tasks: int = TASKS,
    ordered: bool = True,
) -> Stream[Item[U]]:
    """What an async function makes of each value, so many at a time. Its error ends the stream, with
    nothing acknowledged that was not done. `ordered`: as they came, else as they are ready.
    """
    from aiostream import stream

    if tasks < 1:
        raise UsageError(f"tasks {tasks}: give at least 1")

    async def made(item: Item[T], *_others: Item[T]) -> Item[U]:
        return item.into(await function(item.value))

    return stream.map(source, made, ordered=ordered, task_limit=tasks)


def keep(source: AsyncIterable[Item[T]], wanted: Callable[[T], bool]) -> Stream[Item[T]]:
    """Only what is wanted; the rest is done with. The event loop calls `wanted`, which must not block."""
    from aiostream import stream

    async def kept() -> AsyncIterator[Item[T]]:
        async with stream.iterate(source).stream() as streamer:
            async for item in streamer:
                if wanted(item.value):
                    yield item
                else:
                    item.done()

    return stream.iterate(kept())


def chunk(source: AsyncIterable[Item[T]], count: int, *, within_s: float = CHUNK_S) -> Stream[Item[list[T]]]:
    """Lists of up to `count` values; what there is after `within_s` goes as it is."""
    from aiostream import stream

    if count < 1 or not within_s > 0:
        raise UsageError(f"chunks of {count} within {within_s} s: give at least 1, and some time")
    return stream.iterate(_chunks(source, count, within_s))


async def values(source: AsyncIterable[Item[T]]) -> AsyncIterator[T]:
    """The end of a stream: each value is done with when the loop comes back for the next."""
    from aiostream import stream

    async with stream.iterate(source).stream() as streamer:
        async for item in streamer:
            yield item.value
            item.done()


class _Open:
    """The deltas of one subscription that are taken and not done with."""

    def __init__(self, subscriber: Subscriber, most: int) -> None:
        self.subscriber = subscriber
        self._most = most
        self._open: OrderedDict[int, bool] = OrderedDict()  # offset to whether it is done with, rising
        self._room = asyncio.Event()

    async def until_room(self) -> None:
        """Wait until one more may be taken."""
        while len(self._open) >= self._most:
            self._room.clear()
            await self._room.wait()

    def take(self, offset: int) -> None:
        """One more is open."""
        self._open[offset] = False

    def done(self, offset: int) -> None:
        """One is done with; acknowledge as far as all before it are."""
        if offset not in self._open:
            return
        self._open[offset] = True
        reached = None
        while self._open and (first := next(iter(self._open.items())))[1]:
            reached, _ = self._open.popitem(last=False)
            assert reached == first[0]
        if reached is not None:
            self.subscriber.ack(reached)
            self._room.set()


class _Deltas:
    """A subscription as something to iterate over."""

    def __init__(self, open_: _Open) -> None:
        self._open = open_

    def __aiter__(self) -> _Deltas:
        return self

    async def __anext__(self) -> Item[Delivered]:
        await self._open.until_room()
        delivered = await anext(self._open.subscriber)
        self._open.take(delivered.offset)
        return Item(delivered, ((self._open, delivered.offset),))


async def _chunks(
    source: AsyncIterable[Item[T]], count: int, within_s: float
) -> AsyncIterator[Item[list[T]]]:
    from aiostream import stream

    loop = asyncio.get_running_loop()
    async with stream.iterate(source).stream() as streamer:
        coming: asyncio.Task[Item[T]] | None = None
        held: list[Item[T]] = []
        try:
            while True:
                began = loop.time()
                while len(held) < count:
                    coming = coming or asyncio.ensure_future(_next(streamer))
                    left_s = began + within_s - loop.time() if held else None
                    await asyncio.wait({coming}, timeout=None if left_s is None else max(left_s, 0.0))
                    if not coming.done():
                        break  # what comes next is waited for further, with the next chunk
                    began = began if held else loop.time()
                    one, coming = coming, None
                    held.append(one.result())
                yield _together(held)
                held = []
        except StopAsyncIteration:
            if held:
                yield _together(held)
        finally:
            if coming is not None:
                coming.cancel()


async def _next(streamer: AsyncIterator[Item[T]]) -> Item[T]:
    return await anext(streamer)


def _together(held: Sequence[Item[T]]) -> Item[list[T]]:
    return Item([item.value for item in held], [one for item in held for one in item._origins])
