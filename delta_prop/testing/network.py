"""A false network in virtual time: hosts, streams between them, and what goes wrong there, all from one seed.

Secured streams are plain here, but both sides must want the same. `struck` counts what was done to streams: a
test of a fault that never struck proves nothing.
"""

from __future__ import annotations

import errno
import math
from collections import Counter, deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.misconfigured import speaks_no_tls, speaks_tls
from delta_prop.testing.link import Conditions, Way
from delta_prop.testing.streams import Bell, VirtualConnection, VirtualStream
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.ports import Listener, Network, Tls

BACKLOG = 1024

_FIRST_PORT = 49_152
_OWN_HOST = {"", "0.0.0.0", "::", "localhost"}


class VirtualNetwork:
    """The network as one host sees it. `at(host)` is the same network, seen from another one."""

    def __init__(
        self, seed: int = 0, conditions: Conditions | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self.host = host
        self._wires = _Wires(seed, conditions or Conditions())

    @property
    def struck(self) -> Counter[str]:
        """How often what was done."""
        return self._wires.struck

    @property
    def conditions(self) -> Conditions:
        """What ways are like that have no conditions of their own."""
        return self._wires.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._wires.conditions = conditions
        self._wires.update()

    @property
    def connections(self) -> list[VirtualConnection]:
        """The connections that are there, the older first."""
        return list(self._wires.connections)

    def at(self, host: str) -> VirtualNetwork:
        """This network as another host sees it."""
        other = VirtualNetwork(host=host)
        other._wires = self._wires
        return other

    def set_way(self, source: str, target: str, conditions: Conditions) -> None:
        """Give the way from one host to another conditions of its own."""
        self._wires.own_conditions[source, target] = conditions
        self._wires.update()

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from one host to another: what is sent waits for `heal`, as it really does."""
        self._wires.cuts.add((source, target))
        self._wires.update()
        self.struck["cut"] += 1

    def heal(self, source: str, target: str) -> None:
        """Let it through again."""
        self._wires.cuts.discard((source, target))
        self._wires.update()

    def reset(self, host: str | None = None) -> None:
        """Break every connection, or those of one host."""
        for connection in self.connections:
            if host is None or host in connection.hosts:
                connection.reset()

    def kill(self, host: str) -> None:
        """End the process on a host: its listeners and streams are gone, and others are told so."""
        self._wires.end_at(host, told=True)
        self.struck["kill"] += 1

    def crash(self, host: str) -> None:
        """Take a host away: nothing answers there, nobody is told, and who connects to it waits."""
        self._wires.away.add(host)
        self._wires.end_at(host, told=False)
        self._wires.update()
        self.struck["crash"] += 1

    def restore(self, host: str) -> None:
        """The host is back, and knows nothing of former connections: who sends on one is told."""
        self._wires.away.discard(host)
        self._wires.update()

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> VirtualListener:
        """Listen; port 0 is any free one. Raises OSError, UsageError."""
        _check(port)
        await anyio.lowlevel.checkpoint()
        if tls is not None and tls.certificate is None:
            raise UsageError("a server that speaks TLS shows a certificate: name its file, and its key's")
        address = (self.host if host in _OWN_HOST else host, port or self._wires.draw_port())
        if address in self._wires.listeners:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {_name(*address)}: Address already in use")
        return VirtualListener(self._wires, address, secured=tls is not None)

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> VirtualStream:
        """Connect. Raises OSError, TimeoutError, UsageError."""
        _check(port)
        host = self.host if host in _OWN_HOST else host
        try:
            with anyio.fail_after(timeout_s):
                await self._wires.travel(self.host, host)
                await self._wires.travel(host, self.host)
        except TimeoutError as error:
            raise TimeoutError(f"{_name(host, port)} did not answer within {timeout_s:g} s") from error
        listener = self._wires.listeners.get((host, port))
        if listener is None or len(listener.waiting) >= BACKLOG:
            told = f"cannot connect to {_name(host, port)}: Connection refused"
            raise ConnectionRefusedError(errno.ECONNREFUSED, told)
        if listener.secured != (tls is not None):
            where = _name(host, port)
            raise speaks_tls(where) if listener.secured else speaks_no_tls(where)
        connection = self._wires.new_connection(self.host, host, port)
        listener.waiting.append(connection.server)
        listener.bell.ring()
        return connection.client


class VirtualListener:
    """Where connections come in."""

    def __init__(self, wires: _Wires, address: tuple[str, int], *, secured: bool) -> None:
        self.address = address
        self.secured = secured
        self.waiting: deque[VirtualStream] = deque()
        self.bell = Bell()
        self._wires = wires
        wires.listeners[address] = self

    async def accept(self) -> VirtualStream:
        """Wait for the next connection. Raises ConnectionError once the listener is closed."""
        await anyio.lowlevel.checkpoint()
        while self._wires.listeners.get(self.address) is self:
            if self.waiting:
                return self.waiting.popleft()
            await self.bell.wait()
        raise ConnectionError("the listener was closed")

    async def aclose(self) -> None:
        """Take no more; connections that were accepted go on."""
        self.close()
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """The same, without waiting."""
        if self._wires.listeners.get(self.address) is self:
            del self._wires.listeners[self.address]
            for stream in self.waiting:
                stream.give_up(told=True)
            self.waiting.clear()
            self.bell.ring()


class _Wires:
    """What all hosts share."""

    def __init__(self, seed: int, conditions: Conditions) -> None:
        self.seed = seed
        self.conditions = conditions
        self.own_conditions: dict[tuple[str, str], Conditions] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.away: set[str] = set()
        self.listeners: dict[tuple[str, int], VirtualListener] = {}
        self.connections: dict[VirtualConnection, None] = {}  # in their order
        self.struck: Counter[str] = Counter()
        self._bell = Bell()
        self._next_port = _FIRST_PORT
        self._chance = Random(f"network {seed}")

    def update(self) -> None:
        """Ways are open or cut as is said now."""
        now = anyio.current_time()
        for connection in self.connections:
            for way in connection.ways:
                (way.hold if self._is_cut(way.source, way.target) else way.let_go)(now)
            connection.ring()
        self._bell.ring()

    async def travel(self, source: str, target: str) -> None:
        """Wait as long as a first packet is under way, and as long as it does not get through."""
        conditions = self._conditions(source, target)
        await anyio.sleep(conditions.latency_s + self._chance.uniform(0, conditions.jitter_s_max))
        while self._is_cut(source, target):
            await self._bell.wait()

    def new_connection(self, client_host: str, server_host: str, port: int) -> VirtualConnection:
        """Join two hosts."""
        client = _name(client_host, self.draw_port())
        mean = self._conditions(client_host, server_host).reset_bytes_mean
        life = Random(f"network {self.seed} {client} life")
        connection = VirtualConnection(
            there=self._way(client_host, server_host, client),
            back=self._way(server_host, client_host, client),
            names=(client, _name(server_host, port)),
            bytes_max=math.inf if mean is None else life.expovariate(1 / mean),
            on_over=lambda: self.connections.pop(connection, None),
            struck=self.struck,
        )
        self.connections[connection] = None
        self.update()
        return connection

    def end_at(self, host: str, *, told: bool) -> None:
        """Everything of a host's process is gone."""
        for listener in [one for (at, _), one in self.listeners.items() if at == host]:
            listener.close()
        for connection in list(self.connections):
            connection.end_at(host, told=told)

    def draw_port(self) -> int:
        """A port that nobody has."""
        self._next_port += 1
        return self._next_port - 1

    def _way(self, source: str, target: str, name: str) -> Way:
        return Way(
            source,
            target,
            conditions=partial(self._conditions, source, target),
            chance=Random(f"network {self.seed} {name} {source} {target}"),
            struck=self.struck,
        )

    def _conditions(self, source: str, target: str) -> Conditions:
        return self.own_conditions.get((source, target), self.conditions)

    def _is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts or source in self.away or target in self.away


def _check(port: int) -> None:
    if not 0 <= port <= 65_535:
        raise UsageError(f"port {port} is none: it is from 0 to 65,535")


def _name(host: str, port: int) -> str:
    return f"{host}:{port}"


if TYPE_CHECKING:

    def _conforms(network: VirtualNetwork, listener: VirtualListener) -> tuple[Network, Listener]:
        return network, listener
