"""TCP of this machine: the real `Network`. Non-blocking sockets, awaited through anyio.

A call tries at once and waits only if the kernel would block. So a busy connection does not pay an event loop
tick per call; it yields after each half millisecond for which it held the loop.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from delta_prop.platform.buffers import skip_bytes, total_bytes
from delta_prop.platform.readiness import Readiness, closed_error
from delta_prop.platform.tls import TlsStream
from delta_prop.platform.tls_contexts import client_context, server_context
from delta_prop.platform.unknown_hosts import unknown_host
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.platform.ports import Listener, Network, Stream, Tls
    from delta_prop_broker.disk import FileRange

logger = logging.getLogger("delta_prop")

BUSY_S_MAX = 0.0005
"""Maximum seconds for which connections together hold the event loop before one of them yields."""
LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 32 * 1024 * 1024
"""Maximum seconds, and maximum bytes, for which `aclose` waits for the other side to close too."""
BACKLOG = 1024
"""Maximum connections that wait for `accept`."""
EXHAUSTED_S = 0.25
"""Seconds without an accept after the system had no descriptor or memory for a connection."""
HEAD_START_S = 0.25
"""Seconds for which an address of a host is tried before the next one is tried concurrently."""

_PARTS_MAX = max(16, os.sysconf("SC_IOV_MAX"))
_FILE_BYTES_PER_CALL = 512 * 1024
_DISCARD_BYTES = 64 * 1024
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class SocketNetwork:
    """The network of the machine, for one event loop."""

    def __init__(self) -> None:
        self._coop_budget = CoopBudget()

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> SocketListener:
        """Listen on the host's first IPv4 address, or its first one if it has none; `::` accepts IPv4 too.

        Port 0 is any free one. Raises OSError, UsageError.
        """
        context = None if tls is None else await anyio.to_thread.run_sync(server_context, tls)
        targets = await _resolve(host, port, socket.AI_PASSIVE)
        family, address = min(targets, key=lambda target: target[0] != socket.AF_INET)
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setblocking(False)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
            server.bind(address)
            server.listen(BACKLOG)
        except OSError as error:
            server.close()
            raise _wrap_error(error, f"cannot listen on {_format_address(host, port)}") from error
        except BaseException:
            server.close()
            raise
        return SocketListener(server, self._coop_budget, context)

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        """Connect, TLS handshake included. Raises OSError, TimeoutError, UsageError."""
        name = _format_address(host, port)
        try:
            with anyio.fail_after(timeout_s):
                context = None if tls is None else await anyio.to_thread.run_sync(client_context, tls)
                sock = await _connect_first(await _resolve(host, port), name)
                stream = SocketStream(sock, self._coop_budget, name, host)
                if tls is None or context is None:
                    return stream
                secured = TlsStream(stream, context, tls.server_name or host)
                try:
                    await secured.handshake()
                except BaseException:
                    await stream.aclose()
                    raise
                return secured
        except TimeoutError as error:
            raise TimeoutError(f"{name} did not answer within {timeout_s:g} s") from error


class SocketListener:
    """A listening socket."""

    def __init__(
        self, server: socket.socket, coop_budget: CoopBudget, context: ssl.SSLContext | None
    ) -> None:
        self._server = server
        self._coop_budget = coop_budget
        self._context = context
        self._closing = False
        host, port = server.getsockname()[:2]
        self._address: tuple[str, int] = (host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the actual one if 0 was requested."""
        return self._address

    async def accept(self) -> Stream:
        """Wait for the next connection. If the system lacks resources for it, log that and retry.

        Raises ConnectionError once the listener is closed.
        """
        while True:
            await self._coop_budget.yield_if_due()
            if self._closing:
                raise closed_error()
            try:
                accepted, address = self._server.accept()
            except BlockingIOError:
                await _wait_ready(anyio.wait_readable, self._server)
                self._coop_budget.note_yield()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # the socket stays readable: without a pause this would spin
                    logger.warning("no connection can be accepted; the service retries: %s", error)
                    await anyio.sleep(EXHAUSTED_S)
            else:
                return self._make_stream(accepted, address)

    async def aclose(self) -> None:
        """Accept no more; accepted connections continue."""
        if not self._closing:
            self._closing = True
            with anyio.CancelScope(shield=True):
                anyio.notify_closing(self._server)
                await anyio.lowlevel.checkpoint()  # the waiting task must end before the descriptor is reused
            self._server.close()

    def _make_stream(self, accepted: socket.socket, address: Any) -> Stream:
        _prepare(accepted)
        host = _normalize_host(address[0])
        stream = SocketStream(accepted, self._coop_budget, _format_address(host, address[1]), host)
        return stream if self._context is None else TlsStream(stream, self._context, None)


class SocketStream:
    """One connection. After a cancelled send it can only be closed."""

    def __init__(self, connected: socket.socket, coop_budget: CoopBudget, peer: str, peer_host: str) -> None:
        self._socket = connected
        self._readiness = Readiness(connected)
        self._coop_budget = coop_budget
        self._peer = peer
        self._peer_host = peer_host
        self._failure: str | None = None  # first error; kept, since the kernel reports it only once
        self._ended = False  # True once the other side has closed
        self._closing = False

    @property
    def peer(self) -> str:
        """Address of the other end: `host:port`."""
        return self._peer

    @property
    def peer_host(self) -> str:
        """Host of the other end, without the port."""
        return self._peer_host

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and read them into the buffer; return how many, 0 at the end of the stream."""
        assert len(buffer), "an empty buffer looks like the end of the stream"
        await self._coop_budget.yield_if_due()
        while True:
            self._check_open()
            count = self._receive(buffer)
            if count is not None:
                return count
            await _wait_ready(anyio.wait_readable, self._socket)
            self._coop_budget.note_yield()

    async def receive_each(
        self, get_buffer: Callable[[], memoryview], on_received: Callable[[int], bool]
    ) -> bool:
        """Receive into `get_buffer()` and pass each count to `on_received`, until that is False.

        Return True if `on_received` ended it, False at the end of the peer's stream.
        """
        ended, budget, receive_into = False, self._coop_budget, self._socket.recv_into

        def receive() -> bool:
            nonlocal ended
            budget.has_yielded = True
            try:
                count = receive_into(get_buffer())
            except OSError as error:
                self._check_would_block(error)
                return True
            if count:
                return on_received(count)
            ended = True
            self._note_end()
            return False

        await budget.yield_if_due()
        await self._readiness.call_on_readable(receive)
        return not ended

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what the kernel takes at once; return how many bytes that were."""
        if self._closing:
            raise closed_error()
        if len(parts) <= _PARTS_MAX:
            return self._send_some(parts)
        sent = 0
        for first in range(0, len(parts), _PARTS_MAX):
            chunk = parts[first : first + _PARTS_MAX]
            count = self._send_some(chunk)
            sent += count
            if count < total_bytes(chunk):
                break
        return sent

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers in order; return once the kernel has taken all."""
        await self._coop_budget.yield_if_due()
        bytes_left = total_bytes(parts)
        while bytes_left:
            sent = self.send_now(parts)
            bytes_left -= sent
            if bytes_left:
                parts = skip_bytes(parts, sent)
                await _wait_ready(anyio.wait_writable, self._socket)
                self._coop_budget.note_yield()

    async def send_file(self, part: FileRange) -> None:
        """Send bytes of a file, with sendfile if possible. Raises OSError if the file fails."""
        sent = 0
        while sent < part.size:
            await self._coop_budget.yield_if_due()
            self._check_open()
            # read each time, since a closed descriptor is reused for another file
            descriptor = part.file.descriptor()
            count = None if descriptor is None else self._send_from(descriptor, part, sent)
            if count is None:
                for piece in part.chunks(sent):
                    await self.send([piece])
                return
            sent += count
            if count == 0:
                await _wait_ready(anyio.wait_writable, self._socket)
                self._coop_budget.note_yield()

    async def aclose(self, patience_s: float = 0.0) -> None:
        """Close the connection: flush, then wait up to a second, or `patience_s`, for the other side.

        Without that wait, unread bytes of the other side would reset the connection, and what was sent last,
        the reason for closing it, would be lost on the way.
        """
        if self._closing:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            await self._readiness.close()
            with anyio.move_on_after(max(LINGER_S_MAX, patience_s)):
                await self._linger()
        self._socket.close()

    # --- helpers

    def _check_open(self) -> None:
        """Raise ConnectionError once this is closed.

        Called before each wait: a wait that begins after the close would never end.
        """
        if self._closing:
            raise closed_error()

    def _receive(self, buffer: memoryview) -> int | None:
        """Return how many bytes were received, 0 at the end of the peer's stream; None: nothing has come."""
        try:
            count = self._socket.recv_into(buffer)
        except OSError as error:
            self._check_would_block(error)
            return None
        if count == 0:
            self._note_end()
        return count

    def _check_would_block(self, error: OSError) -> None:
        """Return if a receive would merely block. Raises ConnectionError for any other error."""
        if not isinstance(error, BlockingIOError):
            raise self._connection_error(error) from error

    def _note_end(self) -> None:
        self._ended = True
        if self._failure is not None:  # a send has failed before, and the kernel reports the error once
            raise ConnectionError(self._failure)

    def _send_some(self, parts: Sequence[Buffer]) -> int:
        """Return how many bytes one system call has sent."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._connection_error(error) from error

    def _send_from(self, descriptor: int, part: FileRange, sent: int) -> int | None:
        """Return how many bytes of the file were sent, 0 if it would block; None if sendfile cannot do it."""
        count_max = min(part.size - sent, _FILE_BYTES_PER_CALL)
        try:
            sent_now = os.sendfile(self._socket.fileno(), descriptor, part.position + sent, count_max)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno in _NO_SENDFILE:
                return None
            if error.errno == errno.EIO:
                raise
            raise self._connection_error(error) from error
        if sent_now == 0:
            raise part.short_read_error(sent)
        return sent_now

    async def _linger(self) -> None:
        if self._ended or self._failure is not None:
            return
        with suppress(OSError):  # the connection has ended already
            self._socket.shutdown(socket.SHUT_WR)
            scratch, bytes_left = bytearray(_DISCARD_BYTES), LINGER_BYTES_MAX
            while bytes_left > 0:
                await self._coop_budget.yield_if_due()
                try:
                    count = self._socket.recv_into(scratch)
                except BlockingIOError:
                    await anyio.wait_readable(self._socket)
                    self._coop_budget.note_yield()
                else:
                    bytes_left = bytes_left - count if count else 0

    def _connection_error(self, error: OSError) -> ConnectionError:
        text = error.strerror or str(error)
        self._failure = self._failure or f"the connection to {self._peer} broke: {text}"
        return ConnectionError(self._failure)


class CoopBudget:
    """Tracks how long the sockets of one loop have held it.

    A task that has waited calls `note_yield`; the time counts from the next `yield_if_due` on.
    """

    def __init__(self) -> None:
        self.has_yielded = True
        self._since = 0.0

    def note_yield(self) -> None:
        """Note that the loop has run other tasks."""
        self.has_yielded = True

    async def yield_if_due(self) -> None:
        """Yield to other tasks, if the budget is used up. Called before any work, so cancellation is safe."""
        now = time.monotonic()
        if self.has_yielded:
            self.has_yielded, self._since = False, now
        elif now - self._since >= BUSY_S_MAX:
            await anyio.lowlevel.checkpoint()
            self.has_yielded = True


async def _wait_ready(ready: Any, watched: socket.socket) -> None:
    try:
        await ready(watched)
    except anyio.ClosedResourceError:
        raise closed_error() from None


async def _resolve(host: str, port: int, flags: int = 0) -> list[tuple[int, Any]]:
    """Return the addresses of a host, each with its family."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"port {port}: give one from 0 to 65,535")
    try:
        entries = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        message = f"the host {host!r} has no address that is known here: {error}"
        raise unknown_host(host, error) or OSError(message) from error
    return [(family, address) for family, _, _, _, address in entries]


async def _connect_first(targets: list[tuple[int, Any]], name: str) -> socket.socket:
    """Connect to the address that answers first; each has a head start before the next one."""
    connected: list[socket.socket] = []
    failures: list[OSError] = []

    async def attempt(family: int, address: Any, done: anyio.Event) -> None:
        try:
            connected.append(await _connect(family, address))
            tasks.cancel_scope.cancel()
        except OSError as error:
            failures.append(error)
        finally:
            done.set()

    try:
        async with anyio.create_task_group() as tasks:
            for family, address in targets:
                done = anyio.Event()
                tasks.start_soon(attempt, family, address, done)
                with anyio.move_on_after(HEAD_START_S):
                    await done.wait()
    except BaseException:
        for sock in connected:
            sock.close()
        raise
    for sock in connected[1:]:
        sock.close()
    if not connected:
        raise _wrap_error(failures[0], f"cannot connect to {name}") from failures[0]
    return connected[0]


async def _connect(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _prepare(sock)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            await anyio.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED  # nothing listens, and the kernel has connected the socket to itself
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    with suppress(OSError):  # the other side has closed already, which macOS reports here
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _wrap_error(error: OSError, what: str) -> OSError:
    return OSError(error.errno, f"{what}: {error.strerror or error}")


@lru_cache(maxsize=4096)
def _normalize_host(host: str) -> str:
    """Return an address without its scope; IPv4 unmapped if it came in by IPv6."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if TYPE_CHECKING:

    def _conforms(
        network: SocketNetwork, listener: SocketListener, stream: SocketStream
    ) -> tuple[Network, Listener, Stream]:
        return network, listener, stream
