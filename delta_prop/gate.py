"""What holds the source to its pace, as the chain sees it. Pure: `now` is an argument."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """What stands before the chain and holds the source to its pace."""

    def admits(self, count: int, size: int, now: float) -> bool:
        """Whether so many deltas and bytes may go down now."""
        ...

    def note(self, count: int, size: int, now: float) -> None:
        """They go."""
        ...

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """When to ask again, in seconds; None when a sink has made progress."""
        ...


class OpenGate:
    """No pace to keep."""

    def admits(self, count: int, size: int, now: float) -> bool:
        return True

    def note(self, count: int, size: int, now: float) -> None:
        pass

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        return 0.0
