"""The write side of a connection: answers first, then deliveries, batched into few system calls.

One task writes. If the client does not read, the task waits up to a deadline; unread bytes are bounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop.platform.buffers import skip_bytes
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop_broker.disk import FileRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop.platform.ports import Stream
    from delta_prop.server.send_queue import SendChunk
    from delta_prop.server.server_context import ServerContext
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.frames import Frame

WRITES_PER_TICK = 4
"""Maximum writes for one connection at the end of a tick; its own loop writes the rest."""
CONTROL_BYTES_MAX = 8 * 1024 * 1024
"""Maximum bytes of answers queued for a client that does not read; beyond it the connection is closed."""


class FrameSource(Protocol):
    """Supplies the frames to write; implemented by `ConnectionHandler`."""

    def take_answers(self) -> Sequence[Frame]:
        """Return the outcomes of received deltas that were not reported yet."""

    def next_chunk(self, now: float) -> SendChunk | None:
        """Return the next chunk to deliver; None if there is none now."""

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until `next_chunk` may have more; None if `notify` will report it."""

    def is_idle(self) -> bool:
        """Return True if nothing is to be written or ended before the next `notify`.

        Called after a complete write, since it is faster than the three methods above.
        """

    def is_finished(self) -> bool:
        """Return True if no more frames will come. Called when there is nothing to write."""


class ConnectionWriter:
    """Queued frames, and the loop that writes them. `written_at`: the time of the last write.

    The frames of a tick are written at its end, as far as the socket accepts them at once; the loop writes
    the rest, and frames that are due at a certain time.
    """

    def __init__(
        self, stream: Stream, connection: Connection, context: ServerContext, source: FrameSource
    ) -> None:
        self.written_at = context.now()
        self.is_ending = False
        """True once deliveries stop: the queued frames are written, then the loop ends."""
        self._stream = stream
        self._connection = connection
        self._context = context
        self._source = source
        self._tick_callbacks = context.internals.partition.tick_callbacks
        self._wakeup = Wakeup()
        self._is_scheduled = False  # True while a write at the end of the tick is due
        self._wakes_at = math.inf  # when the loop wakes even without a `notify`
        self._control: list[Buffer] = []  # queued answers
        self._control_bytes = 0
        self._unsent: Sequence[Buffer] = ()  # bytes that the socket has not accepted yet
        self._unsent_file: FileRange | None = None  # to be sent after `_unsent`
        self._failure: ConnectionError | None = None

    @property
    def is_overfull(self) -> bool:
        """True if the client leaves too many answers unread."""
        return self._control_bytes > CONTROL_BYTES_MAX

    def send(self, frame: Frame) -> None:
        """Queue a frame; it is written before all deliveries."""
        raw = self._connection.send(frame)
        self._control.append(raw)
        self._control_bytes += len(raw)
        self.notify()

    def notify(self) -> None:
        """Schedule a write: there may be something to write."""
        if not self._is_scheduled:
            self._is_scheduled = self._tick_callbacks.call_at_end(self._write_now)
            if not self._is_scheduled:
                self._wakeup.notify()

    async def run(self) -> None:
        """Write until `is_ending` is set, or the source is finished, and all is written.

        Raises ConnectionError, TimeoutError.
        """
        while True:
            if self._unsent or self._unsent_file is not None:
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
        now = self._context.now()
        wait_s = self._source.wait_s(now)
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
                    if self._unsent or self._unsent_file is not None:
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
        now = self._context.now()
        wait_s = self._source.wait_s(now)
        return wait_s is None or now + wait_s >= self._wakes_at

    def _write(self) -> bool:
        """Write answers and a chunk, as far as the socket accepts them; return False if there is nothing."""
        context, source = self._context, self._source
        now, counters = context.now(), context.counters
        for frame in source.take_answers():
            self._control.append(self._connection.send(frame))
        chunk = None if self.is_ending else source.next_chunk(now)
        parts: list[Buffer] = []
        if self._control:
            parts, self._control, self._control_bytes = self._control, [], 0
        elif chunk is None:
            return False
        if chunk is not None:
            counters.deltas_out += chunk.delta_count
            if isinstance(chunk.parts, FileRange):
                self._unsent_file = chunk.parts
            else:
                parts = parts + chunk.parts if parts else chunk.parts
        counters.frames_out += len(parts)
        self.written_at = now
        if parts:
            sent_bytes = self._stream.send_now(parts)
            size = sum(map(len, parts))  # type: ignore[arg-type]  # bytes all of them, or views of bytes
            counters.bytes_out += size
            if sent_bytes < size:
                self._unsent = skip_bytes(parts, sent_bytes)
        return True

    async def _write_rest(self) -> None:
        """Wait until the socket has accepted the unsent rest. Raises ConnectionError, TimeoutError."""
        parts, self._unsent = self._unsent, ()
        file, self._unsent_file = self._unsent_file, None
        with anyio.fail_after(self._context.settings.send_timeout_s):
            if parts:
                await self._stream.send(parts)
            if file is not None:
                self._context.counters.bytes_out += file.size
                await self._stream.send_file(file)
        await anyio.lowlevel.checkpoint()
