"""Publishing by single calls, as an asyncio program does that has one delta at a time: each call is a task.

A call is made over a raw connection, which writes the bytes of each call and resolves calls in order, or
through a client that batches calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks._peers_contract import WAIT_S_MAX, Call

_WRITE_BYTES_MAX = 8 * 1024 * 1024


@asynccontextmanager
async def raw_calls(
    port: int, bytes_of: Callable[[bytes], bytes], count_acks: Callable[[bytes], int], *, hello: bytes = b""
) -> AsyncIterator[Call]:
    """Open a connection that sends a call's bytes, and counts acknowledgements in the bytes received.

    With `hello`, the server's first line is skipped.
    """
    loop = asyncio.get_running_loop()
    transport, wire = await loop.create_connection(
        lambda: _Wire(count_acks, greeted=bool(hello)), "127.0.0.1", port
    )
    transport.set_write_buffer_limits(_WRITE_BYTES_MAX)
    if hello:
        transport.write(hello)

    def call(payload: bytes) -> asyncio.Future[None]:
        acked: asyncio.Future[None] = loop.create_future()
        wire.waiting.append(acked)
        transport.write(bytes_of(payload))
        return acked

    try:
        yield call
    finally:
        transport.close()


async def publish_singly(
    call: Call, body: bytes, *, seconds: float, window: int
) -> tuple[int, int, list[int]]:
    """Publish with up to `window` calls in flight; return their number, the end, and each duration, in ns."""
    durations_ns: list[int] = []
    window_opened = asyncio.Event()
    open_calls = 0

    async def publish_one(began: int) -> None:
        nonlocal open_calls
        await call(began.to_bytes(8, "little") + body)
        durations_ns.append(time.monotonic_ns() - began)
        open_calls -= 1
        window_opened.set()

    stop = time.monotonic_ns() + int(seconds * 1e9)
    async with asyncio.timeout(seconds + WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        while (now := time.monotonic_ns()) < stop:
            if open_calls < window:
                open_calls += 1
                tasks.create_task(publish_one(now))
            else:
                window_opened.clear()
                await window_opened.wait()
    return len(durations_ns), time.monotonic_ns(), durations_ns


class _Wire(asyncio.Protocol):
    """A connection on which answers come in the order of the calls."""

    def __init__(self, count_acks: Callable[[bytes], int], *, greeted: bool) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._count_acks = count_acks
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
        for _ in range(self._count_acks(data)):
            acked = self.waiting.popleft()
            if not acked.done():
                acked.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for acked in self.waiting:
            if not acked.done():
                acked.set_exception(error or ConnectionError("the server has closed the connection"))
