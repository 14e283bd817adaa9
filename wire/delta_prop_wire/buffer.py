"""The receive buffer: the transport writes bytes into it, and the decoder takes whole frames out.

The buffer reuses one block of memory. The block is small while little arrives, grows while reads fill it, and
is never larger than one frame of the maximum size, nor much larger than the bytes that have really arrived.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import HEADER_BYTES

BUFFER_BYTES_MIN = 4 * 1024
BUFFER_BYTES_MAX = 256 * 1024
"""The maximum size of the block, unless a frame is larger."""
SMALL_READS_MAX = 16
"""After more than this many small reads in a row, the block shrinks to the minimum; a block above
`BUFFER_BYTES_MAX` shrinks to `BUFFER_BYTES_MAX` after more than this many reads in a row for frames that fit
into it.
"""
_GROWTH = 4


class ReceiveBuffer:
    """The bytes received and not yet taken; until the next receive or take they are at `start` to `end`."""

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

        Raises UsageError if no memory is free, since the buffer then holds a whole frame to take first.
        """
        unread_bytes, size = self.end - self.start, len(self._block)
        if (
            not unread_bytes and size == BUFFER_BYTES_MIN >= frame_bytes and not self._was_filled
        ):  # a shortcut: the code below would do the same
            self.start = self.end = 0
            return self._view
        self._normal_reads = 0 if frame_bytes > BUFFER_BYTES_MAX else self._normal_reads + 1
        new_size = size
        if frame_bytes > size:
            new_size = max(size, min(frame_bytes, _GROWTH * max(unread_bytes, BUFFER_BYTES_MIN)))
        elif self._was_filled and size < BUFFER_BYTES_MAX:
            new_size = size * _GROWTH
        elif (
            max(unread_bytes, frame_bytes) <= BUFFER_BYTES_MAX < size and self._normal_reads > SMALL_READS_MAX
        ):
            new_size = BUFFER_BYTES_MAX
        elif not unread_bytes and self._small_reads > SMALL_READS_MAX:
            new_size = BUFFER_BYTES_MIN
        if new_size != size:
            self._move(bytearray(new_size))
        elif not unread_bytes:
            self.start = self.end = 0
        elif self.start and size - self.end < size // 2:
            self._move(self._block)
        if self.end == new_size or unread_bytes >= self._bytes_max:
            raise UsageError(
                f"the receive buffer holds {unread_bytes} bytes: take the events before receiving more"
            )
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

    def unread(self) -> memoryview:
        """Return a view of all bytes received and not taken, valid until the next receive."""
        return self._view[self.start : self.end]

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
        unread_bytes = self.end - self.start
        view = self._view if block is self._block else memoryview(block)
        view[:unread_bytes] = self._view[self.start : self.end]
        self._block, self._view, self.start, self.end = block, view, 0, unread_bytes
