"""What sinks need of the world, as structural types: a clock, a thread for calls that block, another service.

Nothing is implemented here; the program hands the real ones in, a test false ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.errors import Refused

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


class ForwardLink(Protocol):
    """A connection to another service that takes a log's batches as they are."""

    def begin(self, log_id: bytes) -> None:
        """Whose batches they will be. Called once, before anything else."""
        ...

    async def run(self) -> None:
        """Keep the connection up, until cancelled. What stands in the way is told by `forward`."""
        ...

    async def greeted(self) -> Mapping[int, int] | None:
        """Wait for the connection. What the other service has, as it says on each new one: of each origin the
        counter up to which nothing is missing. None: that was told already.

        Raises ConnectionError, Refused as `forward` does.
        """
        ...

    async def forward(self, batches: Sequence[LoggedBatch]) -> list[Refused | None]:
        """Have the other service take these, in order; return what became of each, None where it has it.

        What it has already is not sent. Raises ConnectionError where the connection broke, or there is none:
        all come again. Raises Refused where the service takes nothing from here at all.
        """
        ...

    def statistics(self) -> object:
        """A frozen snapshot of its numbers."""
        ...
