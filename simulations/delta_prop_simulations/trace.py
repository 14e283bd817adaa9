"""Traces a run as one hash: two runs have the same hash if and only if the same events occurred.

Each event is hashed together with the virtual time; the last events are also stored as text, to be read.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

import anyio

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

LINES_MAX = 200

_TURN = Struct("<dI")
_HASH_BYTES = 16


class Trace:
    """The trace of one run. `now`: returns the virtual time."""

    def __init__(self, now: Callable[[], float] = anyio.current_time) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self._now = now
        self._hash = blake2b(digest_size=_HASH_BYTES)

    def note(self, *fields: object) -> None:
        """Note an event. The fields are text, numbers or bytes, since the text of other objects may have an
        address, which differs between runs.
        """
        for value in fields:
            if value is not None and not isinstance(value, str | int | float | bytes):
                raise UsageError(f"{type(value).__name__} in a trace: give text, numbers or bytes")
        line = f"{self._now():.6f} {' '.join([str(value) for value in fields])}"
        self.lines.append(line)
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def note_turn(self, now: float, runnable: int) -> None:
        """Hash one turn of the event loop, without a line of text."""
        self._hash.update(_TURN.pack(now, runnable))

    def digest(self) -> str:
        """Return the hash so far."""
        return self._hash.hexdigest()
