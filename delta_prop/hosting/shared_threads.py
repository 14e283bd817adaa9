"""A few threads for the commits of all partitions, and one for their background work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.platform.ports import Threads, World

COMMIT_THREADS = 4
"""A sync waits for the disk, so that several partitions can commit at a time."""


class SharedThreads:
    """Lends threads to partitions; the calls of one partition run in order, on one thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._exits = AsyncExitStack()
        self._commit_threads: list[Threads] = []
        self._numbers = count()

    async def __aenter__(self) -> World:
        """Start the threads; return the world of the partitions, which has these."""
        await self._exits.__aenter__()
        for _ in range(COMMIT_THREADS):
            self._commit_threads.append(await self._exits.enter_async_context(self._world.own_thread()))
        self._background = await self._exits.enter_async_context(self._world.background_thread())
        return replace(
            self._world, own_thread=self._lend_commit_thread, background_thread=self._lend_background
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _lend_commit_thread(self) -> AsyncIterator[Threads]:
        yield self._commit_threads[next(self._numbers) % COMMIT_THREADS]

    @asynccontextmanager
    async def _lend_background(self) -> AsyncIterator[Threads]:
        yield self._background
