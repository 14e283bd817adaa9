"""The receive buffer: bytes come in where the system puts them, whole frames go out.

One block of memory, used again and again. It is small where little comes, larger where every read fills it,
and as large as one frame of the greatest size at most; it never grows much beyond what really came.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import HEADER_BYTES

ROOM_BYTES_MIN = 4 * 1024
ROOM_BYTES_MAX = 256 * 1024
"""How much one read may bring, unless a frame is larger still."""
SMALL_READS_MAX = 16
"""After so many small reads in a row, or reads between frames of the usual size, the memory of larger ones is
given back.
"""
_GROWTH = 4


class ReceiveBuffer:
    """Bytes received and not yet taken: from `start` to `end`, as long as nothing is received or taken."""

    __slots__ = ("_block", "_bytes_max", "_filled", "_small_reads", "_usual_reads", "_view", "end", "start")

    def __init__(self, payload_bytes_max: int) -> None:
        self._bytes_max = HEADER_BYTES + payload_bytes_max
        self._block = bytearray(ROOM_BYTES_MIN)
        self._view = memoryview(self._block)
        self.start = self.end = 0
        self._filled = False  # whether the last read left no room
        self._small_reads = self._usual_reads = 0

    def __len__(self) -> int:
        return self.end - self.start

    def room(self, frame_bytes: int = 0) -> memoryview:
        """Where the next bytes are to be put; `frame_bytes`: how large the frame is that is under way.

        Raises UsageError where a whole frame must already be lying here.
        """
        held, size = self.end - self.start, len(self._block)
        if (
            not held and size == ROOM_BYTES_MIN >= frame_bytes and not self._filled
        ):  # what follows does the same
            self.start = self.end = 0
            return self._view
        self._usual_reads = 0 if frame_bytes > ROOM_BYTES_MAX else self._usual_reads + 1
        wanted = size
        if frame_bytes > size:
            wanted = max(size, min(frame_bytes, _GROWTH * max(held, ROOM_BYTES_MIN)))
        elif self._filled and size < ROOM_BYTES_MAX:
            wanted = size * _GROWTH
        elif max(held, frame_bytes) <= ROOM_BYTES_MAX < size and self._usual_reads > SMALL_READS_MAX:
            wanted = ROOM_BYTES_MAX
        elif not held and self._small_reads > SMALL_READS_MAX:
            wanted = ROOM_BYTES_MIN
        if wanted != size:
            self._move(bytearray(wanted))
        elif not held:
            self.start = self.end = 0
        elif self.start and size - self.end < size // 2:
            self._move(self._block)
        if self.end == wanted or held >= self._bytes_max:
            raise UsageError(
                f"{held} bytes wait in the receive buffer: take the events before receiving more"
            )
        return self._view[self.end :]

    def received(self, count: int) -> None:
        """So many bytes were put where `room` said."""
        self.end += count
        self._filled = self.end == len(self._block)
        self._small_reads = self._small_reads + 1 if count < ROOM_BYTES_MIN // 2 else 0

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Copy in what was received elsewhere. Raises UsageError as `room` does."""
        rest = memoryview(chunk)
        while rest:
            room = self.room(len(self) + len(rest))
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            self.received(count)
            rest = rest[count:]

    def peek(self, count: int) -> memoryview | None:
        """The first `count` bytes, left where they are and only there until more are received; or None."""
        start = self.start
        return self._view[start : start + count] if self.end - start >= count else None

    def held(self) -> tuple[memoryview, int, int]:
        """The memory, and from where to where in it what was received and not taken lies."""
        return self._view, self.start, self.end

    def skip(self, count: int) -> None:
        """Remove the first `count` bytes, which are there."""
        self.start += count

    def take(self, count: int) -> bytes:
        """Remove and return the first `count` bytes, which are there.

        They are copied out, into an object of their exact size: a frame that is kept for long pins no other.
        """
        start = self.start
        self.start = stop = start + count
        return bytes(self._view[start:stop])

    def clear(self) -> None:
        """Forget everything."""
        self.start = self.end = 0
        self._move(bytearray(ROOM_BYTES_MIN))

    def _move(self, block: bytearray) -> None:
        held = self.end - self.start
        view = self._view if block is self._block else memoryview(block)
        view[:held] = self._view[self.start : self.end]
        self._block, self._view, self.start, self.end = block, view, 0, held
