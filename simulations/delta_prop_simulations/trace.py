"""What happened in a run, as one number: equal for two runs, if and only if both did the same.

Each note goes into a running hash with the virtual time; the last notes are kept for people to read.
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
    """Of one run. `now`: the virtual time."""

    def __init__(self, now: Callable[[], float] = anyio.current_time) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self.notes = 0
        self._now = now
        self._hash = blake2b(digest_size=_HASH_BYTES)

    def note(self, *fields: object) -> None:
        """Something happened. Texts, numbers and bytes alone: what has an address differs at each run."""
        for one in fields:
            if one is not None and not isinstance(one, str | int | float | bytes):
                raise UsageError(f"{type(one).__name__} in a trace: give texts, numbers, bytes")
        line = f"{self._now():.6f} {' '.join([str(one) for one in fields])}"
        self.lines.append(line)
        self.notes += 1
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def turn(self, now: float, runnable: int) -> None:
        """One turn of the loop, which is too small for a line."""
        self._hash.update(_TURN.pack(now, runnable))

    def digest(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()
