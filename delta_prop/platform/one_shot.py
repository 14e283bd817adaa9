"""One-shot results that one task awaits and another sets, as cheap as the event loop allows.

System module: on asyncio a one-shot is a future of the loop itself, on any other backend it wraps an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import anyio


class OneShot(Protocol):
    """A future with one waiter; if the waiter is cancelled, no result may be set."""

    def done(self) -> bool:
        """True if the result was set, or the waiter cancelled."""
        ...

    def cancelled(self) -> bool:
        """True if the waiter was cancelled before a result was set."""
        ...

    def set_result(self, result: Any, /) -> None:
        """Set the result and wake the waiter."""
        ...

    def result(self) -> Any:
        """Return the result that was set."""
        ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class EventOneShot:
    """One-shot for any backend of anyio."""

    __slots__ = ("_cancelled", "_event", "_result")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._result: Any = None
        self._cancelled = False

    def done(self) -> bool:
        """See `OneShot`."""
        return self._cancelled or self._event.is_set()

    def cancelled(self) -> bool:
        """See `OneShot`."""
        return self._cancelled

    def set_result(self, result: Any) -> None:
        """See `OneShot`."""
        assert not self.done(), "settled twice"
        self._result = result
        self._event.set()

    def result(self) -> Any:
        """See `OneShot`."""
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


def one_shot_factory() -> Callable[[], OneShot]:
    """Return a factory of one-shots for the event loop of the calling task."""
    with suppress(RuntimeError):
        # a running loop alone does not prove asyncio: trio may be its guest
        if asyncio.current_task() is not None:
            return partial(asyncio.Future, loop=asyncio.get_running_loop())
    return EventOneShot
