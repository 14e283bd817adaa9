"""Notification when a socket is readable: by a callback if the event loop has those, else by a task.

A task woken for each arrival costs the loop two changes of its set of sockets and a tick; a callback costs
none of them. Both ways behave the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import socket


class Readiness:
    """Readiness of one socket, which never blocks."""

    __slots__ = ("_closed", "_done", "_socket")

    def __init__(self, watched: socket.socket) -> None:
        self._socket = watched
        self._done: asyncio.Future[None] | None = None  # not None while `call_on_readable` waits in asyncio
        self._closed = False

    async def call_on_readable(self, receive: Callable[[], bool]) -> None:
        """Call `receive` whenever there is something to read, until it returns False or raises.

        Raises what `receive` raises, and ConnectionError after `close`. `receive` reads what is there, and
        awaits nothing.
        """
        if self._closed:
            raise closed_error()
        if not await self._watch_with_loop(receive):
            await self._watch_with_task(receive)

    async def close(self) -> None:
        """Wake the waiting task, and let it end before the socket's number is reused."""
        self._closed = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(closed_error())
        anyio.notify_closing(self._socket)
        await anyio.lowlevel.checkpoint()

    async def _watch_with_loop(self, receive: Callable[[], bool]) -> bool:
        """Watch by a callback of the loop; return False if it has no such callbacks."""
        loop = _running_loop()
        if loop is None:
            return False
        finished = loop.create_future()

        def on_readable() -> None:
            if finished.done():  # cancelled or closed, and the task has not run yet
                return
            try:
                if not receive():
                    finished.set_result(None)
            except Exception as error:
                finished.set_exception(error)
            if finished.done():
                loop.remove_reader(descriptor)

        descriptor = self._socket.fileno()
        try:
            loop.add_reader(descriptor, on_readable)
        except NotImplementedError:  # Windows
            return False
        self._done = finished
        try:
            await finished
        finally:
            self._done = None
            loop.remove_reader(descriptor)
        return True

    async def _watch_with_task(self, receive: Callable[[], bool]) -> None:
        while True:
            try:
                await anyio.wait_readable(self._socket)
            except anyio.ClosedResourceError:
                raise closed_error() from None
            if self._closed:
                raise closed_error()
            if not receive():
                return


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:  # a running loop alone does not prove asyncio: trio may be its guest
        return None if asyncio.current_task() is None else asyncio.get_running_loop()
    except RuntimeError:
        return None


def closed_error() -> ConnectionError:
    """Return the error that every call raises after `close`."""
    return ConnectionError("the connection was closed on this side")
