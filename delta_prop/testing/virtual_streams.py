"""A connection of the fake network: two streams over two paths.

There is no background task: each call or wait computes what has arrived by then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop.platform.buffers import chunks
from delta_prop.platform.ports import Stream
from delta_prop.testing.network_path import NetworkPath
from delta_prop_broker.disk import FileRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 4 * 1024 * 1024
"""Maximum seconds, and maximum received bytes, for which a closed stream waits for the other end to close."""

_CHUNK_BYTES = 64 * 1024


class Broadcast:
    """A condition that wakes all its waiters."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake all waiters."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self, until: float = math.inf) -> None:
        """Wait for `notify`, or until a time."""
        event = self._event
        with anyio.move_on_after(None if until == math.inf else until - anyio.current_time()):
            await event.wait()


class ConnectionOwner(Protocol):
    """The network of a connection."""

    fault_counts: Counter[str]

    def forget(self, connection: VirtualConnection) -> None:
        """Forget a connection that is closed at both ends."""


class VirtualConnection:
    """One connection, as a test sees it. It breaks by itself after `bytes_max` sent bytes."""

    def __init__(
        self,
        *,
        to_server: NetworkPath,
        to_client: NetworkPath,
        addresses: tuple[str, str],
        bytes_max: float,
        owner: ConnectionOwner,
    ) -> None:
        self.hosts = (to_server.source, to_server.target)
        self.paths = (to_server, to_client)
        client, server = addresses
        self.client = VirtualStream(self, incoming=to_client, outgoing=to_server, peer=server)
        self.server = VirtualStream(self, incoming=to_server, outgoing=to_client, peer=client)
        self._bytes_left = bytes_max
        self._owner = owner

    def reset(self) -> None:
        """Break the connection; both ends are notified as soon as the reset reaches them."""
        now = anyio.current_time()
        for path in self.paths:
            path.put_reset(now)
        self._owner.fault_counts["reset"] += 1
        self.notify()

    def notify(self) -> None:
        """Wake both ends."""
        self.client.wakeup.notify()
        self.server.wakeup.notify()

    def end_host(self, host: str, *, notify: bool) -> None:
        """Abort a host's ends, without waiting; the other ends are reset only if `notify`."""
        for stream, stream_host in zip((self.client, self.server), self.hosts, strict=True):
            if stream_host == host and not stream.is_closed:
                stream.abort(notify=notify)

    def other(self, stream: VirtualStream) -> VirtualStream:
        """Return the other end."""
        return self.server if stream is self.client else self.client

    def note_sent(self, count: int) -> None:
        """Count sent bytes; break the connection at its bound."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            self._bytes_left = math.inf
            self.reset()

    def note_closed(self) -> None:
        """Note that one end is closed; with both, the connection ends."""
        self.notify()
        if self.client.is_closed and self.server.is_closed:
            self._owner.forget(self)


class VirtualStream:
    """One end of a connection."""

    def __init__(
        self, connection: VirtualConnection, *, incoming: NetworkPath, outgoing: NetworkPath, peer: str
    ) -> None:
        self.connection = connection
        self.wakeup = Broadcast()
        """Notified of changes at this end only, so that few waiters wake in vain."""
        self.wants_capacity = False  # True while a send waits for capacity
        self.is_closed = False  # once True, data that arrives is answered by a reset
        self._incoming = incoming
        self._outgoing = outgoing
        self._peer = peer
        self._failure: str | None = None

    @property
    def peer(self) -> str:
        """Address of the other end: `host:port`."""
        return self._peer

    @property
    def peer_host(self) -> str:
        """Host of the other end, without the port."""
        return self._peer.rpartition(":")[0]

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and copy them into the buffer; return their number; 0: the peer sends no more."""
        assert len(buffer), "an empty buffer would look like the end"
        await anyio.lowlevel.checkpoint()
        while True:
            now = self._check_open()
            count = self._incoming.take(now, buffer)
            if count is not None:
                if (other := self._other).wants_capacity:
                    other.wakeup.notify()
                return count
            await self._wait(now)

    async def receive_each(
        self, get_buffer: Callable[[], memoryview], on_received: Callable[[int], bool]
    ) -> bool:
        """Receive into the buffers of `get_buffer`; call `on_received` with each count until it returns
        False.

        Return True if it did so, False if the peer sends no more.
        """
        while count := await self.receive_into(get_buffer()):
            if not on_received(count):
                return True
        return False

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send bytes up to the capacity; return their number."""
        now, sent_bytes = self._check_open(), 0
        for chunk in chunks(parts, _CHUNK_BYTES):
            view = memoryview(chunk)
            taken = self._outgoing.put(now, view)
            sent_bytes += taken
            if taken < view.nbytes:
                break
        if sent_bytes:
            self._other.wakeup.notify()
            self.connection.note_sent(sent_bytes)
        return sent_bytes

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers in order; return when all are in flight."""
        await anyio.lowlevel.checkpoint()
        self._check_open()
        for chunk in chunks(parts, _CHUNK_BYTES):
            rest = memoryview(chunk)
            while rest.nbytes:
                sent_bytes = self.send_now([rest])
                rest = rest[sent_bytes:]
                if not sent_bytes:
                    await self._wait_for_capacity()

    async def send_file(self, part: FileRange) -> None:
        """Read bytes of a file and send them. Raises OSError if the file fails."""
        self._check_open()
        for piece in part.chunks():
            await self.send([piece])

    async def aclose(self, patience_s: float = 0.0) -> None:
        """Close; sent bytes arrive, and the peer has up to a second, or `patience_s`, to close too."""
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
            if self._failure is None:
                self._failure = "the connection was closed on this side"
                await self._linger(max(LINGER_S_MAX, patience_s))
        self._mark_closed()

    def abort(self, *, notify: bool) -> None:
        """Close at once; the other end is notified by a reset if `notify`."""
        self._failure = "the connection ended with its process"
        if notify:
            self._outgoing.put_reset(anyio.current_time())
        self._mark_closed()

    # --- internals

    async def _linger(self, seconds: float) -> None:
        self._outgoing.put_end(anyio.current_time())
        self._incoming.is_discarding = True
        self.connection.notify()
        with anyio.move_on_after(seconds):
            while self._incoming.discarded_bytes < LINGER_BYTES_MAX:
                now = anyio.current_time()
                if self._incoming.is_ended(now) or self._incoming.is_reset(now):
                    break
                await self.wakeup.wait(self._incoming.next_at(now))

    def _mark_closed(self) -> None:
        self.is_closed = True
        self.connection.note_closed()

    def _check_open(self) -> float:
        """Return the time. Raises ConnectionError if the connection is closed."""
        now = anyio.current_time()
        if self._failure is None:
            if self._must_reset(now):
                self._incoming.put_reset(now)
            if self._incoming.is_reset(now):
                self._failure = f"the connection to {self._peer} broke: it was reset"
                self._mark_closed()
        if self._failure is not None:
            raise ConnectionError(self._failure)
        return now

    def _must_reset(self, now: float) -> bool:
        """True if data reached a closed end, which answers by a reset."""
        return (
            self.connection.other(self).is_closed
            and self._outgoing.has_data(now)
            and not self._incoming.has_reset
        )

    @property
    def _other(self) -> VirtualStream:
        return self.connection.other(self)

    async def _wait_for_capacity(self) -> None:
        self.wants_capacity = True
        try:
            await self._wait(anyio.current_time())
        finally:
            self.wants_capacity = False

    async def _wait(self, now: float) -> None:
        until = self._incoming.next_at(now)
        if self._outgoing.is_discarding or self.connection.other(self).is_closed:
            until = min(until, self._outgoing.next_at(now))  # then capacity is freed, or a reset is sent
        await self.wakeup.wait(until)


if TYPE_CHECKING:

    def _conforms(stream: VirtualStream) -> Stream:
        return stream
