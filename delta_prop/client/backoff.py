"""Exponential backoff with jitter, so that clients do not all retry at the same time.

Pure: the random sample is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.05
MAX_S = 5.0
JITTER = 0.5


@dataclass(slots=True)
class Backoff:
    """Waits of `first_s`, twice that, and so on, up to `max_s`.

    Each is shortened by a random share of up to `jitter`.
    """

    first_s: float = FIRST_S
    max_s: float = MAX_S
    jitter: float = JITTER
    _attempts: int = 0

    def next_s(self, sample: float) -> float:
        """Return the next wait; `sample` from 0 to 1 is the share of the jitter to subtract."""
        full_s = min(self.first_s * 2.0 ** min(self._attempts, 32), self.max_s)
        self._attempts += 1
        return full_s * (1 - self.jitter * sample)

    def reset(self) -> None:
        """Start over with `first_s`: the last attempt succeeded."""
        self._attempts = 0
