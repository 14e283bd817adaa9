"""How long to wait before the next try: doubling, bounded, with jitter, so that clients do not come at once.

Pure: chance is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.05
MAX_S = 5.0
JITTER = 0.5


@dataclass(slots=True)
class Backoff:
    """Waits of `first_s`, twice that, and so on up to `max_s`; of each, chance leaves out a share."""

    first_s: float = FIRST_S
    max_s: float = MAX_S
    jitter: float = JITTER
    _tries: int = 0

    def next_s(self, chance: float) -> float:
        """The next wait; `chance` from 0 to 1 says how much of the jitter is left out."""
        whole = min(self.first_s * 2.0 ** min(self._tries, 32), self.max_s)
        self._tries += 1
        return whole * (1 - self.jitter * chance)

    def reset(self) -> None:
        """It went well: begin anew."""
        self._tries = 0
