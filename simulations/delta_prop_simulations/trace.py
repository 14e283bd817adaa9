"""The events of a run, as one hash: two runs have the same hash if and only if they did the same.

Each note goes into a running hash with the virtual time; the last notes are stored for people to read.
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
        self.notes = 0
        self._now = now
        self._hash = blake2b(digest_size=_HASH_BYTES)

    def note(self, *fields: object) -> None:
        """Note an event. Texts, numbers and bytes only: the address of an object differs at each run."""
        for one in fields:
            if one is not None and not isinstance(one, str | int | float | bytes):
                raise UsageError(f"{type(one).__name__} in a trace: give texts, numbers, bytes")
        line = f"{self._now():.6f} {' '.join([str(one) for one in fields])}"
        self.lines.append(line)
        self.notes += 1
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def turn(self, now: float, runnable: int) -> None:
        """Note one turn of the event loop, which gets no line of its own."""
        self._hash.update(_TURN.pack(now, runnable))

    def digest(self) -> str:
        """Return the hash so far."""
        return self._hash.hexdigest()
