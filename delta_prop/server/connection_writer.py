"""The write side of a connection: answers first, then deliveries, batched into few system calls.

One task writes. If the client does not read, the task waits up to a deadline; unread bytes are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.platform.buffers import skip_bytes
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop_broker.disk import FileRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.platform.ports import Stream
    from delta_prop.server.connection_handler import ConnectionHandler
    from delta_prop.server.server_context import Counters, ServerContext
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.frames import Frame

WRITES_PER_TICK = 4
"""Maximum writes for one connection at the end of a tick; its own loop writes the rest."""
CONTROL_BYTES_MAX = 8 * 1024 * 1024
"""Maximum bytes of answers queued for a client that does not read; beyond it the connection is closed."""


class AnswerQueue:
    """The encoded answers that wait to be written."""

    def __init__(self, connection: Connection) -> None:
        self.parts: list[Buffer] = []
        self._connection = connection
        self._bytes = 0

    @property
    def is_overfull(self) -> bool:
        """True if the client leaves too many answers unread."""
        return self._bytes > CONTROL_BYTES_MAX

    def put(self, frame: Frame) -> None:
        """Encode and append a frame."""
        raw = self._connection.send(frame)
        self.parts.append(raw)
        self._bytes += len(raw)

    def take(self) -> list[Buffer]:
        """Remove and return all answers."""
        parts, self.parts, self._bytes = self.parts, [], 0
        return parts


class UnsentRest:
    """The rest of a write that the socket has not accepted: bytes, and after them a range of a file."""

    def __init__(self) -> None:
        self.parts: Sequence[Buffer] = ()
        self.file: FileRange | None = None

    async def send(self, stream: Stream, counters: Counters) -> None:
        """Wait until the socket has accepted all. Raises ConnectionError."""
        parts, self.parts = self.parts, ()
        file, self.file = self.file, None
        if parts:
            await stream.send(parts)
        if file is not None:
            counters.bytes_out += file.size
            await stream.send_file(file)


class ConnectionWriter:
    """Queued frames, and the loop that writes them. `written_at`: the time of the last write.

    The frames of a tick are written at its end, as far as the socket accepts them at once; the loop writes
    the rest, and frames that are due at a certain time.
    """

    def __init__(
        self, stream: Stream, connection: Connection, context: ServerContext, source: ConnectionHandler
    ) -> None:
        self._now = context.clock.now
        self.written_at = self._now()
        self.is_ending = False
        """True once deliveries stop: the queued frames are written, then the loop ends."""
        self._stream = stream
        self._context = context
        self._source = source
        self._wakeup = Wakeup()
        self._is_scheduled = False  # True while a write at the end of the tick is due
        self._wakes_at = math.inf  # when the loop wakes even without a `notify`
        self._answers = AnswerQueue(connection)
        self._rest = UnsentRest()
        self._failure: ConnectionError | None = None

    @property
    def is_overfull(self) -> bool:
        """True if the client leaves too many answers unread."""
        return self._answers.is_overfull

    def send(self, frame: Frame) -> None:
        """Queue a frame; it is written before all deliveries."""
        self._answers.put(frame)
        self.notify()

    def notify(self) -> None:
        """Schedule a write: there may be something to write."""
        if not self._is_scheduled:
            self._is_scheduled = self._context.partition.tick_callbacks.call_at_end(self._write_now)
            if not self._is_scheduled:
                self._wakeup.notify()

    async def run(self) -> None:
        """Write until `is_ending` is set, or the source is finished, and all is written.

        Raises ConnectionError, TimeoutError.
        """
        while True:
            if self._rest.parts or self._rest.file is not None:
                await self._write_rest()
            elif self._failure is not None:
                raise self._failure
            elif self._write():
                # A client that reads everything at once must not starve the others.
                await anyio.lowlevel.checkpoint()
            elif self.is_ending or self._source.is_finished():
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        now = self._now()
        wait_s = self._source.deliveries.wait_s(now)
        if wait_s is None:
            await self._wakeup.wait()
            return
        self._wakes_at = now + wait_s
        with anyio.move_on_after(wait_s):
            await self._wakeup.wait()
        self._wakes_at = math.inf

    def _write_now(self) -> None:
        """Write at the end of a tick, as long as the socket accepts everything."""
        self._is_scheduled = False
        if self._wakeup.has_waiter:
            try:
                for _ in range(WRITES_PER_TICK):
                    if not self._write():
                        if self._is_done():
                            return
                        break
                    if self._rest.parts or self._rest.file is not None:
                        break
                    if not self.is_ending and self._source.is_idle():
                        return
            except ConnectionError as failure:
                self._failure = failure
        self._wakeup.notify()

    def _is_done(self) -> bool:
        """Return True if the waiting loop has nothing to do before it wakes by itself."""
        if self.is_ending or self._source.is_finished():
            return False
        now = self._now()
        wait_s = self._source.deliveries.wait_s(now)
        return wait_s is None or now + wait_s >= self._wakes_at

    def _write(self) -> bool:
        """Write answers and a chunk, as far as the socket accepts them; return False if there is nothing."""
        context, source, answers = self._context, self._source, self._answers
        now, counters = self._now(), context.counters
        for frame in source.take_answers():
            answers.put(frame)
        chunk = None if self.is_ending else source.deliveries.next_chunk(now)
        parts: list[Buffer] = []
        if answers.parts:
            parts = answers.take()
        elif chunk is None:
            return False
        if chunk is not None:
            counters.deltas_out += chunk.delta_count
            if isinstance(chunk.parts, FileRange):
                self._rest.file = chunk.parts
            else:
                parts = parts + chunk.parts if parts else chunk.parts
        counters.frames_out += len(parts)
        self.written_at = now
        if parts:
            sent_bytes = self._stream.send_now(parts)
            size = sum(map(len, parts))  # type: ignore[arg-type]  # bytes all of them, or views of bytes
            counters.bytes_out += size
            if sent_bytes < size:
                self._rest.parts = skip_bytes(parts, sent_bytes)
        return True

    async def _write_rest(self) -> None:
        """Wait until the socket has accepted the unsent rest. Raises ConnectionError, TimeoutError."""
        with anyio.fail_after(self._context.settings.send_timeout_s):
            await self._rest.send(self._stream, self._context.counters)
        await anyio.lowlevel.checkpoint()
