"""Wakers: what one task waits for and another settles, once, as cheaply as the event loop can do it.

An edge: on asyncio a waker is a future of the loop itself, on any other backend it is made of an event.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class Waker(Protocol):
    """What of a future is needed. It has one waiter; where that is cancelled, nobody may settle it."""

    def done(self) -> bool:
        """Whether it was settled, or its waiter cancelled."""
        ...

    def cancelled(self) -> bool:
        """Whether its waiter was cancelled before."""
        ...

    def set_result(self, result: Any, /) -> None:
        """Wake the waiter with this."""
        ...

    def result(self) -> Any:
        """With what it was settled."""
        ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class EventWaker:
    """A waker on any backend of anyio."""

    __slots__ = ("_cancelled", "_event", "_result")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._result: Any = None
        self._cancelled = False

    def done(self) -> bool:
        """See `Waker`."""
        return self._cancelled or self._event.is_set()

    def cancelled(self) -> bool:
        """See `Waker`."""
        return self._cancelled

    def set_result(self, result: Any) -> None:
        """See `Waker`."""
        assert not self.done(), "settled twice"
        self._result = result
        self._event.set()

    def result(self) -> Any:
        """See `Waker`."""
        assert self._event.is_set(), "not settled yet"
        return self._result

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            await self._event.wait()
        except BaseException:
            self._cancelled = not self._event.is_set()
            raise
        return self._result


def waker_maker() -> Callable[[], Waker]:
    """What makes wakers for the event loop whose task calls this."""
    with suppress(RuntimeError):
        if asyncio.current_task() is not None:  # a loop alone does not say so: trio may be its guest
            return asyncio.get_running_loop().create_future
    return EventWaker
