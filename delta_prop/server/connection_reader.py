"""The read side of a connection: receives bytes, within a budget, and has their frames handled in ticks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import anyio.lowlevel

from delta_prop.server.receive_budget import UNBUDGETED_BYTES
from delta_prop_wire.errors import ProtocolError

if TYPE_CHECKING:
    import anyio

    from delta_prop.platform.ports import Stream
    from delta_prop.server.answers import Answers
    from delta_prop.server.server_context import ServerContext
    from delta_prop_wire.connection import Connection

TICK_MAX_S = 0.002
"""Seconds after which other tasks run; checked after each frame, or run of frames."""


class FrameTarget(Protocol):
    """Handles the complete frames of a connection; implemented by `FrameDispatcher`."""

    hello_done: anyio.Event | None
    """Set once the first hello is answered, for which later frames wait; None if none waits."""

    def handle_run(self) -> bool:
        """Handle the next frames as one run, the fast path; return False if they form none."""

    def handle_next(self) -> bool:
        """Handle the next complete frame; return False if there is none."""


class ConnectionReader:
    """Reads one connection. `received_at`: the time of the last frame.

    `frame_started_at`: when the incomplete frame began to arrive; None if there is none. `waits_for_budget`:
    True while a large frame waits, which does not count as the client's silence.
    """

    def __init__(
        self,
        stream: Stream,
        connection: Connection,
        context: ServerContext,
        *,
        target: FrameTarget,
        answers: Answers,
    ) -> None:
        self.received_at = context.clock.now()
        self.frame_started_at: float | None = None
        self.waits_for_budget = False
        self._stream = stream
        self._connection = connection
        self._buffer = connection.receive_buffer
        self._context = context
        self._now = context.clock.now
        self._target = target
        self._answers = answers
        self._budget_bytes = UNBUDGETED_BYTES  # acquired for the arriving frame

    async def run(self) -> None:
        """Read and handle all frames, until either side ends the connection."""
        connection, stream, target = self._connection, self._stream, self._target
        try:
            while not self._answers.writer.is_ending:
                # Budget is for bytes that have arrived, not for those that a header announces.
                if connection.buffered_bytes >= self._budget_bytes < connection.incoming_frame_bytes:
                    await self._acquire_budget(connection.incoming_frame_bytes)
                if not await stream.receive_each(connection.get_buffer, self._on_received):
                    return
                while not self._handle_frames():
                    hello = target.hello_done
                    await (anyio.lowlevel.checkpoint() if hello is None else hello.wait())
        except ConnectionError:
            self._answers.abort()
        except ProtocolError as error:
            self._answers.refuse_bytes(error)

    def close(self) -> None:
        """Release the budget: the connection has closed."""
        if self._budget_bytes > UNBUDGETED_BYTES:
            self._release_budget()

    # --- helpers

    def _on_received(self, byte_count: int) -> bool:
        """Handle received bytes; return True if all were handled and the budget allows more."""
        connection, buffer = self._connection, self._buffer
        self._context.counters.bytes_in += byte_count
        connection.buffer_updated(byte_count)
        if not self._handle_frames() or self._answers.writer.is_ending:
            return False
        return not (buffer.end - buffer.start >= self._budget_bytes < connection.incoming_frame_bytes)

    def _handle_frames(self) -> bool:
        """Handle complete frames for the time of one tick; return True if none is left."""
        if not self._handle_tick():
            return False
        if self._budget_bytes > UNBUDGETED_BYTES and not self._connection.incoming_frame_bytes:
            self._release_budget()
        if self.frame_started_at is None and self._buffer.start < self._buffer.end:
            self.frame_started_at = self._now()
        return True

    def _handle_tick(self) -> bool:
        """Handle complete frames in one tick, whose callbacks run at its end; return True if none is left."""
        buffer, target, writer = self._buffer, self._target, self._answers.writer
        started_at = self._now()
        with self._context.partition.tick_callbacks:
            while buffer.start < buffer.end:
                if target.hello_done is not None:
                    return False
                if not (target.handle_run() or target.handle_next()):
                    break
                self.frame_started_at = None
                now = self.received_at = self._now()
                if writer.is_ending:
                    return True
                if now - started_at > TICK_MAX_S:
                    return False
        return True

    async def _acquire_budget(self, size: int) -> None:
        """Wait until there is budget for a large frame."""
        self.waits_for_budget = True
        await self._context.receive_budget.acquire(size)
        self.waits_for_budget, self._budget_bytes = False, size
        self.frame_started_at = self._now()

    def _release_budget(self) -> None:
        self._context.receive_budget.release(self._budget_bytes)
        self._budget_bytes = UNBUDGETED_BYTES
