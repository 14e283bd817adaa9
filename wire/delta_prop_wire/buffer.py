"""The receive buffer: the transport writes bytes into it, and the decoder takes whole frames out.

One block of memory that is reused. It is small while little arrives, grows while reads fill it, and is never
larger than one frame of the maximum size, nor much larger than what has really arrived.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import HEADER_BYTES

BUFFER_BYTES_MIN = 4 * 1024
BUFFER_BYTES_MAX = 256 * 1024
"""The most that one read may bring, unless a frame is larger still."""
SMALL_READS_MAX = 16
"""After more than this many small reads in a row, or reads without a frame above `BUFFER_BYTES_MAX`, the
buffer shrinks.
"""
_GROWTH = 4


class ReceiveBuffer:
    """Bytes received and not yet taken: from `start` to `end`, until the next receive or take."""

    __slots__ = (
        "_block",
        "_bytes_max",
        "_normal_reads",
        "_small_reads",
        "_view",
        "_was_filled",
        "end",
        "start",
    )

    def __init__(self, payload_bytes_max: int) -> None:
        self._bytes_max = HEADER_BYTES + payload_bytes_max
        self._block = bytearray(BUFFER_BYTES_MIN)
        self._view = memoryview(self._block)
        self.start = self.end = 0
        self._was_filled = False  # True if the last read filled the buffer
        self._small_reads = self._normal_reads = 0

    def __len__(self) -> int:
        return self.end - self.start

    def get_buffer(self, frame_bytes: int = 0) -> memoryview:
        """Return the memory to receive into; `frame_bytes` is the size of the frame being received.

        Raises UsageError if the buffer must already hold a whole frame.
        """
        held, size = self.end - self.start, len(self._block)
        if (
            not held and size == BUFFER_BYTES_MIN >= frame_bytes and not self._was_filled
        ):  # a shortcut: the code below would do the same
            self.start = self.end = 0
            return self._view
        self._normal_reads = 0 if frame_bytes > BUFFER_BYTES_MAX else self._normal_reads + 1
        wanted = size
        if frame_bytes > size:
            wanted = max(size, min(frame_bytes, _GROWTH * max(held, BUFFER_BYTES_MIN)))
        elif self._was_filled and size < BUFFER_BYTES_MAX:
            wanted = size * _GROWTH
        elif max(held, frame_bytes) <= BUFFER_BYTES_MAX < size and self._normal_reads > SMALL_READS_MAX:
            wanted = BUFFER_BYTES_MAX
        elif not held and self._small_reads > SMALL_READS_MAX:
            wanted = BUFFER_BYTES_MIN
        if wanted != size:
            self._move(bytearray(wanted))
        elif not held:
            self.start = self.end = 0
        elif self.start and size - self.end < size // 2:
            self._move(self._block)
        if self.end == wanted or held >= self._bytes_max:
            raise UsageError(f"the receive buffer holds {held} bytes: take the events before receiving more")
        return self._view[self.end :]

    def buffer_updated(self, count: int) -> None:
        """Record that `count` bytes were written into the memory that `get_buffer` returned."""
        self.end += count
        self._was_filled = self.end == len(self._block)
        self._small_reads = self._small_reads + 1 if count < BUFFER_BYTES_MIN // 2 else 0

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Copy in bytes that were received elsewhere. Raises UsageError as `get_buffer` does."""
        rest = memoryview(chunk)
        while rest:
            free = self.get_buffer(len(self) + len(rest))
            count = min(len(free), len(rest))
            free[:count] = rest[:count]
            self.buffer_updated(count)
            rest = rest[count:]

    def peek(self, count: int) -> memoryview | None:
        """Return a view of the first `count` bytes, valid until the next receive; None if there are fewer."""
        start = self.start
        return self._view[start : start + count] if self.end - start >= count else None

    def unread(self) -> tuple[memoryview, int, int]:
        """Return the memory, and start and end of the bytes in it that were received and not taken."""
        return self._view, self.start, self.end

    def skip(self, count: int) -> None:
        """Remove the first `count` bytes, which must have been received."""
        self.start += count

    def take(self, count: int) -> bytes:
        """Remove and return the first `count` bytes, which must have been received.

        They are copied into an object of their exact size, so that a frame held for long pins no other.
        """
        start = self.start
        self.start = stop = start + count
        return bytes(self._view[start:stop])

    def clear(self) -> None:
        """Drop all bytes and shrink to the smallest size."""
        self.start = self.end = 0
        self._move(bytearray(BUFFER_BYTES_MIN))

    def _move(self, block: bytearray) -> None:
        held = self.end - self.start
        view = self._view if block is self._block else memoryview(block)
        view[:held] = self._view[self.start : self.end]
        self._block, self._view, self.start, self.end = block, view, 0, held
