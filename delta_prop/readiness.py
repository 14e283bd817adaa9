"""When a socket can be read: told by a call of the event loop itself where it has such, else by a task.

A task that wakes up for each arrival costs the loop two changes of its list of sockets and a turn; a call
costs none of them. Both ways do the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable


class Readiness:
    """Of one socket, which never blocks."""

    __slots__ = ("_closed", "_over", "_socket")

    def __init__(self, watched: socket.socket) -> None:
        self._socket = watched
        self._over: asyncio.Future[None] | None = None  # while `each_readable` waits in asyncio
        self._closed = False

    async def each_readable(self, call: Callable[[], bool]) -> None:
        """Call whenever there is something to read, until it gives False or raises, which is passed on.

        Raises ConnectionError once `close` was called. The call reads what is there, and awaits nothing.
        """
        if self._closed:
            raise closed()
        if not await self._by_the_loop(call):
            await self._by_waiting(call)

    async def close(self) -> None:
        """Wake who waits, and let them go before the socket's number is another one's."""
        self._closed = True
        if self._over is not None and not self._over.done():
            self._over.set_exception(closed())
        anyio.notify_closing(self._socket)
        await anyio.lowlevel.checkpoint()

    async def _by_the_loop(self, call: Callable[[], bool]) -> bool:
        """False where the loop makes no such calls."""
        loop = _loop()
        if loop is None:
            return False
        over = loop.create_future()

        def readable() -> None:
            if over.done():  # cancelled, or closed: its task has not run yet
                return
            try:
                if not call():
                    over.set_result(None)
            except Exception as error:
                over.set_exception(error)
            if over.done():
                loop.remove_reader(number)

        number = self._socket.fileno()
        try:
            loop.add_reader(number, readable)
        except NotImplementedError:  # of Windows
            return False
        self._over = over
        try:
            await over
        finally:
            self._over = None
            loop.remove_reader(number)
        return True

    async def _by_waiting(self, call: Callable[[], bool]) -> None:
        while True:
            try:
                await anyio.wait_readable(self._socket)
            except anyio.ClosedResourceError:
                raise closed() from None
            if self._closed:
                raise closed()
            if not call():
                return


def _loop() -> asyncio.AbstractEventLoop | None:
    try:  # a loop alone does not say so: trio may be its guest
        return None if asyncio.current_task() is None else asyncio.get_running_loop()
    except RuntimeError:
        return None


def closed() -> ConnectionError:
    """What everything raises from then on."""
    return ConnectionError("the connection was closed on this side")
