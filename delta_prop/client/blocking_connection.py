"""A connection with blocking calls: one socket, with its session."""

from __future__ import annotations

import random
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop.client.addresses import Address
from delta_prop.client.session import Session
from delta_prop.client.settings import ClientSettings
from delta_prop.platform.connection_faults import FIRST_BYTES_MAX, tls_fault
from delta_prop.platform.unknown_hosts import unknown_host

if TYPE_CHECKING:
    from typing_extensions import Buffer

RNG = random.SystemRandom()
"""For waits. Python's own generator belongs to the program, which may have seeded it."""


class BlockingConnection:
    """One connected socket and its session. Raises OSError, Misconfigured."""

    def __init__(
        self,
        address: Address,
        timeout_s: float,
        context: ssl.SSLContext | None,
        server_name: str | None,
        settings: ClientSettings,
    ) -> None:
        self.address = address
        self._server_name = server_name or address.host
        sock = _connect_socket(address, timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock = context.wrap_socket(
                    sock, server_hostname=self._server_name, do_handshake_on_connect=False
                )
                self._handshake(sock)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self.session = Session(settings, time.monotonic(), address, secured=context is not None)

    def send(self, parts: Iterable[Buffer]) -> None:
        """Queue bytes for the next steps."""
        self._unsent.extend(map(memoryview, parts))

    def step(self, wait_s: float) -> int:
        """Send and receive all that is possible, waiting for either; return the number of bytes received.

        Raises OSError, Misconfigured.
        """
        self._write()
        count = self.read()
        if count:
            return count
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._socket, events)
        if not self._selector.select(wait_s):
            return 0
        self._write()
        return self.read()

    def read(self) -> int:
        """Receive without waiting; return the number of bytes. Raises OSError, Misconfigured."""
        connection = self.session.connection
        try:
            count = self._socket.recv_into(connection.get_buffer())
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except ssl.SSLError as error:
            raise tls_fault(error, str(self.address), self._server_name, b"") or error from error
        if not count:
            raise self.session.eof_error()
        connection.buffer_updated(count)
        return count

    def close(self) -> None:
        """Close the socket."""
        self._selector.close()
        with suppress(OSError):
            self._socket.close()

    def _handshake(self, sock: ssl.SSLSocket) -> None:
        try:
            sock.do_handshake()
        except ssl.SSLError as error:
            fault = tls_fault(error, str(self.address), self._server_name, _read_first_bytes(sock, error))
            raise fault or error from error

    def _write(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._socket.send(part)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            self.session.on_sent(time.monotonic())
            if sent < len(part):
                self._unsent[0] = part[sent:]
            else:
                self._unsent.popleft()


def _connect_socket(address: Address, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection(address, timeout_s)
    except (socket.gaierror, UnicodeError) as error:
        raise unknown_host(address.host, error) or error from None


def _read_first_bytes(sock: ssl.SSLSocket, error: ssl.SSLError) -> bytes:
    """Return the first bytes of a server without TLS; OpenSSL has consumed the five bytes before `rest`."""
    if error.reason != "WRONG_VERSION_NUMBER":
        return b""
    with suppress(OSError):
        rest = socket.socket.recv(sock, FIRST_BYTES_MAX, socket.MSG_DONTWAIT)
        return b"HTTP/" + rest if rest.startswith((b"1.0 ", b"1.1 ")) else b""
    return b""
