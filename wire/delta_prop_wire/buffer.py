"""The receive buffer: bytes come in as they come, whole frames go out.

It never holds more than one frame of the greatest size and one chunk; a caller who feeds on without
taking what is whole is refused.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import HEADER_BYTES


class ReceiveBuffer:
    """Bytes received and not yet taken."""

    __slots__ = ("_bytes_max", "_held")

    def __init__(self, payload_bytes_max: int) -> None:
        self._held = bytearray()
        self._bytes_max = HEADER_BYTES + payload_bytes_max

    def __len__(self) -> int:
        return len(self._held)

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add what was received. Raises UsageError where a whole frame must already be lying here."""
        if len(self._held) >= self._bytes_max:
            raise UsageError(
                f"{len(self._held)} bytes wait in the receive buffer: take the events before feeding more"
            )
        self._held += chunk

    def peek(self, count: int) -> bytes | None:
        """The first `count` bytes, left where they are; None while there are fewer."""
        return bytes(self._held[:count]) if len(self._held) >= count else None

    def take(self, count: int) -> memoryview | None:
        """Remove and return the first `count` bytes; None while there are fewer.

        They are copied out, into an object of their exact size: a frame that is kept for long pins no other.
        """
        if len(self._held) < count:
            return None
        with memoryview(self._held) as view:
            taken = bytes(view[:count])
        del self._held[:count]
        return memoryview(taken)

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
