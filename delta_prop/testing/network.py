"""A fake network in virtual time: hosts, streams between them, and faults, all from one seed.

TLS streams are not encrypted here, but both sides must agree to use TLS. `fault_counts` counts the faults
that happened: a test whose fault never happened proves nothing.
"""

from __future__ import annotations

import errno
import math
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.platform.connection_faults import tls_required_fault, tls_unsupported_fault
from delta_prop.platform.ports import Listener, Network, Tls
from delta_prop.testing.network_path import NetworkConditions, NetworkPath
from delta_prop.testing.virtual_streams import Broadcast, VirtualConnection, VirtualStream
from delta_prop_wire.errors import UsageError

BACKLOG = 1024

_FIRST_PORT = 49_152
_OWN_HOST = {"", "0.0.0.0", "::", "localhost"}


class VirtualNetwork:
    """The network as one host sees it. `at(host)` is the same network as another host sees it."""

    def __init__(
        self, seed: int = 0, conditions: NetworkConditions | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self.host = host
        self._shared = _SharedNetwork(seed, conditions or NetworkConditions())

    @property
    def fault_counts(self) -> Counter[str]:
        """Number of faults of each kind."""
        return self._shared.fault_counts

    @property
    def conditions(self) -> NetworkConditions:
        """Conditions of all paths that `set_path` has not changed."""
        return self._shared.conditions

    @conditions.setter
    def conditions(self, conditions: NetworkConditions) -> None:
        self._shared.conditions = conditions
        self._shared.update_paths()

    @property
    def connections(self) -> list[VirtualConnection]:
        """The open connections, oldest first."""
        return list(self._shared.connections)

    def at(self, host: str) -> VirtualNetwork:
        """Return this network as another host sees it."""
        other = VirtualNetwork(host=host)
        other._shared = self._shared
        return other

    def set_path(self, source: str, target: str, conditions: NetworkConditions) -> None:
        """Set conditions for the path from one host to another, which replace the general ones."""
        self._shared.own_conditions[source, target] = conditions
        self._shared.update_paths()

    def cut(self, source: str, target: str) -> None:
        """Cut the path from one host to another: sent bytes wait for `heal`, as with real retransmission."""
        self._shared.cuts.add((source, target))
        self._shared.update_paths()
        self.fault_counts["cut"] += 1

    def heal(self, source: str, target: str) -> None:
        """Reopen the path."""
        self._shared.cuts.discard((source, target))
        self._shared.update_paths()

    def reset(self, host: str | None = None) -> None:
        """Reset every connection, or those of one host."""
        for connection in self.connections:
            if host is None or host in connection.hosts:
                connection.reset()

    def kill(self, host: str) -> None:
        """End the process on a host: its listeners and streams close, and the other ends are reset."""
        self._shared.end_host(host, notify=True)
        self.fault_counts["kill"] += 1

    def crash(self, host: str) -> None:
        """Crash a host: it answers nothing; other ends are not notified, and connecting to it waits."""
        self._shared.crashed_hosts.add(host)
        self._shared.end_host(host, notify=False)
        self._shared.update_paths()
        self.fault_counts["crash"] += 1

    def restore(self, host: str) -> None:
        """Restart a host without its former connections: it answers a send on one of them by a reset."""
        self._shared.crashed_hosts.discard(host)
        self._shared.update_paths()

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> VirtualListener:
        """Listen; port 0 means any free port. Raises OSError, UsageError."""
        _check_port(port)
        await anyio.lowlevel.checkpoint()
        if tls is not None and tls.certificate is None:
            raise UsageError("tls: a server needs a certificate: give the files of a certificate and its key")
        address = (self.host if host in _OWN_HOST else host, port or self._shared.draw_port())
        if address in self._shared.listeners:
            raise OSError(
                errno.EADDRINUSE, f"cannot listen on {_format_address(*address)}: Address already in use"
            )
        return VirtualListener(self._shared, address, secured=tls is not None)

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> VirtualStream:
        """Connect. Raises OSError, TimeoutError, UsageError."""
        _check_port(port)
        host = self.host if host in _OWN_HOST else host
        try:
            with anyio.fail_after(timeout_s):
                await self._shared.wait_for_packet(self.host, host)
                await self._shared.wait_for_packet(host, self.host)
        except TimeoutError as error:
            raise TimeoutError(
                f"{_format_address(host, port)} did not answer within {timeout_s:g} s"
            ) from error
        listener = self._shared.listeners.get((host, port))
        if listener is None or len(listener.waiting) >= BACKLOG:
            text = f"cannot connect to {_format_address(host, port)}: Connection refused"
            raise ConnectionRefusedError(errno.ECONNREFUSED, text)
        if listener.secured != (tls is not None):
            address = _format_address(host, port)
            raise tls_required_fault(address) if listener.secured else tls_unsupported_fault(address)
        connection = self._shared.new_connection(self.host, host, port)
        listener.waiting.append(connection.server)
        listener.wakeup.notify()
        return connection.client


class VirtualListener:
    """Listener for connections to one address."""

    def __init__(self, shared: _SharedNetwork, address: tuple[str, int], *, secured: bool) -> None:
        self.address = address
        self.secured = secured
        self.waiting: deque[VirtualStream] = deque()
        self.wakeup = Broadcast()
        self._shared = shared
        shared.listeners[address] = self

    async def accept(self) -> VirtualStream:
        """Wait for the next connection. Raises ConnectionError once the listener is closed."""
        await anyio.lowlevel.checkpoint()
        while self._shared.listeners.get(self.address) is self:
            if self.waiting:
                return self.waiting.popleft()
            await self.wakeup.wait()
        raise ConnectionError("the listener was closed")

    async def aclose(self) -> None:
        """Close, with a checkpoint; accepted connections stay open."""
        self.close()
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """Close without waiting."""
        if self._shared.listeners.get(self.address) is self:
            del self._shared.listeners[self.address]
            for stream in self.waiting:
                stream.abort(notify=True)
            self.waiting.clear()
            self.wakeup.notify()


class _SharedNetwork:
    """State that all hosts share."""

    def __init__(self, seed: int, conditions: NetworkConditions) -> None:
        self.seed = seed
        self.conditions = conditions
        self.own_conditions: dict[tuple[str, str], NetworkConditions] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.crashed_hosts: set[str] = set()
        self.listeners: dict[tuple[str, int], VirtualListener] = {}
        self.connections: dict[VirtualConnection, None] = {}  # in order of creation
        self.fault_counts: Counter[str] = Counter()
        self._wakeup = Broadcast()
        self._next_port = _FIRST_PORT
        self._rng = Random(f"network {seed}")

    def update_paths(self) -> None:
        """Open or cut each path, and set its conditions, according to the present faults of the network."""
        now = anyio.current_time()
        for connection in self.connections:
            for path in connection.paths:
                path.conditions = self._conditions(path.source, path.target)
                (path.hold if self._is_cut(path.source, path.target) else path.release)(now)
            connection.notify()
        self._wakeup.notify()

    async def wait_for_packet(self, source: str, target: str) -> None:
        """Wait for the latency of a first packet, and while the path is cut."""
        conditions = self._conditions(source, target)
        await anyio.sleep(conditions.latency_s + self._rng.uniform(0, conditions.jitter_s_max))
        while self._is_cut(source, target):
            await self._wakeup.wait()

    def new_connection(self, client_host: str, server_host: str, port: int) -> VirtualConnection:
        """Create a connection between two hosts."""
        client = _format_address(client_host, self.draw_port())
        bytes_mean = self._conditions(client_host, server_host).reset_bytes_mean
        break_rng = Random(f"network {self.seed} {client} life")
        connection = VirtualConnection(
            to_server=self._new_path(client_host, server_host, client),
            to_client=self._new_path(server_host, client_host, client),
            addresses=(client, _format_address(server_host, port)),
            bytes_max=math.inf if bytes_mean is None else break_rng.expovariate(1 / bytes_mean),
            owner=self,
        )
        self.connections[connection] = None
        self.update_paths()
        return connection

    def end_host(self, host: str, *, notify: bool) -> None:
        """Close all listeners and streams of a host."""
        for address, listener in list(self.listeners.items()):
            if address[0] == host:
                listener.close()
        for connection in list(self.connections):
            connection.end_host(host, notify=notify)

    def forget(self, connection: VirtualConnection) -> None:
        """Forget a connection that is closed at both ends."""
        self.connections.pop(connection, None)

    def draw_port(self) -> int:
        """Return a free port."""
        self._next_port += 1
        return self._next_port - 1

    def _new_path(self, source: str, target: str, name: str) -> NetworkPath:
        return NetworkPath(
            source,
            target,
            conditions=self._conditions(source, target),
            rng=Random(f"network {self.seed} {name} {source} {target}"),
            fault_counts=self.fault_counts,
        )

    def _conditions(self, source: str, target: str) -> NetworkConditions:
        return self.own_conditions.get((source, target), self.conditions)

    def _is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts or source in self.crashed_hosts or target in self.crashed_hosts


def _check_port(port: int) -> None:
    if not 0 <= port <= 65_535:
        raise UsageError(f"port {port}: give 0 to 65,535")


def _format_address(host: str, port: int) -> str:
    return f"{host}:{port}"


if TYPE_CHECKING:

    def _conforms(network: VirtualNetwork, listener: VirtualListener) -> tuple[Network, Listener]:
        return network, listener
