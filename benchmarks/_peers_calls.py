"""Publishing by single calls, as a program on asyncio does that knows one delta at a time: each is a task.

The raw connection writes what each call says and hands out answers in turn; clients that gather calls take
its place.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks._peers_contract import WAIT_S_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks._peers_contract import Call

_WRITE_BYTES_MAX = 8 * 1024 * 1024


@asynccontextmanager
async def raw_calls(
    port: int, bytes_of: Callable[[bytes], bytes], acks_in: Callable[[bytes], int], *, hello: bytes = b""
) -> AsyncIterator[Call]:
    """A connection that sends a call's bytes, and counts acknowledgements in what comes.

    A server that is to be told hello has a line of its own to say first.
    """
    loop = asyncio.get_running_loop()
    transport, wire = await loop.create_connection(
        lambda: _Wire(acks_in, greeted=bool(hello)), "127.0.0.1", port
    )
    transport.set_write_buffer_limits(_WRITE_BYTES_MAX)
    if hello:
        transport.write(hello)

    def call(payload: bytes) -> asyncio.Future[None]:
        told: asyncio.Future[None] = loop.create_future()
        wire.waiting.append(told)
        transport.write(bytes_of(payload))
        return told

    try:
        yield call
    finally:
        transport.close()


async def published_singly(
    call: Call, body: bytes, *, seconds: float, window: int
) -> tuple[int, int, list[int]]:
    """Publish for so long, at most `window` unanswered: how many, until when, how long each took (ns)."""
    took: list[int] = []
    opening = asyncio.Event()
    open_calls = 0

    async def one(began: int) -> None:
        nonlocal open_calls
        await call(began.to_bytes(8, "little") + body)
        took.append(time.monotonic_ns() - began)
        open_calls -= 1
        opening.set()

    stop = time.monotonic_ns() + int(seconds * 1e9)
    async with asyncio.timeout(seconds + WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        while (now := time.monotonic_ns()) < stop:
            if open_calls < window:
                open_calls += 1
                tasks.create_task(one(now))
            else:
                opening.clear()
                await opening.wait()
    return len(took), time.monotonic_ns(), took


class _Wire(asyncio.Protocol):
    """Answers come in the order of the calls."""

    def __init__(self, acks_in: Callable[[bytes], int], *, greeted: bool) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._acks_in = acks_in
        self._greeted = greeted
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._greeted:
            _, end, data = data.partition(b"\r\n")
            self._greeted = not end
        if b"PING\r\n" in data:
            self._transport.write(b"PONG\r\n")
        for _ in range(self._acks_in(data)):
            told = self.waiting.popleft()
            if not told.done():
                told.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for told in self.waiting:
            if not told.done():
                told.set_exception(error or ConnectionError("the server has closed the connection"))
