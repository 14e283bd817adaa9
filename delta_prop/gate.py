"""Interface of the gate that paces the source of the pipeline. Pure: `now` is an argument."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """Gate before the pipeline that paces the source."""

    def admits(self, count: int, size: int, now: float) -> bool:
        """True if so many deltas and bytes may pass now."""
        ...

    def note(self, count: int, size: int, now: float) -> None:
        """Charge what passes."""
        ...

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """Return the seconds after which to ask again; None: once a sink has made progress."""
        ...


class OpenGate:
    """A gate that is always open."""

    def admits(self, count: int, size: int, now: float) -> bool:
        return True

    def note(self, count: int, size: int, now: float) -> None:
        pass

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        return 0.0
