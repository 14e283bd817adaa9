"""A connection of the false network: two streams over two ways.

Nothing happens by itself: whoever calls or waits works out what has arrived by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.buffers import chunks

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from delta_prop.ports import Stream
    from delta_prop.testing.link import Way
    from delta_prop_broker.disk import FileRange

LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 4 * 1024 * 1024
"""How long, and for how many bytes, a closed stream waits for the other side to end too, as real ones do."""

_CHUNK_BYTES = 64 * 1024


class Bell:
    """Wakes everybody who waits for it."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Something has changed."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self, until: float = math.inf) -> None:
        """Wait for a ring, or until a time."""
        event = self._event
        with anyio.move_on_after(None if until == math.inf else until - anyio.current_time()):
            await event.wait()


class VirtualConnection:
    """One connection, seen from outside. It breaks by itself once more bytes than `bytes_max` were sent."""

    def __init__(
        self,
        *,
        there: Way,
        back: Way,
        names: tuple[str, str],
        bytes_max: float,
        struck: Counter[str],
        on_over: Callable[[], object],
    ) -> None:
        self.hosts = (there.source, there.target)
        self.ways = (there, back)
        client, server = names
        self.client = VirtualStream(self, incoming=back, outgoing=there, peer=server)
        self.server = VirtualStream(self, incoming=there, outgoing=back, peer=client)
        self._bytes_left = bytes_max
        self._struck = struck
        self._on_over = on_over

    def reset(self) -> None:
        """Break it; both ends are told as soon as that reaches them."""
        now = anyio.current_time()
        for way in self.ways:
            way.put_reset(now)
        self._struck["reset"] += 1
        self.ring()

    def ring(self) -> None:
        """Wake both ends."""
        self.client.bell.ring()
        self.server.bell.ring()

    def end_at(self, host: str, *, told: bool) -> None:
        """A host's ends are gone, without waiting; the other ends are told or not."""
        for stream, at in zip((self.client, self.server), self.hosts, strict=True):
            if at == host and not stream.is_over:
                stream.give_up(told=told)

    def other(self, stream: VirtualStream) -> VirtualStream:
        """The other end."""
        return self.server if stream is self.client else self.client

    def note_sent(self, count: int) -> None:
        """Some bytes were sent."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            self._bytes_left = math.inf
            self.reset()

    def note_over(self) -> None:
        """One end is over; with both the connection is."""
        self.ring()
        if self.client.is_over and self.server.is_over:
            self._on_over()


class VirtualStream:
    """One end of a connection."""

    def __init__(self, connection: VirtualConnection, *, incoming: Way, outgoing: Way, peer: str) -> None:
        self.connection = connection
        self.bell = Bell()
        """Rung when something changes here; each end has its own, so that few wake for nothing."""
        self.wants_room = False
        self.is_over = False  # what arrives here from now on is answered by a reset
        self._incoming = incoming
        self._outgoing = outgoing
        self._peer = peer
        self._failure: str | None = None

    @property
    def peer(self) -> str:
        """Who is at the other end: `host:port`."""
        return self._peer

    @property
    def peer_host(self) -> str:
        """Where it is, without the port."""
        return self._peer.rpartition(":")[0]

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and put them there; how many, 0 where the peer sends no more."""
        assert len(buffer), "no room to receive into looks like the end"
        await anyio.lowlevel.checkpoint()
        while True:
            now = self._live()
            count = self._incoming.take(now, buffer)
            if count is not None:
                if (other := self._other).wants_room:
                    other.bell.ring()
                return count
            await self._wait(now)

    async def receive_each(self, room: Callable[[], memoryview], take: Callable[[int], bool]) -> bool:
        """Receive into what `room` gives and hand each count to `take`, until that gives False.

        Whether that ended it: False where the peer sends no more.
        """
        while count := await self.receive_into(room()):
            if not take(count):
                return True
        return False

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what there is room for; how many bytes that were."""
        now, sent = self._live(), 0
        for chunk in chunks(parts, _CHUNK_BYTES):
            view = memoryview(chunk)
            taken = self._outgoing.put(now, view)
            sent += taken
            if taken < view.nbytes:
                break
        if sent:
            self._other.bell.ring()
            self.connection.note_sent(sent)
        return sent

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers one behind the other; return when all are under way."""
        await anyio.lowlevel.checkpoint()
        self._live()
        for chunk in chunks(parts, _CHUNK_BYTES):
            left = memoryview(chunk)
            while left.nbytes:
                sent = self.send_now([left])
                left = left[sent:]
                if not sent:
                    await self._wait_for_room()

    async def send_file(self, part: FileRange) -> None:
        """Read bytes of a file and send them. Raises OSError where the file fails."""
        self._live()
        for piece in part.pieces():
            await self.send([piece])

    async def aclose(self, patience_s: float = 0.0) -> None:
        """End it; what was sent arrives, and the other side has up to a second, or more, to end too."""
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
            if self._failure is None:
                self._failure = "the connection was closed on this side"
                await self._linger(max(LINGER_S_MAX, patience_s))
        self._be_over()

    def give_up(self, *, told: bool) -> None:
        """End it at once; the other end is told by a reset, or not at all."""
        self._failure = "the connection went with its process"
        if told:
            self._outgoing.put_reset(anyio.current_time())
        self._be_over()

    # --- within

    async def _linger(self, seconds: float) -> None:
        self._outgoing.put_end(anyio.current_time())
        self._incoming.discarding = True
        self.connection.ring()
        with anyio.move_on_after(seconds):
            while self._incoming.discarded_bytes < LINGER_BYTES_MAX:
                now = anyio.current_time()
                if self._incoming.is_ended(now) or self._incoming.is_reset(now):
                    break
                await self.bell.wait(self._incoming.next_at(now))

    def _be_over(self) -> None:
        self.is_over = True
        self.connection.note_over()

    def _live(self) -> float:
        """The time, if the connection is there."""
        now = anyio.current_time()
        if self._failure is None:
            if self._meets_dead_end(now):
                self._incoming.put_reset(now)
            if self._incoming.is_reset(now):
                self._failure = f"the connection to {self._peer} broke: it was reset"
                self._be_over()
        if self._failure is not None:
            raise ConnectionError(self._failure)
        return now

    def _meets_dead_end(self, now: float) -> bool:
        """Whether something arrived where nobody is any more, which answers by a reset."""
        return (
            self.connection.other(self).is_over
            and self._outgoing.has_data(now)
            and not self._incoming.has_reset
        )

    @property
    def _other(self) -> VirtualStream:
        return self.connection.other(self)

    async def _wait_for_room(self) -> None:
        self.wants_room = True
        try:
            await self._wait(anyio.current_time())
        finally:
            self.wants_room = False

    async def _wait(self, now: float) -> None:
        until = self._incoming.next_at(now)
        if self._outgoing.discarding or self.connection.other(self).is_over:
            until = min(until, self._outgoing.next_at(now))  # room is made there, or an answer
        await self.bell.wait(until)


if TYPE_CHECKING:

    def _conforms(stream: VirtualStream) -> Stream:
        return stream
