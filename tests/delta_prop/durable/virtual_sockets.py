"""Blocking sockets in virtual time, for a client without an event loop and a service on a virtual loop.

A blocking call runs the loop until the call ends, so it must not be made from within the loop.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from delta_prop.client import blocking_connection, sync_producer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import pytest

    from delta_prop.platform.ports import Network, Stream

T = TypeVar("T")

_READ_BYTES = 64 * 1024


class VirtualModules:
    """Replacement for the modules `time`, `socket`, `selectors` and `random` in a client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, network: Network, seed: int) -> None:
        self.loop = loop
        self.network = network
        self._rng = random.Random(f"blocking {seed}")
        self._tasks: set[asyncio.Task[Any]] = set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the blocking client use this object."""
        for module in (sync_producer, blocking_connection):
            time = SimpleNamespace(monotonic=self.loop.time, sleep=self.wait)
            monkeypatch.setattr(module, "time", time)
            monkeypatch.setattr(module, "RNG", SimpleNamespace(random=self._rng.random))
        sockets = SimpleNamespace(
            create_connection=self.connect, gaierror=socket.gaierror, IPPROTO_TCP=6, TCP_NODELAY=1
        )
        monkeypatch.setattr(blocking_connection, "socket", sockets)
        selectors = SimpleNamespace(
            DefaultSelector=lambda: VirtualSelector(self), EVENT_READ=1, EVENT_WRITE=2
        )
        monkeypatch.setattr(blocking_connection, "selectors", selectors)

    def connect(self, address: tuple[str, int], timeout_s: float) -> VirtualSocket:
        """Return a connected socket. Raises OSError."""
        return VirtualSocket(self, self.run(self.network.connect(*address, timeout_s=timeout_s)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the loop until `work` is done; return its result."""
        return self.wait_for(self.start(work))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work`, which proceeds whenever the loop runs."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def wait_for(self, task: asyncio.Task[T]) -> T:
        """Run the loop until the task is done; return its result."""
        finished: asyncio.Future[None] = self.loop.create_future()
        task.add_done_callback(lambda _: finished.set_result(None))
        # Not the task itself: anyio would treat it as the root task and end its threads with it.
        self.loop.run_until_complete(finished)
        return task.result()

    def wait(self, time_s: float, woken: asyncio.Future[None] | None = None) -> None:
        """Run the loop for a time, or until a future is done."""
        woken = self.loop.create_future() if woken is None else woken
        timer = None
        if time_s < math.inf:
            timer = self.loop.call_at(self.loop.time() + time_s, wake, woken)
        self.loop.run_until_complete(woken)
        if timer is not None:
            timer.cancel()


def wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class VirtualSocket:
    """A connected socket that does not block."""

    def __init__(self, owner: VirtualModules, stream: Stream) -> None:
        self._owner = owner
        self._stream = stream
        self._received: deque[bytes] = deque()
        self._ended = False
        self._failure: OSError | None = None
        self.woken: asyncio.Future[None] | None = None
        self._reader = owner.start(self._read())

    @property
    def readable(self) -> bool:
        return bool(self._received or self._ended or self._failure)

    async def _read(self) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        while not self._ended and self._failure is None:
            try:
                count = await self._stream.receive_into(buffer)
            except OSError as failure:
                self._failure = failure
            else:
                self._ended = not count
                if count:
                    self._received.append(bytes(buffer[:count]))
            if self.woken is not None:
                wake(self.woken)

    def setsockopt(self, *_: int) -> None:
        pass

    def setblocking(self, _: bool) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        """Receive the bytes that have arrived. Raises BlockingIOError, OSError."""
        if self._received:
            received = self._received.popleft()
            count = min(len(received), len(buffer))
            buffer[:count] = received[:count]
            if count < len(received):
                self._received.appendleft(received[count:])
            return count
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return 0
        raise BlockingIOError

    def send(self, part: memoryview) -> int:
        """Send as many bytes as the connection accepts. Raises BlockingIOError, OSError."""
        sent_counts: list[int] = []

        async def send() -> None:
            sent_counts.append(self._stream.send_now([part]))

        self._owner.run(send())
        if not sent_counts[0]:
            raise BlockingIOError
        return sent_counts[0]

    def close(self) -> None:
        self._reader.cancel()
        self._owner.start(self._stream.aclose())


class VirtualSelector:
    """Waits for a socket."""

    def __init__(self, owner: VirtualModules) -> None:
        self._owner = owner
        self._socket: VirtualSocket | None = None

    def register(self, socket: VirtualSocket, _: int) -> None:
        self._socket = socket

    def modify(self, socket: VirtualSocket, _: int) -> None:
        self._socket = socket

    def select(self, wait_s: float) -> bool:
        """Wait until the socket is readable, or for `wait_s`; the caller then tries to send again."""
        assert self._socket is not None
        if not self._socket.readable:
            self._socket.woken = self._owner.loop.create_future()
            self._owner.wait(max(wait_s, 0.0), self._socket.woken)
        return self._socket.readable

    def close(self) -> None:
        pass
