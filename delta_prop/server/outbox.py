"""A connection's way out: answers first, then what its outlet has; one system call for what can go together.

One task writes. Who does not read is waited for under a deadline, and what it may leave unread is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop_broker.disk import FileRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from delta_prop.ports import Stream
    from delta_prop.server.hot import Sending
    from delta_prop.server.hub import Hub
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.frames import Frame

CONTROL_BYTES_MAX = 8 * 1024 * 1024
"""What may wait for a client that does not read its answers; above that the connection ends."""


class Outgoing(Protocol):
    """Where what goes out comes from: a connection's peer."""

    def answers(self) -> Sequence[Frame]:
        """What has become of what came in, not told yet."""

    def next_sending(self, now: float) -> Sending | None:
        """What is to be delivered next; None: nothing at the moment."""

    def wait_s(self, now: float) -> float | None:
        """When to ask again, in seconds; None: when the bell rings."""

    def finished(self) -> bool:
        """Whether nothing more is to come. Asked when there is nothing to write."""


class Outbox:
    """Frames to be told, and the loop that writes. `spoke_at`: when something was written last."""

    def __init__(self, stream: Stream, connection: Connection, hub: Hub) -> None:
        self.spoke_at = hub.now()
        self.ending = False
        """Nothing is delivered any more; what is told goes out, then the loop ends."""
        self._stream = stream
        self._connection = connection
        self._hub = hub
        self._bell = anyio.Event()
        self._told: list[Buffer] = []
        self._told_bytes = 0

    @property
    def overfull(self) -> bool:
        """Whether the client leaves too much unread."""
        return self._told_bytes > CONTROL_BYTES_MAX

    def tell(self, frame: Frame) -> None:
        """Have this written, before anything that is delivered."""
        raw = self._connection.send(frame)
        self._told.append(raw)
        self._told_bytes += len(raw)
        self._bell.set()

    def ring(self) -> None:
        """There may be something to write."""
        self._bell.set()

    async def run(self, outgoing: Outgoing) -> None:
        """Write until all is told after `ending`. Raises ConnectionError, TimeoutError."""
        while True:
            self._bell = bell = anyio.Event()
            now = self._hub.now()
            for frame in outgoing.answers():
                self._told.append(self._connection.send(frame))
            sending = None if self.ending else outgoing.next_sending(now)
            if self._told or sending is not None:
                await self._write(sending)
            elif self.ending or outgoing.finished():
                return
            else:
                await _wait(bell, outgoing.wait_s(now))

    async def _write(self, sending: Sending | None) -> None:
        parts, self._told, self._told_bytes = self._told, [], 0
        counters, file = self._hub.counters, None
        if sending is not None:
            if isinstance(sending.parts, FileRange):
                file = sending.parts
            else:
                parts += sending.parts
            counters.deltas_out += sending.deltas
        counters.frames_out += len(parts)
        self.spoke_at = self._hub.now()
        if parts:
            counters.bytes_out += await self._send(parts)
        if file is not None:
            counters.bytes_out += file.size
            with anyio.fail_after(self._hub.settings.send_s_max):
                await self._stream.send_file(file)
        if sending is not None:
            await anyio.lowlevel.checkpoint()  # whose client takes all at once must not keep others waiting

    async def _send(self, parts: list[Buffer]) -> int:
        sent, size = self._stream.send_now(parts), sum(map(_size, parts))
        if sent < size:
            with anyio.fail_after(self._hub.settings.send_s_max):
                await self._stream.send(list(_rest(parts, sent)))
        return size


async def _wait(bell: anyio.Event, wait_s: float | None) -> None:
    if wait_s is None:
        await bell.wait()
    else:
        with anyio.move_on_after(wait_s):
            await bell.wait()


def _size(part: Buffer) -> int:
    return memoryview(part).nbytes


def _rest(parts: Sequence[Buffer], sent: int) -> Iterator[Buffer]:
    """What is left of the parts behind so many bytes."""
    for part in parts:
        size = _size(part)
        if sent >= size:
            sent -= size
        elif sent:
            yield memoryview(part).cast("B")[sent:]
            sent = 0
        else:
            yield part
