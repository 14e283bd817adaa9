"""A TCP proxy for tests on real sockets, which does to connections what networks do.

It forwards both ways until told otherwise. What it draws comes from a seed; a real machine's times do not.
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
Direction = Literal["there", "back"]  # from the one who connects, or to it

_ABORT = struct.pack("ii", 1, 0)
_READ_BYTES = 65_536


@dataclass(frozen=True)
class Fate:
    """The faults of one direction of a connection.

    `cut_at`: the connection is reset after so many bytes this way. `delay_s`: how long bytes are held.
    `piece_bytes_max`: bytes are sent in pieces of a random size from 1 to this.
    """

    cut_at: float = math.inf
    delay_s: float = 0.0
    piece_bytes_max: int = _READ_BYTES


Fates = tuple[Fate, Fate]


def smooth(_: int) -> Fates:
    """Nothing happens."""
    return Fate(), Fate()


def rough(
    seed: int,
    *,
    cut_bytes_mean: float = math.inf,
    delay_s_max: float = 0.0,
    piece_bytes_max: int = _READ_BYTES,
) -> Callable[[int], Fates]:
    """Each connection, by its number, has a fate of its own, drawn."""

    def draw(number: int) -> Fates:
        chance = Random(f"{seed} {number}")

        def one() -> Fate:
            cut_at = chance.expovariate(1 / cut_bytes_mean) if cut_bytes_mean < math.inf else math.inf
            return Fate(cut_at, chance.uniform(0, delay_s_max), chance.randint(1, piece_bytes_max))

        return one(), one()

    return draw


class Proxy:
    """A running proxy. `target` and `fates` may be changed; connections that come then are as they say.

    While it is `refusing`, who connects is reset at once. `struck` counts what was done to connections.
    """

    def __init__(
        self, listening: socket.socket, target: tuple[str, int], fates: Callable[[int], Fates], seed: int
    ):
        self.address: tuple[str, int] = listening.getsockname()
        self.target = target
        self.fates = fates
        self.refusing = False
        self.struck: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # that went there, and back
        self._listening = listening
        self._chance = Random(f"proxy {seed}")
        self._links: list[_Link] = []
        self._stalled: set[Direction] = set()
        self._resumed = anyio.Event()

    @property
    def connections(self) -> int:
        """The number open now."""
        return len(self._links)

    def cut(self) -> None:
        """Reset every connection now."""
        for link in self._links:
            link.cut()

    def stall(self, direction: Direction) -> None:
        """Let nothing through this way any more, until `resume`."""
        self._stalled.add(direction)
        self.struck["stall"] += 1

    def resume(self, direction: Direction) -> None:
        """Let it through again."""
        self._stalled.discard(direction)
        self._resumed.set()
        self._resumed = anyio.Event()

    async def run(self) -> None:
        """Forward until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                with suppress(BlockingIOError):
                    accepted, _ = self._listening.accept()
                    self.struck["connection"] += 1
                    tasks.start_soon(self._serve, accepted, self.struck["connection"])
                    continue
                await anyio.wait_readable(self._listening)

    async def _serve(self, client: socket.socket, number: int) -> None:
        link = _Link(client, socket.socket())
        self._links.append(link)
        try:
            with link.scope, suppress(OSError):
                there, back = self.fates(number)
                if not self.refusing and await _connected(link.server, self.target):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._pump, link, client, link.server, there, "there")
                        tasks.start_soon(self._pump, link, link.server, client, back, "back")
                    link.whole = not link.was_cut
        finally:
            self._links.remove(link)
            self.struck["reset"] += not link.whole
            link.close()

    async def _pump(
        self, link: _Link, source: socket.socket, sink: socket.socket, fate: Fate, direction: Direction
    ) -> None:
        passed = 0
        source.setblocking(False)
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while data := await _received(source):
                await anyio.sleep(fate.delay_s)
                for piece in self._pieces(data, fate):
                    while direction in self._stalled:
                        await self._resumed.wait()
                    await _send(sink, piece[: int(min(fate.cut_at - passed, len(piece)))])
                    passed += len(piece)
                    self.bytes[direction] += len(piece)
                    self.struck["piece"] += 1
                    if passed >= fate.cut_at:
                        self.struck["cut at a byte"] += 1
                        link.cut()
                        await anyio.lowlevel.checkpoint()
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side broke it: the other one is told
            link.cut()

    def _pieces(self, data: bytes, fate: Fate) -> Iterator[bytes]:
        while data:
            count = (
                self._chance.randint(1, fate.piece_bytes_max)
                if fate.piece_bytes_max < _READ_BYTES
                else len(data)
            )
            yield data[:count]
            data = data[count:]


class _Link:
    """One connection, both halves."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.scope = anyio.CancelScope()
        self.was_cut = False
        self.whole = False

    def cut(self) -> None:
        self.was_cut = True
        self.scope.cancel()

    def close(self) -> None:
        for one in (self.client, self.server):
            if not self.whole:
                with suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            one.close()


@asynccontextmanager
async def proxy_to(
    target: tuple[str, int], *, fates: Callable[[int], Fates] = smooth, seed: int = 0
) -> AsyncIterator[Proxy]:
    """A proxy before `target` for as long as the scope lasts; then its connections are reset."""
    with socket.create_server((HOST, 0), backlog=128) as listening:
        listening.setblocking(False)
        proxy = Proxy(listening, target, fates, seed)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.run)
            yield proxy
            tasks.cancel_scope.cancel()


async def _connected(one: socket.socket, target: tuple[str, int]) -> bool:
    one.setblocking(False)
    one.connect_ex(target)
    await anyio.wait_writable(one)
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


async def _received(one: socket.socket) -> bytes:
    while True:
        try:
            return one.recv(_READ_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(one)


async def _send(one: socket.socket, data: bytes) -> None:
    await anyio.lowlevel.checkpoint()  # so that pieces leave one by one
    while data:
        try:
            data = data[one.send(data) :]
        except BlockingIOError:
            await anyio.wait_writable(one)
