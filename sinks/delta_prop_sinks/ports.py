"""What sinks need of the world, as structural types: a clock, and a thread for calls that block.

Nothing is implemented here; the program hands the real ones in, a test false ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time for rules, wall time for display."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970, information only."""
        ...


class Threads(Protocol):
    """One worker thread: calls that block run there, one at a time, in order."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return what it returns."""
        ...
