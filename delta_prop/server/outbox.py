"""A connection's way out: answers first, then what its outlet has; one system call for what can go together.

One task writes. Who does not read is waited for under a deadline, and what it may leave unread is bounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop.buffers import behind
from delta_prop.turns import Bell
from delta_prop_broker.disk import FileRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop.ports import Stream
    from delta_prop.server.hot import Sending
    from delta_prop.server.hub import Hub
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.frames import Frame

WRITES_A_TURN = 4
"""Calls of the system for one connection at the end of a turn; what is left then is for its own loop."""
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

    def rests(self) -> bool:
        """Whether nothing is to be written, nor to end, before somebody rings. Asked behind a whole write.

        Quicker to tell than that nothing is found by the calls above.
        """

    def finished(self) -> bool:
        """Whether nothing more is to come. Asked when there is nothing to write."""


class Outbox:
    """Frames to be told, and the loop that writes. `spoke_at`: when something was written last.

    What a turn has to tell is written at its end, as far as the system takes it at once; the loop does the
    rest, and what comes at its own time.
    """

    def __init__(self, stream: Stream, connection: Connection, hub: Hub, outgoing: Outgoing) -> None:
        self.spoke_at = hub.now()
        self.ending = False
        """Nothing is delivered any more; what is told goes out, then the loop ends."""
        self._stream = stream
        self._connection = connection
        self._hub = hub
        self._outgoing = outgoing
        self._turn = hub.inside.turn
        self._bell = Bell()
        self._due = False  # at the end of the turn
        self._looks_at = math.inf  # when the loop, waiting for the bell, looks again all the same
        self._told: list[Buffer] = []
        self._told_bytes = 0
        self._left: Sequence[Buffer] = ()  # that the system has not taken yet
        self._file: FileRange | None = None  # behind that
        self._failure: ConnectionError | None = None

    @property
    def overfull(self) -> bool:
        """Whether the client leaves too much unread."""
        return self._told_bytes > CONTROL_BYTES_MAX

    def tell(self, frame: Frame) -> None:
        """Have this written, before anything that is delivered."""
        raw = self._connection.send(frame)
        self._told.append(raw)
        self._told_bytes += len(raw)
        self.ring()

    def ring(self) -> None:
        """There may be something to write."""
        if not self._due:
            self._due = self._turn.later(self._write_now)
            if not self._due:
                self._bell.ring()

    async def run(self) -> None:
        """Write until all is told after `ending`. Raises ConnectionError, TimeoutError."""
        while True:
            if self._left or self._file is not None:
                await self._write_rest()
            elif self._failure is not None:
                raise self._failure
            elif self._write():
                await (
                    anyio.lowlevel.checkpoint()
                )  # a client that takes all at once must not keep others waiting
            elif self.ending or self._outgoing.finished():
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        now = self._hub.now()
        wait_s = self._outgoing.wait_s(now)
        if wait_s is None:
            await self._bell.wait()
            return
        self._looks_at = now + wait_s
        with anyio.move_on_after(wait_s):
            await self._bell.wait()
        self._looks_at = math.inf

    def _write_now(self) -> None:
        """At the end of a turn: write what there is, while the system takes all of it."""
        self._due = False
        if self._bell.awaited:
            try:
                for _ in range(WRITES_A_TURN):
                    if not self._write():
                        if self._is_done():
                            return
                        break
                    if self._left or self._file is not None:
                        break
                    if not self.ending and self._outgoing.rests():
                        return
            except ConnectionError as failure:
                self._failure = failure
        self._bell.ring()

    def _is_done(self) -> bool:
        """Whether the loop, which waits, has nothing to look at before its time."""
        if self.ending or self._outgoing.finished():
            return False
        now = self._hub.now()
        wait_s = self._outgoing.wait_s(now)
        return wait_s is None or now + wait_s >= self._looks_at

    def _write(self) -> bool:
        """Write what there is, as far as the system takes it; False where there is nothing."""
        hub, outgoing = self._hub, self._outgoing
        now, counters = hub.now(), hub.counters
        for frame in outgoing.answers():
            self._told.append(self._connection.send(frame))
        sending = None if self.ending else outgoing.next_sending(now)
        parts: list[Buffer] = []
        if self._told:
            parts, self._told, self._told_bytes = self._told, [], 0
        elif sending is None:
            return False
        if sending is not None:
            counters.deltas_out += sending.deltas
            if isinstance(sending.parts, FileRange):
                self._file = sending.parts
            else:
                parts = parts + sending.parts if parts else sending.parts
        counters.frames_out += len(parts)
        self.spoke_at = now
        if parts:
            sent = self._stream.send_now(parts)
            size = sum(map(len, parts))  # type: ignore[arg-type]  # bytes all of them, or views of bytes
            counters.bytes_out += size
            if sent < size:
                self._left = behind(parts, sent)
        return True

    async def _write_rest(self) -> None:
        """Wait until the system has taken what it left. Raises ConnectionError, TimeoutError."""
        parts, self._left = self._left, ()
        file, self._file = self._file, None
        with anyio.fail_after(self._hub.settings.send_s_max):
            if parts:
                await self._stream.send(parts)
            if file is not None:
                self._hub.counters.bytes_out += file.size
                await self._stream.send_file(file)
        await anyio.lowlevel.checkpoint()
