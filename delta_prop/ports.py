"""What the service needs of the world, as structural types: a clock, randomness, threads.

Nothing is implemented here. `world.py` has the real ones, `testing/` false ones; nowhere else does
time, chance or a thread come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from delta_prop_broker.disk import Disk

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time for rules, wall time for display."""

    def now(self) -> float:
        """Monotonic seconds, of the running event loop."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970; decides nothing."""
        ...


class Randomness(Protocol):
    """Chance: identifiers and jitter."""

    def bytes(self, count: int) -> bytes:
        """That many random bytes."""
        ...

    def random(self) -> float:
        """A number from 0 (inclusive) to 1 (exclusive)."""
        ...

    def fork(self, name: str) -> Randomness:
        """A source for one concern, which takes nothing from what others draw."""
        ...


class Threads(Protocol):
    """One worker thread: calls that block run there, one at a time, in order."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return what it returns, or raise what it raises."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """All ports together.

    `new_threads` gives each owner a worker of its own. Two kinds of thread live as long as their scope:
    `own_thread` one that runs nothing else, for many short calls that somebody waits for; `background_thread`
    one of low priority, where the system knows that, for long computations that others must not feel.
    `open_disk` gives the disk below a directory.
    """

    clock: Clock
    randomness: Randomness
    new_threads: Callable[[], Threads]
    own_thread: Callable[[], AbstractAsyncContextManager[Threads]]
    background_thread: Callable[[], AbstractAsyncContextManager[Threads]]
    open_disk: Callable[[str], Disk]
