"""TLS 1.3 over any stream.

The engine works on bytes in memory. Its output is sent by any task that sends, always in order; a plain byte
counts as sent once the transport has taken its encrypted form.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from delta_prop.platform.buffers import chunks, skip_bytes, total_bytes
from delta_prop.platform.connection_faults import FIRST_BYTES_MAX, TLS_ALERT, Misconfigured, tls_fault
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.platform.ports import Stream
    from delta_prop_broker.disk import FileRange

RECORD_BYTES_MAX = 16 * 1024
"""Maximum bytes of a TLS record."""
SENT_BYTES_MAX = 64 * 1024
"""Maximum bytes that are encrypted before they are sent."""
RECEIVED_BYTES_MAX = 32 * 1024
"""Maximum bytes that are received before they are decrypted."""
CLOSE_NOTIFY_S_MAX = 1.0
"""Maximum seconds for which `aclose` tries to send close_notify."""


class TlsStream:
    """One secured connection. After a cancelled send it can only be closed."""

    def __init__(self, transport: Stream, context: ssl.SSLContext, server_name: str | None) -> None:
        """Create the client's end of a connection to the server of that name; with None the server's end."""
        self._transport = transport
        self._server_name = server_name
        self._first_bytes = b""  # first bytes that the other side sent
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._engine = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._received = memoryview(bytearray(RECEIVED_BYTES_MAX))
        self._handshake_done = False
        self._handshake_lock = anyio.Lock()
        self._sending = False  # True while a task waits for the transport to take what is unsent
        self._unsent = memoryview(b"")  # encrypted, but not taken by the transport
        self._pending_plain = b""  # plain bytes encrypted but unsent, so not counted as sent yet
        self._failure: ConnectionError | Misconfigured | None = None
        self._closing = False

    @property
    def peer(self) -> str:
        """Address of the other end: `host:port`."""
        return self._transport.peer

    @property
    def peer_host(self) -> str:
        """Host of the other end, without the port."""
        return self._transport.peer_host

    async def handshake(self) -> None:
        """Perform the TLS handshake; the first receive or send does it too.

        Raises ConnectionError; in a client Misconfigured if it can never succeed.
        """
        async with self._handshake_lock:
            while not self._handshake_done:
                self._check_alive()
                try:
                    self._engine.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                except ssl.SSLError as error:
                    failure = self._note_failure(error)
                    if self._server_name is None and not self._outgoing.pending:
                        # OpenSSL sends nothing to a peer that does not speak TLS
                        self._outgoing.write(TLS_ALERT)
                    await self._flush()  # send the alert, which has the reason
                    raise failure from error
                else:
                    await self._flush()
                    self._handshake_done = True

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and read them into the buffer; return how many, 0 at the end of the stream."""
        assert len(buffer), "an empty buffer looks like the end of the stream"
        await self._ensure_handshake()
        while True:
            try:
                return self._decrypt(buffer)
            except ssl.SSLWantReadError:
                self._flush_now()
                await self._fill()
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                failure = self._note_failure(error)
                self._flush_now()
                raise failure from error

    async def receive_each(
        self, get_buffer: Callable[[], memoryview], on_received: Callable[[int], bool]
    ) -> bool:
        """Receive into `get_buffer()` and pass each count to `on_received`, until that is False.

        Return True if `on_received` ended it, False at the end of the peer's stream.
        """
        while count := await self.receive_into(get_buffer()):
            if not on_received(count):
                return True
        return False

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what the transport takes at once; return how many bytes that were.

        The caller must send the rest next, since it may be encrypted already.
        """
        self._check_alive()
        if not self._handshake_done or not self._flush_now():
            return 0
        parts, sent = self._skip_pending_plain(parts)
        # one at a time, so that little is left encrypted but unsent
        for chunk in chunks(parts, RECORD_BYTES_MAX):
            self._encrypt(chunk)
            if not self._flush_now():
                self._pending_plain = bytes(chunk)
                break
            sent += memoryview(chunk).nbytes
        return sent

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers in order; return once the transport has taken all."""
        await self._ensure_handshake()
        await self._flush()
        parts, _ = self._skip_pending_plain(parts)
        for chunk in chunks(parts, SENT_BYTES_MAX):
            self._encrypt(chunk)
            await self._flush()

    async def send_file(self, part: FileRange) -> None:
        """Read bytes of a file and send them. Raises OSError if the file fails."""
        for piece in part.chunks():
            await self.send([piece])

    async def aclose(self, patience_s: float = 0.0) -> None:
        """Send close_notify, then close the transport."""
        if self._closing:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            if self._handshake_done and not self._sending and self._failure is None:
                with suppress(ssl.SSLError):
                    self._engine.unwrap()  # raises if the other side has not sent close_notify too
                with suppress(ConnectionError), anyio.move_on_after(CLOSE_NOTIFY_S_MAX):
                    await self._flush()
            await self._transport.aclose(patience_s)

    # --- helpers

    async def _ensure_handshake(self) -> None:
        self._check_alive()
        if not self._handshake_done:
            await self.handshake()

    def _check_alive(self) -> None:
        if self._closing:
            raise ConnectionError("the connection was closed on this side")
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _note_failure(self, error: ssl.SSLError) -> ConnectionError | Misconfigured:
        fault = None
        if self._server_name is not None:
            fault = tls_fault(error, self.peer, self._server_name, self._first_bytes)
        why = (error.reason or str(error)).replace("_", " ").lower()
        broken = ConnectionError(f"the secured connection to {self.peer} broke: {why}")
        self._failure = fault or broken
        return self._failure

    def _decrypt(self, buffer: memoryview) -> int:
        """Decrypt received bytes into the buffer, at least one, else raise an SSLError."""
        count = self._read(buffer)  # from one record; more may follow
        while count < len(buffer) and (self._engine.pending() or self._incoming.pending):
            try:
                count += self._read(buffer[count:])
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):  # the next call raises it again
                break
            except ssl.SSLError as error:  # the next call raises it
                self._note_failure(error)
                break
        return count

    def _read(self, buffer: memoryview) -> int:
        count: int = self._engine.read(len(buffer), buffer)  # type: ignore[assignment]  # bytes without a buffer
        return count

    async def _fill(self) -> None:
        count = await self._transport.receive_into(self._received)
        if count:
            self._first_bytes = self._first_bytes or bytes(self._received[: min(count, FIRST_BYTES_MAX)])
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()

    def _encrypt(self, chunk: Buffer) -> None:
        view = memoryview(chunk)
        try:
            while view.nbytes:
                view = view[self._engine.write(view) :]
        except ssl.SSLError as error:
            raise self._note_failure(error) from error

    def _flush_now(self) -> bool:
        """Send what is encrypted as far as the transport takes it; return True if that was all."""
        while not self._sending:
            if not self._unsent:
                if not self._outgoing.pending:
                    return True
                self._unsent = memoryview(self._outgoing.read())
            sent = self._transport.send_now([self._unsent])
            if not sent:
                break
            self._unsent = self._unsent[sent:]
        return False

    async def _flush(self) -> None:
        """Send all that is encrypted, in order."""
        while not self._flush_now():
            self._sending = True
            try:
                await self._transport.send([self._unsent])
            except BaseException:  # it is unknown how much was sent
                self._failure = self._failure or ConnectionError(f"a send to {self.peer} was interrupted")
                raise
            finally:
                self._sending = False
            self._unsent = memoryview(b"")

    def _skip_pending_plain(self, parts: Sequence[Buffer]) -> tuple[Sequence[Buffer], int]:
        """Return what is left to encrypt of these buffers, and how many of their bytes were encrypted."""
        if not self._pending_plain:
            return parts, 0
        count = min(len(self._pending_plain), total_bytes(parts))
        if count and next(chunks(parts, count)) != self._pending_plain[:count]:
            raise UsageError("parts do not begin with the unsent bytes: send those first")
        self._pending_plain = self._pending_plain[count:]
        return skip_bytes(parts, count), count


if TYPE_CHECKING:

    def _conforms(stream: TlsStream) -> Stream:
        return stream
