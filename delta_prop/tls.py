"""TLS 1.3 over any stream.

The engine works on bytes in memory. What it makes is sent by whoever is there, always in the order in which
it was made; a plain byte counts as sent when the stream below has taken what became of it.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from delta_prop.buffers import behind, bytes_in, chunks
from delta_prop.misconfigured import FIRST_BYTES_MAX, TLS_ALERT, Misconfigured, of_tls
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from delta_prop.ports import Stream
    from delta_prop_broker.disk import FileRange

RECORD_BYTES_MAX = 16 * 1024
"""How much TLS encrypts as one."""
SENT_BYTES_MAX = 64 * 1024
"""How much is encrypted before it is sent."""
RECEIVED_BYTES_MAX = 32 * 1024
"""How much is received before it is decrypted."""
FAREWELL_S_MAX = 1.0
"""How long `aclose` tries to say that nothing was cut off."""


class TlsStream:
    """One secured connection. A send that was cancelled leaves it fit for closing only."""

    def __init__(self, below: Stream, context: ssl.SSLContext, server_name: str | None) -> None:
        """The client's end of a connection to the server of that name; with None the server's end."""
        self._below = below
        self._server_name = server_name
        self._first = b""  # of what the other side sent
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._engine = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._received = memoryview(bytearray(RECEIVED_BYTES_MAX))
        self._shaken = False
        self._shaking = anyio.Lock()
        self._sending = False  # somebody waits until the stream below takes what is unsent
        self._unsent = memoryview(b"")  # encrypted, and not taken by the stream below
        self._owed = b""  # what became of these plain bytes is unsent: they are not counted as sent yet
        self._failure: ConnectionError | Misconfigured | None = None
        self._closing = False

    @property
    def peer(self) -> str:
        """Who is at the other end: `host:port`."""
        return self._below.peer

    @property
    def peer_host(self) -> str:
        """Where it is, without the port."""
        return self._below.peer_host

    async def handshake(self) -> None:
        """Agree with the other side; the first receive or send does it too.

        Raises ConnectionError; in a client Misconfigured where it cannot be agreed with.
        """
        async with self._shaking:
            while not self._shaken:
                self._must_live()
                try:
                    self._engine.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                except ssl.SSLError as error:
                    failure = self._failed(error)
                    if self._server_name is None and not self._outgoing.pending:
                        self._outgoing.write(TLS_ALERT)  # OpenSSL tells nothing to who does not speak TLS
                    await self._flush()  # the other side is told why
                    raise failure from error
                else:
                    await self._flush()
                    self._shaken = True

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and put them there; how many, 0 where the peer sends no more."""
        assert len(buffer), "no room to receive into looks like the end"
        await self._be_ready()
        while True:
            try:
                return self._decrypt(buffer)
            except ssl.SSLWantReadError:
                self._flush_now()
                await self._fill()
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                failure = self._failed(error)
                self._flush_now()
                raise failure from error

    async def receive_each(self, room: Callable[[], memoryview], take: Callable[[int], bool]) -> bool:
        """Receive into what `room` gives and hand each count to `take`, until that gives False.

        Whether that ended it: False where the peer sends no more.
        """
        while count := await self.receive_into(room()):
            if not take(count):
                return True
        return False

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what the stream below takes at once; how many bytes that were.

        What was not taken must come next, for it may be encrypted already.
        """
        self._must_live()
        if not self._shaken or not self._flush_now():
            return 0
        parts, sent = self._without_owed(parts)
        for chunk in chunks(parts, RECORD_BYTES_MAX):  # one at a time, so that little is owed
            self._encrypt(chunk)
            if not self._flush_now():
                self._owed = bytes(chunk)
                break
            sent += memoryview(chunk).nbytes
        return sent

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers one behind the other; return when the stream below has taken all."""
        await self._be_ready()
        await self._flush()
        parts, _ = self._without_owed(parts)
        for chunk in chunks(parts, SENT_BYTES_MAX):
            self._encrypt(chunk)
            await self._flush()

    async def send_file(self, part: FileRange) -> None:
        """Read bytes of a file and send them. Raises OSError where the file fails."""
        for piece in part.pieces():
            await self.send([piece])

    async def aclose(self, patience_s: float = 0.0) -> None:
        """End it, and say so before; the stream below has the last word."""
        if self._closing:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            if self._shaken and not self._sending and self._failure is None:
                with suppress(ssl.SSLError):
                    self._engine.unwrap()  # raises where the other side has not said so too
                with suppress(ConnectionError), anyio.move_on_after(FAREWELL_S_MAX):
                    await self._flush()
            await self._below.aclose(patience_s)

    # --- within

    async def _be_ready(self) -> None:
        self._must_live()
        if not self._shaken:
            await self.handshake()

    def _must_live(self) -> None:
        if self._closing:
            raise ConnectionError("the connection was closed on this side")
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _failed(self, error: ssl.SSLError) -> ConnectionError | Misconfigured:
        lasts = None
        if self._server_name is not None:
            lasts = of_tls(error, self.peer, self._server_name, self._first)
        why = (error.reason or str(error)).replace("_", " ").lower()
        broken = ConnectionError(f"the secured connection to {self.peer} broke: {why}")
        self._failure = lasts or broken
        return self._failure

    def _decrypt(self, buffer: memoryview) -> int:
        """Put what has been received into the buffer, some bytes at least, else raise an SSLError."""
        count = self._read(buffer)  # of one record; others may stand behind it
        while count < len(buffer) and (self._engine.pending() or self._incoming.pending):
            try:
                count += self._read(buffer[count:])
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):  # comes again
                break
            except ssl.SSLError as error:  # is told by the next call
                self._failed(error)
                break
        return count

    def _read(self, buffer: memoryview) -> int:
        count: int = self._engine.read(len(buffer), buffer)  # type: ignore[assignment]  # bytes without a buffer
        return count

    async def _fill(self) -> None:
        count = await self._below.receive_into(self._received)
        if count:
            self._first = self._first or bytes(self._received[: min(count, FIRST_BYTES_MAX)])
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()

    def _encrypt(self, chunk: Buffer) -> None:
        view = memoryview(chunk)
        try:
            while view.nbytes:
                view = view[self._engine.write(view) :]
        except ssl.SSLError as error:
            raise self._failed(error) from error

    def _flush_now(self) -> bool:
        """Pass on what is encrypted as far as the stream below takes it; whether that was all."""
        while not self._sending:
            if not self._unsent:
                if not self._outgoing.pending:
                    return True
                self._unsent = memoryview(self._outgoing.read())
            sent = self._below.send_now([self._unsent])
            if not sent:
                break
            self._unsent = self._unsent[sent:]
        return False

    async def _flush(self) -> None:
        """Pass on all that is encrypted, in its order."""
        while not self._flush_now():
            self._sending = True
            try:
                await self._below.send([self._unsent])
            except BaseException:  # nobody knows how much of it has gone
                self._failure = self._failure or ConnectionError(f"a send to {self.peer} was broken off")
                raise
            finally:
                self._sending = False
            self._unsent = memoryview(b"")

    def _without_owed(self, parts: Sequence[Buffer]) -> tuple[Sequence[Buffer], int]:
        """What is to be encrypted of these buffers, and how many bytes of them have been by now."""
        if not self._owed:
            return parts, 0
        count = min(len(self._owed), bytes_in(parts))
        if count and next(chunks(parts, count)) != self._owed[:count]:
            raise UsageError("what a send did not take comes next: it is encrypted already")
        self._owed = self._owed[count:]
        return behind(parts, count), count


if TYPE_CHECKING:

    def _conforms(stream: TlsStream) -> Stream:
        return stream
