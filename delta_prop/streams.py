"""Subscriptions as aiostream streams, for asyncio programs that may be under the GPL, as aiostream is.

The extra `streams` installs it. The operators acknowledge a delta only when everything derived from it is
done, and take a bounded number of unacknowledged deltas, so a slow step slows the service down.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from delta_prop.calls.outcomes import Delivered
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from aiostream import Stream

    from delta_prop.client.subscriber import Subscriber

__all__ = ["Delivered", "Item", "chunk", "filter", "items", "map", "merge", "values"]

T = TypeVar("T")
U = TypeVar("U")

OPEN_MAX = 1_000
"""Maximum unacknowledged deltas of one subscription."""
TASKS = 8
"""Maximum calls of a `map` function at a time."""
CHUNK_S = 0.1
"""Maximum seconds for which the first value of a chunk waits for others."""


class Item(Generic[T]):
    """Item of a stream: a value, and the deltas that it was derived from, until `done()`."""

    __slots__ = ("_sources", "value")

    def __init__(self, value: T, sources: Sequence[tuple[_InFlight, int]]) -> None:
        self.value = value
        self._sources = sources  # the deltas, each as the subscription's unacknowledged deltas and an offset

    def done(self) -> None:
        """Acknowledge its deltas, as soon as all before them are done too. Call once."""
        sources, self._sources = self._sources, ()
        for in_flight, offset in sources:
            in_flight.done(offset)

    def into(self, value: U) -> Item[U]:
        """Return an item with a derived value, which replaces this one."""
        sources, self._sources = self._sources, ()
        return Item(value, sources)


def items(subscriber: Subscriber, *, open_max: int = OPEN_MAX) -> Stream[Item[Delivered]]:
    """Return a stream of a subscription's deltas, opened with `ack="manual"`. Raises UsageError."""
    from aiostream import stream

    if not subscriber.manual:
        raise UsageError('the subscriber acknowledges by itself: create it with ack="manual"')
    if open_max < 1:
        raise UsageError(f"open_max {open_max}: give at least 1")
    return stream.iterate(_DeltaIterator(_InFlight(subscriber, open_max)))


def merge(*streams: AsyncIterable[Item[T]]) -> Stream[Item[T]]:
    """Return several streams as one, each in its own order, none waiting for another."""
    from aiostream import stream

    return stream.merge(*streams)


def map(
    source: AsyncIterable[Item[T]],
    function: Callable[[T], Awaitable[U]],
    *,
    tasks: int = TASKS,
    ordered: bool = True,
) -> Stream[Item[U]]:
    """Return a stream of an async function's result for each value, up to `tasks` at a time.

    Its error ends the stream; items that were not done stay unacknowledged. `ordered`: in the order of the
    source, else as results are ready.
    """
    from aiostream import stream

    if tasks < 1:
        raise UsageError(f"tasks {tasks}: give at least 1")

    async def apply(item: Item[T], *_others: Item[T]) -> Item[U]:
        return item.into(await function(item.value))

    return stream.map(source, apply, ordered=ordered, task_limit=tasks)


def filter(source: AsyncIterable[Item[T]], wanted: Callable[[T], bool]) -> Stream[Item[T]]:
    """Return a stream of wanted items; others are done. The loop calls `wanted`, so it must not block."""
    from aiostream import stream

    async def filtered() -> AsyncIterator[Item[T]]:
        async with stream.iterate(source).stream() as streamer:
            async for item in streamer:
                if wanted(item.value):
                    yield item
                else:
                    item.done()

    return stream.iterate(filtered())


def chunk(source: AsyncIterable[Item[T]], count: int, *, within_s: float = CHUNK_S) -> Stream[Item[list[T]]]:
    """Return a stream of lists of up to `count` values; after `within_s` a list is sent as it is."""
    from aiostream import stream

    if count < 1 or not within_s > 0:
        raise UsageError(f"chunks of {count} within {within_s} s: give at least 1, and a time above 0")
    return stream.iterate(_chunks(source, count, within_s))


async def values(source: AsyncIterable[Item[T]]) -> AsyncIterator[T]:
    """Yield the values of a stream; an item is done when the loop requests the next one."""
    from aiostream import stream

    async with stream.iterate(source).stream() as streamer:
        async for item in streamer:
            yield item.value
            item.done()


class _InFlight:
    """Unacknowledged deltas of one subscription."""

    def __init__(self, subscriber: Subscriber, open_max: int) -> None:
        self.subscriber = subscriber
        self._open_max = open_max
        self._open: OrderedDict[int, bool] = OrderedDict()  # offset to True once it is done, rising
        self._capacity_event = asyncio.Event()

    async def wait_capacity(self) -> None:
        """Wait until one more may be taken."""
        while len(self._open) >= self._open_max:
            self._capacity_event.clear()
            await self._capacity_event.wait()

    def take(self, offset: int) -> None:
        """Add a taken delta."""
        self._open[offset] = False

    def done(self, offset: int) -> None:
        """Mark a delta as done; acknowledge as far as all before it are done."""
        if offset not in self._open:
            return
        self._open[offset] = True
        reached = None
        while self._open and (first := next(iter(self._open.items())))[1]:
            reached, _ = self._open.popitem(last=False)
            assert reached == first[0]
        if reached is not None:
            self.subscriber.ack(reached)
            self._capacity_event.set()


class _DeltaIterator:
    """A subscription as an async iterator."""

    def __init__(self, in_flight: _InFlight) -> None:
        self._in_flight = in_flight

    def __aiter__(self) -> _DeltaIterator:
        return self

    async def __anext__(self) -> Item[Delivered]:
        await self._in_flight.wait_capacity()
        delivered = await anext(self._in_flight.subscriber)
        self._in_flight.take(delivered.offset)
        return Item(delivered, ((self._in_flight, delivered.offset),))


async def _chunks(
    source: AsyncIterable[Item[T]], count: int, within_s: float
) -> AsyncIterator[Item[list[T]]]:
    from aiostream import stream

    loop = asyncio.get_running_loop()
    async with stream.iterate(source).stream() as streamer:
        next_item: asyncio.Task[Item[T]] | None = None
        collected: list[Item[T]] = []
        try:
            while True:
                began = loop.time()
                while len(collected) < count:
                    next_item = next_item or asyncio.ensure_future(_next(streamer))
                    left_s = began + within_s - loop.time() if collected else None
                    await asyncio.wait({next_item}, timeout=None if left_s is None else max(left_s, 0.0))
                    if not next_item.done():
                        break  # the next item is awaited for the next chunk
                    began = began if collected else loop.time()
                    collected.append(next_item.result())
                    next_item = None
                yield _join_items(collected)
                collected = []
        except StopAsyncIteration:
            if collected:
                yield _join_items(collected)
        finally:
            if next_item is not None:
                next_item.cancel()


async def _next(streamer: AsyncIterator[Item[T]]) -> Item[T]:
    return await anext(streamer)


def _join_items(items: Sequence[Item[T]]) -> Item[list[T]]:
    return Item([item.value for item in items], [source for item in items for source in item._sources])
