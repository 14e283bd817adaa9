"""A TCP proxy for tests on real sockets that injects delays, resets, stalls and small pieces.

It forwards in both directions unless a fault stops it. A seed determines the faults; the timing depends on
the machine.
"""

from __future__ import annotations

import math
import socket
import struct
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

HOST = "127.0.0.1"
Direction = Literal["there", "back"]  # there: from the client to the target; back: to the client

_ABORT = struct.pack("ii", 1, 0)
_READ_BYTES = 65_536


@dataclass(frozen=True)
class Faults:
    """The faults of one direction of a connection.

    `cut_at`: number of bytes after which the connection is reset. `delay_s`: how long bytes are held.
    `piece_bytes_max`: bytes are sent in pieces of a random size, from 1 up to this.
    """

    cut_at: float = math.inf
    delay_s: float = 0.0
    piece_bytes_max: int = _READ_BYTES


ConnectionFaults = tuple[Faults, Faults]
"""The faults from the client to the target, and those back."""


def no_faults(_: int) -> ConnectionFaults:
    """Return a connection's faults, none of which ever happens."""
    return Faults(), Faults()


def random_faults(
    seed: int,
    *,
    cut_bytes_mean: float = math.inf,
    delay_s_max: float = 0.0,
    piece_bytes_max: int = _READ_BYTES,
) -> Callable[[int], ConnectionFaults]:
    """Return a function that draws each connection's faults from the seed and the connection's number."""

    def draw(number: int) -> ConnectionFaults:
        rng = Random(f"{seed} {number}")

        def draw_direction() -> Faults:
            cut_at = rng.expovariate(1 / cut_bytes_mean) if cut_bytes_mean < math.inf else math.inf
            return Faults(cut_at, rng.uniform(0, delay_s_max), rng.randint(1, piece_bytes_max))

        return draw_direction(), draw_direction()

    return draw


class Proxy:
    """A running proxy. Changes of `target` and `draw_faults` apply to later connections.

    While `refusing` is true, new connections are reset at once. `counts`: faults and connections by kind.
    """

    def __init__(
        self,
        listening: socket.socket,
        target: tuple[str, int],
        draw_faults: Callable[[int], ConnectionFaults],
        seed: int,
    ):
        self.address: tuple[str, int] = listening.getsockname()
        self.target = target
        self.draw_faults = draw_faults
        self.refusing = False
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # forwarded bytes by direction
        self._listening = listening
        self._rng = Random(f"proxy {seed}")  # draws the sizes of pieces
        self._links: list[_Link] = []
        self._stalled: set[Direction] = set()
        self._resumed = anyio.Event()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._links)

    def cut(self) -> None:
        """Reset every open connection."""
        for link in self._links:
            link.cut()

    def stall(self, direction: Direction) -> None:
        """Forward nothing in this direction until `resume`."""
        self._stalled.add(direction)
        self.counts["stall"] += 1

    def resume(self, direction: Direction) -> None:
        """Forward in this direction again, after `stall`."""
        self._stalled.discard(direction)
        self._resumed.set()
        self._resumed = anyio.Event()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                with suppress(BlockingIOError):
                    accepted, _ = self._listening.accept()
                    self.counts["connection"] += 1
                    tasks.start_soon(self._serve, accepted, self.counts["connection"])
                    continue
                await anyio.wait_readable(self._listening)

    async def _serve(self, client: socket.socket, number: int) -> None:
        link = _Link(client, socket.socket())
        self._links.append(link)
        try:
            with link.scope, suppress(OSError):
                there, back = self.draw_faults(number)
                if not self.refusing and await _try_connect(link.server, self.target):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._pump, link, client, link.server, there, "there")
                        tasks.start_soon(self._pump, link, link.server, client, back, "back")
                    link.closed_cleanly = not link.was_cut
        finally:
            self._links.remove(link)
            self.counts["reset"] += not link.closed_cleanly
            link.close()

    async def _pump(
        self, link: _Link, source: socket.socket, sink: socket.socket, faults: Faults, direction: Direction
    ) -> None:
        byte_count = 0
        source.setblocking(False)
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while data := await _receive(source):
                await anyio.sleep(faults.delay_s)
                for piece in self._pieces(data, faults):
                    while direction in self._stalled:
                        await self._resumed.wait()
                    await _send(sink, piece[: int(min(faults.cut_at - byte_count, len(piece)))])
                    byte_count += len(piece)
                    self.bytes[direction] += len(piece)
                    self.counts["piece"] += 1
                    if byte_count >= faults.cut_at:
                        self.counts["cut at a byte"] += 1
                        link.cut()
                        await anyio.lowlevel.checkpoint()
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side failed, so the other one is reset too
            link.cut()

    def _pieces(self, data: bytes, faults: Faults) -> Iterator[bytes]:
        while data:
            count = (
                self._rng.randint(1, faults.piece_bytes_max)
                if faults.piece_bytes_max < _READ_BYTES
                else len(data)
            )
            yield data[:count]
            data = data[count:]


class _Link:
    """One connection: the client's socket and the target's."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.scope = anyio.CancelScope()
        self.was_cut = False
        self.closed_cleanly = False

    def cut(self) -> None:
        self.was_cut = True
        self.scope.cancel()

    def close(self) -> None:
        for end in (self.client, self.server):
            if not self.closed_cleanly:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            end.close()


@asynccontextmanager
async def proxy_to(
    target: tuple[str, int], *, draw_faults: Callable[[int], ConnectionFaults] = no_faults, seed: int = 0
) -> AsyncIterator[Proxy]:
    """Run a proxy in front of `target`; at the end of the block, all connections are reset."""
    with socket.create_server((HOST, 0), backlog=128) as listening:
        listening.setblocking(False)
        proxy = Proxy(listening, target, draw_faults, seed)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.run)
            yield proxy
            tasks.cancel_scope.cancel()


async def _try_connect(endpoint: socket.socket, target: tuple[str, int]) -> bool:
    endpoint.setblocking(False)
    endpoint.connect_ex(target)
    await anyio.wait_writable(endpoint)
    return endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


async def _receive(endpoint: socket.socket) -> bytes:
    while True:
        try:
            return endpoint.recv(_READ_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(endpoint)


async def _send(endpoint: socket.socket, data: bytes) -> None:
    await anyio.lowlevel.checkpoint()  # so that pieces leave one by one
    while data:
        try:
            data = data[endpoint.send(data) :]
        except BlockingIOError:
            await anyio.wait_writable(endpoint)
