"""TCP of this machine: the real `Network`. Sockets that never block, waited for through anyio.

A call tries at once and waits only where the system has nothing for it. So a busy connection does not pay a
turn of the event loop for each call; it gives way after each half millisecond that it kept the loop.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from delta_prop.buffers import behind, bytes_in
from delta_prop.readiness import Readiness, closed
from delta_prop.tls import TlsStream
from delta_prop.tls_contexts import client_context, server_context
from delta_prop.unknown_hosts import unknown_host
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from delta_prop.ports import Listener, Network, Stream, Tls
    from delta_prop_broker.disk import FileRange

logger = logging.getLogger("delta_prop")

BUSY_S_MAX = 0.0005
"""How long connections may keep the event loop between them before one of them gives way."""
LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 32 * 1024 * 1024
"""How long, and for how many bytes, `aclose` waits for the other side to end too."""
BACKLOG = 1024
EXHAUSTED_S = 0.25
"""How long nobody is let in after the system had no descriptor or memory for a connection."""
HEAD_START_S = 0.25
"""How long an address is tried before the next one of the same host is tried beside it."""

_PARTS_MAX = max(16, os.sysconf("SC_IOV_MAX"))
_FILE_BYTES_A_CALL = 512 * 1024
_DISCARD_BYTES = 64 * 1024
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class SocketNetwork:
    """The network of the machine, for one event loop."""

    def __init__(self) -> None:
        self._turns = Turns()

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> SocketListener:
        """Listen on one address: the host's first, of IPv4 where it has one; `::` takes IPv4 too.

        Port 0 is any free one. Raises OSError, UsageError.
        """
        context = None if tls is None else await anyio.to_thread.run_sync(server_context, tls)
        targets = await _look_up(host, port, socket.AI_PASSIVE)
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
            raise _told(error, f"cannot listen on {_name(host, port)}") from error
        except BaseException:
            server.close()
            raise
        return SocketListener(server, self._turns, context)

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        """Connect, TLS handshake included. Raises OSError, TimeoutError, UsageError."""
        name = _name(host, port)
        try:
            with anyio.fail_after(timeout_s):
                context = None if tls is None else await anyio.to_thread.run_sync(client_context, tls)
                connected = await _first_of(await _look_up(host, port), name)
                stream = SocketStream(connected, self._turns, name, host)
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

    def __init__(self, server: socket.socket, turns: Turns, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._turns = turns
        self._context = context
        self._closing = False
        host, port = server.getsockname()[:2]
        self._address: tuple[str, int] = (host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the real one where 0 was asked for."""
        return self._address

    async def accept(self) -> Stream:
        """Wait for the next connection. Where the system has no room for one it is told, and tried again.

        Raises ConnectionError once the listener is closed.
        """
        while True:
            await self._turns.give_way()
            if self._closing:
                raise closed()
            try:
                accepted, address = self._server.accept()
            except BlockingIOError:
                await _wait(anyio.wait_readable, self._server)
                self._turns.note()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # it stays readable: without a pause this would spin
                    logger.warning("no connection can be accepted, which is tried again: %s", error)
                    await anyio.sleep(EXHAUSTED_S)
            else:
                return self._stream(accepted, address)

    async def aclose(self) -> None:
        """Take no more; connections that were accepted go on."""
        if not self._closing:
            self._closing = True
            with anyio.CancelScope(shield=True):
                anyio.notify_closing(self._server)
                await anyio.lowlevel.checkpoint()  # who waits wakes up before its number is another one's
            self._server.close()

    def _stream(self, accepted: socket.socket, address: Any) -> Stream:
        _prepare(accepted)
        host = _plain_host(address[0])
        stream = SocketStream(accepted, self._turns, _name(host, address[1]), host)
        return stream if self._context is None else TlsStream(stream, self._context, None)


class SocketStream:
    """One connection. A send that was cancelled leaves it fit for closing only."""

    def __init__(self, connected: socket.socket, turns: Turns, peer: str, peer_host: str) -> None:
        self._socket = connected
        self._readiness = Readiness(connected)
        self._turns = turns
        self._peer = peer
        self._peer_host = peer_host
        self._failure: str | None = None  # what broke it; it is told by one call of the system alone
        self._ended = False  # by the other side
        self._closing = False

    @property
    def peer(self) -> str:
        """Who is at the other end: `host:port`."""
        return self._peer

    @property
    def peer_host(self) -> str:
        """Where it is, without the port."""
        return self._peer_host

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and put them there; how many, 0 where the peer sends no more."""
        assert len(buffer), "no room to receive into looks like the end"
        await self._turns.give_way()
        while True:
            self._must_be_open()
            count = self._receive(buffer)
            if count is not None:
                return count
            await _wait(anyio.wait_readable, self._socket)
            self._turns.note()

    async def receive_each(self, room: Callable[[], memoryview], take: Callable[[int], bool]) -> bool:
        """Receive into what `room` gives and hand each count to `take`, until that gives False.

        Whether that ended it: False where the peer sends no more.
        """
        ended, turns, receive = False, self._turns, self._socket.recv_into

        def readable() -> bool:
            nonlocal ended
            turns.turned = True
            try:
                count = receive(room())
            except OSError as error:
                self._must_be_nothing(error)
                return True
            if count:
                return take(count)
            ended = True
            self._note_end()
            return False

        await turns.give_way()
        await self._readiness.each_readable(readable)
        return not ended

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what the system takes at once; how many bytes that were."""
        if self._closing:
            raise closed()
        if len(parts) <= _PARTS_MAX:
            return self._send_some(parts)
        sent = 0
        for first in range(0, len(parts), _PARTS_MAX):
            some = parts[first : first + _PARTS_MAX]
            now = self._send_some(some)
            sent += now
            if now < bytes_in(some):
                break
        return sent

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers one behind the other; return when the system has taken all."""
        await self._turns.give_way()
        left = bytes_in(parts)
        while left:
            sent = self.send_now(parts)
            left -= sent
            if left:
                parts = behind(parts, sent)
                await _wait(anyio.wait_writable, self._socket)
                self._turns.note()

    async def send_file(self, part: FileRange) -> None:
        """Send bytes of a file, by the system alone where it can. Raises OSError where the file fails."""
        sent = 0
        while sent < part.size:
            await self._turns.give_way()
            self._must_be_open()
            descriptor = part.file.descriptor()  # asked each time: a closed one is given to another file
            now = None if descriptor is None else self._send_from(descriptor, part, sent)
            if now is None:
                for piece in part.pieces(sent):
                    await self.send([piece])
                return
            sent += now
            if now == 0:
                await _wait(anyio.wait_writable, self._socket)
                self._turns.note()

    async def aclose(self, patience_s: float = 0.0) -> None:
        """End it: what was sent goes out, then the other side has up to a second, or more, to end too.

        Without that wait bytes of its that nobody read any more would reset the connection, and what was
        sent last, the reason for ending it, would be lost on the way.
        """
        if self._closing:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            await self._readiness.close()
            with anyio.move_on_after(max(LINGER_S_MAX, patience_s)):
                await self._linger()
        self._socket.close()

    # --- within

    def _must_be_open(self) -> None:
        """Asked after each wait: who begins another one while this is closed would never wake up."""
        if self._closing:
            raise closed()

    def _receive(self, buffer: memoryview) -> int | None:
        """How many bytes there were, 0 where the peer sends no more; None: nothing has come."""
        try:
            count = self._socket.recv_into(buffer)
        except OSError as error:
            self._must_be_nothing(error)
            return None
        if count == 0:
            self._note_end()
        return count

    def _must_be_nothing(self, error: OSError) -> None:
        """Nothing was received: that nothing has come is no error."""
        if not isinstance(error, BlockingIOError):
            raise self._gone(error) from error

    def _note_end(self) -> None:
        self._ended = True
        if self._failure is not None:  # sending found out, and the system tells it once
            raise ConnectionError(self._failure)

    def _send_some(self, parts: Sequence[Buffer]) -> int:
        """What one call of the system takes."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._gone(error) from error

    def _send_from(self, descriptor: int, part: FileRange, sent: int) -> int | None:
        """How many bytes went out of the file, 0 where the system takes none; None: it cannot do it."""
        count = min(part.size - sent, _FILE_BYTES_A_CALL)
        try:
            now = os.sendfile(self._socket.fileno(), descriptor, part.at + sent, count)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno in _NO_SENDFILE:
                return None
            if error.errno == errno.EIO:
                raise
            raise self._gone(error) from error
        if now == 0:
            raise part.short(sent)
        return now

    async def _linger(self) -> None:
        if self._ended or self._failure is not None:
            return
        with suppress(OSError):  # it was gone already
            self._socket.shutdown(socket.SHUT_WR)
            scratch, left = bytearray(_DISCARD_BYTES), LINGER_BYTES_MAX
            while left > 0:
                await self._turns.give_way()
                try:
                    count = self._socket.recv_into(scratch)
                except BlockingIOError:
                    await anyio.wait_readable(self._socket)
                    self._turns.note()
                else:
                    left = left - count if count else 0

    def _gone(self, error: OSError) -> ConnectionError:
        text = error.strerror or str(error)
        self._failure = self._failure or f"the connection to {self._peer} broke: {text}"
        return ConnectionError(self._failure)


class Turns:
    """Whether the sockets of one loop have kept it long enough.

    Who was woken by the loop knows that it has turned; from the next call on that got on without waiting,
    time counts.
    """

    def __init__(self) -> None:
        self.turned = True
        self._since = 0.0

    def note(self) -> None:
        """The loop has turned."""
        self.turned = True

    async def give_way(self) -> None:
        """Let others run, if it is their turn. Called before anything is done, so that nothing is lost."""
        now = time.monotonic()
        if self.turned:
            self.turned, self._since = False, now
        elif now - self._since >= BUSY_S_MAX:
            await anyio.lowlevel.checkpoint()
            self.turned = True


async def _wait(ready: Any, waited_for: socket.socket) -> None:
    try:
        await ready(waited_for)
    except anyio.ClosedResourceError:
        raise closed() from None


async def _look_up(host: str, port: int, flags: int = 0) -> list[tuple[int, Any]]:
    """The addresses of a host, each with its family."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"port {port} is none: it is from 0 to 65,535")
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        told = f"the host {host!r} has no address that is known here: {error}"
        raise unknown_host(host, error) or OSError(told) from error
    return [(family, address) for family, _, _, _, address in found]


async def _first_of(targets: list[tuple[int, Any]], name: str) -> socket.socket:
    """Connect to whichever address answers first; each has a head start before the next one."""
    won: list[socket.socket] = []
    failures: list[OSError] = []

    async def attempt(family: int, address: Any, over: anyio.Event) -> None:
        try:
            won.append(await _connected(family, address))
            tasks.cancel_scope.cancel()
        except OSError as error:
            failures.append(error)
        finally:
            over.set()

    try:
        async with anyio.create_task_group() as tasks:
            for family, address in targets:
                over = anyio.Event()
                tasks.start_soon(attempt, family, address, over)
                with anyio.move_on_after(HEAD_START_S):
                    await over.wait()
    except BaseException:
        for one in won:
            one.close()
        raise
    for one in won[1:]:
        one.close()
    if not won:
        raise _told(failures[0], f"cannot connect to {name}") from failures[0]
    return won[0]


async def _connected(family: int, address: Any) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        _prepare(one)
        code = one.connect_ex(address)
        if code == errno.EINPROGRESS:
            await anyio.wait_writable(one)
            code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and one.getsockname() == one.getpeername():
            code = errno.ECONNREFUSED  # nobody listens, and the system has joined the socket to itself
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        one.close()
        raise
    return one


def _prepare(one: socket.socket) -> None:
    one.setblocking(False)
    with suppress(OSError):  # the other side has gone already, and macOS says so here
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _told(error: OSError, what: str) -> OSError:
    return OSError(error.errno, f"{what}: {error.strerror or error}")


@lru_cache(maxsize=4096)
def _plain_host(host: str) -> str:
    """An address without its scope; IPv4 as itself where it came in by IPv6."""
    found = ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def _name(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if TYPE_CHECKING:

    def _conforms(
        network: SocketNetwork, listener: SocketListener, stream: SocketStream
    ) -> tuple[Network, Listener, Stream]:
        return network, listener, stream
