"""Traces a run as one hash: two runs have the same hash if and only if the same events occurred."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from struct import Struct

from delta_prop.platform.ports import Timer
from delta_prop.testing.world import VirtualClock
from delta_prop_wire.errors import UsageError

LINES_MAX = 200

_TURN = Struct("<dI")
_HASH_BYTES = 16


class Trace:
    """The trace of one run. `timer`: the virtual time; by default that of the running loop."""

    def __init__(self, timer: Timer | None = None) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self._timer = VirtualClock() if timer is None else timer
        self._hash = blake2b(digest_size=_HASH_BYTES)

    def note(self, *fields: object) -> None:
        """Note an event: text, numbers or bytes, as other objects' texts may have an address."""
        for value in fields:
            if value is not None and not isinstance(value, str | int | float | bytes):
                raise UsageError(f"{type(value).__name__} in a trace: give text, numbers or bytes")
        line = f"{self._timer.now():.6f} {' '.join([str(value) for value in fields])}"
        self.lines.append(line)
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def note_turn(self, now: float, runnable: int) -> None:
        """Hash one turn of the event loop, without a line of text."""
        self._hash.update(_TURN.pack(now, runnable))

    def digest(self) -> str:
        """Return the hash so far."""
        return self._hash.hexdigest()
