"""Says what a command waits for: to people within seconds where nothing moves, and again now and then."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio

from delta_prop.client import outage
from delta_prop.commands import edge
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from delta_prop.client import Subscriber

WAIT_S = 3.0
"""How long nothing has to move before it is told."""
AGAIN_S = 30.0
"""How often the same is told."""
NO_PORT = "no answer has come yet: is HOST:PORT the one that `serve` prints as port=…?"
NO_HTTP_PORT = "no answer has come yet: is HOST:PORT the one that `serve` prints as http=…?"
_LOOK_S = 0.25


class Waiting:
    """`ask` says what stands in the way, None where that is not known; `busy`, whether anything is waited
    for. Whoever opens what is asked sets them. `unknown`: what to say where nothing is known.
    """

    def __init__(self, unknown: str = "no answer has come yet") -> None:
        self.ask: Callable[[], Exception | None] = lambda: None
        self.busy: Callable[[], bool] = lambda: True
        self._unknown = unknown
        self._since = edge.now()
        self._told: str | None = None
        self._told_at = 0.0

    def moved(self) -> None:
        """Note that what was waited for came."""
        now = edge.now()
        if self._told is not None:
            edge.note(f"goes on after {now - self._since:.0f} s")
            self._told = None
        self._since = now

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Tell, until the block ends, what is waited for."""
        failure: BaseException | None = None
        with _told_once():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                try:
                    yield
                except (Exception, KeyboardInterrupt) as error:  # a task group would wrap it
                    failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @contextmanager
    def told_beside(self) -> Iterator[None]:
        """The same for what blocks; `ask` and `busy` are called in another thread."""
        with _told_once(), edge.repeated(lambda: self._look(edge.now()), _LOOK_S):
            yield

    async def _run(self) -> None:
        while True:
            await anyio.sleep(_LOOK_S)
            self._look(edge.now())

    def _look(self, now: float) -> None:
        if not self.busy():
            self.moved()
            return
        if now - self._since < WAIT_S:
            return
        cause = self.ask()
        if cause is None and self._told is not None:  # it is being sent again
            return
        kind = cause.code.name if isinstance(cause, Refused) else type(cause).__name__
        if kind != self._told or now - self._told_at >= AGAIN_S:
            self._told, self._told_at = kind, now
            edge.note(f"waits, as nothing was answered for {now - self._since:.0f} s: {self._shown(cause)}")

    def _shown(self, cause: Exception | None) -> str:
        if cause is None:
            return self._unknown
        if isinstance(cause, Refused):
            return str(cause)
        return f"no connection ({str(cause) or type(cause).__name__}), which is tried again"


@contextmanager
def _told_once() -> Iterator[None]:
    """Keep the client's own warning back: people read it here, with what else is waited for."""
    was, outage.logger.disabled = outage.logger.disabled, True
    try:
        yield
    finally:
        outage.logger.disabled = was


@asynccontextmanager
async def waiting_for(subscriber: Subscriber) -> AsyncIterator[None]:
    """Tell, until the block ends, why there is no connection."""
    waiting = Waiting(NO_PORT)
    waiting.ask = lambda: subscriber.waits_for
    waiting.busy = lambda: not subscriber.started or subscriber.waits_for is not None
    async with waiting.told():
        yield
