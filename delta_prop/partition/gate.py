"""Interface of the gate that the pipeline asks before work bypasses or leaves its queue.

Pure: `now` is an argument.
"""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """Limits the rate at which work enters the pipeline; it holds no work itself."""

    def admits(self, count: int, size: int, now: float) -> bool:
        """True if `count` deltas of `size` bytes together may pass now."""
        ...

    def note(self, count: int, size: int, now: float) -> None:
        """Charge deltas that pass."""
        ...

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """Return the seconds until the caller is to ask again; None if a sink must progress first."""
        ...
